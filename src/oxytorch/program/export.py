"""Exported programs of torch (`torch.export`) as programs that run without Python's code."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ConstantArgument,
    InputKind,
    OutputKind,
    SymIntArgument,
    TensorArgument,
)
from torch.utils import _pytree
from torch.utils._sympy.printers import PythonPrinter

from ..core.described_file import identity
from ..graph.errors import CaptureError
from . import conditions
from .capture import Given, Outputs, steps_of
from .conditions import Condition
from .constants import Captured
from .model import (
    FixedInput,
    Input,
    Interface,
    Output,
    ProgramModel,
    SizeInput,
    TensorInput,
    Write,
)
from .passes.quantized_layers import Layers
from .program import Steps, Value
from .smaller import with_smaller_ones
from .structure import Structure

_aten = torch.ops.aten

_FROM_STATE = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
_WRITES = {
    OutputKind.BUFFER_MUTATION: "state",
    OutputKind.PARAMETER_MUTATION: "state",
    OutputKind.USER_INPUT_MUTATION: "input",
}
_ASSERTED = (
    _aten._assert_scalar.default,
    _aten.sym_constrain_range.default,
    _aten.sym_constrain_range_for_size.default,
)


_Found = TypeVar("_Found")


def from_exported(
    exported: ExportedProgram,
    storable: bool = False,
    layers: Layers | None = None,
) -> ProgramModel:
    """The model of an exported program, as a program.

    storable: whether packed weights have to be plain tensors, which files can hold.
    layers: those that multiply bytes.

    Raises ValueError, which names the operator or the argument, where a program cannot hold it.
    """
    return _imported(exported, lambda found: found.model(storable, layers))


def captured(exported: ExportedProgram) -> Captured:
    """The steps of an exported program. Raises ValueError as `from_exported` does."""
    return _imported(exported, _Import.captured)


def _imported(exported: ExportedProgram, read: Callable[[_Import], _Found]) -> _Found:
    try:
        return with_smaller_ones(
            lambda table: read(_Import(exported, _decomposed(exported, table)))
        )
    except CaptureError as error:
        raise ValueError(
            f"optimize: the exported program cannot become a program: {error}. Write that part "
            'with other operators, or use torch.compile(model, backend="oxytorch"), which leaves '
            "such parts to Python"
        ) from error


def _decomposed(exported: ExportedProgram, table: dict[Any, Any]) -> ExportedProgram:
    """The same program without operators of the table, and without writes to tensors."""
    try:
        return exported.run_decompositions(table)  # type: ignore[no-any-return]
    except AssertionError as error:  # torch 2.13 of a loaded file with sizes such as 2 * s0
        raise CaptureError(
            f"torch {torch.__version__} cannot decompose its operators ({error}); optimize what "
            "torch.export.export returns, not what torch.export.load does"
        ) from error


class _Import:
    """Writes one exported program. original: as it was before operators were decomposed."""

    def __init__(self, original: ExportedProgram, exported: ExportedProgram) -> None:
        self._original = original
        self._exported = exported
        self._graph: fx.GraphModule = exported.graph_module
        self._inputs: list[Input] = []
        self._state: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}
        self._kept: list[tuple[str, int]] = []

    def captured(self) -> Captured:
        """The steps, with nothing done to them."""
        self._replace_inputs(_argument_names(self._original, self._arguments()))
        steps, weights, _, _ = self._steps()
        return Captured(steps, weights, self._names_of(weights))

    def _names_of(self, weights: dict[Value, Tensor]) -> dict[Value, str]:
        return {value: self._names[id(tensor)] for value, tensor in weights.items()}

    def _arguments(self) -> Structure:
        return Structure.of(self._original.call_spec.in_spec)

    def _steps(self) -> tuple[Steps, dict[Value, Tensor], Outputs, Any]:
        """The steps, their weights, what they return, and the outputs that the graph computes."""
        for node in self._graph.graph.nodes:
            if node.target in _ASSERTED and not node.users:
                self._graph.graph.erase_node(node)
        computed = self._replace_outputs()
        self._graph.graph.eliminate_dead_code()
        steps, outputs = steps_of(self._graph.graph, self._graph)
        weights = {v: t for v, t in steps.constants.items() if id(t) in self._names}
        for value, tensor in weights.items():
            value.meta = tensor
        return steps, weights, outputs, computed

    def model(self, storable: bool, layers: Layers | None = None) -> ProgramModel:
        """The program and how it is called."""
        arguments = self._arguments()
        self._replace_inputs(_argument_names(self._original, arguments))
        steps, weights, outputs, (kinds, given) = self._steps()
        own = Captured(steps, weights, self._names_of(weights), layers)
        found = self._outputs(outputs, given)
        interface = Interface(
            arguments,
            tuple(self._inputs),
            Structure.of(self._original.call_spec.out_spec),
            *self._results(kinds, found),
            tuple(_Sizes(self._original, self._inputs).conditions()),
        )
        return own.model(interface, self._state, storable)

    def _replace_inputs(self, names: Sequence[str]) -> None:
        """Keep the placeholders of tensors and sizes that change; the others are constants."""
        graph = self._graph.graph
        nodes = graph.find_nodes(op="placeholder")
        rest = iter(zip(_user_inputs(self._original), names, strict=True))
        signature = self._exported.graph_signature
        written = {spec.target for spec in signature.output_specs if spec.kind in _WRITES}
        same: dict[Any, fx.Node] = {}
        for node, spec in zip(nodes, signature.input_specs, strict=True):
            if spec.kind is InputKind.USER_INPUT:
                (kind, argument), name = next(rest)
                self._user_input(node, kind.meta.get("val"), argument, name)
            elif spec.kind not in _FROM_STATE or spec.target is None:
                raise CaptureError(f"its input {spec.target or spec.arg} is no tensor")
            elif spec.target in written:
                self._kept.append(("state", len(self._state)))
                self._state[spec.target] = self._stored(spec.target)
            else:
                tensor = self._stored(spec.target)
                if identity(tensor) not in same:
                    with graph.inserting_before(node):
                        same[identity(tensor)] = self._constant(node, spec.target, tensor)
                node.replace_all_uses_with(same[identity(tensor)])
                graph.erase_node(node)

    def _user_input(self, node: fx.Node, meta: Any, argument: Any, name: str) -> None:
        is_symbolic = isinstance(meta, torch.SymInt)
        if isinstance(argument, ConstantArgument) and not is_symbolic:
            if node.users:
                raise CaptureError(f"its input {name} is a {type(argument.value).__name__}")
            self._inputs.append(FixedInput(name, argument.value))
            self._graph.graph.erase_node(node)
            return
        self._kept.append(("input", len(self._inputs)))
        if isinstance(meta, Tensor):
            if meta.device.type != "cpu" or meta.layout is not torch.strided:
                raise CaptureError(f"its input {name} is a {meta.layout} tensor on {meta.device}")
            shape = tuple(size if isinstance(size, int) else None for size in meta.shape)
            self._inputs.append(TensorInput(name, meta.dtype, shape))
        elif is_symbolic:
            self._inputs.append(SizeInput(name))
        else:
            raise CaptureError(f"its input {name} is a {type(meta).__name__}")

    def _stored(self, name: str) -> Tensor:
        """A parameter, buffer or constant."""
        found = self._exported.state_dict.get(name)
        if found is None:
            found = self._exported.constants.get(name)
        if not isinstance(found, Tensor):
            raise CaptureError(f"its constant {name} is a {type(found).__name__}")
        if found.device.type != "cpu" or found.layout is not torch.strided:
            raise CaptureError(
                f"its tensor {name} is a {found.layout} tensor on {found.device}; move the model "
                "to the CPU before it is exported"
            )
        return found.detach()

    def _constant(self, node: fx.Node, name: str, tensor: Tensor) -> fx.Node:
        attribute = f"_oxytorch_{len(self._names)}"
        self._graph.register_buffer(attribute, tensor)
        self._names[id(tensor)] = name
        found = self._graph.graph.get_attr(attribute)
        found.meta = dict(node.meta)
        return found

    def _replace_outputs(self) -> tuple[list[tuple[Any, Any]], list[bool]]:
        """Outputs with their kinds; the graph keeps those that it computes."""
        (node,) = self._graph.graph.find_nodes(op="output")
        specs = self._exported.graph_signature.output_specs
        kinds = [*zip(specs, node.args[0], strict=True)]
        computed = [isinstance(spec.arg, TensorArgument | SymIntArgument) for spec in specs]
        kept = [own for own, is_kept in zip(node.args[0], computed, strict=True) if is_kept]
        node.args = (tuple(kept),)
        return kinds, computed

    def _outputs(self, outputs: Outputs, computed: Sequence[bool]) -> list[Output | None]:
        """Where each output of the graph comes from; None for those that it does not compute."""
        counts = {"tensor": 0, "size": 0}
        rest = iter(outputs)
        found: list[Output | None] = []
        for is_computed in computed:
            each = next(rest) if is_computed else None
            if isinstance(each, Value):
                kind = "size" if each.is_size else "tensor"
                found.append(Output(kind, counts[kind]))
                counts[kind] += 1
            elif isinstance(each, Given):
                found.append(Output(*self._kept[each.place]))
            else:
                found.append(Output("fixed", each) if is_computed else None)
        return found

    def _results(
        self, kinds: Sequence[tuple[Any, Any]], found: Sequence[Output | None]
    ) -> tuple[tuple[Output, ...], tuple[Write, ...]]:
        state = {name: place for place, name in enumerate(self._state)}
        by_name = {node.name: place for node, place in self._user_places()}
        outputs: list[Output] = []
        writes: list[Write] = []
        written: dict[Any, Output] = {}
        for (spec, node), own in zip(kinds, found, strict=True):
            if spec.kind in _WRITES and own is not None:
                kind = _WRITES[spec.kind]
                place = (state if kind == "state" else by_name)[spec.target]
                written[node] = Output(kind, place)
                if own.kind == "tensor":
                    writes.append(Write(kind, place, own.value))
                elif own != written[node]:
                    raise CaptureError(f"it writes one of its inputs to {spec.target}")
            elif spec.kind is not OutputKind.USER_OUTPUT:
                raise CaptureError(f"it has an output of another kind: {spec.kind.name}")
            elif own is not None:
                # What was written and returned is the tensor that was written to.
                outputs.append(written.get(node, own))
            elif isinstance(spec.arg, ConstantArgument):
                outputs.append(Output("fixed", spec.arg.value))
            else:
                raise CaptureError(f"its output {spec.arg} is no tensor and no number")
        return tuple(outputs), tuple(writes)

    def _user_places(self) -> list[tuple[fx.Node, int]]:
        nodes = self._graph.graph.find_nodes(op="placeholder")
        pairs = zip(nodes, self._kept, strict=True)
        return [(node, place) for node, (kind, place) in pairs if kind == "input"]


def _argument_names(exported: ExportedProgram, arguments: Structure) -> list[str]:
    """The name of each input, as its argument is called."""
    paths = _paths(exported, arguments.count())
    return [f"{path[0].key}{_pytree.keystr(path[1:])}" for path in paths]


def _paths(exported: ExportedProgram, count: int) -> list[Any]:
    """The way to each input from the names of the arguments."""
    args, kwargs = _pytree.tree_unflatten(range(count), exported.call_spec.in_spec)
    signature = inspect.signature(exported.module(check_guards=False).forward)
    bound = signature.bind(*args, **kwargs).arguments
    found = {leaf: path for path, leaf in _pytree.tree_leaves_with_path(dict(bound))}
    return [found[place] for place in range(count)]


def _user_inputs(exported: ExportedProgram) -> list[tuple[fx.Node, Any]]:
    """The placeholder of each input, with its argument."""
    nodes = exported.graph.find_nodes(op="placeholder")
    pairs = zip(nodes, exported.graph_signature.input_specs, strict=True)
    return [(node, spec.arg) for node, spec in pairs if spec.kind is InputKind.USER_INPUT]


_OF_REST = re.compile(r"\['(\w+)_(\d+)'\]")


class _Sizes:
    """What an exported program asks of the sizes of its inputs."""

    def __init__(self, exported: ExportedProgram, inputs: Sequence[Input]) -> None:
        self._exported = exported
        self._inputs = inputs
        self._symbols: dict[str, Condition] = {}
        self._sources: dict[str, Condition] = {}
        self._found: list[Condition] = []
        self._seen: set[Any] = set()

    def conditions(self) -> list[Condition]:
        """The conditions, without those that fixed sizes already say."""
        paths = _paths(self._exported, len(self._inputs))
        dims: list[tuple[Any, Condition]] = []
        for place, ((node, _), path) in enumerate(
            zip(_user_inputs(self._exported), paths, strict=True)
        ):
            source = f"L{_pytree.keystr(path)}"
            meta = node.meta.get("val")
            # `*rest` of a forward is called rest_0, rest_1 ... in the exported module.
            in_rest = _OF_REST.sub(r"['\1'][\2]", _pytree.keystr(path[:1]))
            for name in (
                source,
                f"L['flat_args'][{place}]",
                f"L{in_rest}{_pytree.keystr(path[1:])}",
            ):
                if isinstance(meta, Tensor):
                    for dim in range(meta.dim()):
                        self._sources.setdefault(f"{name}.size()[{dim}]", ["size", place, dim])
                else:
                    self._sources.setdefault(name, ["value", place])
            if isinstance(meta, Tensor):
                dims += [(size, ["size", place, dim]) for dim, size in enumerate(meta.shape)]
            else:
                dims.append((meta, ["value", place]))
        symbolic = [(size.node.expr, at) for size, at in dims if isinstance(size, torch.SymInt)]
        self._bind(symbolic)
        self._ranges(symbolic)
        for text in getattr(self._exported, "_guards_code", ()):
            self._add(text, self._sources)
        for node in self._exported.graph.nodes:
            if node.target is _aten._assert_scalar.default and isinstance(node.args[0], fx.Node):
                self._asserted(node.args[0])
        return self._found

    def _bind(self, symbolic: Sequence[tuple[Any, Condition]]) -> None:
        """Find a size, or a formula of one, for each symbol; the others have to be equal to it."""
        for expression, at in symbolic:
            if expression.is_symbol:
                if str(expression) in self._symbols:
                    self._keep(["==", at, self._symbols[str(expression)]])
                self._symbols.setdefault(str(expression), at)
        for expression, at in symbolic:
            if expression.is_symbol:
                continue
            unknown = [s for s in expression.free_symbols if str(s) not in self._symbols]
            if len(unknown) == 1:  # of a multiple, as in 8 * s0 + 1
                (symbol,) = unknown
                factor, rest = expression.coeff(symbol), expression.subs(symbol, 0)
                if not (
                    factor.is_Integer and rest.is_Integer and expression == factor * symbol + rest
                ):
                    raise CaptureError(f"the size {expression} is no multiple of {symbol}")
                self._symbols[str(symbol)] = ["//", ["-", at, int(rest)], int(factor)]
            self._keep(["==", at, self._parsed(_text(expression), self._symbols)])

    def _ranges(self, symbolic: Sequence[tuple[Any, Condition]]) -> None:
        for expression, at in symbolic:
            limits = self._exported.range_constraints.get(expression)
            if limits is None:
                continue
            # As torch: 2 is the least of a range that says nothing.
            if limits.lower > 2:
                self._keep([">=", at, int(limits.lower)])
            if limits.upper.is_Integer and limits.upper < 1 << 62:
                self._keep(["<=", at, int(limits.upper)])

    def _asserted(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if not isinstance(value, torch.SymBool):
            if value is not True:
                raise CaptureError(f"it asserts {node.format_node()}")
            return
        expression, text = value.node.expr, _text(value.node.expr)
        symbols = [str(symbol) for symbol in expression.free_symbols]
        if any(name not in self._symbols for name in symbols):
            # Of the size of a result nothing is known before the call but that it is not negative.
            if text in (f"{symbols[0]} >= 0", f"0 <= {symbols[0]}"):
                return
            raise CaptureError(f"it asserts {text}, of sizes that depend on values")
        self._add(text, self._symbols)

    def _add(self, text: str, names: Mapping[str, Condition]) -> None:
        self._keep(self._parsed(text, names))

    def _parsed(self, text: str, names: Mapping[str, Condition]) -> Condition:
        try:
            return conditions.parse(text, names)
        except (ValueError, SyntaxError) as error:
            raise CaptureError(f"a guard of its sizes is {text}: {error}") from error

    def _keep(self, condition: Condition) -> None:
        if str(condition) not in self._seen:
            self._seen.add(str(condition))
            self._found.append(condition)


def _text(expression: Any) -> str:
    found: str = PythonPrinter().doprint(expression)
    return found
