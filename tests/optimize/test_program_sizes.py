"""Pass `program`: calls that differ in sizes alone share a program, and only those do."""

from __future__ import annotations

import copy
import cProfile
import pickle
import pstats
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from counting import counts_original
from torch import Tensor, nn
from torch.nn import functional as F

import oxytorch
from oxytorch.graph.errors import CaptureError
from oxytorch.optimize import tune
from oxytorch.program import families
from oxytorch.program.passes import convolution, own_convolutions
from oxytorch.program.patience import CALLS_OF_A_TRY, FREE_TRIES
from oxytorch.program.replay import Replay
from oxytorch.program.sized import Formula
from oxytorch.program.sizes import DifferentError, SizedRun
from oxytorch.rewriting import measure, turns


def _replay(model: nn.Module) -> Replay:
    found = model.__dict__["forward"]
    assert isinstance(found, Replay)
    return found


def _optimized(model: nn.Module, *sample: Any) -> nn.Module:
    optimized = oxytorch.optimize(model, sample_input=sample, passes=["program"])
    _replay(optimized)
    return optimized


def _shared(model: nn.Module) -> list[Any]:
    """The programs of several sizes."""
    found: list[Any] = _replay(model)._builder._families  # type: ignore[attr-defined]
    return [family.placed for family in found if family.placed is not None]


def _is_served(optimized: nn.Module, *args: Any) -> bool:
    """Whether a call runs no code of the model's."""
    calls = counts_original(optimized)
    with torch.no_grad():
        optimized(*args)
    return not calls


class Encoder(nn.Module):
    """A layer of attention over embedded ids, with positions and a mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.positions = nn.Embedding(50, 32), nn.Embedding(200, 32)
        self.project, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        batch, length = ids.shape
        x = self.embedding(ids) + self.positions(torch.arange(length))
        heads = self.project(x).view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
        seen = None if mask is None else mask[:, None, None].bool()
        y = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], seen)
        y = self.norm(x + self.out(y.transpose(1, 2).reshape(batch, length, 32)))
        return y, y.new_zeros(batch * length, 2 * length + 1)


def _ids(batch: int, length: int) -> tuple[Tensor, Tensor]:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[:, length - 1 :] = 0
    return torch.randint(0, 50, (batch, length)), mask


def test_one_program_serves_all_batch_sizes_and_lengths() -> None:
    model = Encoder().eval()
    optimized = _optimized(model, *_ids(3, 12))
    sizes = [(3, 7), (4, 9), (2, 30), (5, 2), (7, 100), (3, 12)]
    for size in sizes:
        for _ in range(3):
            given = _ids(*size)
            with torch.no_grad():
                torch.testing.assert_close(optimized(*given), model(*given))
        assert _is_served(optimized, *_ids(*size))
    assert len(_shared(optimized)) == 1
    given = _ids(6, 40)  # the formulas are proven: a new size runs none of the model's code
    calls = counts_original(optimized)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(optimized(*given), model(*given))
    assert not calls


@pytest.mark.parametrize(
    "returned",
    [
        lambda m, x: (m.linear(x), x),
        lambda m, x: {"h": m.linear(x), "in": x.float()},
        lambda m, x: (m.linear(x), x.contiguous(), m.kept),
    ],
    ids=["input", "float", "contiguous"],
)
def test_inputs_and_weights_are_returned_at_any_size(returned: Callable[..., Any]) -> None:
    """What a model returns of what it is given, or holds, is that at a new size too."""

    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.register_buffer("kept", torch.ones(3))

        def forward(self, x: Tensor) -> Any:
            return returned(self, x)

    model = Returns().eval()
    optimized = _optimized(model, torch.randn(4, 12, 64))
    with torch.no_grad():
        for batch, length in ((5, 14), (6, 16), (7, 20), (3, 22), (8, 26)) * 2:
            x = torch.randn(batch, length, 64)
            torch.testing.assert_close(optimized(x), model(x))


def test_sizes_of_one_are_another_program() -> None:
    model = Encoder().eval()
    optimized = _optimized(model, *_ids(1, 12))
    for size in [(1, 7), (1, 30), (4, 9), (2, 30), (1, 1), (3, 1), (1, 50), (3, 8)]:
        for _ in range(3):
            given = _ids(*size)
            with torch.no_grad():
                torch.testing.assert_close(optimized(*given), model(*given))
    assert len(_shared(optimized)) == 2


PLACES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "rows": lambda m, x: m.layer(x).relu(),
    "strided": lambda m, x: m.layer(x.as_strided((2, 8), (16, 1))),
    "strided from the start": lambda m, x: m.layer(x[1:].as_strided((2, 8), (8, 1), 0)),
    "a copy strided from the start": lambda m, x: m.layer(
        x.relu()[1:].as_strided((2, 8), (8, 1), 0)
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_one_program_serves_all_parts_of_a_tensor(name: str) -> None:
    model, data = Of(PLACES[name]).eval(), torch.randn(64, 8)
    optimized = _optimized(model, torch.randn(4, 8))
    calls = counts_original(optimized)
    with torch.no_grad():
        for begin in range(0, 60, 3):
            given = data[begin : begin + 4]
            torch.testing.assert_close(optimized(given), model(given))
    assert not calls


def test_code_that_asks_where_a_tensor_begins_runs_itself() -> None:
    model = Of(lambda m, x: m.layer(x) * (1 + x.storage_offset())).eval()
    optimized = oxytorch.optimize(model, sample_input=torch.randn(4, 8), graph=True)
    data = torch.randn(64, 8)
    with torch.no_grad():
        for begin in (0, 4, 8, 4, 0, 8):
            given = data[begin : begin + 4]
            torch.testing.assert_close(optimized(given), model(given))


def test_threads_share_a_program_for_their_parts() -> None:
    model, data = Of(PLACES["rows"]).eval(), torch.randn(64, 8)
    optimized = _optimized(model, data[:4])
    calls = counts_original(optimized)

    def run(begin: int) -> Tensor:
        with torch.no_grad():
            found: Tensor = optimized(data[begin : begin + 4])
        return found

    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(run, range(60))]
    with torch.no_grad():
        for begin, each in enumerate(found):
            torch.testing.assert_close(each, model(data[begin : begin + 4]))
    assert not calls


def test_a_shared_program_follows_the_weights() -> None:
    model = Encoder().eval()
    optimized = _optimized(model, *_ids(3, 12))
    for factor in (1.0, 1.5):
        with torch.no_grad():
            for each in (model, optimized):
                each.project.weight.mul_(factor)
        for size in [(3, 7), (4, 9), (2, 30), (3, 7)]:
            for _ in range(2):
                given = _ids(*size)
                with torch.no_grad():
                    torch.testing.assert_close(optimized(*given), model(*given))


def test_what_is_made_of_weights_and_constants_is_made_once() -> None:
    def scaled(m: Any, x: Tensor) -> Any:
        return F.linear(x, m.layer.weight * torch.tensor(0.5), m.layer.bias)

    model = Of(scaled).eval()
    optimized = _optimized(model, torch.randn(6, 8))
    with torch.no_grad():
        for rows in (5, 7, 9, 12):
            for _ in range(2):
                optimized(torch.randn(rows, 8))
        (placed,) = _shared(optimized)
        made = placed._derived._noted
        for rows in (5, 9, 7, 12, 5, 7):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(optimized(x), model(x))
        assert placed._derived._noted is made


class Of(nn.Module):
    """A function of a layer and an input as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.other, self.function = nn.Linear(8, 8), nn.Linear(8, 8), function
        self.scale = 2.0

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def _branches(m: Any, x: Tensor) -> Any:
    return m.layer(x) if len(x) < 10 else m.other(x)


def _bounded(m: Any, x: Tensor) -> Any:
    return m.layer(x)[: min(len(x), 12)]


def _root(m: Any, x: Tensor) -> Any:
    return m.layer(x)[: int(len(x) ** 0.5)]


def _mean(m: Any, x: Tensor) -> Any:
    return m.layer(x) * (1.0 / len(x))


def _constant(m: Any, x: Tensor) -> Any:
    return m.layer(x) + torch.tensor([float(len(x))])


def _weights(m: Any, x: Tensor) -> Any:
    return m.layer(x) * torch.tensor([1.0 + i for i in range(len(x))])[:, None]


def _is_even(m: Any, x: Tensor) -> Any:
    return m.layer(x) + len(x) % 2


def _reads(m: Any, x: Tensor) -> Any:
    return m.layer(x) if x[0, 0] > -9 else m.other(x)


def _loops(m: Any, x: Tensor) -> Any:
    y = x
    for _ in range(len(x) % 3):
        y = m.layer(y)
    return m.other(y)


def _halves(m: Any, x: Tensor) -> Any:
    return m.layer(x)[len(x) // 2 :], m.other(x)[: -(-len(x) // 2)]


def _tables(m: Any, x: Tensor) -> Any:
    return {"y": m.layer(x), "sizes": [len(x), x.shape], "n": len(x)}


def _square(m: Any, x: Tensor) -> Any:
    return m.layer(x) @ m.other(x).T, x.new_ones(len(x) * len(x) + 3)


SIZED = {
    function.__name__: function
    for function in (
        _branches, _bounded, _root, _mean, _constant, _weights, _is_even, _reads, _loops, _halves,
        _tables, _square,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", SIZED)
def test_code_that_decides_by_sizes_is_followed(name: str) -> None:
    model = Of(SIZED[name]).eval()
    optimized = _optimized(model, torch.randn(6, 8))
    for rows in (8, 5, 7, 12, 9, 16, 25, 10, 11, 2, 1, 14, 30, 6, 8):
        for _ in range(3):
            x = torch.randn(rows, 8)
            with torch.no_grad():
                torch.testing.assert_close(optimized(x), model(x))


def test_sizes_that_were_equal_by_chance() -> None:
    model = Of(lambda m, x, y: (m.layer(x).sum(0) + m.other(y).sum(0), x.new_zeros(len(y), 3)))
    optimized = _optimized(model.eval(), torch.randn(6, 8), torch.randn(6, 8))
    for rows in ((7, 7), (5, 5), (9, 9), (4, 9), (9, 4), (3, 3), (8, 2), (2, 8)):
        for _ in range(3):
            given = torch.randn(rows[0], 8), torch.randn(rows[1], 8)
            with torch.no_grad():
                torch.testing.assert_close(optimized(*given), model(*given))


def test_what_new_sizes_make_the_code_read_is_followed() -> None:
    """Code that runs for some sizes only reads an attribute, which changes later."""

    def by_size(m: Any, x: Tensor) -> Any:
        return _scaled(m, x) if len(x) > 10 else m.layer(x) * 2.0

    def _scaled(m: Any, x: Tensor) -> Any:
        return m.layer(x) * m.scale

    model = Of(by_size).eval()
    optimized = _optimized(model, torch.randn(6, 8))
    for scale in (2.0, 3.0):
        model.scale = optimized.scale = scale
        for rows in (5, 7, 12, 13, 9, 20):
            for _ in range(3):
                x = torch.randn(rows, 8)
                with torch.no_grad():
                    torch.testing.assert_close(optimized(x), model(x))


def test_effects_at_new_sizes_happen_once_a_call() -> None:
    counted: list[int] = []

    def noting(m: Any, x: Tensor) -> Any:
        if len(x) > 10:
            counted.append(len(x))
        return m.layer(x)

    model = Of(noting).eval()
    optimized = _optimized(model, torch.randn(6, 8))
    with torch.no_grad():
        for rows in (5, 7):
            for _ in range(3):
                optimized(torch.randn(rows, 8))
        assert _shared(optimized)
        optimized(torch.randn(12, 8))
        assert counted == [12]


def test_an_error_at_a_new_size_is_the_models_own() -> None:
    def strict(m: Any, x: Tensor) -> Any:
        if len(x) > 10:
            raise KeyError("too many rows")
        return m.layer(x)

    model = Of(strict).eval()
    optimized = _optimized(model, torch.randn(6, 8))
    with torch.no_grad():
        for rows in (5, 5, 7, 7, 8):
            optimized(torch.randn(rows, 8))
        for _ in range(3):
            with pytest.raises(KeyError, match="too many rows"):
                optimized(torch.randn(12, 8))
        x = torch.randn(9, 8)
        torch.testing.assert_close(optimized(x), model(x))


def test_code_that_reads_values_at_a_new_size_goes_on() -> None:
    def listed(m: Any, x: Tensor) -> Any:
        y = m.layer(x)
        return y if len(x) < 10 else y * sum(y[0].tolist())

    model = Of(listed).eval()
    optimized = _optimized(model, torch.randn(6, 8))
    for rows in (5, 7, 8, 12, 11, 12, 9):
        for _ in range(3):
            x = torch.randn(rows, 8)
            with torch.no_grad():
                torch.testing.assert_close(optimized(x), model(x))


def test_kinds_of_calls_beyond_the_most_run_the_models_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(families, "MOST_OWN", 2)
    model = Of(_mean).eval()  # whose programs share nothing
    optimized = _optimized(model, torch.randn(6, 8))
    for rows in (5, 7, 9, 9):
        for _ in range(3):
            x = torch.randn(rows, 8)
            with torch.no_grad():
                torch.testing.assert_close(optimized(x), model(x))
    assert "2 other kinds of call" in " ".join(_replay(optimized)._refused.values())


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).mean((2, 3))


@pytest.mark.parametrize("is_own", [True, False])
def test_weights_in_an_order_for_a_size_have_programs_of_their_own_first(
    is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(families, "MOST_OWN", 2)
    monkeypatch.setattr(own_convolutions, "_is_faster", lambda *given: is_own)
    monkeypatch.setattr(convolution, "winners", lambda editor, steps: {*steps})
    model = Images().eval()
    optimized = _optimized(model, torch.randn(2, 3, 9, 9))
    for size in [(3, 9), (4, 9), (5, 11), (7, 21), (2, 13), (3, 9)]:
        for _ in range(3):
            x = torch.randn(size[0], 3, size[1], size[1])
            with torch.no_grad():
                torch.testing.assert_close(optimized(x), model(x))
    kinds = _replay(optimized)._builder._families  # type: ignore[attr-defined]
    assert len(kinds) == (1 if is_own else 2) and len(_shared(optimized)) >= 1


def test_copies_begin_anew() -> None:
    model = Encoder().eval()
    optimized = _optimized(model, *_ids(3, 12))
    with torch.no_grad():
        for size in [(3, 7), (3, 7), (4, 9), (4, 9)]:
            optimized(*_ids(*size))
        for copied in (copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized))):
            for size in [(3, 7), (4, 9), (2, 30)]:
                for _ in range(3):
                    given = _ids(*size)
                    torch.testing.assert_close(copied(*given), model(*given))
            assert len(_shared(copied)) == 1


def _run(rows: int) -> tuple[Any, Any]:
    from oxytorch.program.recorded import forms_of
    from oxytorch.program.tape import recorded_once

    x = torch.ones(rows, 4)

    def run() -> Tensor:
        return (x @ _WEIGHT).view(rows * 3).expand(2, rows * 3)

    with torch.no_grad():
        _, recording = recorded_once(run, lambda y: [y], [x])
    return recording, forms_of([x])


_WEIGHT = torch.ones(4, 3)


def test_formulas_of_two_runs() -> None:
    (first, one), (second, two) = _run(5), _run(8)
    sized = SizedRun([first, second], [one, two], 1)
    assert sized.places == [(0, 0)] and sized.inputs[0].shape == (Formula(1, (0,), 0), 4)
    (view,) = (step for step in sized.recording.steps if "view" in str(step.operator))
    assert view.arguments[1] == (Formula(3, (0,), 0),)
    third, three = _run(11)
    assert sized.sizes_of(three) == [11] and sized.is_of(third, three, [11])
    assert not sized.is_of(third, three, [12])
    with pytest.raises(DifferentError):
        SizedRun([first, first], [one, one], 1)


@pytest.mark.parametrize("ratio", [0.9, 1.02, 1.1])
def test_a_program_is_kept_where_it_is_no_slower_than_the_other_passes(
    ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "TIMED", True)
    monkeypatch.setattr(tune, "_turns", lambda *_: [(1.0, 1e-3, ratio * 1e-3)])
    # The times of the program's first run, which another load of the machine makes long.
    monkeypatch.setattr(turns, "is_settled", lambda *_: False)
    model, given = Encoder().eval(), _ids(3, 12)
    optimized = oxytorch.optimize(model, sample_input=given, graph=True)
    report = oxytorch.explain(optimized)
    assert any(entry.pass_name == "program" for entry in report.applied) is (ratio < 1.03)
    assert ("(call by call 1.100 times as long): not used" in str(report)) is (ratio > 1.03)
    with torch.no_grad():
        torch.testing.assert_close(optimized(*given), model(*given))


def test_calls_with_more_or_fewer_tensors() -> None:
    def sums(m: Any, *tensors: Tensor) -> Any:
        return sum(m.layer(tensor) for tensor in tensors)

    model = Of(sums).eval()
    optimized = _optimized(model, torch.randn(2, 8), torch.randn(2, 8))
    for rows, count in ((3, 2), (4, 2), (2, 1), (5, 1), (4, 3), (6, 2), (5, 3)):
        for _ in range(3):
            given = [torch.randn(rows, 8) for _ in range(count)]
            with torch.no_grad():
                torch.testing.assert_close(optimized(*given), model(*given))


class Counted:
    """A context manager that counts how often it is entered."""

    entered = 0

    def __enter__(self) -> None:
        Counted.entered += 1

    def __exit__(self, *_: Any) -> None:
        pass


NOTED: list[int] = []
TOTAL = 0
TABLE = torch.zeros(1)
NUMBERS = iter(range(1000))


def _note_elsewhere() -> None:
    NOTED.append(1)


def _add_to_global(m: Any) -> None:
    global TOTAL
    TOTAL += 1


def _enter(m: Any) -> None:
    with Counted():
        pass


EFFECTS: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
    "print": (lambda m: print("called"), lambda: None),
    "list": (lambda m: NOTED.append(1), lambda: len(NOTED)),
    "elsewhere": (lambda m: _note_elsewhere(), lambda: len(NOTED)),
    "global": (_add_to_global, lambda: TOTAL),
    "context": (_enter, lambda: Counted.entered),
    "tensor": (lambda m: TABLE.add_(1), lambda: int(TABLE)),
    "iterator": (lambda m: next(NUMBERS), lambda: NUMBERS.__reduce__()[2]),
    "random": (lambda m: torch.rand(3), lambda: torch.initial_seed() and _drawn()),
    "module": (lambda m: setattr(m, "scale", m.scale + 1), lambda: None),
}


def _drawn() -> int:
    """How far torch's generator is, as a number that each draw changes."""
    return int(torch.get_rng_state().sum())


@pytest.mark.parametrize("sample_rows", [4, 6])
@pytest.mark.parametrize("name", EFFECTS)
def test_effects_of_some_calls_happen_once_each(
    name: str, sample_rows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    effect, counted = EFFECTS[name]

    def noting(m: Any, x: Tensor, flag: bool = False) -> Any:
        if flag or len(x) in (7, 9):
            effect(m)
        return m.layer(x)

    def states(run: Callable[..., Any], of: Any) -> list[Any]:
        found = []
        for rows, flag in [(6, False), (6, False), *[(7, False)] * 5, *[(6, True)] * 5, (9, False)]:
            torch.manual_seed(rows)
            before = counted()
            with torch.no_grad():
                run(torch.ones(rows, 8), flag)
            lines = capsys.readouterr().out.count("called")
            moved = (counted() != before) if name == "random" else (counted() or 0) - (before or 0)
            found.append((moved, lines, of.scale, _drawn()))
        return found

    model, twin = Of(noting).eval(), Of(noting).eval()
    optimized = _optimized(model, torch.randn(sample_rows, 8), False)
    capsys.readouterr()
    assert states(optimized, optimized) == states(twin, twin)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("options", [{"graph": True}, {"tune": True}, {}], ids=str)
def test_torchs_random_numbers_stay_as_they_are(
    options: dict[str, Any], dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "TIMED", True)
    monkeypatch.setattr(measure, "_known", {})
    model = nn.Sequential(Images(), nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 256)).eval()
    before = torch.get_rng_state()
    x = torch.ones(2, 3, 9, 9)
    optimized = oxytorch.optimize(model, dtype=dtype, sample_input=x, **options)
    with torch.no_grad():
        for batch in (2, 3, 3, 3, 4, 4, 1, 1):
            optimized(x[:1].expand(batch, 3, 9, 9))
    assert torch.equal(torch.get_rng_state(), before)


class Returning(nn.Module):
    """Returns what no program can, in calls with many rows."""

    def __init__(self, output: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.output = nn.Linear(8, 8), output

    def forward(self, x: Tensor) -> Any:
        return self.output(self, x) if x.shape[0] > 4 else self.layer(x)


def _holding_itself(module: Any, x: Tensor) -> list[Any]:
    found: list[Any] = [module.layer(x)]
    found.append(found)
    return found


OUTPUTS: dict[str, Callable[[Any, Tensor], Any]] = {
    "set": lambda m, x: (m.layer(x), {1, 2}),
    "parameter": lambda m, x: (m.layer(x), m.layer.weight),
    "view of a parameter": lambda m, x: (m.layer(x), m.layer.weight[0]),
    "iterator": lambda m, x: (m.layer(x), iter([1])),
    "generator": lambda m, x: (m.layer(x), (i for i in range(3))),
    "module": lambda m, x: (m.layer(x), m.layer),
    "array": lambda m, x: (m.layer(x), x.detach().numpy()),
    "itself": _holding_itself,
    "nested tensor": lambda m, x: (torch.nested.as_nested_tensor([m.layer(x), x]), x.sum()),
    "by a nested tensor": lambda m, x: (
        torch.nested.as_nested_tensor([m.layer(x), x]).to_padded_tensor(0.0),
        x.sum(),
    ),
    "input": lambda m, x: (m.layer(x), x),
}


@pytest.mark.parametrize("is_parameter", [False, True])
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_that_no_program_holds(name: str, is_parameter: bool) -> None:
    model = Returning(OUTPUTS[name]).eval()
    optimized = _optimized(model, torch.randn(2, 8))
    for rows in (9, 9, 9, 7, 7, 2):
        x = nn.Parameter(torch.randn(rows, 8)) if is_parameter else torch.randn(rows, 8)
        with torch.no_grad():
            found, wanted = optimized(x), model(x)
        if rows > 4:
            assert type(found) is type(wanted) and isinstance(found[1], type(wanted[1]))
            found, wanted = found[0], wanted[0]
        if found.is_nested:
            found, wanted = (each.to_padded_tensor(0.0) for each in (found, wanted))
        torch.testing.assert_close(found, wanted)


def test_a_further_size_joins_at_its_first_call() -> None:
    model = Encoder().eval()
    optimized = _optimized(model, *_ids(3, 12))
    for size in [(3, 7), (4, 10), (2, 30)]:  # each is seen once
        given = _ids(*size)
        with torch.inference_mode():  # whose operators are noted as those of no_grad
            torch.testing.assert_close(optimized(*given), model(*given))
    assert len(_shared(optimized)) == 1
    assert _is_served(optimized, *_ids(4, 10))


@pytest.mark.parametrize("name", ["serves", "decides"])
def test_few_of_many_sizes_cost_more_than_the_models_code(name: str) -> None:
    def decides(m: Any, x: Tensor) -> Any:
        return m.layer(x) * len(x) if len(x) % 2 else m.other(x) / len(x)

    model = Of(decides if name == "decides" else lambda m, x: m.other(m.layer(x))).eval()
    optimized = _optimized(model, torch.randn(6, 8))
    rounds, rows = 4, 150
    with torch.no_grad():
        for _ in range(rounds):  # each size comes again after more than looks are kept
            for number in range(2, rows):
                x = torch.randn(number, 8)
                torch.testing.assert_close(optimized(x), model(x))
    replay = _replay(optimized)
    patience = replay._patience
    assert patience.calls == rounds * (rows - 2)
    assert patience.tries <= FREE_TRIES + patience.calls // CALLS_OF_A_TRY
    if name == "serves":
        assert len(_shared(optimized)) == 1 and patience.served > patience.tries


def test_a_profiler_goes_on() -> None:
    model = Encoder().eval()
    profiler = cProfile.Profile()
    with profiler:
        optimized = _optimized(model, *_ids(3, 12))
        with torch.no_grad():
            for size in [(3, 7), (4, 9), (3, 7), (4, 9)]:
                optimized(*_ids(*size))
        max(1, 2)
    names = {str(key) for key in pstats.Stats(profiler).stats}  # type: ignore[attr-defined]
    assert any("builtins.max" in name for name in names)
    assert len(_shared(optimized)) == 1


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="torch watches Python in another way")
def test_nothing_is_looked_on_beside_a_profiler_that_could_not_go_on() -> None:
    model = Encoder().eval()
    optimized = _optimized(model, *_ids(3, 12))
    with torch.profiler.profile(with_stack=True), torch.no_grad():
        watch = sys.getprofile()
        for size in [(3, 7), (4, 9), (3, 7)]:
            given = _ids(*size)
            torch.testing.assert_close(optimized(*given), model(*given))
        assert sys.getprofile() is watch
        with pytest.raises(CaptureError, match="a profiler watches it"):
            Replay(model).prepare(_ids(3, 12), {})
        assert sys.getprofile() is watch
    assert not _shared(optimized)
