"""Torch's own layers whose code somebody replaced before `optimize`: they run that code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oxytorch
from oxytorch.core.layer_functions import replaced_in


@contextlib.contextmanager
def doubled(place: Any, name: str) -> Iterator[None]:
    """While a function of torch returns twice what it does."""
    own = getattr(place, name)

    def twice(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs) * 2

    setattr(place, name, twice)
    try:
        yield
    finally:
        setattr(place, name, own)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(64, 96, 3, padding=1),
        nn.BatchNorm2d(96),
        nn.ReLU(),
        nn.Conv2d(96, 64, 3, padding=1),
        nn.Flatten(2),
        nn.Linear(49, 128),
        nn.LayerNorm(128),
        nn.GELU(),
        nn.Linear(128, 64),
    ).eval()


PLACES = [
    (F, "conv2d"),
    (F, "linear"),
    (F, "batch_norm"),
    (F, "layer_norm"),
    (F, "relu"),
    (F, "gelu"),
    (nn.Conv2d, "_conv_forward"),
    (nn.Conv2d, "forward"),
    (nn.Linear, "forward"),
    (nn.LayerNorm, "forward"),
    (nn.modules.batchnorm._BatchNorm, "forward"),
    (nn.ReLU, "forward"),
]


@pytest.mark.parametrize(
    ("place", "name"), PLACES, ids=[f"{p.__name__.rpartition('.')[2]}.{n}" for p, n in PLACES]
)
@pytest.mark.parametrize("way", ["default", "sample", "graph"])
def test_what_was_replaced_before_optimize_is_called(
    place: Any, name: str, way: str, pack_small_layers: None
) -> None:
    model, x = network(), torch.randn(2, 64, 7, 7)
    options: dict[str, Any] = {} if way == "default" else {"sample_input": x}
    with doubled(place, name), torch.no_grad():
        expected = model(x)
        optimized = oxytorch.optimize(model, graph=way == "graph", **options)
        for each in (x, x[:1]):
            torch.testing.assert_close(optimized(each), model(each), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert (expected - model(x)).abs().max() > 1e-2


def test_the_report_names_it() -> None:
    with doubled(nn.Linear, "forward"):
        report = str(oxytorch.explain(oxytorch.optimize(network())))
    assert "Linear.forward of torch was replaced by other code" in report


def test_torchs_own_layers_are_as_torch_wrote_them() -> None:
    kinds = [k for k in vars(nn).values() if isinstance(k, type) and issubclass(k, nn.Module)]
    assert len(kinds) > 100
    assert [kind for kind in kinds if replaced_in(kind) is not None] == []


def test_a_class_of_the_users_is_not_one_that_was_replaced() -> None:
    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    assert replaced_in(Twice) is None
    with doubled(F, "linear"):
        assert replaced_in(Twice) == "linear"
