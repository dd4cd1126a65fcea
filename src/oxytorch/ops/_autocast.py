"""What becomes of an op's arguments under `torch.autocast`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Autocast:
    """A rule of torch's, and the arguments that it casts.

    rule: "lower": to the dtype of autocast, as matrix products; "widest": to the widest dtype of
    theirs, as operators whose operands are promoted; "given": none, as norms and softmax on CPUs.
    arguments: names of tensors, or of lists of tensors; what is no number with a point, is float64
    or lies elsewhere is not cast.
    """

    rule: str = "given"
    arguments: tuple[str, ...] = ()

    def cast(self, named: dict[str, Any], device: str) -> dict[str, Any]:
        """The arguments of a call, by name, as the op is to take them."""
        chosen = {name: named[name] for name in self.arguments if name in named}
        if self.rule == "given" or not chosen:
            return named
        if self.rule == "lower":
            dtype = torch.get_autocast_dtype(device)
        else:
            found = [t.dtype for value in chosen.values() for t in _eligible(value, device)]
            if not found:
                return named
            dtype = functools.reduce(torch.promote_types, found)
        return {**named, **{name: _cast(value, dtype, device) for name, value in chosen.items()}}


AS_GIVEN = Autocast()


def _is_eligible(value: Any, device: str) -> bool:
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.dtype != torch.float64
        and value.device.type == device
    )


def _eligible(value: Any, device: str) -> list[Tensor]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [each for each in values if _is_eligible(each, device)]


def _cast(value: Any, dtype: torch.dtype, device: str) -> Any:
    if isinstance(value, (list, tuple)):
        return [_cast(each, dtype, device) for each in value]
    return value.to(dtype) if _is_eligible(value, device) else value


def run(overload: Any, rule: Autocast, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Call an op under autocast on CPUs: casts its arguments, and calls it without autocast."""
    names = [each.name for each in overload._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **named}
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    with torch._C._ExcludeDispatchKeyGuard(keys):
        return overload(**rule.cast(given, "cpu"))
