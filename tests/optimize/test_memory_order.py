"""What is computed in one sweep has the order in memory of torch's result: code may view it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import oxytorch

WIDTH = 32

INPUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(2, 6, WIDTH),
    "tokens of an image": lambda: torch.randn(2, WIDTH, 6).transpose(1, 2),
    "one image": lambda: torch.randn(1, WIDTH, 6).transpose(1, 2),
    "sequence first": lambda: torch.randn(6, 2, WIDTH).transpose(0, 1),
    "a slice": lambda: torch.randn(2, 6, WIDTH + 3)[..., :WIDTH],
    "every second": lambda: torch.randn(2, 6, 2 * WIDTH)[..., ::2],
    "expanded": lambda: torch.randn(1, 1, WIDTH).expand(2, 6, WIDTH),
    "last first": lambda: torch.randn(6, WIDTH, 2).permute(2, 0, 1),
}


class Parts(nn.Module):
    def __init__(self, use: Callable[[Parts, Tensor], Tensor | tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.rms = nn.RMSNorm(WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 1)
        self.use = use

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.use(self, x)


def _with_total(norm: nn.Module, total: Tensor) -> tuple[Tensor, Tensor]:
    return total, norm(total)


USES: dict[str, Callable[[Parts, Tensor], Tensor | tuple[Tensor, ...]]] = {
    "x + linear": lambda m, x: x + m.a(x),
    "linear + x": lambda m, x: m.a(x) + x,
    "linear.add_(x)": lambda m, x: m.a(x).add_(x),
    "x * linear": lambda m, x: x * m.a(x),
    "gelu(linear)": lambda m, x: F.gelu(m.a(x)),
    "layer_norm": lambda m, x: m.norm(x),
    "rms_norm": lambda m, x: m.rms(x),
    "layer_norm of a sum": lambda m, x: m.norm(x + m.a(x)),
    "sum and layer_norm": lambda m, x: _with_total(m.norm, x + m.a(x)),
    "sum and rms_norm": lambda m, x: _with_total(m.rms, m.a(x) + x),
    "silu(x) * linear": lambda m, x: F.silu(x) * m.a(x),
    "linear * silu(x)": lambda m, x: m.a(x) * F.silu(x),
    "gelu(x) * flipped": lambda m, x: F.gelu(x) * x.flip(-1),
    "convolution + x": lambda m, x: m.conv(x.mT) + x.mT,
    "x + relu of convolution": lambda m, x: x.mT + F.relu(m.conv(x.mT)),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("given", INPUTS)
def test_results_have_torchs_order(given: str, use: str) -> None:
    torch.manual_seed(0)
    stock = Parts(USES[use]).eval()
    x = INPUTS[given]()
    for sample in (x, torch.randn(2, 6, WIDTH)):
        model = oxytorch.optimize(stock, sample_input=sample)
        with torch.inference_mode():
            wanted, got = stock(x), model(x)
        for one, other in zip(_tensors(got), _tensors(wanted), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
            assert _order(one) == _order(other)


def _tensors(nested: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return nested if isinstance(nested, tuple) else (nested,)


def _order(x: Tensor) -> tuple[int, ...]:
    """The strides that mean anything: not those of dimensions of size 1."""
    return tuple(s for size, s in zip(x.shape, x.stride(), strict=True) if size > 1)
