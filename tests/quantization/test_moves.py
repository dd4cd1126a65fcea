"""Steps that move elements move bytes between layers of bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from int8_models import error
from torch import Tensor, nn
from torch.nn import functional as F

import oxytorch
from oxytorch.quantization import Int8StaticActivationInt8Weight, convert, quantize, recipe_of

IMAGES = [torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(n)) for n in range(3)]
TOKENS = [torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(n)) for n in range(3)]
ONES = torch.tensor([0, 3, 3])


class Between(nn.Module):
    """Two convolutions with something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.between = nn.Conv2d(8, 16, 1), between
        self.last = nn.Conv2d(between(torch.zeros(2, 16, 6, 6)).shape[1], 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.between(self.first(x)))
        return result


def _c2f(x: Tensor) -> Tensor:
    a, b = x.chunk(2, 1)
    return torch.cat([a, b, b.flip(1)], 1)


def _pools(x: Tensor) -> Tensor:
    y = F.max_pool2d(x, 3, 1, 1)
    return torch.cat([x, y, F.max_pool2d(y, 3, 1, 1)], 1)


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "chunk": _c2f,
    "split": lambda x: torch.cat(x.split([4, 12], 1)[::-1], 1),
    "unbind": lambda x: torch.stack(x.unbind(1)[::2], 1),
    "select": lambda x: x[0][None],
    "slice": lambda x: x[:, ::2],
    "narrow": lambda x: x.narrow(2, 1, 3),
    "gather": lambda x: x.gather(1, torch.zeros(2, 3, 6, 6, dtype=torch.int64)),
    "index": lambda x: x[:, ONES],
    "index_select": lambda x: x.index_select(1, ONES),
    "diagonal": lambda x: torch.diagonal(x, 0, 2, 3)[..., None],
    "flip": lambda x: x.flip(1, 2),
    "roll": lambda x: x.roll((1, 2), (2, 3)),
    "rot90": lambda x: x.rot90(1, (2, 3)),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "expand": lambda x: x[:1].expand(3, -1, -1, -1),
    "transpose": lambda x: x.mT.contiguous(),
    "windows": lambda x: x.view(2, 16, 2, 3, 2, 3).permute(0, 2, 4, 1, 3, 5).reshape(8, 16, 3, 3),
    "squeeze": lambda x: x[:1].squeeze().unsqueeze(0),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 2),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 4),
    "pad": lambda x: F.pad(x, (1, 2, 0, -1)).flip(3),
    "unfold": lambda x: x.unfold(2, 2, 2).flatten(3),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "nearest-exact": lambda x: F.interpolate(x, size=(4, 9), mode="nearest-exact"),
    "max_pool": _pools,
    "amax": lambda x: x.amax((2, 3), keepdim=True),
    "relu": lambda x: F.relu(x.flip(1)),
    "relu of parts": lambda x: torch.cat([x[:, :8], F.relu(x.flip(1))], 1),
    "float": lambda x: x.flip(1).double().float(),
}
NOT_MOVED = {"float"}
UNSIGNED = {"nearest", "nearest-exact"}
"""What torch has no kernel of for signed bytes, which symmetric ranges are rounded to."""


@pytest.mark.parametrize("symmetric", [False, True])
def test_relu_is_of_bytes_whatever_zero_is(symmetric: bool) -> None:
    _check("relu of parts", symmetric, None)


@pytest.mark.parametrize("place", range(len(MOVES)), ids=[*MOVES])
def test_elements_move_as_bytes(place: int) -> None:
    _check([*MOVES][place], place % 2 == 1, torch.bfloat16 if place % 3 else None)


def _check(name: str, symmetric: bool, dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model = Between(MOVES[name]).eval()
    config = Int8StaticActivationInt8Weight(symmetric=symmetric, only_faster=False)
    quantized = quantize(model, IMAGES, config, dtype=dtype)
    found = _run(quantized, IMAGES[0])
    assert found.shape == _run(model, IMAGES[0]).shape
    assert error(found, _run(model, IMAGES[0])) < 0.05
    is_moved = name not in NOT_MOVED and not (symmetric and name in UNSIGNED)
    assert _text(quantized).count("quantize_per_tensor") == 2 - is_moved


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("name", sorted(UNSIGNED))
def test_the_nearest_are_moved_as_unsigned_bytes(name: str, symmetric: bool) -> None:
    _check(name, symmetric, None)


def test_bytes_that_are_moved_are_those_of_rounding_behind() -> None:
    torch.manual_seed(0)
    model = Between(_c2f).eval()
    config = Int8StaticActivationInt8Weight(only_faster=False)
    moved = quantize(model, IMAGES, config)
    again = Between(lambda x: _c2f(x).double().float()).eval()  # rounded behind these
    again.load_state_dict(model.state_dict())
    again = convert(again, recipe_of(moved), example_inputs=IMAGES[0])
    assert _text(again).count("quantize_per_tensor") == 2
    assert torch.equal(_run(moved, IMAGES[1]), _run(again, IMAGES[1]))


IN_FILES = ("chunk", "unbind", "index", "roll", "pad", "pixel_shuffle", "nearest", "relu of parts")


@pytest.mark.parametrize("name", IN_FILES)
def test_files_move_bytes(name: str, tmp_path: Path) -> None:
    config = Int8StaticActivationInt8Weight(only_faster=False)
    quantized = quantize(Between(MOVES[name]).eval(), IMAGES, config)
    oxytorch.save(quantized, tmp_path / "model", sample_input=IMAGES[0])
    loaded = oxytorch.load(tmp_path / "model")
    with torch.inference_mode():
        assert torch.equal(loaded(IMAGES[1]), quantized(IMAGES[1]))


class Parts(nn.Module):
    """A layer whose parts go to layers of their own; the second one `factor` times as large."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.first, self.a, self.b = nn.Linear(32, 32), nn.Linear(16, 8), nn.Linear(16, 8)
        with torch.no_grad():
            self.first.weight[16:] *= factor
            self.first.bias[16:] *= factor

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.first(x).relu().chunk(2, -1)
        result: Tensor = self.a(a) + self.b(b)
        return result


@pytest.mark.parametrize(("factor", "roundings"), [(1.5, 1), (10.0, 3)])
def test_parts_share_a_range_if_none_is_much_narrower(factor: float, roundings: int) -> None:
    torch.manual_seed(0)
    model = Parts(factor).eval()
    quantized = quantize(model, TOKENS, Int8StaticActivationInt8Weight(only_faster=False))
    assert _text(quantized).count("quantize_per_tensor") == roundings
    a, b = (recipe_of(quantized).layers[name].input for name in "ab")
    assert (a == b) == (roundings == 1)
    assert error(_run(quantized, TOKENS[0]), _run(model, TOKENS[0])) < 0.03


class Shared(nn.Module):
    """A value that is taken as it is, and in parts by a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.first(x))
        return x, self.last(x[:, 0])


def test_what_is_also_taken_as_it_is_is_rounded_in_parts() -> None:
    quantized = quantize(Shared().eval(), TOKENS, Int8StaticActivationInt8Weight(only_faster=False))
    before = _text(quantized).partition("aten::select")
    assert before[0].count("quantize_per_tensor") == 1
    assert before[2].count("quantize_per_tensor") == 1


class Sums(nn.Module):
    """Parts of a layer with residual sums among them, all concatenated (as in YOLO)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(8, 16, 1), nn.Conv2d(32, 8, 1)
        self.inner = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        parts = [*self.first(x).relu().chunk(2, 1)]
        for inner in self.inner:
            parts.append(parts[-1] + inner(parts[-1]))
        result: Tensor = self.last(torch.cat(parts, 1))
        return result


def test_parts_are_added_as_bytes() -> None:
    torch.manual_seed(0)
    model = Sums().eval()
    quantized = quantize(model, IMAGES, Int8StaticActivationInt8Weight(only_faster=False))
    assert error(_run(quantized, IMAGES[0]), _run(model, IMAGES[0])) < 0.05
    text = _text(quantized)
    assert text.count("quantize_per_tensor") == 1
    assert " = add " not in text


def _run(model: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(x)
    return found


def _text(model: nn.Module) -> str:
    stands_in: Any = model.forward
    (program,) = stands_in.programs()
    return str(program)
