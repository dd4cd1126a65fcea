"""A step of a rule in plain PyTorch: for other devices, without the library, and for tests.

The same bits as the kernel's wherever torch's arithmetic is the kernel's: the rule is the same, the
formats are those of formats.py, and the random numbers are drawn in the same way.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.optimizer_step import formats, rules
from .batch import MEASURE, SUMS, UPDATE, WHOLE, Batch, Scaling

_MASK = (1 << 64) - 1


def run(
    rule: str,
    batch: Batch,
    hyper: Sequence[float],
    scaling: Scaling,
    stochastic: bool,
    seed: int,
    sums: Tensor | None = None,
    phase: int = WHOLE,
) -> None:
    """As `_step.run`, one tensor after the other."""
    if scaling.found_inf is not None and scaling.found_inf.item():
        return
    factor = scaling.whole_factor
    if scaling.gradient_scale is not None:
        factor /= scaling.gradient_scale.item()
    if sums is None:
        sums = torch.zeros(len(batch.parameters), SUMS, dtype=torch.float64)
    for index in range(len(batch.parameters)):
        step = batch.steps[index].item() + (phase != UPDATE) if batch.steps else 0.0
        _update(rule, batch, index, hyper, step, factor, stochastic, seed, sums[index], phase)
        if batch.steps:
            batch.steps[index].fill_(step)


def _update(
    rule: str,
    batch: Batch,
    index: int,
    hyper: Sequence[float],
    step: float,
    factor: float,
    stochastic: bool,
    seed: int,
    sums: Tensor,
    phase: int,
) -> None:
    parameter = batch.parameters[index]
    low = batch.low_halves[index] if batch.low_halves else None
    split = low is not None and low.numel() > 0
    wide = formats.join(parameter, low) if split and low is not None else _widened(parameter)
    gradient = _widened(batch.gradients[index]) * factor
    kept = [state[index] for state in batch.states]
    bounds = [state[index] for state in batch.scales] or [torch.empty(0)] * len(kept)
    constants: Callable[..., dict[str, float]] = getattr(rules, f"{rule}_constants")
    has_step = "step" in inspect.signature(constants).parameters
    values = constants(*([step] if has_step else []), *hyper)
    # Scalars are float32 where the elements are.
    if wide.dtype == torch.float32:
        values = {
            key: value
            if isinstance(value, bool)
            else torch.tensor(value, dtype=torch.float32).item()
            for key, value in values.items()
        }

    read: list[Tensor] = []

    def call(name: str) -> tuple[Any, ...]:
        function = getattr(rules, name)
        read[:] = [_read(*pair) for pair in zip(kept, bounds, strict=True)]
        operands = [wide, gradient, *read]
        named = list(inspect.signature(function).parameters)
        missing = len(named) - len(operands) - len(values)
        return tuple(function(*operands, *[wide] * missing, **values))

    def write(results: Sequence[Tensor], states: Sequence[int]) -> None:
        for position, value in zip(states, results, strict=False):
            # A state that the options do not use comes back as it was.
            if position < len(kept) and value is not read[position]:
                key = random_key(seed, batch.streams[index], step, position)
                _write(kept[position], bounds[position], value, stochastic, key)

    if hasattr(rules, f"{rule}_measure"):
        if phase != UPDATE:
            *states, first, second = call(f"{rule}_measure")
            write(states, range(len(kept)))
            sums.copy_(torch.stack([square.double().sum() for square in (first, second)]))
        if phase == MEASURE:
            return
        factor_of = getattr(rules, f"{rule}_trust")
        has_count = "count" in inspect.signature(factor_of).parameters
        count = [max(wide.numel(), 1)] if has_count else []
        trust = factor_of(*sums.tolist(), *count, *hyper)
        values["step_size"] = torch.tensor(values["step_size"] * trust, dtype=wide.dtype).item()
    updated, *states = call(rule)
    write(states, range(len(kept)))
    if split and low is not None:
        upper, new_low = formats.split(updated)
        parameter.copy_(upper)
        low.copy_(new_low)
    else:
        parameter.copy_(updated)


def _widened(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _read(kept: Tensor, bounds: Tensor) -> Tensor:
    if kept.dtype in (torch.int8, torch.uint8):
        return formats.decode(kept, bounds)
    if bounds.numel():
        return kept * bounds
    return _widened(kept)


def _write(kept: Tensor, bounds: Tensor, value: Tensor, stochastic: bool, key: int) -> None:
    if kept.dtype in (torch.int8, torch.uint8):
        noise = formats.noise(value.numel(), key).to(value.device)
        codes, found = formats.encode(value, kept.dtype == torch.int8, noise)
        kept.copy_(codes)
        bounds.copy_(found)
    elif kept.dtype == torch.bfloat16 and stochastic:
        kept.copy_(formats.round_at_random(value.float(), key))
    else:
        kept.copy_(value)


def random_key(seed: int, stream: int, step: float, operand: int) -> int:
    """Where the noise of an operand starts: 32 bits that differ for every tensor and step."""
    key = _mix(seed & _MASK)
    for value in (stream, math.floor(step), operand):
        key = _mix(key ^ value & _MASK)
    return key & 0xFFFFFFFF


def _mix(x: int) -> int:
    """Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _MASK
    return x ^ x >> 31
