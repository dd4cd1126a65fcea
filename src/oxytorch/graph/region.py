"""The forward that runs the rewritten record of a module's call, with its guards."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..core.modes import is_plain_inference
from ..core.sources import Sources
from .code import is_constant
from .errors import CaptureError
from .forward import Forward
from .patterns import Match, values_in
from .record import Record
from .steps import Held, Other, RecordedCall, RecordedValue

_REGION = "<oxytorch region>"
"""The file name of generated code."""


@dataclass(frozen=True)
class Slot:
    """What one argument of a call has to be: a tensor, a constant, or a sequence of such.

    kind: "tensor", of the class `value` and of so many dimensions, "constant" or "sequence".
    shape, dtype: None where any will do.
    needs_grad: whether it requires a gradient, None where code does not ask.
    """

    kind: str
    value: Any = None
    dim: int = 0
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None
    needs_grad: bool | None = None

    @staticmethod
    def of(argument: Any, shapes: bool, kinds: bool) -> Slot:
        if isinstance(argument, Tensor):
            shape = argument.shape if shapes else None
            dtype = argument.dtype if kinds or not argument.is_floating_point() else None
            needs_grad = argument.requires_grad if kinds else None
            return Slot("tensor", type(argument), argument.dim(), shape, dtype, needs_grad)
        if type(argument) in (tuple, list):
            inner = tuple(Slot.of(a, shapes, kinds) for a in argument)
            return Slot("sequence", (type(argument), inner))
        if is_constant(argument):
            return Slot("constant", argument)
        raise CaptureError(f"it is given a {type(argument).__name__}")

    def accepts(self, argument: Any) -> bool:
        if self.kind == "tensor":
            return (
                type(argument) is self.value
                and argument.dim() == self.dim
                and argument.layout == torch.strided
                and self.dtype in (argument.dtype, None)
                and (self.dtype is not None or argument.is_floating_point())
                and self.shape in (argument.shape, None)
                and self.needs_grad in (argument.requires_grad, None)
            )
        if self.kind == "sequence":
            kind, inner = self.value
            return (
                type(argument) is kind
                and len(argument) == len(inner)
                and all(s.accepts(a) for s, a in zip(inner, argument, strict=True))
            )
        return type(argument) is type(self.value) and bool(argument == self.value)


@dataclass(frozen=True)
class _Method:
    """A method of tensors in a file: some, as `__pow__`, have the name of what they wrap, under
    which pickle does not find them."""

    name: str


def _by_name(value: Any) -> Any:
    if not isinstance(value, FunctionType):
        return value
    name = next((name for name, method in vars(Tensor).items() if method is value), None)
    return value if name is None else _Method(name)


@dataclass
class RegionSource:
    """The steps of a region as Python source, for calls of one form.

    source: of a function `run(args, kwargs)`; scope: the objects that it names.
    positional, keywords: the form.
    same: the pairs of tensors in it, by number, that are one.
    sources: what it holds for.
    dtypes: weights, with the dtype that they have to have since code that is gone past looks at
        dtypes.
    least: elements of the first tensor of a call below which its own code is as fast.
    """

    positional: tuple[Slot, ...]
    keywords: tuple[tuple[str, Slot], ...]
    same: tuple[tuple[int, int], ...]
    source: str
    scope: dict[str, Any]
    sources: Sources
    dtypes: tuple[tuple[Held, torch.dtype], ...] = ()
    least: int = 0
    run: Any = field(init=False)
    matches: Any = field(init=False)

    def __post_init__(self) -> None:
        scope = dict(self.scope)
        exec(compile(self.source, _REGION, "exec"), scope)
        self.run = scope["run"]
        self.begin_at(self.least)

    def is_current(self) -> bool:
        """Whether the modules that it goes past are what they were."""
        for held, dtype in self.dtypes:
            weight = held.read()
            if weight is None or weight.dtype is not dtype:
                return False
        return self.sources.are_current()

    def begin_at(self, least: int) -> None:
        """Leave calls to the module's own code whose first tensor has fewer elements."""
        self.least = least
        self.matches = _guard(self.positional, self.keywords, self.same, least)

    @property
    def form(self) -> tuple[Any, ...]:
        """What tells it from programs for other calls."""
        return self.positional, self.keywords, self.same

    def __getstate__(self) -> dict[str, Any]:
        made = ("run", "matches")
        state = {name: value for name, value in self.__dict__.items() if name not in made}
        return {**state, "scope": {name: _by_name(value) for name, value in self.scope.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for name, value in self.scope.items():
            if isinstance(value, _Method):
                self.scope[name] = getattr(Tensor, value.name)
        self.__post_init__()


def _guard(
    positional: tuple[Slot, ...],
    keywords: tuple[tuple[str, Slot], ...],
    same: tuple[tuple[int, int], ...],
    least: int,
) -> Any:
    """Write the function that tells whether a call has the form: `matches(args, kwargs)`."""
    scope: dict[str, Any] = {"Tensor": Tensor, "strided": torch.strided}
    lines = [
        "def matches(args, kwargs):",
        f"    if len(args) != {len(positional)} or len(kwargs) != {len(keywords)}: return False",
    ]
    given = [(f"args[{number}]", slot) for number, slot in enumerate(positional)]
    given += [(f"kwargs.get({name!r}, Tensor)", slot) for name, slot in keywords]
    tensors = []
    first = next((n for n, (_, slot) in enumerate(given) if slot.kind == "tensor"), None)
    for number, (expression, slot) in enumerate(given):
        lines.append(f"    x = {expression}")
        tensors += _tensors_of(slot, expression)
        if slot.kind != "tensor":
            scope[f"accepts{number}"] = slot.accepts
            lines.append(f"    if not accepts{number}(x): return False")
            continue
        scope |= {f"kind{number}": slot.value, f"dtype{number}": slot.dtype}
        lines += [
            f"    if type(x) is not kind{number}: return False",
            f"    if x.dim() != {slot.dim} or x.layout is not strided: return False",
        ]
        if slot.dtype is None:
            lines.append("    if not x.is_floating_point(): return False")
        else:
            lines.append(f"    if x.dtype is not dtype{number}: return False")
        if slot.shape is not None:
            scope[f"shape{number}"] = slot.shape
            lines.append(f"    if x.shape != shape{number}: return False")
        if least and number == first:
            lines.append(f"    if x.numel() < {least}: return False")
        if slot.needs_grad is not None:
            lines.append(f"    if x.requires_grad is not {slot.needs_grad}: return False")
    for second, last in enumerate(tensors):
        for first in range(second):
            word = "is not" if (first, second) in same else "is"
            lines.append(f"    if {tensors[first]} {word} {last}: return False")
    lines.append("    return True")
    exec(compile("\n".join(lines), _REGION, "exec"), scope)
    return scope["matches"]


def _tensors_of(slot: Slot, expression: str) -> list[str]:
    """The expressions of the tensors in an argument, in order."""
    if slot.kind == "tensor":
        return [expression]
    inner = slot.value[1] if slot.kind == "sequence" else ()
    return [
        found for i, own in enumerate(inner) for found in _tensors_of(own, f"{expression}[{i}]")
    ]


def _same_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[int, int], ...]:
    """Which of the tensors in the arguments are one object, by number."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, [*kwargs.values()])) if _is_tensor(leaf)]
    pairs = ((i, j) for j in range(len(tensors)) for i in range(j))
    return tuple((i, j) for i, j in pairs if tensors[i] is tensors[j])


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


class Region(Forward):
    """Runs a program of the module's recorded steps where its guards hold, else its own code.

    The guards: plain inference, a call of a form that was recorded, and the modules that it goes
    past are what they were (see `Sources`).
    """

    def __init__(self, module: nn.Module, programs: Iterable[RegionSource]) -> None:
        super().__init__(module)
        self.programs = [*programs]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_plain_inference():
            for program in self.programs:
                if program.matches(args, kwargs) and program.is_current():
                    return program.run(args, kwargs)
        return self.own(*args, **kwargs)


def program(
    record: Record,
    home: int,
    inlined: set[int],
    matches: list[Match],
    dropped: dict[int, nn.Module | None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    converted: Set[nn.Module] = frozenset(),
) -> RegionSource:
    """Write the program of one call of a module.

    home: the number of the call; inlined: those below it whose code is gone past.
    matches: those made in it.
    dropped: the steps that do nothing, with the module called.
    args, kwargs: what it was called with.
    converted: the modules whose weights get another dtype than they had in the run.

    Raises CaptureError with the reason.
    """
    call = record.calls[home]
    passed = [call, *(record.calls[number] for number in sorted(inlined))]
    shapes = any(own.reads_shapes for own in passed)
    kinds = any(own.reads_kinds for own in passed)
    _refuse_calls(passed, kinds, converted)
    positional = tuple(Slot.of(a, shapes, kinds) for a in args)
    keywords = tuple((name, Slot.of(a, shapes, kinds)) for name, a in kwargs.items())
    writer = _Writer(record)
    writer.arguments(call.arguments)
    items = _items(record, home, inlined)
    left_out = {item for item in items if not isinstance(item, RecordedCall) and item in dropped}
    items = [item for item in items if isinstance(item, RecordedCall) or item not in left_out]
    called = _write(writer, record, items, matches)
    source = writer.finish(call.output)
    modules = [record.calls[number].module for number in inlined]
    modules += [module for match in matches for module in match.modules]
    modules += [module for number in left_out if (module := dropped[number]) is not None]
    sources = Sources(
        [*dict.fromkeys(modules)],
        [tensor for match in matches for tensor in match.watched],
        owner=call.module,
        holders=_holders([call.module, *modules], {*called, *modules}),
        values=False,
        names=[*dict.fromkeys(name for own in passed for name in own.globals)],
        methods=[*dict.fromkeys(name for own in passed for name in own.methods)],
        settings=[setting for own in passed for setting in own.settings],
    )
    same = _same_tensors(args, kwargs)
    dtypes = _dtypes([call.module, *modules, *called], writer.scope) if kinds else ()
    return RegionSource(positional, keywords, same, source, writer.scope, sources, dtypes)


def _refuse_calls(passed: Sequence[RecordedCall], kinds: bool, converted: Set[nn.Module]) -> None:
    """Raise CaptureError where a program cannot stand for calls, the outermost of them first.

    kinds: whether their code looks at dtypes.
    converted: see `program`.
    """
    for own in passed:
        if own.refusal is not None:
            raise CaptureError(f"{type(own.module).__name__}: {own.refusal}")
    if kinds and not converted.isdisjoint(passed[0].module.modules()):
        raise CaptureError("its code looks at dtypes, and its weights get another one")
    if any(type(leaf) is Held for leaf in pytree.tree_leaves(passed[0].arguments)):
        raise CaptureError("it is given one of the model's own tensors")


def _dtypes(
    modules: Iterable[nn.Module], scope: dict[str, Any]
) -> tuple[tuple[Held, torch.dtype], ...]:
    """The weights that steps read, and one of each module, with their dtypes."""
    found: dict[Held, None] = {v: None for v in scope.values() if type(v) is Held}
    for module in modules:
        first = (
            Held(part, name)
            for part in module.modules()
            for name, weight in part._parameters.items()
            if weight is not None and weight.is_floating_point()
        )
        found.update(dict.fromkeys(itertools.islice(first, 1)))
    read = ((held, held.read()) for held in found)
    return tuple((held, weight.dtype) for held, weight in read if weight is not None)


def _write(
    writer: _Writer, record: Record, items: list[int | RecordedCall], matches: list[Match]
) -> list[nn.Module]:
    """Write steps and calls, matches in place of theirs; return the modules that are called."""
    made = {match.at: match for match in matches}
    replaced = {number for match in matches for number in match.steps}
    called: list[nn.Module] = []
    for item in items:
        if isinstance(item, RecordedCall):
            called.append(item.module)
            writer.call(item.module, item.outer, item.outer_output)
        elif item in made:
            match = made[item]
            writer.call(match.run, (tuple(match.arguments), {}), match.results)
        elif item not in replaced:
            step = record.steps[item]
            called += [step.target] if isinstance(step.target, nn.Module) else []
            writer.call(step.target, step.arguments, step.result)
    return called


def _holders(modules: Iterable[nn.Module], called: set[nn.Module]) -> list[nn.Module]:
    """The modules below some that the code of these may look into: lists of modules, and all that
    are not called."""
    found: dict[nn.Module, None] = {}
    todo = [*modules]
    while todo:
        for child in todo.pop().children():
            if isinstance(child, torch.jit.ScriptModule):  # nothing in it can be replaced
                continue
            is_list = isinstance(child, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
            if child not in found and (is_list or child not in called):
                found[child] = None
                todo.append(child)
    return [*found]


def _items(record: Record, home: int, inlined: set[int]) -> list[int | RecordedCall]:
    """The steps, by number, and the calls of modules that a call makes, in order."""
    calls = record.calls
    direct = {home, *inlined}
    places: list[tuple[int, int, int | RecordedCall]] = []
    begin, end = calls[home].begin, calls[home].end
    for number in range(begin, end):
        if record.steps[number].call in direct:
            places.append((number, 1, number))
    for number in range(home + 1, len(calls)):
        own = calls[number]
        # Modules called as a whole are steps.
        if own.parent in direct and number not in inlined and not record.is_step(own):
            places.append((own.begin, 0, own))
    return [item for *_, item in sorted(places, key=lambda place: place[:2])]


class _Writer:
    """Writes steps as Python source."""

    def __init__(self, record: Record) -> None:
        self.scope: dict[str, Any] = {}
        self._record = record
        self._lines = ["def run(args, kwargs):"]
        self._names: dict[int, str] = {}
        self._objects: dict[int, str] = {}

    def arguments(self, given: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        args, kwargs = given
        for number, argument in enumerate(args):
            self._unpack(argument, f"args[{number}]")
        for name, argument in kwargs.items():
            self._unpack(argument, f"kwargs[{name!r}]")

    def _unpack(self, nested: Any, expression: str) -> None:
        """Give names to the tensors in what an expression returns."""
        if type(nested) is RecordedValue:
            name = f"v{nested.number}"
            self._lines.append(f"    {name} = {expression}")
            self._names[nested.number] = name
        elif type(nested) in (tuple, list):
            for number, item in enumerate(nested):
                self._unpack(item, f"{expression}[{number}]")
        elif isinstance(nested, dict):
            for key, item in nested.items():
                self._unpack(item, f"{expression}[{self._object(key)}]")
        elif not is_constant(nested) and type(nested) is not Held and [*values_in(nested)]:
            raise CaptureError(f"a call in it returns a {type(nested).__name__}")

    def call(self, target: Any, arguments: Any, result: Any) -> None:
        args, kwargs = arguments
        given = [self._expression(a) for a in args]
        given += [f"{name}={self._expression(a)}" for name, a in kwargs.items()]
        getter = getattr(target, "__name__", "") == "__get__"
        if getter:
            expression = f"{given[0]}.{target.__self__.__name__}"
        else:
            expression = f"{self._object(target)}({', '.join(given)})"
        if any(not _is_value(leaf) for leaf in pytree.tree_leaves(result)):
            raise CaptureError("a call in it returns something besides tensors")
        if type(result) is RecordedValue:
            self._unpack(result, expression)
            return
        name = f"r{len(self._lines)}"
        self._lines.append(f"    {name} = {expression}")
        self._unpack(result, name)

    def _expression(self, value: Any) -> str:
        if type(value) is RecordedValue:
            if value.number not in self._names:
                raise CaptureError("it uses a tensor that was made elsewhere")
            return self._names[value.number]
        if type(value) is Held:
            return f"{self._object(value)}.read()"
        if type(value) is Other:
            raise CaptureError("it passes an object on that is no tensor")
        if type(value) is tuple:
            return f"({''.join(self._expression(v) + ', ' for v in value)})"
        if type(value) is list:
            return f"[{', '.join(map(self._expression, value))}]"
        if type(value) is dict:
            items = (f"{self._object(k)}: {self._expression(v)}" for k, v in value.items())
            return f"{{{', '.join(items)}}}"
        if [*values_in(value)]:
            raise CaptureError(f"it makes a {type(value).__name__}")
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        return self._object(value)

    def _object(self, value: Any) -> str:
        if id(value) not in self._objects:
            name = f"o{len(self.scope)}"
            self.scope[name] = value  # which keeps the id valid
            self._objects[id(value)] = name
        return self._objects[id(value)]

    def finish(self, output: Any) -> str:
        self._lines.append(f"    return {self._expression(output)}")
        return "\n".join(_freed(self._lines)) + "\n"


def _freed(lines: list[str]) -> Iterator[str]:
    """The lines, with what no later one uses deleted, so that its memory serves the next call."""
    made = {line.partition(" = ")[0].strip() for line in lines}
    last: dict[str, int] = {}
    for number, line in enumerate(lines):
        last |= dict.fromkeys(made.intersection(_NAME.findall(line)), number)
    for number, line in enumerate(lines):
        yield line
        unused = [name for name, use in last.items() if use == number]
        if unused and number < len(lines) - 1:
            yield f"    del {', '.join(unused)}"


_NAME = re.compile(r"\b[vr]\d+\b")


def _is_value(leaf: Any) -> bool:
    return leaf is None or type(leaf) in (RecordedValue, Held)
