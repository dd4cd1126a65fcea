"""What the passes share: the model, the choices, what a sample run showed, what has been done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.interruption import pass_on_interruption
from ..core.layer_functions import replaced_in
from ..core.watched import is_parameter
from ..graph.boundary import Boundary
from ..graph.fused import Folded
from ..graph.patterns import Match
from ..graph.recognize import Recognizer
from ..graph.record import Record
from ..graph.recording import are_alike, recorded, refuse_differences, refuse_same
from ..graph.region import RegionSource
from ..graph.state import State
from ..graph.steps import RecordedValue
from ..program.replay import Replay
from ..rewriting.changes import BufferSet, ChangeLog, ParameterSet
from ..rewriting.copies import InPlace, Separation
from ..rewriting.report import Entry
from .sample import SampleInput

CLOSED = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    torch.jit.ScriptModule,
)
"""Modules of torch that read their children's weights themselves, or have no Python to change: left
alone as a whole."""


@dataclass(frozen=True)
class AttentionCall:
    """A call of scaled_dot_product_attention: (args, kwargs).

    others: the calls of other functions in the module that makes it.
    """

    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    others: int


@dataclass
class ObservedRun:
    """What one run of the model on the sample input showed.

    input_sizes: for each layer, the shape of its input where all its calls had one shape.
    without_tensor: the layers that were given something else first, as a PackedSequence.
    shared_inputs: for each parent, groups of children called with one and the same tensor.
    attention: the modules whose code calls torch's scaled_dot_product_attention.
    """

    input_sizes: dict[nn.Module, tuple[int, ...]] = field(default_factory=dict)
    without_tensor: set[nn.Module] = field(default_factory=set)
    shared_inputs: list[tuple[nn.Module, ...]] = field(default_factory=list)
    attention: dict[nn.Module, AttentionCall] = field(default_factory=dict)

    def of(self, other: Mapping[nn.Module, nn.Module]) -> ObservedRun:
        """The same of a model like it, whose modules are given for this one's."""
        return ObservedRun(
            {other[m]: size for m, size in self.input_sizes.items() if m in other},
            {other[m] for m in self.without_tensor if m in other},
            [
                tuple(other[m] for m in group)
                for group in self.shared_inputs
                if other.keys() >= {*group}
            ],
            {other[m]: call for m, call in self.attention.items() if m in other},
        )


@dataclass
class OptimizeContext:
    """One optimization in progress.

    separate: gives the model tensors of its own, where it is a copy that still shares the
        original's; what notes tensors by identity calls it first.
    sample: what the model is called with, if that is known.
    dtype: the one asked for all modules, if one was.
    run: the record of the model's run on it; why_no_run: why there is none.
    patched: modules with a forward of their own that somebody put there; closed, but not what is
        below.
    is_program: whether the whole model runs as one; all its modules are closed then.
    rules: the dtypes asked for, by "", path or type.
    boundaries: what modules are given and give where some are converted.
    kept: modules that keep their dtype since their code needs it.
    kept_parts: these with all below.
    slower: layers that keep their dtype since they are faster in it, with the one that was asked
        for.
    packing_decides: whether that would be other ones without packed weights.
    runs_with: the dtypes of modules, by path, with which it was seen to run.
    tries_later: whether that is not tried before anything is changed, since a program is recorded.
    converts_vectors: whether vectors of the model's own classes are converted too.
    made_for: modules that make a weight at each call, and for which module.
    program_seconds: of a call of the own code of a model that became a program, and of the
        program's first call.
    replays: makes what stands in for such a model.
    must_gain: whether its programs go that take longer than the model's own code.
    of_integers: layers that will multiply integers, whatever dtype they have.
    fused: what the report says of a layer with what was fused to it, and the layer.
    reverts: whether a model that cannot become a program is left as it was, for which its weights
        are kept until it is one.
    regions: each with the elements of the first tensor that it was given, and its patterns.
    """

    model: nn.Module
    dtype_of: Mapping[nn.Module, torch.dtype]
    log: ChangeLog
    passes: tuple[str, ...]
    separate: Separation | InPlace
    dtype: torch.dtype | None = None
    run: Record | None = None
    why_no_run: str = "needs sample_input to see what the model's code does"
    sample: SampleInput | None = None
    observed: ObservedRun = field(default_factory=ObservedRun)
    recognizer: Recognizer = field(default_factory=Recognizer)
    folds: dict[nn.Module, Folded] = field(default_factory=dict)
    fused_layers: set[nn.Module] = field(default_factory=set)
    paths: dict[nn.Module, str] = field(default_factory=dict)
    closed: set[nn.Module] = field(default_factory=set)
    closed_roots: list[nn.Module] = field(default_factory=list)
    patched: set[nn.Module] = field(default_factory=set)
    is_program: bool = False
    rules: Mapping[Any, torch.dtype] = field(default_factory=dict)
    boundaries: dict[nn.Module, Boundary] = field(default_factory=dict)
    kept: set[nn.Module] = field(default_factory=set)
    kept_parts: set[nn.Module] = field(default_factory=set)
    slower: dict[nn.Module, torch.dtype] = field(default_factory=dict)
    converts_vectors: bool = False
    packing_decides: bool = False
    runs_with: Mapping[str, torch.dtype] | None = None
    tries_later: bool = False
    made_for: dict[nn.Module, nn.Module] = field(default_factory=dict)
    program_seconds: tuple[float, float] | None = None
    replays: Callable[[nn.Module], Replay] = Replay
    must_gain: bool = False
    of_integers: set[nn.Module] = field(default_factory=set)
    fused: list[tuple[Entry, nn.Module]] = field(default_factory=list)
    reverts: bool = True
    regions: list[tuple[RegionSource, int, list[Match]]] = field(default_factory=list)
    owners: dict[int, list[tuple[nn.Module, str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path, module in self.model.named_modules():
            self.paths[module] = path
            if module in self.closed:
                continue
            if isinstance(module, CLOSED):
                self.closed_roots.append(module)
                self.closed.update(module.modules())
            elif _has_own(module) and not _is_ours(module.__dict__["forward"]):
                self.patched.add(module)
                self.closed.add(module)
            elif (name := replaced_in(type(module))) is not None:
                self.patched.add(module)
                self.closed.add(module)
                self.skipped("-", module, f"{name} of torch was replaced by other code")
            elif (device := _other_device(module)) is not None:
                self.closed.add(module)
                self.skipped("-", module, f"{type(module).__name__} is on device {device}")
        self.index()

    def take_over(self, seen: OptimizeContext) -> None:
        """Take what a run of a model like this one showed, but for the record of it."""
        own = {path: module for module, path in self.paths.items()}
        other = {m: own[path] for m, path in seen.paths.items() if path in own}
        self.observed, self.why_no_run = seen.observed.of(other), seen.why_no_run
        self.runs_with = seen.runs_with

    def index(self) -> None:
        """Note which modules hold each parameter, by id; valid until a pass replaces some."""
        self.owners.clear()
        for module in self.paths:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self.owners.setdefault(id(parameter), []).append((module, name))

    def open_modules(self) -> list[nn.Module]:
        """All modules that passes may change, each once."""
        return [module for module in self.paths if module not in self.closed]

    def is_open(self, module: nn.Module) -> bool:
        """Whether a module of the model may get a forward of ours."""
        return module in self.paths and module not in self.closed and not _has_own(module)

    def is_free(self, module: nn.Module) -> bool:
        """Whether a module's call may be gone past."""
        hooks = module._forward_hooks or module._forward_pre_hooks
        backward = module._backward_hooks or module._backward_pre_hooks
        return self.is_open(module) and not module.training and not hooks and not backward

    def converts(self, module: nn.Module) -> bool:
        """Whether a module's parameters are given another dtype."""
        dtype = self.dtype_of.get(module)
        return dtype is not None and any(
            p is not None and p.is_floating_point() and p.dtype != dtype
            for p in module._parameters.values()
        )

    def is_held_elsewhere(self, module: nn.Module) -> bool:
        """Whether a module's parameters may be written to unseen, as their memory is that of other
        tensors too; a conversion gives them memory of their own."""
        own = (id(p) for p in module._parameters.values())
        return not self.separate.aliased.isdisjoint(own) and not self.converts(module)

    def is_converted(self, module: nn.Module) -> bool:
        """Whether a dtype is asked for a module, to which its inputs are converted."""
        forward = module.__dict__.get("forward")
        is_asked = module in self.dtype_of or module in self.slower
        return is_asked or bool(getattr(forward, "converts", False))

    def rule(self, module: nn.Module) -> torch.dtype | None:
        """The dtype that is asked for by a key that names the module or its type; for the model
        also the one asked for everything."""
        path = self.paths[module]
        for key in (path, type(module)):
            if key in self.rules:
                return self.rules[key]
        return None

    def is_mixed(self, own: torch.dtype) -> bool:
        """Whether modules are to have another dtype than this one."""
        return any(dtype != own for dtype in self.dtype_of.values())

    def leave_dtype(self, modules: set[nn.Module]) -> None:
        """Leave the parameters of modules in their dtype."""
        self.dtype_of = {m: dtype for m, dtype in self.dtype_of.items() if m not in modules}

    def keep_dtype(self, module: nn.Module) -> None:
        """Leave a module and all below in their dtype, in which it is given its input."""
        self.kept.add(module)
        self.kept_parts.update(module.modules())
        self.leave_dtype(self.kept_parts)

    def finish(self) -> None:
        """Note what regions go past, now that all passes have changed it."""
        for module in self.paths:
            forward = module.__dict__.get("forward")
            inner: Any = forward
            while hasattr(inner, "inner"):
                inner = inner.inner
            for made in getattr(inner, "programs", ()):
                made.sources.note()

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Take back what was changed where an error is raised, with the very same parameters."""
        before = [
            (m, {**m._parameters}, {**m._buffers}, m.__dict__.get("forward")) for m in self.paths
        ]
        values: list[tuple[Tensor, Tensor, Tensor | None]] = [
            (p, p.data, p.grad) for p in self.model.parameters() if is_parameter(p)
        ]
        values += [(b, b.data, b.grad) for b in self.model.buffers()]
        changes, entries = len(self.log.changes), len(self.log.report.entries)
        around = {**self.boundaries}
        try:
            yield
        except BaseException:
            for module, parameters, buffers, forward in before:
                module._parameters.update(parameters)
                module._buffers.update(buffers)
                if forward is None:
                    module.__dict__.pop("forward", None)
                else:
                    module.__dict__["forward"] = forward
            for tensor, data, gradient in values:
                tensor.data = data
                tensor.grad = gradient
            del self.log.changes[changes:]
            del self.log.report.entries[entries:]
            self.boundaries = around
            raise

    def applied(self, pass_name: str, module: nn.Module, detail: str) -> None:
        self.log.applied(pass_name, self.paths[module], detail)

    def skipped(self, pass_name: str, module: nn.Module, reason: str) -> None:
        self.log.skipped(pass_name, self.paths[module], reason)

    def set_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        """Make a parameter another one, in all modules that hold it."""
        owners = self.owners.get(id(module._parameters[name]), [(module, name)])
        self.log.changes.append(ParameterSet(module, name, parameter, owners=owners))

    def set_buffer(self, module: nn.Module, name: str, buffer: torch.Tensor) -> None:
        self.log.changes.append(BufferSet(module, name, buffer))

    def target_dtype(self, module: nn.Module, parameter: torch.Tensor) -> torch.dtype:
        """The dtype that a module's parameter is to have."""
        return self.dtype_of.get(module, parameter.dtype)


def _has_own(module: nn.Module) -> bool:
    return "forward" in module.__dict__


def _other_device(module: nn.Module) -> torch.device | None:
    """The device of a module's own tensors, where some are not on the CPU."""
    own = (*module._parameters.values(), *module._buffers.values())
    return next((t.device for t in own if t is not None and t.device.type != "cpu"), None)


def _is_ours(forward: Any) -> bool:
    return type(forward).__module__.startswith(__name__.partition(".")[0])


def observe(context: OptimizeContext, once: bool = False) -> None:
    """Run the model on the sample input, if there is one, and note what it does.

    once: whether one run is enough, since others have shown that all do the same, or since no
    region is made.
    """
    sample = context.sample
    if sample is None:
        return

    def is_leaf(module: nn.Module) -> bool:
        if module in context.closed or _has_own(module):
            return True
        is_torchs = type(module).__module__.startswith("torch.nn")
        is_container = isinstance(module, nn.Sequential) and is_torchs
        return not is_container and (is_torchs or context.recognizer.keeps_whole(module))

    for module in context.paths:  # before a run notes its hooks, which would look like the user's
        is_leaf(module)

    def record(state: State | None = None) -> Record:
        return recorded(context.model, is_leaf, *sample.call, state)[0]

    try:
        with sample.learning(context.model) as state:
            first = again = record(state)
            run = first if once else record()
            if not are_alike(run, first):  # what is made at the first call counts for none
                again = record()
    except Exception as error:
        pass_on_interruption(error)
        sample.learn(context.model)
        # The model runs, but not under modes: then it keeps its own code.
        message = str(error).splitlines()[0] if str(error) else ""
        context.why_no_run = f"its run cannot be recorded ({type(error).__name__}: {message})"
        return
    _note(context, run)
    refuse_differences(run, again)
    # Of what it made no call of the model knows yet: it was taken back.
    refuse_same(run, first)
    context.run = run


def look_at_sizes(context: OptimizeContext) -> None:
    """Run the model on the sample input, and note the sizes of what modules are given: for passes
    that ask for no more."""
    sample, model, found = context.sample, context.model, _Sizes()
    assert sample is not None
    try:
        with ExitStack() as around, torch.no_grad():
            for module in context.paths:
                if not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
                    around.enter_context(module.register_forward_pre_hook(found.note_call))
            state = around.enter_context(sample.learning(model))
            if state is not None:
                around.enter_context(state.watching())
            sample.given_to(model)
    except Exception as error:  # it may not run under modes
        pass_on_interruption(error)
        sample.learn(model)
    found.settle(context.observed)


class _Sizes:
    """The shapes of what modules are given first: None for tensors of other kinds."""

    def __init__(self) -> None:
        self._found: dict[nn.Module, set[tuple[int, ...] | None]] = {}
        self._without_tensor: set[nn.Module] = set()

    def note_call(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if args:
            self.note(module, args[0])

    def note(self, module: nn.Module, given: Any) -> None:
        if not isinstance(given, Tensor):
            self._without_tensor.add(module)
            return
        is_plain = type(given) is Tensor and given.layout == torch.strided and not given.is_nested
        self._found.setdefault(module, set()).add(tuple(given.shape) if is_plain else None)

    def settle(self, observed: ObservedRun) -> None:
        """Note the sizes of modules all of whose calls had one."""
        only = {m: next(iter(found)) for m, found in self._found.items() if len(found) == 1}
        observed.input_sizes = {m: size for m, size in only.items() if size is not None}
        observed.without_tensor = self._without_tensor


def _note(context: OptimizeContext, run: Record) -> None:
    observed = context.observed
    parents = {child: m for m in context.paths for child in m.children()}
    sizes = _Sizes()
    inputs: dict[tuple[nn.Module | None, RecordedValue], list[nn.Module]] = {}
    for step in run.steps:
        if step.target is F.scaled_dot_product_attention:
            call = run.calls[step.call]
            found = AttentionCall(run.values_of(step.arguments), 2 * (call.end - call.begin))
            observed.attention.setdefault(call.module, found)
        args = step.arguments[0]
        if not isinstance(step.target, nn.Module) or not args:
            continue
        is_tensor = type(args[0]) is RecordedValue
        sizes.note(step.target, run.tensors[args[0].number] if is_tensor else None)
        if is_tensor and context.recognizer.linear(step.target) is not None:
            inputs.setdefault((parents.get(step.target), args[0]), []).append(step.target)
    sizes.settle(observed)
    observed.shared_inputs = [
        tuple(group)
        for group in inputs.values()
        if len(group) > 1 and len(set(group)) == len(group)
    ]
