"""Programs of images and signals of any size: operators with strides round sizes down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import oxytorch
from oxytorch.program import families
from oxytorch.program.replay import Replay
from oxytorch.rewriting import measure


@pytest.fixture(autouse=True)
def ours_wins(monkeypatch: pytest.MonkeyPatch, packing_pays: Callable[..., None]) -> Iterator[None]:
    monkeypatch.setattr(measure, "TIMED", False)
    packing_pays(False, own=True)
    torch.manual_seed(0)
    with torch.no_grad():
        yield


class Network(nn.Module):
    """A convolution with strides, and a function of it."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.c = nn.Conv2d(4, 16, 3, stride=2, padding=1)
        self.d = nn.Conv2d(16, 16, 3, stride=2)
        self.up, self.join = nn.ConvTranspose2d(16, 16, 2, 2), nn.Conv2d(32, 16, 3, padding=1)
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)
        self.groups = nn.GroupNorm(4, 16)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.c(x).relu())


def _tokens(m: Any, x: Tensor) -> Tensor:
    tokens = m.norm(m.d(x).flatten(2).transpose(1, 2))
    weights = (m.linear(tokens) @ tokens.transpose(1, 2)).softmax(-1)
    return weights @ tokens  # type: ignore[no-any-return]


def _blocks(m: Any, x: Tensor) -> Tensor:
    """Images as in Swin: halves of even and of odd lines side by side."""
    y = x.permute(0, 2, 3, 1)
    return torch.cat([y[:, ::2, ::2], y[:, ::2, ::2] * 2], -1)


def _skips(m: Any, x: Tensor) -> Tensor:
    up = m.up(F.max_pool2d(x, 2))
    return m.join(torch.cat([x, up], 1))  # type: ignore[no-any-return]


NETWORKS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "alone": lambda m, x: x * 2,
    "two": lambda m, x: m.d(x).relu(),
    "largest": lambda m, x: m.d(F.max_pool2d(x, 3, 2, 1)),
    "largest, rounded up": lambda m, x: m.d(F.max_pool2d(x, 2, 2, ceil_mode=True)),
    "means": lambda m, x: F.avg_pool2d(x, (2, 3), (3, 2)),
    "all": lambda m, x: m.linear(m.d(x).mean((2, 3))),
    "adaptive": lambda m, x: F.adaptive_avg_pool2d(m.d(x), 1).flatten(1),
    "transposed": lambda m, x: m.up(m.d(x)),
    "padded": lambda m, x: m.d(F.pad(x, (1, 2, 3, 0))),
    "reflected": lambda m, x: m.d(F.pad(x, (1, 1, 1, 1), mode="reflect")),
    "tokens": _tokens,
    "blocks": _blocks,
    "norm of groups": lambda m, x: m.d(m.groups(x)),
    "every third": lambda m, x: m.d(x[..., ::3]),
    "cropped": lambda m, x: m.d(x[..., 1:-1, 2:]),
    "sizes in its code": lambda m, x: m.d(x).reshape(x.shape[0], 16, -1).transpose(1, 2),
}
LEARNT = ((2, 40, 56), (3, 64, 48), (5, 45, 39), (4, 37, 66), (2, 51, 43))
OTHERS = (
    (2, 41, 57),
    (4, 33, 64),
    (3, 90, 31),
    (2, 128, 30),
    (7, 39, 40),
    (2, 29, 29),
    (2, 63, 47),
)


def _x(batch: int, *size: int) -> Tensor:
    return torch.randn(batch, 4 if len(size) > 1 else 1, *size)


def _optimized(model: nn.Module, x: Tensor) -> nn.Module:
    return oxytorch.optimize(model, sample_input=x, graph=True, passes=["program"])


def _compare(fast: nn.Module, model: nn.Module, x: Tensor) -> None:
    found, wanted = fast(x), model(x)
    assert found.stride() == wanted.stride()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def _is_at_once(fast: nn.Module, model: nn.Module, x: Tensor) -> bool:
    """Whether a call, which is right, ran none of the model's code."""
    replay, ran = fast.__dict__["forward"], list[int]()
    own = replay.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        ran.append(1)
        return own(*args, **kwargs)

    replay.forward = counted
    try:
        _compare(fast, model, x)
    finally:
        replay.forward = own
    return not ran


def _proofs(fast: nn.Module) -> list[str]:
    replay: Any = fast.__dict__["forward"]
    assert isinstance(replay, Replay)
    return [family.in_words() for family in replay._builder._families]


@pytest.mark.parametrize("name", NETWORKS)
def test_images_of_any_size_share_a_program(name: str) -> None:
    model = Network(NETWORKS[name])
    fast = _optimized(model, _x(*LEARNT[0]))
    for size in LEARNT:
        _compare(fast, model, _x(*size))
    assert any(text.startswith("checked") for text in _proofs(fast)), _proofs(fast)
    at_once = [_is_at_once(fast, model, _x(*size)) for size in OTHERS]
    least = len(OTHERS) - 3 if name == "blocks" else len(OTHERS)  # torch asks how strides compare
    assert sum(at_once) >= least, (at_once, _proofs(fast))


def test_sizes_that_do_not_fit_together_are_errors_as_before() -> None:
    model = Network(_skips)
    fast = _optimized(model, _x(2, 40, 56))
    for size in ((3, 64, 48), (4, 80, 24), (2, 72, 32), (5, 36, 60)):
        _compare(fast, model, _x(*size))
    for size in ((2, 96, 16), (5, 20, 64)):
        assert _is_at_once(fast, model, _x(*size)), _proofs(fast)
    for size in ((2, 42, 64), (3, 64, 30)):
        with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
            fast(_x(*size))


def test_images_that_are_too_small() -> None:
    model = Network(NETWORKS["two"])
    fast = _optimized(model, _x(*LEARNT[0]))
    for size in LEARNT:
        _compare(fast, model, _x(*size))
    for size in ((5, 40), (40, 5), (6, 6), (7, 9), (9, 7)):  # whose results have a side of 1
        _compare(fast, model, _x(2, *size))
    for size in ((4, 40), (2, 2), (40, 1)):
        with pytest.raises(RuntimeError, match="Kernel size"):
            fast(_x(3, *size))


@pytest.mark.parametrize("strides", [(5, 2, 2), (3, 3, 2), (2, 4, 1)])
def test_signals_of_any_length_share_a_program(strides: tuple[int, ...]) -> None:
    layers: list[nn.Module] = []
    for place, stride in enumerate(strides):
        layers += [nn.Conv1d(16 if place else 1, 16, 2 * stride, stride), nn.GELU()]
    model = nn.Sequential(*layers).eval()
    fast = _optimized(model, _x(2, 400))
    for size in ((3, 500), (4, 321), (2, 444), (5, 605)):
        _compare(fast, model, _x(*size))
    for length in (399, 401, 402, 403, 1000, 777, 250):
        assert _is_at_once(fast, model, _x(2, length)), (length, _proofs(fast))


class Padded(nn.Module):
    """Pads as TensorFlow does: by what is left of a size."""

    def __init__(self, as_number: bool) -> None:
        super().__init__()
        self.c, self.as_number = nn.Conv2d(4, 16, 3, stride=2), as_number
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        height, width = (int(n) if self.as_number else n for n in x.shape[-2:])
        pads = [max(3 - (2 if n % 2 == 0 else n % 2), 0) for n in (width, height)]
        pad = [side for n in pads for side in (n // 2, n - n // 2)]
        return self.c(F.pad(x, pad)).relu()  # type: ignore[no-any-return]


@pytest.mark.parametrize("as_number", [False, True])
def test_padding_by_what_is_left_of_a_size(as_number: bool) -> None:
    model = Padded(as_number)
    fast = _optimized(model, _x(2, 40, 56))
    for size in ((2, 64, 48), (2, 30, 66), (2, 45, 39), (2, 33, 71), (2, 55, 41), (2, 40, 33)):
        for _ in range(2):
            _compare(fast, model, _x(*size))
    texts = _proofs(fast)
    if as_number:
        assert any("as `int(size)` does" in text for text in texts), texts
        assert not any(text.startswith("checked") for text in texts), texts
    else:
        assert any(text.startswith("checked") and "% 2" in text for text in texts), texts
        assert _is_at_once(fast, model, _x(2, 62, 74))
    for size in ((2, 62, 74), (2, 31, 29), (2, 62, 29), (2, 31, 74)):
        for _ in range(2):
            _compare(fast, model, _x(*size))


def test_proofs_that_fail_are_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    own = families.conditions_of

    def counted(*given: Any) -> Any:
        tried.append(1)
        return own(*given)

    monkeypatch.setattr(families, "conditions_of", counted)
    model = Padded(as_number=True)
    fast = _optimized(model, _x(2, 40, 56))
    for place in range(24):
        for _ in range(2):
            _compare(fast, model, _x(2 + place % 3, 30 + place, 60 - place))
    assert 0 < len(tried) <= families.MOST_FAILED


class Asks(nn.Module):
    """Code that decides by a size that is rounded down."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Conv2d(4, 16, 3, stride=2)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        y = self.c(x)
        if y.shape[2] % 2:
            y = F.pad(y, (0, 0, 0, 1))
        return y.relu() if y.shape[3] > 24 else y.sigmoid()


def test_code_that_asks_about_rounded_sizes_is_followed() -> None:
    model = Asks()
    fast = _optimized(model, _x(2, 41, 57))
    for size in ((41, 57), (61, 55), (45, 59), (43, 57), (43, 31), (50, 40), (80, 81), (82, 49)):
        for _ in range(2):
            _compare(fast, model, _x(2, *size))


def test_threads_with_images_of_their_own_sizes() -> None:
    from concurrent.futures import ThreadPoolExecutor

    model = Network(NETWORKS["two"])
    fast = _optimized(model, _x(2, 40, 56))

    def run(number: int) -> float:
        with torch.no_grad():
            x = _x(2, 30 + number % 23, 40 + number % 17)
            return float((fast(x) - model(x)).abs().max())

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(run, range(120))) < 1e-4
