"""What is known of the values of a graph: shapes with symbolic sizes, strides and dtypes.

The graph is run on tensors without values. Sizes of its inputs are symbols, so that what is found
holds for all sizes within the conditions that torch's shape environment notes on the way. A value
that is not the same on all ways through loops and branches is not known.
"""

from __future__ import annotations

import logging
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses import fake_tensor
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from ..numbered import DTYPES, as_given
from ..passes.editor import are_same, is_same
from .types import operator_of

UNKNOWN = object()
"""Stands for a value of which nothing is known."""
FOLLOWS = "what it takes is not known"
"""The reason why a result is not known where that is no operator's own."""
MOST_TURNS = 4
"""Times that a loop's body is looked at: after each, more of what it carries is not known."""

_UNTRACKED = (
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
)
_INTEGERS: dict[str, Callable[..., Any]] = {
    "aten::add.int": operator.add,
    "aten::sub.int": operator.sub,
    "aten::mul.int": operator.mul,
    "aten::floordiv.int": operator.floordiv,
    "aten::neg.int": operator.neg,
    "aten::remainder.int": operator.mod,
}
_OF_NUMBERS = {
    "aten::add": operator.add,
    "aten::sub": operator.sub,
    "aten::mul": operator.mul,
    "aten::floor_divide": operator.floordiv,
}


class Number:
    """A size as a tensor without dimensions, as traces have it."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Metas:
    """What is known of the values of a graph.

    dynamic: whether sizes of inputs may vary.
    varied: whether an input's first size is taken to vary also where the sample has 1 there.
    symbols: of each size that may vary, the symbol, with the input's place and the dimension.
    reasons: why results of operators are not known, by number.
    """

    def __init__(self, dynamic: bool, varied: bool) -> None:
        self._dynamic = dynamic
        self._varied = varied
        self.shapes = ShapeEnv(duck_shape=False)
        self.mode = fake_tensor.FakeTensorMode(shape_env=self.shapes, allow_non_fake_inputs=False)
        self.symbols: list[tuple[Any, int, int]] = []
        self.reasons: dict[int, str] = {}
        self._known: dict[int, Any] = {}
        self._constants: dict[int, tuple[Tensor, Any]] = {}

    def of(self, value: Any) -> Any:
        """What is known of a value: a tensor without values, a number, a list; or UNKNOWN."""
        return self._known.get(value.unique(), UNKNOWN)

    def given(self, place: int, value: Any, sample: Any) -> None:
        """Note what an input is called with."""
        if isinstance(sample, Tensor):
            self._known[value.unique()] = self._input(place, sample)
        elif sample is None:
            self._known[value.unique()] = None

    def _input(self, place: int, sample: Tensor) -> Any:
        shape = list(sample.shape)
        if self._varied and shape and shape[0] == 1:
            shape[0] = 5
        kind = DimDynamic.DYNAMIC if self._dynamic else DimDynamic.STATIC
        context: Any = StatelessSymbolicContext(
            dynamic_sizes=[kind] * len(shape), constraint_sizes=[None] * len(shape)
        )
        order = order_of(sample)
        if order is None:
            return UNKNOWN
        real = torch.empty(shape, dtype=sample.dtype, memory_format=order, device="cpu")
        source = ConstantSource(f"input{place}")
        fake = self.mode.from_tensor(real, source=source, symbolic_context=context)
        for dim, size in enumerate(fake.shape):
            if isinstance(size, torch.SymInt):
                self.symbols.append((size.node._expr, place, dim))
        return fake

    def run(self, graph: Any) -> None:
        """Look at all nodes of a graph."""
        self._aliases = graph.alias_db()
        with _without_log():
            self._run(graph.block())

    def _run(self, block: Any) -> None:
        for node in block.nodes():
            self._node(node)

    def _node(self, node: Any) -> None:
        kind = node.kind()
        if kind == "prim::Constant":
            self._constant(node)
        elif kind == "prim::If":
            self._branches(node)
        elif kind == "prim::Loop":
            self._loop(node)
        elif kind in _STRUCTURES:
            self._note(node, _STRUCTURES[kind](node, [self.of(each) for each in node.inputs()]))
        else:
            self._note(node, self._called(node))

    def _note(self, node: Any, results: Any) -> None:
        outputs = [*node.outputs()]
        if results is UNKNOWN or len(results) != len(outputs):
            results = [UNKNOWN] * len(outputs)
        for output, result in zip(outputs, results, strict=True):
            if isinstance(result, list) and self._aliases.has_writers(output):
                result = UNKNOWN  # it may be longer by the time it is read
            self._known[output.unique()] = result
            if result is UNKNOWN and output.type().kind() == "TensorType":
                self.reasons.setdefault(output.unique(), FOLLOWS)
            else:
                self.reasons.pop(output.unique(), None)

    def _constant(self, node: Any) -> None:
        value = node.output()
        if value.type().kind() in ("FunctionType", "ClassType"):
            return
        found = value.toIValue()
        if isinstance(found, Tensor):
            if found.layout != torch.strided or found.device.type != "cpu" or found.is_quantized:
                return
            key = id(found)
            if key not in self._constants:
                self._constants[key] = found, self.mode.from_tensor(found, static_shapes=True)
            found = self._constants[key][1]
        self._known[value.unique()] = found

    def _called(self, node: Any) -> Any:
        """The results of an operator."""
        text = node.schema().split("(")[0]
        given = [self.of(each) for each in node.inputs()]
        simple = _simple(text, given)
        if simple is not None:
            return simple
        func = operator_of(node)
        if func is None or (any(tag in func.tags for tag in _UNTRACKED) and not _by_place(given)):
            return UNKNOWN
        if text == "aten::select.int" and given[2] is UNKNOWN:
            given[2] = 0  # any place in the dimension
        if any(map(_has_unknown, given)) or _squeezes_symbols(text, given):
            return UNKNOWN
        try:
            pairs = zip(given, func._schema.arguments, strict=True)
            made = [as_given(value, argument) for value, argument in pairs]
            names = [a.name for a in func._schema.arguments if a.kwarg_only]
            rest = len(made) - len(names)
            with self.mode, torch.no_grad():
                found = func(*made[:rest], **dict(zip(names, made[rest:], strict=True)))
        except Exception as error:  # of whatever kind an operator raises for such tensors
            reason = str(error).strip().splitlines()
            for output in node.outputs():
                self.reasons[output.unique()] = reason[0] if reason else type(error).__name__
            return UNKNOWN
        return found if len(func._schema.returns) != 1 else (found,)

    def _branches(self, node: Any) -> None:
        blocks = [*node.blocks()]
        for block in blocks:
            self._run(block)
        pairs = zip(*(block.outputs() for block in blocks), strict=True)
        self._note(node, [_joined(self.of(a), self.of(b)) for a, b in pairs])

    def _loop(self, node: Any) -> None:
        (body,) = node.blocks()
        _, _, *before = node.inputs()
        _, *carried = body.inputs()
        _, *after = body.outputs()
        known = [self.of(each) for each in before]
        for turn in range(MOST_TURNS):
            self._known.update(zip((each.unique() for each in carried), known, strict=True))
            self._run(body)
            ends = [self.of(each) for each in after]
            joined = [_joined(a, b) for a, b in zip(known, ends, strict=True)]
            if turn == MOST_TURNS - 2:
                joined = [UNKNOWN] * len(joined)
            if all(a is b for a, b in zip(known, joined, strict=True)):
                break
            known = joined
        self._note(node, known)


@contextmanager
def _without_log() -> Iterator[None]:
    """While this thread's errors of operators are no news: torch logs each before it raises it."""
    thread = threading.get_ident()
    log = logging.getLogger(fake_tensor.__name__)

    def is_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    log.addFilter(is_others)
    try:
        yield
    finally:
        log.removeFilter(is_others)


def order_of(tensor: Tensor) -> torch.memory_format | None:
    """The order in which a tensor lies in memory without gaps, None if it is another."""
    orders = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
    fitting = (order for order in orders if tensor.is_contiguous(memory_format=order))
    return next(fitting, None)


def _has_unknown(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_unknown, value))
    return value is UNKNOWN or isinstance(value, Number)


def _by_place(given: Sequence[Any]) -> bool:
    """Whether what is indexed is chosen by numbers of places, which say the size of the result."""
    if len(given) != 2 or not isinstance(given[1], list) or _has_unknown(given):
        return False
    chosen = [each for each in given[1] if isinstance(each, Tensor)]
    return bool(chosen) and all(each.dtype in (torch.int64, torch.int32) for each in chosen)


def _squeezes_symbols(text: str, given: Sequence[Any]) -> bool:
    """Whether the number of dimensions depends on a size that may be 1."""
    if not text.startswith("aten::squeeze"):
        return False
    return any(isinstance(size, torch.SymInt) for size in given[0].shape)


def _joined(a: Any, b: Any) -> Any:
    """What holds for both."""
    if a is b:
        return a
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        alike = a.dtype == b.dtype and are_same(a.shape, b.shape)
        return a if alike and are_same(a.stride(), b.stride()) else UNKNOWN
    if isinstance(a, int | torch.SymInt) and isinstance(b, int | torch.SymInt):
        return a if type(a) is type(b) and is_same(a, b) else UNKNOWN
    return UNKNOWN


def _simple(text: str, given: Sequence[Any]) -> Any:
    """The results of what computes with numbers and sizes; None of anything else."""
    first: Any = given[0] if given else UNKNOWN
    if text in _INTEGERS:
        is_known = all(isinstance(each, int | torch.SymInt) for each in given)
        return (_INTEGERS[text](*given),) if is_known else UNKNOWN
    if text == "aten::size.int" and given[1] is not UNKNOWN:
        return (first.shape[given[1]],) if isinstance(first, Tensor) else UNKNOWN
    if text == "aten::size":
        return ([*first.shape],) if isinstance(first, Tensor) else UNKNOWN
    if text == "aten::dim":
        return (first.dim(),) if isinstance(first, Tensor) else UNKNOWN
    if text.startswith("aten::__getitem__"):
        is_known = isinstance(first, list | tuple) and type(given[1]) is int
        return (first[given[1]],) if is_known else UNKNOWN
    if text in ("aten::Int.Tensor", "aten::IntImplicit", "aten::ScalarImplicit"):
        return (first.value,) if isinstance(first, Number) else UNKNOWN
    name = text.partition(".")[0]
    if name in _OF_NUMBERS and isinstance(first, Number):
        return _of_number(name, given)
    return None


def _of_number(name: str, given: Sequence[Any]) -> Any:
    second = given[1].value if isinstance(given[1], Number) else given[1]
    if not isinstance(second, int | torch.SymInt) or isinstance(second, bool):
        return UNKNOWN
    if len(given) > 2 and given[2] != 1:
        return UNKNOWN
    return (Number(_OF_NUMBERS[name](given[0].value, second)),)


def _unpacked(node: Any, given: Sequence[Any]) -> Any:
    (found,) = given
    return found if isinstance(found, list | tuple) else UNKNOWN


def _indexed(node: Any, given: Sequence[Any]) -> Any:
    found, place = given
    is_known = isinstance(found, list | tuple) and type(place) is int
    return (found[place],) if is_known else UNKNOWN


def _dtype(node: Any, given: Sequence[Any]) -> Any:
    (found,) = given
    is_known = isinstance(found, Tensor) and found.dtype in DTYPES
    return (DTYPES.index(found.dtype),) if is_known else UNKNOWN


_STRUCTURES: dict[str, Callable[[Any, Sequence[Any]], Any]] = {
    "prim::ListConstruct": lambda node, given: ([*given],),
    "prim::TupleConstruct": lambda node, given: (tuple(given),),
    "prim::ListUnpack": _unpacked,
    "prim::TupleUnpack": _unpacked,
    "prim::TupleIndex": _indexed,
    "prim::NumToTensor": lambda node, given: (
        UNKNOWN if given[0] is UNKNOWN or isinstance(given[0], float) else Number(given[0]),
    ),
    "prim::dtype": _dtype,
    "prim::device": lambda node, given: (
        (given[0].device,) if isinstance(given[0], Tensor) else UNKNOWN
    ),
    "prim::unchecked_cast": lambda node, given: (given[0],),
}
