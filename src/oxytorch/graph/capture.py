"""Capture one module's forward as a graph, for one way of calling it.

Symbolic tracing (`torch.fx`) sees Python only, so what decides a branch has to be fixed: the
`CallForm` says for every argument whether it is a tensor, an opaque object that is passed on, or a
constant. A `Region` (see region.py) uses the graph only for calls of that very form.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

_CONSTANT_TYPES = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class Slot:
    """One argument of a call: kind is "tensor", "object" (passed on unseen) or "constant".

    value: the constant, the object's type, or the tensor's shape where the form fixes it.
    """

    kind: str
    value: Any = None

    def accepts(self, argument: Any) -> bool:
        if self.kind == "tensor":
            return isinstance(argument, torch.Tensor) and self.value in (None, argument.shape)
        if self.kind == "object":
            return type(argument) is self.value
        return type(argument) is type(self.value) and bool(argument == self.value)


@dataclass(frozen=True)
class CallForm:
    """How a module is called: its positional arguments and its keyword arguments."""

    positional: tuple[Slot, ...]
    keywords: tuple[tuple[str, Slot], ...] = ()

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any], shapes: bool = False) -> CallForm:
        """Return the form of one actual call; with `shapes`, of calls with those very shapes."""
        return CallForm(
            tuple(_slot(a, shapes) for a in args),
            tuple((k, _slot(v, shapes)) for k, v in kwargs.items()),
        )

    @staticmethod
    def default(module: nn.Module) -> CallForm | None:
        """Return the plainest form: required arguments as tensors, all else left at its default.

        None where the signature has no such form (a required keyword argument).
        """
        slots = []
        for parameter in inspect.signature(type(module).forward).parameters.values():
            if parameter.name == "self":
                continue
            if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty:
                return None
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                if parameter.default is not parameter.empty:
                    break
                slots.append(Slot("tensor"))
        return CallForm(tuple(slots)) if slots else None

    @property
    def fixes_shapes(self) -> bool:
        slots = (*self.positional, *(slot for _, slot in self.keywords))
        return any(slot.kind == "tensor" and slot.value is not None for slot in slots)

    def matches(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an actual call has this form."""
        if len(args) != len(self.positional) or len(kwargs) != len(self.keywords):
            return False
        for slot, argument in zip(self.positional, args, strict=True):
            if not slot.accepts(argument):
                return False
        for (name, slot), (given, argument) in zip(self.keywords, kwargs.items(), strict=True):
            if name != given or not slot.accepts(argument):
                return False
        return True

    def variables(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the arguments of a matching call that the captured graph takes."""
        found = [a for s, a in zip(self.positional, args, strict=True) if s.kind != "constant"]
        values = zip(self.keywords, kwargs.values(), strict=True)
        return found + [a for (_, slot), a in values if slot.kind != "constant"]


def _slot(argument: Any, shapes: bool) -> Slot:
    if isinstance(argument, torch.Tensor):
        return Slot("tensor", argument.shape if shapes else None)
    if isinstance(argument, _CONSTANT_TYPES):
        return Slot("constant", argument)
    return Slot("object", type(argument))


class _Call(nn.Module):
    """Calls a module in one form; the root that the tracer starts from."""

    def __init__(self, module: nn.Module, form: CallForm) -> None:
        super().__init__()
        self.m = module
        self.form = form

    def shapes(self) -> list[torch.Size | None]:
        """The shape of each variable, None where the form leaves it open."""
        slots = (*self.form.positional, *(slot for _, slot in self.form.keywords))
        return [s.value if s.kind == "tensor" else None for s in slots if s.kind != "constant"]

    def bind(self, variables: Iterable[Any]) -> tuple[list[Any], dict[str, Any]]:
        rest = iter(variables)

        def value(slot: Slot) -> Any:
            return slot.value if slot.kind == "constant" else next(rest)

        args = [value(slot) for slot in self.form.positional]
        return args, {name: value(slot) for name, slot in self.form.keywords}


class CaptureError(Exception):
    """The module cannot be captured; the text says why."""


@dataclass
class Capture:
    """A captured forward. Node targets are relative to a root whose `m` is the module.

    owner: for each node, the path (below the module) of the inlined module whose code made it.
    inlined: the modules whose code is part of the graph, without the captured module itself.
    """

    module: nn.Module
    form: CallForm
    graph: fx.Graph
    owner: dict[fx.Node, tuple[str, ...]]
    inlined: list[nn.Module] = field(default_factory=list)


class _ShapedProxy(fx.Proxy):
    """An argument whose shape is known: code that branches on it, or counts with it, can go on."""

    def __init__(self, node: fx.Node, tracer: fx.Tracer, shape: torch.Size) -> None:
        super().__init__(node, tracer)
        self._known = shape

    @property
    def shape(self) -> torch.Size:
        return self._known

    @property
    def ndim(self) -> int:
        return len(self._known)

    def size(self, dim: int | None = None) -> Any:
        return self._known if dim is None else self._known[dim]

    def dim(self) -> int:
        return len(self._known)

    def numel(self) -> int:
        return self._known.numel()


class _Tracer(fx.Tracer):
    def __init__(
        self, is_leaf: Callable[[nn.Module], bool], shapes: list[torch.Size | None]
    ) -> None:
        super().__init__()
        self._shapes = shapes
        self.proxy_buffer_attributes = True
        self.stack: list[nn.Module] = []
        self.inlined: list[nn.Module] = []
        self.owner: dict[fx.Node, tuple[str, ...]] = {}
        self._is_leaf = is_leaf
        self._path: list[str] = []

    def proxy(self, node: fx.Node) -> fx.Proxy:
        if node.op == "placeholder":
            shape = self._shapes[int(str(node.target)[1:])]
            if shape is not None:
                return _ShapedProxy(node, self, shape)
        return super().proxy(node)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self._is_leaf(m)

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        name = self.path_of_module(m)
        if self.is_leaf_module(m, name):
            return self.create_proxy("call_module", name, args, kwargs)
        if name != "m":
            self._path.append(name)
            self.inlined.append(m)
        self.stack.append(m)
        result = forward(*args, **kwargs)
        # On an exception the stack stays as it was: its top is the module that cannot be traced.
        self.stack.pop()
        if name != "m":
            self._path.pop()
        return result

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        self.owner[node] = tuple(self._path)
        return node


class Capturer:
    """Captures modules; remembers the classes whose forward cannot be traced.

    keep_whole: modules that the graph calls instead of looking inside, besides `torch.nn`'s own
    layers and modules with hooks.
    """

    def __init__(self, keep_whole: Callable[[nn.Module], bool]) -> None:
        self._keep_whole = keep_whole
        self._opaque: dict[type, str] = {}

    def capture(self, module: nn.Module, form: CallForm) -> Capture:
        """Capture `module` called in `form`; inlines what can be traced, calls what cannot.

        Raises CaptureError naming the reason.
        """
        while True:
            root = _call_root(module, form)
            tracer = _Tracer(lambda m: m is not module and self._is_leaf(m), root.shapes())
            try:
                graph = tracer.trace(root)
            except Exception as error:  # whatever a user's forward raises on symbolic values
                culprit = tracer.stack[-1] if tracer.stack else module
                reason = (
                    f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                )
                if culprit is module or type(culprit) in self._opaque:
                    raise CaptureError(f"{type(culprit).__name__}.forward: {reason}") from error
                self._opaque[type(culprit)] = reason
                continue
            for node in graph.nodes:
                if node.op == "get_attr" and not str(node.target).startswith("m."):
                    raise CaptureError(f"{type(module).__name__}.forward makes a constant tensor")
            return Capture(module, form, graph, tracer.owner, tracer.inlined)

    def _is_leaf(self, module: nn.Module) -> bool:
        if isinstance(module, nn.Sequential) and type(module).__module__.startswith("torch.nn"):
            return bool(module._forward_hooks or module._forward_pre_hooks)
        return (
            type(module).__module__.startswith("torch.nn")
            or type(module) in self._opaque
            or "forward" in module.__dict__
            or bool(module._forward_hooks or module._forward_pre_hooks)
            or self._keep_whole(module)
        )


def _call_root(module: nn.Module, form: CallForm) -> _Call:
    """Make a root module whose forward takes one named argument per variable of the form."""
    slots = (*form.positional, *(slot for _, slot in form.keywords))
    names = [f"a{i}" for i in range(sum(slot.kind != "constant" for slot in slots))]
    scope: dict[str, Any] = {}
    listed = ", ".join(names)
    source = f"def forward(self, {listed}):\n    args, kwargs = self.bind([{listed}])\n"
    exec(source + "    return self.m(*args, **kwargs)\n", scope)
    kind: type[_Call] = type("_CallForm", (_Call,), {"forward": scope["forward"]})
    return kind(module, form)
