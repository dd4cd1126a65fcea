"""One step of an optimizer over many tensors, on CPUs and GPUs; rules.py is its arithmetic."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._binding import with_writing_kernel
from .._op import Cost, Sample, nbytes, register
from .._samples import MEBI, values
from . import formats, reference
from .layout import SUMS, UPDATE, WHOLE


@with_writing_kernel
def optimizer_step(
    parameters: Sequence[Tensor],
    low_bits: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: Sequence[Tensor],
    scales: Sequence[Tensor],
    steps: Sequence[Tensor],
    rng_streams: Sequence[int],
    rule: str,
    hyper: Sequence[float],
    gradient_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    gradient_factor: float = 1.0,
    stochastic: bool = False,
    seed: int = 0,
    sums: Tensor | None = None,
    phase: int = WHOLE,
) -> None:
    """Updates parameters, states, scales and steps in place, by a rule of rules.py.

    Arithmetic is float32 and rounded once to the format of what is written (formats.py), the same
    bits at every level; norms of a tensor are sums in float64. All is checked before anything is
    written. There is no gradient. float64 and other devices run plain PyTorch.

    Args:
        parameters: float32, bfloat16 or float16, without holes between their elements.
        low_bits: int16 beside a bfloat16 parameter whose float32 value it completes, an empty
            tensor beside any other; or no tensors.
        gradients: float32, bfloat16 or float16, with the strides of the parameters.
        states: the rule's first state for each parameter, then its second for each, and so on:
            float32, bfloat16, float16, or 8-bit values (int8; uint8 if never negative), with the
            strides of the parameters. Last ones that the flags do not use may be left out. A state
            may be float32 columns [..., 1, width] whose products with rows are its values.
        scales: for each state float32 [blocks of 256 values], for columns their rows
            [..., height, 1], else an empty tensor; or no tensors.
        steps: float32 of one element, the number of steps done, which the call counts; none for
            rules that do not need it.
        rng_streams: for each parameter the number of its stream of random numbers; none for 0, 1, 2
            and so on.
        rule: "sgd", "adam", "adagrad", "rmsprop", "lion", "lamb", "lars" or "adafactor".
        hyper: the arguments of the rule's `_constants` function after the number of the step.
        gradient_scale: float32 of one element by which gradients are divided.
        found_inf: float32 of one element; the call does nothing if it is not zero.
        gradient_factor: gradients are multiplied by it.
        stochastic: bfloat16 states are rounded up or down at random, so that the mean is right.
        seed: of the random numbers.
        sums: float64 [number of parameters, 2], of a rule with norms: written by phase 1, read by
            phase 2, so that the sums of several processes can be added in between.
        phase: 0 for the whole step; of a rule with norms, 1 for the norms and 2 for the update.

    Raises RuntimeError if a number of tensors, a dtype, shape, stride or device does not fit.
    """
    reference.check(rule, hyper)
    if found_inf is not None and found_inf.item():
        return
    count = len(parameters)
    if sums is None:
        sums = torch.zeros(count, SUMS, dtype=torch.float64, device="cpu")
    factor = gradient_factor if gradient_scale is None else gradient_factor / gradient_scale.item()
    for index, parameter in enumerate(parameters):
        step = steps[index].item() + (phase != UPDATE) if steps else 0.0
        rng_stream = rng_streams[index] if rng_streams else index
        update = reference.Update(
            rule,
            parameter,
            low_bits[index] if low_bits else None,
            gradients[index],
            factor,
            states[index::count],
            scales[index::count],
            functools.partial(reference.random_key, seed, rng_stream, step),
            stochastic,
        )
        update.run(hyper, step, sums[index], phase)
        if steps:
            steps[index].fill_(step)


def _fake(*tensors: object, **rest: object) -> None:
    """There is no result."""


_HYPER = {
    "lr": 0.01,
    "weight_decay": 0.1,
    "momentum": 0.9,
    "dampening": 0.3,
    "alpha": 0.9,
    "beta1": 0.9,
    "beta2": 0.99,
    "eps": 1e-6,
    "epsilon": 1e-6,
    "lr_decay": 0.01,
    "eeta": 0.1,
    "beta2_decay": -0.8,
    "eps1": 1e-6,
    "eps2": 1e-3,
    "d": 1.0,
}
"""Hyper-parameters of sample calls; those that are not here are flags."""


def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
    """Calls for tests ("test") and benchmarks ("cache", "memory").

    Those for tests have vectors, whose gradients keep their layout where tests change layouts.
    Matrices, parameters in two parts and phases have tests of their own, in tests/optim.
    """
    if size != "test":
        count = (MEBI // 4 if size == "cache" else 256 * MEBI) // 2 // (2 * dtype.itemsize + 8)
        adam = _call("adam", ("decoupled_weight_decay",), dtype, sizes=[count] * 2)
        # That of amsgrad is left out.
        yield Sample(f"adam-2x{count}", (), adam | {"states": adam["states"][:4]})
        return
    for rule in reference.RULES:
        flags = tuple(name for name in reference.hyper_of(rule) if name not in _HYPER)
        for count in range(len(flags) + 1):
            for chosen in itertools.combinations(flags, count):
                if "is_factored" not in chosen:
                    yield Sample("-".join((rule, *chosen)), (), _call(rule, chosen, dtype))
        if dtype != torch.float32:
            yield Sample(f"{rule}-narrow", (), _call(rule, (), dtype, state_dtype=dtype))
    adam = _call("adam", ("amsgrad",), dtype)
    yield Sample("adam-codes", (), adam | _encoded("adam", adam["states"]))
    narrow = _call("adam", ("amsgrad",), dtype, state_dtype=torch.bfloat16)
    streams = {"rng_streams": [*range(5, 5 + len(adam["parameters"]))], "seed": 7}
    yield Sample("adam-stochastic", (), narrow | streams | {"stochastic": True})
    scaled = {
        "gradient_scale": torch.tensor(8.0, device="cpu"),
        "found_inf": torch.tensor(0.0, device="cpu"),
    }
    yield Sample("adam-scaled", (), adam | scaled | {"gradient_factor": -0.5})
    factored = {"scales": [torch.rand(1, 1, device="cpu") + 0.5 for _ in adam["parameters"]]}
    for name in ("parameters", "gradients", "states"):
        factored[name] = [tensor[None] for tensor in adam[name][-len(adam["parameters"]) :]]
    plain = _call("adafactor", ("is_factored",), dtype)
    yield Sample("adafactor-is_factored", (), plain | factored)


def _call(
    rule: str,
    flags: Sequence[str],
    dtype: torch.dtype,
    state_dtype: torch.dtype = torch.float32,
    sizes: Sequence[int] = (1, 15, 16, 17, 33, 0, 257, 1030),
) -> dict[str, Any]:
    """The arguments of a call with these flags set; the third step of each parameter."""
    kinds = [*reference.operands_of(rule).values()][2:]
    return {
        "parameters": [values(size, dtype=dtype) for size in sizes],
        "low_bits": [],
        "gradients": [values(size, dtype=dtype) for size in sizes],
        "states": [
            (
                torch.rand(size, device="cpu") + 1
                if is_magnitude
                else torch.randn(size, device="cpu") / 8
            ).to(state_dtype)
            for is_magnitude in kinds
            for size in sizes
        ],
        "scales": [],
        "steps": [torch.tensor(2.0, device="cpu") for _ in sizes],
        "rng_streams": [],
        "rule": rule,
        "hyper": [_HYPER.get(name, float(name in flags)) for name in reference.hyper_of(rule)],
    }


def _encoded(rule: str, states: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """States quantized to 8 bits, and their scales."""
    kinds = [*reference.operands_of(rule).values()][2:]
    count = len(states) // len(kinds)
    pairs = [
        formats.encode(state, signed=not kinds[place // count])
        for place, state in enumerate(states)
    ]
    return {"states": [codes for codes, _ in pairs], "scales": [scales for _, scales in pairs]}


def cost(
    parameters: Sequence[Tensor],
    low_bits: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: Sequence[Tensor],
    scales: Sequence[Tensor],
    **rest: object,
) -> Cost:
    """Gradients are read; parameters and states are read and written, some operations for each."""
    changed = nbytes([*parameters, *low_bits, *states, *scales])
    elements = sum(tensor.numel() for tensor in (*parameters, *states))
    return Cost(nbytes(gradients) + 2 * changed, 4 * elements)


_WRITES = ("parameters", "low_bits", "states", "scales", "steps", "sums")
op = register(optimizer_step, samples, cost, writes=_WRITES, fake=_fake)
