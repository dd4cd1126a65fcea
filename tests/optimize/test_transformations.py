"""Models whose layers are bfloat16 between float32 norms, under torch.func and forward-mode AD."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import oxytorch


def _optimized_for(model: nn.Module, training: bool) -> nn.Module:
    if not training:
        return oxytorch.optimize(model, dtype={nn.Linear: torch.bfloat16})
    optimizer = torch.optim.AdamW(model.parameters())
    return oxytorch.optimize(model, optimizer=optimizer, dtype=torch.bfloat16)[0]


TRANSFORMATIONS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "jacrev": lambda m, x: torch.func.jacrev(lambda v: m(v).sum(0))(x),
    "jacfwd": lambda m, x: torch.func.jacfwd(lambda v: m(v).sum(0))(x),
    "vmap": lambda m, x: torch.func.vmap(m)(x[:, None]),
    "jvp": lambda m, x: torch.func.jvp(m, (x,), (torch.ones_like(x),))[1],
    "hessian": lambda m, x: torch.func.hessian(lambda v: m(v).float().square().sum())(x),
}


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", TRANSFORMATIONS)
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d, partial(nn.GroupNorm, 4)])
def test_norms_amid_converted_layers_can_be_transformed(
    norm: Callable[[int], nn.Module], name: str, training: bool
) -> None:
    model = nn.Sequential(nn.Linear(16, 32), norm(32), nn.Linear(32, 8)).eval()
    optimized = _optimized_for(model, training)
    x = torch.randn(3, 16)
    found = TRANSFORMATIONS[name](optimized, x).float()
    wanted = TRANSFORMATIONS[name](model, x)
    assert (found - wanted).norm() < 0.05 * wanted.norm()


def test_norms_amid_converted_layers_take_dual_numbers() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8)).eval()
    x, tangent = torch.randn(3, 16), torch.randn(3, 16)

    def derivative(run: nn.Module) -> Tensor:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, tangent)
            return torch.autograd.forward_ad.unpack_dual(run(dual)).tangent.float()

    wanted = derivative(model)
    for training in (False, True):
        found = derivative(_optimized_for(model, training))
        assert (found - wanted).norm() < 0.05 * wanted.norm()
