"""Uses of networks that have names: each after two calls without gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from .compare import Log
from .layers import KINDS
from .networks import NETWORKS

FORMS = ["default", "sample", pytest.param("program", marks=pytest.mark.slow)]

NAMED: dict[str, tuple[Callable[[], Any], Callable[[], torch.Tensor]]] = {
    **NETWORKS,
    **{name: (kind.build, kind.sample) for name, kind in KINDS.items()},
}


def check_named(
    check: Callable[..., None], network: str, function: Callable[..., Any], form: str
) -> None:
    """Compare a use of a network, `function(model, x, log)`, in a form with stock's."""
    build, sample = NAMED[network]

    def use(model: Any, log: Log) -> None:
        x = sample()
        with torch.no_grad():
            log(model(x), model(x))
        function(model, x, log)

    check(build, use, form, sample, tolerance=3e-5)
