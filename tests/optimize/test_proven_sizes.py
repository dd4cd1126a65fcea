"""Pass `program`: sizes for which a program is proven to be right are served at once."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from counting import counts_original
from torch import Tensor, nn

import oxytorch
from oxytorch.program.replay import Replay


class Layers(nn.Module):
    """Layers with positions, and code that may ask about sizes. asks: of x, and what it adds."""

    def __init__(self, asks: Callable[[Tensor], Any] = lambda x: 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.asks = asks
        self.positions = nn.Parameter(torch.randn(300, 32))
        self.wide, self.narrow, self.norm = nn.Linear(32, 96), nn.Linear(96, 32), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        x = x + self.positions[:length] + self.asks(x)
        y = self.narrow(torch.relu(self.wide(x)))
        return self.norm(x + y).view(batch * length, width)


def _family(model: nn.Module) -> Any:
    replay = model.__dict__["forward"]
    assert isinstance(replay, Replay)
    found: list[Any] = [f for f in replay._builder._families if f.placed]  # type: ignore[attr-defined]
    return found[0]


def _x(*shape: int) -> Tensor:
    return torch.randn(*shape, 32)


def _shared(model: nn.Module) -> nn.Module:
    """An optimized model whose program serves several sizes."""
    optimized = oxytorch.optimize(model, sample_input=_x(2, 40), passes=["program"])
    with torch.no_grad():
        for shape in ((3, 50), (5, 57), (5, 57), (7, 61)):
            optimized(_x(*shape))
    return optimized


def _check(optimized: nn.Module, model: nn.Module, x: Tensor) -> bool:
    """Compare a call with the model's; whether no code of the model's ran."""
    calls = counts_original(optimized)
    with torch.no_grad():
        found = optimized(x)
        ran = bool(calls)
        wanted = model(x)
    assert found.shape == wanted.shape and found.stride() == wanted.stride()
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    return not ran


def _check_proven(model: nn.Module, *shapes: tuple[int, int]) -> None:
    """Sizes of a shared family are proven, and inputs of other shapes run none of its code."""
    optimized = _shared(model)
    family = _family(optimized)
    assert family.proof is not None, family.unproven
    for shape in shapes:
        assert _check(optimized, model, _x(*shape)), shape


def test_a_new_size_is_served_at_once() -> None:
    model = Layers().eval()
    optimized = _shared(model)
    family = _family(optimized)
    assert family.proof is not None, family.unproven
    for shape in ((2, 41), (9, 30), (11, 300), (100, 2)):
        assert _check(optimized, model, _x(*shape)), shape
        assert _check(optimized, model, _x(*shape)), shape


@pytest.mark.parametrize(
    "takes",
    [
        lambda y: y[:, 0],
        lambda y: y[:, :, None].sum(2),
        lambda y: y[:].sum(1),
        lambda y: y[:, 1:][:, 0],
    ],
    ids=["first", "dimension", "all", "rest"],
)
def test_parts_of_all_rows_are_proven(takes: Callable[[Tensor], Tensor]) -> None:
    """Torch leaves out slices that take all, which it cannot tell of symbols."""

    class Pooled(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return takes(super().forward(x).view(x.shape))

    model = Pooled().eval()
    _check_proven(model, (2, 41), (9, 30), (11, 300))


def _images(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*layers, nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()


@pytest.mark.parametrize(
    "layers",
    [
        [nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(8, 16, 3, 2)],
        [nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16)],
        [nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 16, 1)],
        [nn.ConvTranspose2d(8, 16, 2, 2)],
    ],
    ids=["padded", "of one element", "depthwise", "transposed"],
)
def test_batches_of_images_are_proven(layers: list[nn.Module]) -> None:
    """Torch decides by the batch, and padding takes it as known."""
    model = _images(*layers)
    optimized = oxytorch.optimize(model, sample_input=torch.randn(2, 8, 12, 12), passes=["program"])
    with torch.no_grad():
        for batch in (3, 5, 6):
            optimized(torch.randn(batch, 8, 12, 12))
    family = _family(optimized)
    assert family.proof is not None, family.unproven
    assert family.in_words() == "checked for other sizes: new ones run at once"
    for batch in (4, 15, 16, 33):
        assert _check(optimized, model, torch.randn(batch, 8, 12, 12)), batch


def test_padding_of_the_batch_is_computed() -> None:
    class Padded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.pad(x, (0, 0, 0, 0, 1, 1)) * 2

    model = Padded().eval()
    optimized = _shared(model)
    for shape in ((4, 41), (9, 30)):
        _check(optimized, model, _x(*shape))


def test_sizes_that_break_a_condition_run_the_models_code() -> None:
    model = Layers().eval()
    optimized = _shared(model)
    for shape in ((1, 40), (2, 1), (0, 40), (2, 0)):
        assert not _check(optimized, model, _x(*shape)), shape
    with torch.no_grad(), pytest.raises(RuntimeError, match="must match"):
        optimized(_x(2, 301))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.transpose(0, 1),
        lambda x: x[:, ::2],
        lambda x: x[1:],
        lambda x: x.expand(2, *x.shape)[1],
        lambda x: x.double(),
        lambda x: x[..., :16].repeat(1, 1, 2),
    ],
)
def test_inputs_that_lie_otherwise(change: Callable[[Tensor], Tensor]) -> None:
    model = Layers().eval()
    optimized = _shared(model)
    x = change(_x(6, 44))
    if x.dtype == torch.float64:
        with torch.no_grad(), pytest.raises(RuntimeError):
            optimized(x)
        return
    _check(optimized, model, x)
    _check(optimized, model, x)


def _by_kind(x: Tensor) -> float:
    return 1.0 if isinstance(x.shape[1], int) and x.shape[1] > 100 else 2.0


@functools.lru_cache
def _cached(length: int) -> float:
    return 1.0 if length > 100 else 2.0


_TABLE = {101: 5.0}
ASKS: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    # what the code asks, and whether it has to be proven for lengths up to 100
    "compares": (lambda x: 1.0 if x.shape[1] > 100 else 2.0, True),
    "a minimum": (lambda x: x[:, : min(x.shape[1], 100)].sum(), False),
    "asserts": (lambda x: 1.0 if x.size(1) % 2 in (0, 1) and x.size(0) < 90 else 2.0, False),
    "by kind": (_by_kind, False),
    "by type": (lambda x: 1.0 if type(x.shape[1]) is int and x.shape[1] > 100 else 2.0, False),
    "a cache": (lambda x: _cached(x.shape[1]), False),
    "a table": (lambda x: _TABLE.get(x.shape[1], 1.0), False),
    "text": (lambda x: float(len(str(x.shape[1]))), False),
    "a loop": (lambda x: sum(x[:, i : i + 1] for i in range(x.shape[1] // 40)), False),
    "a number": (lambda x: x.shape[1] ** 0.5, False),
    "a division": (lambda x: x.new_zeros(x.shape[1] // 3).sum(), False),
    "strides": (lambda x: 1.0 if x.stride(0) > 3000 else 2.0, False),
    "elements": (lambda x: 1.0 if x.numel() > 100 * 32 * 7 else 2.0, False),
    "list of sizes": (lambda x: 1.0 if list(x.shape)[1] > 100 else 2.0, False),
    "a try": (lambda x: _tries(x), False),
    "a float": (lambda x: 2.0 if float(x.shape[1]) < 100.5 else 1.0, False),
    "a comprehension": (
        lambda x: sum([1.0 if isinstance(n, int) and n > 100 else 2.0 for n in x.shape]),
        False,
    ),
    "a generator": (
        lambda x: 1.0 if any(type(n) is int and n > 100 for n in x.shape) else 2.0,
        False,
    ),
    "a table of kinds": (
        lambda x: {int: _of_numbers}.get(type(x.shape[1]), _of_symbols)(x.shape[1]),
        False,
    ),
    "an error": (lambda x: _of_kind(x.shape[1]), False),
    "a property": (
        lambda x: 2.0 if hasattr(x.shape[1], "node") or x.shape[1] < 101 else 1.0,
        False,
    ),
}


def _of_numbers(number: int) -> float:
    return 1.0 if number > 100 else 2.0


def _of_symbols(number: Any) -> float:
    return 2.0


def _of_kind(number: Any) -> float:
    try:
        return [2.0, 1.0][number.bit_length() > 6]
    except AttributeError:
        return 2.0


def _tries(x: Tensor) -> float:
    try:
        return [2.0] * 100 + [3.0][x.shape[1] - 100 if x.shape[1] > 100 else 0] or 1.0
    except (IndexError, TypeError):
        return 1.0


@pytest.mark.parametrize("name", ASKS)
def test_code_that_asks_about_sizes_is_followed(name: str) -> None:
    asks, is_proven = ASKS[name]
    model = Layers(asks).eval()
    optimized = _shared(model)
    for shape in ((4, 60), (4, 101), (4, 99), (7, 140), (91, 61), (3, 80), (3, 39), (2, 120)):
        _check(optimized, model, _x(*shape))
        _check(optimized, model, _x(*shape))
    if is_proven:
        family = _family(optimized)
        assert _check(optimized, model, _x(6, 77)), family.unproven


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "fake": lambda x: 1.0 if isinstance(x, torch._subclasses.FakeTensor) else 2.0,
    "class": lambda x: 1.0 if type(x) is not Tensor else 2.0,
    "device": lambda x: 1.0 if x.device.type != "cpu" or x.is_meta or not x.is_cpu else 2.0,
    "moved": lambda x: x.to("cpu").sum() + torch.ones(x.shape[1], 1, device=x.device),
    "in place": lambda x: (x + 1.0).relu_(),
    "views": lambda x: x.transpose(0, 1).chunk(2, -1)[0].sum(-1).t()[..., None],
    "a lattice": lambda x: (torch.arange(x.shape[1]) == x.shape[1] - 1)[:, None] * 2.0,
}


@pytest.mark.parametrize("name", KINDS)
def test_code_that_asks_about_tensors_is_told_what_it_is_always_told(name: str) -> None:
    model = Layers(KINDS[name]).eval()
    _check_proven(model, (2, 41), (9, 30), (11, 299))


def test_programs_that_differ_in_what_is_read_are_all_proven() -> None:
    model = Layers(lambda x: 1.0 if bool((x[0, :, 0] < 9).all()) else 2.0).eval()
    optimized = oxytorch.optimize(model, sample_input=_x(2, 40), passes=["program"])

    def x(is_large: bool, *shape: int) -> Tensor:
        made = _x(*shape)
        made[0, 0, 0] = 10.0 if is_large else 0.0
        return made

    with torch.no_grad():
        for is_large in (False, True):
            for shape in ((2, 40), (2, 40), (3, 50), (5, 57), (7, 61)):
                optimized(x(is_large, *shape))
        optimized(x(False, 8, 62))
    for number in range(2, 20):
        assert _check(optimized, model, x(number % 3 == 0, number, 100 - number))
    for _ in range(2):  # a program for other values was proven after its own
        assert _check(optimized, model, x(True, 7, 61)) and _check(optimized, model, x(True, 8, 62))


MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "bert": ("Bert", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 1, "n_head": 2}),
    "llama": ("Llama", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}),
}


def _shapes(is_one: bool, *shapes: tuple[int, int]) -> list[tuple[int, int]]:
    return [(1 if is_one else batch, length) for batch, length in shapes]


@pytest.mark.parametrize("is_one", [False, True], ids=["batches", "one text"])
@pytest.mark.parametrize("has_mask", [True, False], ids=["mask", "no mask"])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_are_proven(name: str, has_mask: bool, is_one: bool) -> None:
    transformers = pytest.importorskip("transformers")
    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(vocab_size=50, **sizes, use_cache=False)
    model = getattr(transformers, f"{kind}Model")(config).eval()

    def inputs(*shape: int) -> dict[str, Tensor]:
        mask = torch.ones(shape, dtype=torch.int64)
        mask[0, -1] = 0
        given = {"input_ids": torch.randint(50, shape), "attention_mask": mask}
        return given if has_mask else {"input_ids": given["input_ids"]}

    optimized = oxytorch.optimize(
        model, sample_input=inputs(1 if is_one else 2, 9), passes=["program"]
    )
    with torch.no_grad():
        for shape in _shapes(is_one, (3, 10), (5, 17), (5, 17), (7, 14)):
            optimized(**inputs(*shape))
        calls = counts_original(optimized)
        for shape in _shapes(is_one, (2, 11), (4, 30), (9, 2)):
            given = inputs(*shape)
            found = optimized(**given).last_hidden_state
            assert not calls, oxytorch.explain(optimized)
            wanted = model(**given).last_hidden_state
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_the_report_tells_which_sizes_are_served_and_why_no_others() -> None:
    (line,) = oxytorch.explain(_shared(Layers().eval())).calls[1:]
    assert "checked for other sizes: new ones" in line and "input_0.shape[1] <= 300" in line
    optimized = _shared(Layers(_by_kind).eval())
    report = oxytorch.explain(optimized)
    line = report.calls[1]
    assert (
        "not checked for other sizes" in line
        and "test_proven_sizes.py:" in line
        and "in _by_kind" in line
    )
    assert line in str(report) and line in report.as_dict()["calls"]
    assert line in str(oxytorch.graph.explain(optimized, _x(2, 40)))
    plain = oxytorch.optimize(Layers().eval(), sample_input=_x(2, 40), passes=["kernels"])
    assert oxytorch.explain(plain).calls == []


def test_the_report_tells_why_sizes_share_no_program() -> None:
    model = Layers(lambda x: sum(x[:, i : i + 1] for i in range(x.shape[1] // 10))).eval()
    report = oxytorch.explain(_shared(model))
    assert any("another size was not joined: it calls" in line for line in report.calls)


def test_an_output_that_holds_sizes_is_the_models_own() -> None:
    class Sized(Layers):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x.shape[1]

    model = Sized().eval()
    optimized = _shared(model)
    for length in (60, 61, 62, 61):
        with torch.no_grad():
            assert optimized(_x(4, length))[1] == length


def test_threads_call_with_sizes_of_their_own() -> None:
    model = Layers().eval()
    optimized = _shared(model)

    def call(number: int) -> bool:
        x = torch.randn(2 + number % 7, 2 + number * 13 % 290, 32)
        with torch.no_grad():
            return torch.allclose(optimized(x), model(x), atol=1e-5)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(200)))


def test_what_changes_ends_the_proof() -> None:
    model = Layers().eval()
    optimized = _shared(model)
    assert _check(optimized, model, _x(4, 33))
    for own in (model, optimized):
        own.asks = lambda x: 7.0  # type: ignore[assignment]
    assert not _check(optimized, model, _x(4, 34))
    model, weights = Layers().eval(), _shared(Layers().eval())
    with torch.no_grad():
        model.wide.weight.mul_(2)
        weights.wide.weight.mul_(2)  # type: ignore[union-attr,operator]
    assert _check(weights, model, _x(4, 35))


def test_a_proof_that_fails_writes_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """Torch logs at level ERROR what an operator raises for symbols."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = [*logger.filters]

    def asks(x: Tensor) -> float:
        if not isinstance(x.shape[1], int):
            torch.zeros(2, 3) @ torch.zeros(2, 3)
        return 0.0

    model = Layers(asks).eval()
    optimized = _shared(model)
    family = _family(optimized)
    assert family.proof is None and "RuntimeError" in family.unproven
    assert [line for line in caplog.records if line.levelno >= logging.ERROR] == []
    assert logger.filters == before
    assert not _check(optimized, model, _x(6, 77))


def test_nothing_is_proven_beside_a_debugger() -> None:
    before = sys.gettrace()
    sys.settrace(lambda *given: None)
    try:
        optimized = _shared(Layers().eval())
    finally:
        sys.settrace(before)
    assert _family(optimized).proof is None
    assert _check(optimized, Layers().eval(), _x(4, 33)) is False
