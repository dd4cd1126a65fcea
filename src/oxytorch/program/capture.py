"""Writes a graph of `torch.fx`, of operators of torch, as a program.

Sizes may be symbolic: the program computes them from its inputs. What the library's way into torch
cannot pass is written in other operators: it has no numbers of unknown type (`Scalar`), so they
become tensors without dimensions, which give the same dtypes and values.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from ..graph.errors import CaptureError, UnfitError
from .calls import in_order
from .other_operators import SPECIAL, meta_of
from .program import Argument, Some, Step, Steps, Value
from .tape import is_random
from .words import DTYPES_OF, holds, target_of, word_of

_aten = torch.ops.aten

Outputs = list["Value | Given | int | None"]
"""What the outputs of a graph are: values of the program, its inputs, constants or None."""


@dataclass(frozen=True)
class Given:
    """An output that is an input, by its place among all inputs."""

    place: int


_ARITHMETIC: dict[Any, str] = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.floordiv: "/",
    operator.mod: "%",
    torch.sym_min: "<",
    torch.sym_max: ">",
}

_OF_TENSORS: dict[Any, Any] = {
    _aten.mul.Scalar: _aten.mul.Tensor,
    _aten.div.Scalar: _aten.div.Tensor,
    _aten.pow.Tensor_Scalar: _aten.pow.Tensor_Tensor,
    _aten.pow.Scalar: _aten.pow.Tensor_Tensor,
    _aten.remainder.Scalar: _aten.remainder.Tensor,
    _aten.remainder.Scalar_Tensor: _aten.remainder.Tensor,
    _aten.copysign.Scalar: _aten.copysign.Tensor,
    _aten.xlogy.Scalar_Self: _aten.xlogy.Tensor,
    _aten.xlogy.Scalar_Other: _aten.xlogy.Tensor,
    _aten.fmod.Scalar: _aten.fmod.Tensor,
    _aten.eq.Scalar: _aten.eq.Tensor,
    _aten.ne.Scalar: _aten.ne.Tensor,
    _aten.lt.Scalar: _aten.lt.Tensor,
    _aten.le.Scalar: _aten.le.Tensor,
    _aten.gt.Scalar: _aten.gt.Tensor,
    _aten.ge.Scalar: _aten.ge.Tensor,
    _aten.bitwise_and.Scalar: _aten.bitwise_and.Tensor,
    _aten.bitwise_or.Scalar: _aten.bitwise_or.Tensor,
    _aten.bitwise_xor.Scalar: _aten.bitwise_xor.Tensor,
    _aten.__lshift__.Scalar: _aten.bitwise_left_shift.Tensor,
    _aten.__rshift__.Scalar: _aten.bitwise_right_shift.Tensor,
    _aten.bitwise_left_shift.Tensor_Scalar: _aten.bitwise_left_shift.Tensor,
    _aten.bitwise_right_shift.Tensor_Scalar: _aten.bitwise_right_shift.Tensor,
    _aten.masked_fill.Scalar: _aten.masked_fill.Tensor,
    _aten.where.ScalarOther: _aten.where.self,
    _aten.where.ScalarSelf: _aten.where.self,
    _aten.where.Scalar: _aten.where.self,
}
"""Operators that take numbers, and those that take tensors in their place."""

_CHOICES = (_aten.where.self, _aten.masked_fill.Tensor)
"""Operators one of whose tensors says where, and has no part in the result's dtype."""

_ASSERTIONS = (_aten._assert_scalar.default, _aten._assert_tensor_metadata.default)
"""What the guards of who captured the graph have seen to."""


def steps_of(graph: fx.Graph, owner: Any = None) -> tuple[Steps, Outputs]:
    """The steps of a graph, with an input for each of its placeholders, and its outputs.

    owner: what has the attributes that it asks for. Raises CaptureError, which names the operator,
    where a program cannot hold the graph: UnfitError with all such operators.
    """
    with _disable_current_modes():  # under which constants would be tensors without values
        capture = Capture(owner)
        unfit: dict[Any, CaptureError] = {}
        skipped: set[fx.Node] = set()
        for node in graph.nodes:
            try:
                _add(capture, node)
            except CaptureError as error:
                if skipped.isdisjoint(node.all_input_nodes):  # else it may be for what these gave
                    if not isinstance(node.target, torch._ops.OpOverload):
                        raise
                    unfit.setdefault(node.target, error)
                skipped.add(node)
                capture.skip(node)
        if unfit:
            raise UnfitError(unfit)
        places = {value: Given(place) for place, value in enumerate(capture.steps.inputs)}
        outputs: Outputs = [places.get(v, v) for v in capture.outputs]  # type: ignore[arg-type]
        capture.steps.outputs = [v for v in outputs if isinstance(v, Value)]
        capture.steps.drop_unused()
        return capture.steps, outputs


def _add(capture: Capture, node: fx.Node) -> None:
    try:
        capture.add(node)
    except CaptureError as error:
        name = _name(node.target)
        if node.op != "call_function" or name in str(error):
            raise
        raise CaptureError(f"{name}: {error}") from error


def _name(target: Any) -> str:
    """What errors call an operator or a function of Python."""
    is_operator = isinstance(target, torch._ops.OperatorBase)
    return str(target) if is_operator else getattr(target, "__name__", str(target))


class Capture:
    """Writes nodes as steps. owner: what has the attributes that they ask for."""

    def __init__(self, owner: Any = None) -> None:
        self._owner = owner
        self.values: dict[fx.Node, Any] = {}
        """What each node makes."""
        self.transposed: dict[Value, Value] = {}
        """The matrices that values are the transposes of."""
        self._numbers: dict[tuple[Any, torch.dtype], Value] = {}
        self._sizes: dict[Value, Value] = {}  # as tensors
        self.steps = Steps()
        self.outputs: Outputs = []

    def add(self, node: fx.Node) -> None:
        """Write the steps of a node."""
        if node.op == "placeholder":
            self.values[node] = self._input(node)
        elif node.op == "get_attr":
            self.values[node] = self._attribute(node)
        elif node.op == "output":
            (found,) = node.args
            assert isinstance(found, Sequence)
            self.outputs = [self._output(each) for each in found]
        elif node.op != "call_function":
            raise CaptureError(f"a graph of operators has no {node.op} {node.target}")
        elif isinstance(node.target, torch._ops.OpOverload):
            self._operator(node)
        else:
            self.values[node] = self._of_sizes(node)

    def skip(self, node: fx.Node) -> None:
        """Go on behind an operator that cannot be written, to see which others there are."""
        meta: Any = node.meta.get("val")
        many = isinstance(meta, list | tuple)
        made = [Value(not isinstance(each, Tensor)) for each in (meta if many else (meta,))]
        self.values[node] = made if many else made[0]
        _note(self.values[node], meta)

    def _input(self, node: fx.Node) -> Value:
        kind = node.meta.get("val")
        if not isinstance(kind, Tensor | torch.SymInt | int) or isinstance(kind, bool):
            raise CaptureError(f"an input is a {type(kind).__name__}")
        is_nested = isinstance(kind, Tensor) and kind.is_nested
        if is_nested or (isinstance(kind, torch.SymInt) and kind.node.is_nested_int()):
            raise CaptureError("an input is a nested tensor")
        meta = kind if isinstance(kind, Tensor) else None
        value = Value(meta is None, meta)
        self.steps.inputs.append(value)
        return value

    def _attribute(self, node: fx.Node) -> Value:
        found: Any = self._owner
        for name in str(node.target).split("."):
            found = getattr(found, name)
        if not isinstance(found, Tensor):
            raise CaptureError(f"{node.target} is a {type(found).__name__}")
        return self.constant(found)

    def constant(self, tensor: Tensor) -> Value:
        """The value of a constant, which this tensor is."""
        value = Value()
        self.steps.constants[value] = tensor
        return value

    def _output(self, found: Any) -> Any:
        value = self.values[found] if isinstance(found, fx.Node) else found
        if value is None or isinstance(value, Value | int):
            return value
        raise CaptureError(f"an output is a {type(value).__name__}")

    def _of_sizes(self, node: fx.Node) -> Any:
        if node.target is operator.getitem:
            results, index = node.args
            return self.values[results][index]  # type: ignore[index]
        if node.target is operator.neg:
            return self.emit("*", [self.size(node.args[0]), "-1"], Value(is_size=True))
        if node.target is torch.sym_sum:
            (parts,) = node.args
            total, *rest = [self.size(part) for part in parts]  # type: ignore[union-attr]
            for part in rest:
                total = self.emit("+", [total, part], Value(is_size=True))
            return total
        sign = _ARITHMETIC.get(node.target)
        if sign is None or node.kwargs or len(node.args) != 2:
            raise CaptureError(f"it computes sizes with {_name(node.target)}")
        return self.emit(sign, [self.size(a) for a in node.args], Value(is_size=True))

    def size(self, argument: Any) -> Argument:
        """A size: a value of the program, or a number as it is written."""
        value = self.values[argument] if isinstance(argument, fx.Node) else argument
        if isinstance(value, Value) and value.is_size:
            return value
        if type(value) is int:
            return str(value)
        raise CaptureError(f"a size is a {type(value).__name__}")

    def emit(self, target: str, arguments: Sequence[Argument], result: Value) -> Value:
        """Write a step with one result, and return that."""
        self.steps.steps.append(Step(target, arguments, [result]))
        return result

    def _operator(self, node: fx.Node) -> None:
        func: Any = node.target
        if func in _ASSERTIONS:
            return
        arguments = in_order(func, node.args, node.kwargs)
        special = SPECIAL.get(func)
        found = None if special is None else special(self, node, *arguments)
        if found is None and func in _OF_TENSORS:
            found = self._of_tensors(node, _OF_TENSORS[func], arguments)
        made = self.call(node, func, arguments) if found is None else found
        self.values[node] = made
        _note(made, node.meta.get("val"))

    def call(self, node: fx.Node, func: Any, arguments: Sequence[Any]) -> Any:
        """One step for one operator; its results."""
        schema = func._schema
        words = [
            self._argument(value, argument.type, func, arguments)
            for value, argument in zip(arguments, schema.arguments, strict=True)
        ]
        kinds = [returned.type.kind() for returned in schema.returns]
        target = target_of(schema)
        if kinds == ["ListType"]:
            results = [Value() for _ in node.meta["val"]]
            is_view = schema.returns[0].alias_info is not None
            step = Step(target, words, results, returns_list=True, is_view=is_view)
            self.steps.steps.append(step)
            return results
        if any(kind != "TensorType" for kind in kinds):
            raise CaptureError(f"{func} returns what is no tensor")
        taken = _taken(node) if len(kinds) != 1 else {0}
        results = [Value() if place in taken else None for place in range(len(kinds))]  # type: ignore[misc]
        has_effect = schema.is_mutable or is_random(func, arguments)
        is_view = any(returned.alias_info is not None for returned in schema.returns)
        step = Step(target, words, results, has_effect=has_effect, is_view=is_view)
        self.steps.steps.append(step)
        return results[0] if len(kinds) == 1 else results

    def _argument(self, value: Any, kind: Any, func: Any, all_given: Sequence[Any]) -> Argument:
        name = kind.kind()
        if name == "OptionalType":
            if value is None and kind.getElementType().kind() == "NumberType":
                raise CaptureError(f"{func} takes a number, which a file cannot hold")
            if value is None:
                return "none"
            return Some(self._argument(value, kind.getElementType(), func, all_given))
        if name == "ListType":
            if not isinstance(value, list | tuple):
                raise CaptureError(f"{func} is given {value!r} as a list")
            inner = kind.getElementType()
            return [self._argument(item, inner, func, all_given) for item in value]
        if name == "TensorType":
            return self.tensor(value, all_given, func)
        if isinstance(value, fx.Node):
            return self.size(value)
        word = word_of(value, name)
        if word is None:
            raise CaptureError(f"{func} is given {value!r}, which a program cannot hold")
        return word

    def tensor(self, value: Any, all_given: Sequence[Any], func: Any = None) -> Value:
        """A tensor; a number where a tensor is expected becomes one beside the other tensors."""
        if isinstance(value, fx.Node):
            found = self.values[value]
            if not isinstance(found, Value):
                raise CaptureError("several values are given as a tensor")
            return self.size_as_tensor(found, _beside(func, all_given)) if found.is_size else found
        if isinstance(value, bool | int | float | complex):
            return self._number(value, _beside(func, all_given))
        raise CaptureError(f"{value!r} is given as a tensor")

    def _number(self, number: complex, beside: Sequence[Tensor]) -> Value:
        """A number as a tensor without dimensions that gives the dtype that the number gives."""
        if not beside:  # numbers among themselves give what tensors of them give
            return self._constant(number, torch.tensor(number, device="cpu").dtype)
        for dtype in DTYPES_OF[type(number)]:
            if type(number) is int and not holds(dtype, number):
                continue
            tensor = torch.tensor(number, dtype=dtype, device="cpu")
            if any(torch.result_type(b, number) == torch.complex128 for b in beside):
                break  # whose digits complex64 has not
            if all(torch.result_type(b, tensor) == torch.result_type(b, number) for b in beside):
                return self._constant(number, dtype)
        raise CaptureError(f"the number {number!r} gives a dtype that no tensor gives")

    def size_as_tensor(self, size: Value, beside: Sequence[Tensor] = ()) -> Value:
        """A size as a tensor without dimensions: the first size of a tensor without elements."""
        made = torch.empty((), dtype=torch.int64, device="meta")
        if any(torch.result_type(each, made) != torch.result_type(each, 0) for each in beside):
            raise CaptureError("a size gives a dtype that no tensor gives")
        if size not in self._sizes:
            nothing = [[size, "0"], *["none"] * 5]
            empty = self.emit("aten::empty.memory_format", nothing, Value())
            sizes = self.emit("aten::_shape_as_tensor", [empty], Value())
            first = Step("aten::select.int", [sizes, "0", "0"], [Value(meta=made)], is_view=True)
            self.steps.steps.append(first)
            self._sizes[size] = first.results[0]  # type: ignore[assignment]
        return self._sizes[size]

    def _constant(self, number: complex, dtype: torch.dtype) -> Value:
        key = (repr(number), dtype)
        if key not in self._numbers:
            self._numbers[key] = self.constant(torch.tensor(number, dtype=dtype, device="cpu"))
        return self._numbers[key]

    def _of_tensors(self, node: fx.Node, func: Any, given: Sequence[Any]) -> Any:
        return self.call(node, func, given[: len(func._schema.arguments)])


def _beside(func: Any, given: Sequence[Any]) -> list[Tensor]:
    """What is known of the tensors that decide beside a number which dtype an operator gives."""
    if func in _CHOICES:
        given = given[1:] if func is _aten.where.self else given[:1]
    return [meta for meta in map(meta_of, given) if meta is not None]


def _note(made: Any, meta: Any) -> None:
    """Note what is known of the tensors that a node makes."""
    if isinstance(made, Value):
        is_told = isinstance(meta, Tensor) and not meta.is_quantized  # whose bytes have one already
        made.meta = meta if is_told else made.meta
    elif isinstance(made, list):
        for value, each in zip(made, meta, strict=True):
            _note(value, each)


def _taken(node: fx.Node) -> set[int]:
    """The places of a node's results that somebody takes."""
    if any(user.target is not operator.getitem for user in node.users):
        return {*range(len(node.meta["val"]))}
    return {user.args[1] for user in node.users}  # type: ignore[misc]
