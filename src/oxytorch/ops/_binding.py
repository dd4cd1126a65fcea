"""Connects an op's compiled kernel with its reference: other devices, tracing and gradients.

The C++ library defines each schema twice, as `name` and as `name.reference`, and has a CPU kernel
for `name` that passes float64 on to `name.reference`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _library

Function = Callable[..., Any]


@functools.cache
def _namespace() -> torch.library.Library:
    return torch.library.Library("oxytorch", "FRAGMENT")  # type: ignore[no-untyped-call]


def is_compiled(name: str) -> bool:
    """Whether the library is loaded and has the op."""
    return _library.loaded and hasattr(torch.ops.oxytorch, name)


def entry(name: str, reference: Function) -> Function:
    """What the public function calls, with all arguments given by position.

    The compiled op, or the reference where there is no library. Without gradients the dispatcher's
    autograd step is left out: it runs in Python and costs more than the call itself.
    """
    if not is_compiled(name):
        return reference
    overload = getattr(torch.ops.oxytorch, name).default
    is_grad_enabled = torch.is_grad_enabled
    is_compiling = torch.compiler.is_compiling
    below_autograd = torch._C._AutoDispatchBelowAutograd

    def call(*args: Any) -> Any:
        if is_grad_enabled() or is_compiling():
            return overload(*args)
        with below_autograd():
            return overload(*args)

    return call


def bind(name: str, reference: Function, backward: Function | None) -> None:
    """Registers `reference` for every other device, for tracing, and for gradients."""
    if not is_compiled(name):
        return
    library: Any = _namespace()
    library.impl(name, reference, "CompositeExplicitAutograd")
    library.impl(f"{name}.reference", reference, "CompositeImplicitAutograd")
    torch.library.register_autograd(
        f"oxytorch::{name}",
        functools.partial(_backward, backward or functools.partial(_pull_back, reference)),
        setup_context=_save_inputs,
        lib=library,
    )


def bind_mutating(name: str, reference: Function, fake: Function) -> None:
    """As `bind`, for an op that writes into its arguments and so has no gradient.

    fake: returns empty tensors like the results, reading no data and writing none.
    """
    if not is_compiled(name):
        return
    library: Any = _namespace()
    library.impl(name, reference, "CompositeExplicitAutograd")
    library.impl(f"{name}.reference", reference, "CompositeImplicitAutograd")
    torch.library.register_fake(f"oxytorch::{name}", fake, lib=library)


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
        if isinstance(value, list):
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
        if isinstance(value, list):
            return [collect(*pair) for pair in zip(value, wanted, strict=True)]
        return next(found) if isinstance(value, Tensor) and wanted else None

    return [collect(value, wanted) for value, wanted in zip(inputs, needed, strict=True)]
