"""A step of a rule in plain PyTorch: for other devices, without the library, and for tests.

The same bits as the kernel's wherever torch's arithmetic is the kernel's: the rule is the same, the
formats are those of formats.py, and the random numbers are drawn in the same way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from . import formats, rules
from .layout import REDUCE_NORMS, SUMS, UPDATE

_MASK = (1 << 64) - 1


RULES = tuple(
    name.removesuffix("_constants") for name in vars(rules) if name.endswith("_constants")
)


def hyper_of(rule: str) -> tuple[str, ...]:
    """The names of a rule's hyper-parameters, flags last."""
    return tuple(name for name in _arguments(f"{rule}_constants") if name != "step")


def has_norms(rule: str) -> bool:
    """Whether the rule needs norms, and so two sweeps over a tensor."""
    return hasattr(rules, f"{rule}_reduce_norms")


@functools.cache
def operands_of(rule: str) -> Mapping[str, bool]:
    """The operands of a rule in their order, and whether they are never negative."""
    kinds = getattr(rules, rule).__annotations__.items()
    return {name: kind == "Magnitude" for name, kind in kinds if kind in ("Value", "Magnitude")}


def constants_of(rule: str, hyper: Sequence[float], step: float = 1.0) -> dict[str, float]:
    """The scalars and flags of a rule; hyper: in the order of `<rule>_constants`."""
    constants: dict[str, float] = _call(f"{rule}_constants", _named(rule, hyper, step))
    return constants


def check(rule: str, hyper: Sequence[float]) -> None:
    """Raises RuntimeError for an unknown rule, or a wrong number of hyper-parameters."""
    if rule not in RULES:
        known = ", ".join(map(repr, RULES))
        raise RuntimeError(f"optimizer_step: expected rule from {known}, got {rule!r}")
    names = hyper_of(rule)
    if len(hyper) != len(names):
        raise RuntimeError(
            f"optimizer_step: expected hyper of {', '.join(names)}, got {len(hyper)} numbers"
        )


class Update:
    """The update of one tensor."""

    def __init__(
        self,
        rule: str,
        parameter: Tensor,
        low_bits: Tensor | None,
        gradient: Tensor,
        factor: float,
        states: Sequence[Tensor],
        scales: Sequence[Tensor],
        key: Callable[[int], int],
        stochastic: bool,
    ) -> None:
        """key: where the noise of a state starts, by its place."""
        self._rule, self._key, self._stochastic = rule, key, stochastic
        self._parameter, self._kept = parameter, states
        self._gradient = _widened(gradient) * factor
        self._low_bits = low_bits if low_bits is not None and low_bits.numel() else None
        self._wide = (
            _widened(parameter)
            if self._low_bits is None
            else formats.join(parameter, self._low_bits)
        )
        self._scales = scales or [torch.empty(0, device="cpu")] * len(states)

    def run(self, hyper: Sequence[float], step: float, sums: Tensor, phase: int) -> None:
        """One sweep or both; sums: float64 [SUMS], of a rule with norms."""
        named = _named(self._rule, hyper, step)
        constants = _call(f"{self._rule}_constants", named)
        # Scalars are float32 where the elements are.
        if self._wide.dtype == torch.float32:
            constants = {
                name: value if isinstance(value, bool) else _rounded(value, torch.float32)
                for name, value in constants.items()
            }
        if has_norms(self._rule):
            if phase != UPDATE:
                *states, first, second = self._apply(f"{self._rule}_reduce_norms", constants)
                self._write(states)
                sums.copy_(torch.stack([square.double().sum() for square in (first, second)]))
            if phase == REDUCE_NORMS:
                return
            ratio = self._trust_ratio(named, sums.tolist())
            constants["step_size"] = _rounded(constants["step_size"] * ratio, self._wide.dtype)
        updated, *states = self._apply(self._rule, constants)
        self._write(states)
        if self._low_bits is None:
            self._parameter.copy_(updated)
        else:
            for own, value in zip(
                (self._parameter, self._low_bits), formats.split(updated), strict=True
            ):
                own.copy_(value)

    def _apply(self, name: str, constants: Mapping[str, float]) -> tuple[Any, ...]:
        """What a function of the rule makes of the operands; states not given are unused."""
        self._read = [_read(*pair) for pair in zip(self._kept, self._scales, strict=True)]
        given = [self._wide, self._gradient, *self._read]
        names = [*operands_of(self._rule)]
        given += [self._wide] * (len(names) - len(given))
        operands = dict(zip(names, given, strict=True))
        return tuple(_call(name, {**operands, "c": SimpleNamespace(**constants)}))

    def _trust_ratio(self, hyper: Mapping[str, float], sums: Sequence[float]) -> float:
        name = f"{self._rule}_trust_ratio"
        named = dict(zip(_arguments(name)[:SUMS], sums, strict=True))
        return float(_call(name, {**hyper, **named, "count": max(self._wide.numel(), 1)}))

    def _write(self, results: Sequence[Tensor]) -> None:
        for position, value in enumerate(results[: len(self._kept)]):
            # A state that the options do not use comes back as it was.
            if value is not self._read[position]:
                kept, scales = self._kept[position], self._scales[position]
                _write(kept, scales, value, self._stochastic, self._key(position))


@functools.cache
def _arguments(name: str) -> tuple[str, ...]:
    """The arguments of a function of rules.py."""
    code = getattr(rules, name).__code__
    return tuple(code.co_varnames[: code.co_argcount])


def _call(name: str, values: Mapping[str, Any]) -> Any:
    """Calls a function of rules.py with those of the values that it takes."""
    return getattr(rules, name)(**{argument: values[argument] for argument in _arguments(name)})


def _named(rule: str, hyper: Sequence[float], step: float) -> dict[str, float]:
    """Hyper-parameters by name, and the number of the step."""
    return {**dict(zip(hyper_of(rule), hyper, strict=True)), "step": step}


def _rounded(value: float, dtype: torch.dtype) -> float:
    return torch.tensor(value, dtype=dtype, device="cpu").item()


def _widened(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _read(kept: Tensor, scales: Tensor) -> Tensor:
    if kept.dtype in (torch.int8, torch.uint8):
        return formats.decode(kept, scales)
    if scales.numel():
        return kept * scales
    return _widened(kept)


def _write(kept: Tensor, scales: Tensor, value: Tensor, stochastic: bool, key: int) -> None:
    if kept.dtype in (torch.int8, torch.uint8):
        noise = formats.noise(value.numel(), key).to(value.device)
        codes, found = formats.encode(value, kept.dtype == torch.int8, noise)
        kept.copy_(codes)
        scales.copy_(found)
    elif kept.dtype == torch.bfloat16 and stochastic:
        kept.copy_(formats.round_at_random(value.float(), key))
    else:
        kept.copy_(value)


def random_key(seed: int, rng_stream: int, step: float, operand: int) -> int:
    """Where the noise of an operand starts: 32 bits that differ for every tensor and step."""
    key = _mix(seed & _MASK)
    for value in (rng_stream, math.floor(step), operand):
        key = _mix(key ^ value & _MASK)
    return key & 0xFFFFFFFF


def _mix(x: int) -> int:
    """Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _MASK
    return x ^ x >> 31
