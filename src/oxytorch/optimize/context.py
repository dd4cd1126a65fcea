"""What the passes share: the model, the choices, what a sample run showed, what has been done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..graph.capture import CallForm
from ..graph.fused import Folded
from ..graph.recognize import Recognizer
from .record import Change, ForwardSet, HookAdded, ParameterSet, Record
from .report import Entry

CLOSED = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
"""Modules of torch that read their children's weights themselves: left alone as a whole."""


@dataclass
class Observed:
    """What one run of the model on the sample input showed.

    forms: how each module was called; shaped_forms: the same with the shapes.
    input_sizes: shape of its first tensor argument. shared_inputs: for each parent, groups of
    children called with one and the same tensor. attention: the modules that call torch's
    scaled_dot_product_attention themselves.
    """

    forms: dict[nn.Module, CallForm] = field(default_factory=dict)
    shaped_forms: dict[nn.Module, CallForm] = field(default_factory=dict)
    input_sizes: dict[nn.Module, tuple[int, ...]] = field(default_factory=dict)
    shared_inputs: list[tuple[nn.Module, ...]] = field(default_factory=list)
    attention: list[nn.Module] = field(default_factory=list)


@dataclass
class Context:
    """One optimization in progress.

    separate: gives a part of the model tensors of its own, where it is a copy that still shares the
    original's; what notes tensors by identity calls it first.
    sample: the sample input as positional and keyword arguments.
    compiled: modules that run as a graph of oneDNN's, with all below; they are closed too.
    """

    model: nn.Module
    dtype_of: Mapping[nn.Module, torch.dtype]
    record: Record
    passes: tuple[str, ...]
    separate: Callable[[nn.Module], None]
    sample: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    observed: Observed = field(default_factory=Observed)
    recognizer: Recognizer = field(default_factory=Recognizer)
    folds: dict[nn.Module, Folded] = field(default_factory=dict)
    fused_layers: set[nn.Module] = field(default_factory=set)
    paths: dict[nn.Module, str] = field(default_factory=dict)
    closed: set[nn.Module] = field(default_factory=set)
    closed_roots: list[nn.Module] = field(default_factory=list)
    compiled: set[nn.Module] = field(default_factory=set)
    owners: dict[int, list[tuple[nn.Module, str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path, module in self.model.named_modules():
            self.paths[module] = path
            if isinstance(module, CLOSED) and module not in self.closed:
                self.closed_roots.append(module)
                self.closed.update(module.modules())
        self.index()

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

    def did(self, pass_name: str, module: nn.Module, detail: str) -> None:
        self.record.report.entries.append(Entry(pass_name, self.paths[module], True, detail))

    def left(self, pass_name: str, module: nn.Module, reason: str) -> None:
        self.record.report.entries.append(Entry(pass_name, self.paths[module], False, reason))

    def change(self, change: Change) -> None:
        self.record.changes.append(change)

    def set_forward(self, module: nn.Module, forward: Any) -> None:
        self.change(ForwardSet(module, forward))

    def set_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        self.change(ParameterSet(module, name, parameter))

    def add_hook(self, module: nn.Module, registry: str, handle: Any) -> None:
        self.change(HookAdded(module, registry, handle.id))

    def target_dtype(self, module: nn.Module, parameter: torch.Tensor) -> torch.dtype:
        """The dtype that a module's parameter is to have."""
        return self.dtype_of.get(module, parameter.dtype)


def normalized_sample(sample_input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a sample input as positional and keyword arguments.

    A tensor is the only argument, a tuple or list the positional ones, a mapping the keyword ones.
    """
    if isinstance(sample_input, Mapping):
        return (), dict(sample_input)
    if isinstance(sample_input, (tuple, list)):
        return tuple(sample_input), {}
    return (sample_input,), {}


def run_sample(model: nn.Module, sample_input: Any) -> Any:
    """Run a model on a sample input; what does not fit is named as such."""
    args, kwargs = normalized_sample(sample_input)
    try:
        with torch.no_grad():
            return model(*args, **kwargs)
    except Exception as error:
        raise ValueError(
            f"optimize: sample_input does not fit {type(model).__name__}.forward "
            f"({type(error).__name__}: {error}); give a tensor, a tuple of positional arguments "
            "or a mapping of keyword arguments that the model can be called with"
        ) from error


class _AttentionCalls(TorchFunctionMode):
    """Notes which module calls torch's attention; running: modules being run, innermost last."""

    def __init__(self, running: list[nn.Module]) -> None:
        super().__init__()
        self.running = running
        self.modules: list[nn.Module] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention and self.running:
            self.modules.append(self.running[-1])
        return func(*args, **(kwargs or {}))


def observe(context: Context, sample_input: Any) -> None:
    """Run the model once on the sample input and note how its modules are called."""
    observed = context.observed
    parents = {child: m for m in context.paths for child in m.children()}
    inputs: dict[tuple[nn.Module | None, int], list[nn.Module]] = {}
    alive: list[torch.Tensor] = []  # keeps every id below valid until the run has ended

    running: list[nn.Module] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running.append(module)
        observed.forms.setdefault(module, CallForm.of(args, kwargs))
        observed.shaped_forms.setdefault(module, CallForm.of(args, kwargs, shapes=True))
        if args and isinstance(args[0], torch.Tensor):
            observed.input_sizes.setdefault(module, tuple(args[0].shape))
            if context.recognizer.linear(module) is not None:
                alive.append(args[0])
                inputs.setdefault((parents.get(module), id(args[0])), []).append(module)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()

    for module in context.paths:  # before the hooks below, which would look like the user's
        context.recognizer.keeps_whole(module)
    handles = [m.register_forward_pre_hook(note, with_kwargs=True) for m in context.paths]
    handles += [m.register_forward_hook(leave) for m in context.paths]
    try:
        with _AttentionCalls(running) as calls:
            run_sample(context.model, sample_input)
    finally:
        for handle in handles:
            handle.remove()
    observed.attention = [*dict.fromkeys(calls.modules)]
    observed.shared_inputs = [
        tuple(group)
        for group in inputs.values()
        if len(group) > 1 and len(set(group)) == len(group)
    ]
