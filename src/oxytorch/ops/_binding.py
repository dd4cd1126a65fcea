"""Connects an op's compiled kernel with its reference: other devices, tracing and gradients.

The C++ library defines each schema twice, as `name` and as `name.reference`, and has a CPU kernel
for `name` that passes float64 on to `name.reference`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from .. import _library
from . import _autocast
from ._autocast import AS_GIVEN, Autocast

Function = Callable[..., Any]
P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def _namespace() -> torch.library.Library:
    return torch.library.Library("oxytorch", "FRAGMENT")  # type: ignore[no-untyped-call]


def is_compiled(name: str) -> bool:
    """Whether the library is loaded and has the op."""
    return _library.loaded and hasattr(torch.ops.oxytorch, name)


def with_kernel(reference: Callable[P, R]) -> Callable[P, R]:
    """Puts the compiled kernel of the op that `reference` names before it.

    Returns the op's public function, with the signature and docstring of the reference; its
    arguments are those of the schema. It calls the compiled op, or the reference where there is no
    library. Without gradients the dispatcher's autograd step is left out: it runs in Python and
    costs more than the call itself.
    """
    if not is_compiled(reference.__name__):
        return reference
    overload = getattr(torch.ops.oxytorch, reference.__name__).default
    is_grad_enabled = torch.is_grad_enabled
    is_compiling = torch.compiler.is_compiling
    below_autograd = torch._C._AutoDispatchBelowAutograd

    @functools.wraps(reference)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        result: R
        if is_grad_enabled() or is_compiling():
            result = overload(*args, **kwargs)
            return result
        with below_autograd():
            result = overload(*args, **kwargs)
            return result

    return call


def with_writing_kernel(reference: Callable[P, R]) -> Callable[P, R]:
    """As `with_kernel`, for an op that writes into its arguments: there is no gradient."""
    function = with_kernel(reference)
    is_grad_enabled = torch.is_grad_enabled

    @functools.wraps(reference)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_grad_enabled() and any(map(_requires_grad, (*args, *kwargs.values()))):
            raise RuntimeError(
                f"{reference.__name__}: has no gradient; call it under torch.no_grad()"
            )
        return function(*args, **kwargs)

    return call


def _requires_grad(value: object) -> bool:
    """Whether a tensor, or one of a list of tensors, requires a gradient."""
    if isinstance(value, (list, tuple)):
        return any(map(_requires_grad, value))
    return isinstance(value, Tensor) and value.requires_grad


@dataclass(frozen=True)
class _Behaviour:
    """What an op does besides its kernel.

    fake: of an op that writes into its arguments.
    """

    reference: Function
    has_gradient: bool
    fake: Function | None
    autocast: Autocast


_behaviours: dict[str, _Behaviour] = {}
_connected: set[str] = set()


def bind(
    name: str,
    reference: Function,
    has_gradient: bool,
    fake: Function | None,
    autocast: Autocast = AS_GIVEN,
) -> None:
    """Registers `reference` for every other device, for tracing, and for gradients.

    fake: for an op that writes into its arguments: returns empty tensors like the results, reading
    no data and writing none.
    """
    _behaviours[name] = _Behaviour(reference, has_gradient, fake, autocast)
    _connect(name)


def connect_all(names: Sequence[str]) -> None:
    """Connects ops with the dispatcher before their modules are imported.

    So `torch.ops.oxytorch.<name>` does all that it can do as soon as oxytorch is imported. What it
    does in Python comes from the op's module, which is imported when that is called first.
    """
    for name in names:
        _connect(name)


def _connect(name: str) -> None:
    if name in _connected or not is_compiled(name):
        return
    _connected.add(name)
    library: Any = _namespace()
    library.impl(name, functools.partial(_run_reference, name), "CompositeExplicitAutograd")
    reference = functools.partial(_run_reference, name)
    library.impl(f"{name}.reference", reference, "CompositeImplicitAutograd")
    library.impl(name, functools.partial(_run_under_autocast, name), "AutocastCPU")
    if getattr(torch.ops.oxytorch, name).default._schema.is_mutable:
        torch.library.register_fake(
            f"oxytorch::{name}", functools.partial(_run_fake, name), lib=library
        )
    else:
        kernel = functools.partial(_run_above_kernel, name)
        library.impl(name, kernel, "Autograd", with_keyset=True)


def _behaviour_of(name: str) -> _Behaviour:
    if name not in _behaviours:
        importlib.import_module(f"{__package__}.{name}")
    return _behaviours[name]


def _run_reference(name: str, *args: Any, **named: Any) -> Any:
    return _behaviour_of(name).reference(*args, **named)


def _run_under_autocast(name: str, *args: Any, **named: Any) -> Any:
    overload = getattr(torch.ops.oxytorch, name).default
    return _autocast.run(overload, _behaviour_of(name).autocast, args, named)


def _run_fake(name: str, *args: Any, **named: Any) -> Any:
    fake = _behaviour_of(name).fake
    assert fake is not None, f"{name}: an op that writes into its arguments is given a fake"
    return fake(*args, **named)


def _run_above_kernel(name: str, keyset: Any, *args: Any, **named: Any) -> Any:
    return _autograd_kernel(name)(keyset, *args, **named)


@functools.cache
def _autograd_kernel(name: str) -> Function:
    """The kernel that `torch.library.register_autograd` makes, which takes it a millisecond."""
    behaviour = _behaviour_of(name)
    if not behaviour.has_gradient:
        return functools.partial(_pass_on, getattr(torch.ops.oxytorch, name).default)
    caught = _Catching("oxytorch", "FRAGMENT")  # type: ignore[no-untyped-call]
    torch.library.register_autograd(
        f"oxytorch::{name}",
        functools.partial(_backward, functools.partial(_pull_back, behaviour.reference)),
        setup_context=_save_inputs,
        lib=caught,
    )
    return caught.kernel


def _pass_on(overload: Any, keyset: Any, *args: Any, **named: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return overload.redispatch(keyset & torch._C._after_autograd_keyset, *args, **named)


class _Catching(torch.library.Library):
    """Keeps what is to be registered."""

    kernel: Function

    def impl(self, op_name: Any, fn: Any, *args: Any, **options: Any) -> None:
        self.kernel = fn


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Saves all inputs; lists of tensors are saved flat and `ctx.spans` says where they lie."""
    tensors: list[Tensor | None] = []
    ctx.rest = list(inputs)
    ctx.spans = {}
    for position, value in enumerate(inputs):
        if isinstance(value, Tensor):
            ctx.spans[position] = len(tensors)
            tensors.append(value)
            ctx.rest[position] = None
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
            ctx.spans[position] = range(len(tensors), len(tensors) + len(value))
            tensors.extend(value)
            ctx.rest[position] = None
    ctx.save_for_backward(*tensors)


def _saved_inputs(ctx: Any) -> list[Any]:
    tensors = ctx.saved_tensors
    inputs = list(ctx.rest)
    for position, span in ctx.spans.items():
        inputs[position] = (
            [tensors[index] for index in span] if isinstance(span, range) else tensors[span]
        )
    return inputs


def _backward(formula: Function, ctx: Any, *gradients: Any) -> tuple[Any, ...]:
    """Calls `formula(inputs, gradients, needed)`; returns one gradient (or list) per input."""
    inputs = _saved_inputs(ctx)
    # The dispatcher leaves out trailing arguments that have their default value.
    given = len(ctx.needs_input_grad)
    needed = [*ctx.needs_input_grad, *[False] * (len(inputs) - given)]
    return tuple(formula(inputs, gradients, needed))[:given]


def _pull_back(
    reference: Function, inputs: list[Any], gradients: tuple[Any, ...], needed: Any
) -> list[Any]:
    """Vector-Jacobian product of the reference."""
    again = torch.is_grad_enabled()
    leaves: list[Tensor] = []

    def leaf(value: Any, wanted: Any) -> Any:
        if isinstance(value, list) and not isinstance(wanted, bool):  # of tensors
            return [leaf(*pair) for pair in zip(value, wanted, strict=True)]
        if not isinstance(value, Tensor) or not wanted:
            return value
        # A view keeps the way back to the input, for gradients of gradients.
        leaves.append(value.view_as(value) if again else value.detach().requires_grad_())
        return leaves[-1]

    with torch.enable_grad():
        arguments = [leaf(value, wanted) for value, wanted in zip(inputs, needed, strict=True)]
        outputs = reference(*arguments)
    pairs = [
        (output, gradient)
        for output, gradient in zip(
            outputs if isinstance(outputs, (list, tuple)) else (outputs,), gradients, strict=True
        )
        if gradient is not None and output.requires_grad
    ]
    found = iter(
        torch.autograd.grad(
            [output for output, _ in pairs],
            leaves,
            [gradient for _, gradient in pairs],
            create_graph=again,
            allow_unused=True,
        )
    )

    def collect(value: Any, wanted: Any) -> Any:
        if isinstance(value, list) and not isinstance(wanted, bool):  # of tensors
            return [collect(*pair) for pair in zip(value, wanted, strict=True)]
        return next(found) if isinstance(value, Tensor) and wanted else None

    return [collect(value, wanted) for value, wanted in zip(inputs, needed, strict=True)]
