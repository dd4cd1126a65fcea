"""Pass `program`: the recorded operators give the model's answers, and only where they hold."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from counting import counts_original
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import CASES, build, call

import oxytorch
from oxytorch.optimize import DEFAULT, tune
from oxytorch.program.replay import Replay

PASSES = (*DEFAULT, "program")


def _reasons(model: nn.Module) -> str:
    entries = oxytorch.explain(model).entries
    return " | ".join(e.detail for e in entries if e.pass_name == "program")


def _as_program(model: nn.Module, sample: Any, **options: Any) -> nn.Module:
    optimized = oxytorch.optimize(model, sample_input=sample, passes=PASSES, **options)
    assert isinstance(optimized.__dict__.get("forward"), Replay), _reasons(optimized)
    return optimized


def _mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 4)).eval()


class Mapped(nn.Module):
    """Takes and returns containers, reads a value, and uses a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))
        self.read = 0

    def forward(self, pair: tuple[Tensor, Tensor], *, scale: float = 1.0) -> dict[str, Any]:
        x, mask = pair
        y = self.layer(x) * scale + self.shift
        first, second = y.split(2, dim=-1)
        if bool(mask.all()):
            return {"y": y, "parts": [first, second], "note": "all"}
        return {"y": y.masked_fill(~mask, 0.0), "parts": [second, first], "note": "some"}


@pytest.mark.parametrize("name", [*CASES])
def test_answers_of_every_model_are_the_same(name: str) -> None:
    model, sample = build(name)
    optimized = oxytorch.optimize(model, sample_input=sample, passes=PASSES, verify=True)
    plain = oxytorch.optimize(model, sample_input=sample)
    with torch.no_grad():
        expected, first, second = (call(m, sample) for m in (plain, optimized, optimized))
    for wanted, a, b in zip(*(_tensors(v) for v in (expected, first, second)), strict=True):
        torch.testing.assert_close(a, wanted)
        torch.testing.assert_close(b, wanted)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    if not isinstance(items, (tuple, list)) and not isinstance(value, dict):
        return []
    return [tensor for item in items for tensor in _tensors(item)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_recorded_calls_do_not_reach_the_forward(mode: Any) -> None:
    model = _mlp()
    x = torch.randn(3, 8)
    optimized = _as_program(model, x)
    calls = counts_original(optimized)
    with mode():
        for value in (x, -x, x * 3):
            torch.testing.assert_close(optimized(value), model(value))
    assert not calls


class _Attends(nn.Module):
    """Operators that torch takes apart before it runs them, but in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drops = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drops(self.layer(x)).reshape(x.shape[0], 2, -1, 4)
        return torch.matmul(F.scaled_dot_product_attention(x, x, x), x.transpose(2, 3)).flatten(1)


def test_runs_in_inference_mode_are_recorded_as_others() -> None:
    model = _Attends().eval()
    with torch.inference_mode():
        optimized = _as_program(model, torch.randn(3, 8))
        for rows in (5, 5, 5, 6, 6, 6):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(optimized(x), model(x))
    forward = optimized.__dict__["forward"]
    assert not forward._refused and len(forward._programs) == 3
    texts = [str(program) for program in forward.programs()]
    assert not any("dropout" in text for text in texts)


def test_a_model_optimized_in_inference_mode_follows_writes() -> None:
    with torch.inference_mode():
        model = _mlp()
        optimized = _as_program(model, torch.randn(3, 8))
    assert not any(parameter.is_inference() for parameter in optimized.parameters())
    x = torch.randn(3, 8)
    with torch.no_grad():
        torch.testing.assert_close(optimized(x), model(x))
        for parameter in optimized.parameters():
            parameter.mul_(2)
        with torch.inference_mode():
            for parameter in model.parameters():
                parameter.mul_(2)
        torch.testing.assert_close(optimized(x), model(x))


def test_other_forms_are_recorded_when_seen_again() -> None:
    model = _mlp()
    optimized = _as_program(model, torch.randn(3, 8))
    calls = counts_original(optimized)
    with torch.no_grad():
        for rows in (5, 5, 5, 5):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(optimized(x), model(x))
        # One that is new, and those that are looked at and recorded.
        assert 1 <= len(calls) <= 7
        before = len(calls)
        torch.testing.assert_close(optimized(x), model(x))
        assert len(calls) == before
        strided = torch.randn(8, 5).t()
        torch.testing.assert_close(optimized(strided), model(strided))
        assert len(calls) == before + 1
    assert len(optimized.__dict__["forward"]._programs) == 2


def test_values_that_decide_are_checked() -> None:
    model = Mapped().eval()
    x, mask = torch.randn(2, 4), torch.ones(2, 4, dtype=torch.bool)
    optimized = _as_program(model, ((x, mask),))
    other = mask.clone()
    other[0, 1] = False
    calls = counts_original(optimized)
    with torch.no_grad():
        for given in (mask, other, mask, other, other, mask):
            found, wanted = optimized((x, given)), model((x, given))
            assert found["note"] == wanted["note"]
            assert [type(v) for v in found.values()] == [type(v) for v in wanted.values()]
            torch.testing.assert_close(_tensors(found), _tensors(wanted))
        known = len(calls)
        for given in (mask, other):
            optimized((x, given))
        assert len(calls) == known
        found, wanted = (m((x, mask), scale=2.0)["y"] for m in (optimized, model))
        torch.testing.assert_close(found, wanted)
        assert len(calls) == known + 1


@pytest.mark.parametrize("size", [8, 512])
def test_programs_stay_where_weights_are_written_to(size: int) -> None:
    model = nn.Sequential(nn.Linear(size, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    x = torch.randn(3, size)
    optimized = _as_program(model, x)
    replay: Any = optimized.__dict__["forward"]
    (program,) = replay.programs()
    calls = counts_original(optimized)
    for write in (
        lambda m: m[0].weight.mul_(-0.5),
        lambda m: m[2].bias.data.add_(1),
        lambda m: m.load_state_dict({k: v + 0.1 for k, v in m.state_dict().items()}),
        lambda m: setattr(m[0].weight, "data", m[0].weight.data.flip(0)),
    ):
        with torch.no_grad():
            write(model), write(optimized)
            for _ in range(2):
                torch.testing.assert_close(optimized(x), model(x))
        assert replay.programs() == [program]
    assert calls == []


def test_new_weights_are_seen() -> None:
    model = _mlp()
    x = torch.randn(3, 8)
    optimized = _as_program(model, x)
    other = _mlp()
    with torch.no_grad():
        optimized(x)
        for parameter in other.parameters():
            parameter.add_(1.0)
        optimized.load_state_dict(other.state_dict())
        for _ in range(3):
            torch.testing.assert_close(optimized(x), other(x))
        for target in (optimized, other):
            target[3].bias.mul_(-1.0)
        for _ in range(3):
            torch.testing.assert_close(optimized(x), other(x))
        optimized[3] = nn.Linear(16, 2)
        for _ in range(3):
            assert optimized(x).shape == (3, 2)


def test_guards_call_the_forward() -> None:
    model = _mlp()
    x = torch.randn(3, 8)
    optimized = _as_program(model, x)
    calls = counts_original(optimized)
    optimized(x)
    assert len(calls) == 1, "gradients"
    gradient = torch.autograd.grad(optimized(x.requires_grad_()).sum(), x)[0]
    torch.testing.assert_close(gradient, torch.autograd.grad(model(x).sum(), x)[0])
    x = x.detach()
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            optimized(x)
        assert len(calls) == 3, "autocast"
        seen: list[Any] = []
        handle = optimized[0].register_forward_hook(lambda *call: seen.append(call))
        optimized(x)
        handle.remove()
        assert seen
        assert len(calls) == 4, "a hook"
        optimized[2].train()
        optimized(x)
        assert len(calls) == 5, "training mode"
        optimized[2].eval()
        torch.func.vmap(lambda v: optimized(v))(torch.randn(2, 3, 8))
        assert len(calls) == 6, "vmap"
        for _ in range(4):  # recorded again: the transform took the plain weights out
            optimized(x)
        recorded = len(calls)
        optimized(x)
        assert len(calls) == recorded


class Embedded(nn.Module):
    """Returns a size in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.layer = nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> tuple[Tensor, dict[str, Any]]:
        x = self.layer(self.table(tokens))
        return x, {"size": x.shape, "sizes": [x.size()], "kind": x.dtype}


def test_sizes_stay_sizes() -> None:
    model, tokens = Embedded().eval(), torch.arange(6).view(2, 3)
    optimized = _as_program(model, tokens)
    with torch.no_grad():
        found = optimized(tokens)[1]
    assert type(found["size"]) is torch.Size
    assert found == {"size": (2, 3, 8), "sizes": [torch.Size((2, 3, 8))], "kind": torch.float32}


def test_errors_are_those_of_the_module() -> None:
    model, tokens = Embedded().eval(), torch.arange(6).view(2, 3)
    optimized = _as_program(model, tokens)
    calls = counts_original(optimized)
    with torch.no_grad():
        with pytest.raises(IndexError, match="out of range"):
            optimized(tokens + 8)
        assert len(calls) == 1
        torch.testing.assert_close(optimized(tokens)[0], model(tokens)[0])
    assert len(calls) == 1, "the program holds for other values"


@pytest.mark.parametrize("where", ["build", "_watched"])
def test_errors_while_a_form_is_recorded_run_the_module(where: str) -> None:
    model = _mlp()
    optimized = _as_program(model, torch.randn(3, 8))
    replay, failures = optimized.__dict__["forward"], []

    def fails(*given: Any) -> Any:
        failures.append(1)
        raise RuntimeError("could not create a memory")

    replay._stands_in = lambda: where == "_watched"  # else the first call was all that is to see
    setattr(replay._builder if where == "build" else replay, where, fails)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(5, 8)
            torch.testing.assert_close(optimized(x), model(x))
        with pytest.raises(RuntimeError, match=r"shapes|inner product"):
            optimized(torch.randn(5, 7))
    assert len(failures) == 1


def test_a_program_that_fails_by_itself_is_not_used_again() -> None:
    model, tokens = Embedded().eval(), torch.arange(6).view(2, 3)
    optimized = _as_program(model, tokens)
    calls, failures = counts_original(optimized), []

    def fails(tensors: list[Tensor]) -> None:
        failures.append(1)
        raise RuntimeError("could not create a memory")

    replay: Any = optimized.__dict__["forward"]
    for form, ((_, output),) in [*replay._programs.items()]:
        replay._programs[form] = [(fails, output)]
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(optimized(tokens)[0], model(tokens)[0])
    assert len(failures) == 1
    assert len(calls) == 4


@pytest.mark.parametrize("other", ["layer", "parameter"])
def test_swaps_of_tensors_that_are_watched_are_followed(other: str) -> None:
    """Torch swaps a tensor only while nothing but its object in Python refers to it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).eval()
    x = torch.randn(3, 256)
    optimized, stock = _as_program(model, x), copy.deepcopy(model)
    with torch.no_grad():
        torch.testing.assert_close(optimized(x), stock(x))
        for _ in range(3):
            for own in (stock, optimized):
                new = own[2].weight if other == "layer" else nn.Parameter(torch.ones(256, 256))
                torch.utils.swap_tensors(own[0].weight, new)
                del new  # with the memory of the tensor that the program was made for
            for _ in range(3):
                torch.testing.assert_close(optimized(x), stock(x))


class Gathering(nn.Module):
    """Puts its result into a list that it is given, or into one of its own, and returns that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor, given: Any = None, writes: bool = False) -> Any:
        y = self.layer(x)
        if writes:
            given.append(y)
            return y
        return y, self.kept if given is None else given


def test_lists_of_others_are_written_to_as_often_as_stock_does() -> None:
    model, x = Gathering().eval(), torch.randn(3, 8)
    optimized = _as_program(model, (x, (x,)))
    with torch.no_grad():
        given: list[Tensor] = []
        for count in range(1, 5):
            torch.testing.assert_close(optimized(x, [*given], writes=True), model(x, given, True))
            for _ in range(3):
                found: list[Tensor] = []
                optimized(x, found, writes=True)
                assert len(found) == 1
            assert len(given) == count
        for _ in range(4):
            assert optimized(x)[1] is optimized.kept
            assert optimized(x, given)[1] is given


class Writing(nn.Module):
    """Writes to what it is given or keeps, for inputs of more than three rows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(8, 4)
        self.register_buffer("total", torch.zeros(4))
        self.times, self.log, self.table = 0, [0], {"times": 0}

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 3:
            if self.kind == "input":
                x.mul_(2)
            elif self.kind == "buffer":
                self.total.add_(1)
            elif self.kind == "attribute":
                self.times += 1
            elif self.kind == "list":
                self.log.append(1)
            else:
                self.table["times"] += 1
        return self.layer(x) + self.total + self.times + len(self.log) + self.table["times"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", ["input", "buffer", "attribute", "list", "dictionary"])
def test_code_of_a_call_has_its_effects_once(kind: str, mode: Any) -> None:
    model = Writing(kind).eval()
    optimized = _as_program(model, torch.randn(3, 8))
    with mode():
        for _ in range(5):
            x = torch.randn(5, 8)
            given = [x.clone(), x.clone()]
            torch.testing.assert_close(optimized(given[0]), model(given[1]))
            assert torch.equal(*given)


class Asking(nn.Linear):
    """Reads an attribute of its own and of its input, where they have one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(x, "factor", 1.0) * getattr(self, "factor", 1.0)


def test_inputs_with_attributes_run_the_module() -> None:
    model, x = Asking(8, 4).eval(), torch.randn(3, 8)
    optimized = _as_program(model, x)
    with torch.no_grad():
        marked = x.clone()
        marked.factor = 2.0  # type: ignore[attr-defined]
        for given in (x, marked, x):
            torch.testing.assert_close(optimized(given), model(given))


def test_what_is_put_in_later_is_followed() -> None:
    model, x = Asking(8, 4).eval(), torch.randn(3, 8)
    optimized = _as_program(model, x)
    calls = counts_original(optimized)
    with torch.no_grad():
        optimized(x)
        assert not calls
        model.factor = optimized.factor = 2.0  # type: ignore[assignment]
        for _ in range(3):
            torch.testing.assert_close(optimized(x), model(x))
        known = len(calls)
        optimized(x)
        assert len(calls) == known, "recorded again"


def test_undo_copy_and_pickle() -> None:
    model = _mlp()
    x = torch.randn(3, 8)
    optimized = _as_program(model, x)
    with torch.no_grad():
        wanted = model(x)
        for copied in (copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized))):
            for _ in range(3):
                torch.testing.assert_close(copied(x), wanted)
            assert copied.__dict__["forward"].module is copied
        oxytorch.undo(optimized)
        assert "forward" not in optimized.__dict__
        torch.testing.assert_close(optimized(x), wanted)


class Refused(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.last: Tensor | None = None
        self.times = 0

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        if self.kind == "list":
            return y + len(x.tolist())
        if self.kind == "numpy":
            return y + float(x.numpy().sum())
        if self.kind == "fresh":
            return y + torch.tensor([float(self.times)])
        if self.kind == "sizes":
            return y.sum() + x.nonzero().shape[0]
        if self.kind == "buffer":
            self.count.add_(1.0)
            return y
        if self.kind == "input":
            x.add_(1.0)
            return y
        if self.kind == "attribute":
            self.last = y
            return y
        if self.kind == "counter":
            self.times += 1
            return y * self.times
        if self.kind == "random":
            return y + torch.rand_like(y)
        return y, object()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("list", "tolist"),
        ("numpy", "numpy"),
        ("sizes", "depends on values"),
        ("buffer", "writes to"),
        ("input", "writes to"),
        ("attribute", "keeps a state"),
        ("counter", "keeps a state"),
        ("random", "random numbers"),
        ("object", "holds a object"),
    ],
)
def test_what_cannot_be_recorded_is_left_and_named(kind: str, reason: str) -> None:
    model = Refused(kind).eval()
    x = torch.rand(2, 4)
    optimized = oxytorch.optimize(model, sample_input=x.clone(), passes=PASSES)
    assert reason in _reasons(optimized)
    assert not isinstance(optimized.__dict__.get("forward"), Replay)


def test_tune_tries_it() -> None:
    model = _mlp()
    optimized = oxytorch.optimize(model, sample_input=torch.randn(3, 8), tune=True)
    report = oxytorch.explain(optimized)
    assert report.tuned is not None
    assert any(name == "with program" for name, _ in report.tuned["lines"])


class Fresh(nn.Module):
    """Makes a tensor of an attribute, which may change, at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.times = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.tensor([self.times, 1.0, 2.0, 3.0])


def test_tensors_made_of_python_values_are_constants_while_these_are() -> None:
    model, x = Fresh().eval(), torch.randn(2, 4)
    optimized = _as_program(model, x)
    assert isinstance(optimized.__dict__["forward"], Replay)
    with torch.no_grad():
        for times in (2.0, 3.0, 3.0, 3.0, 2.0):
            model.times = optimized.times = times
            torch.testing.assert_close(optimized(x), model(x))


class Cache:
    """What a model hands out beside its result."""

    def __init__(self) -> None:
        self.layers: list[Tensor] = []
        self.length = 0


class Caching(nn.Module):
    """Returns an object that holds tensors: a new one, or one that it keeps."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.own = Cache() if keeps else None

    def forward(self, x: Tensor) -> dict[str, Any]:
        cache = Cache() if self.own is None else self.own
        y = self.layer(x)
        cache.layers = [y * 2.0, y * 3.0]
        cache.length = x.shape[0]
        return {"y": y, "cache": cache}


def test_objects_in_an_output_are_new_at_each_call() -> None:
    model, x = Caching(keeps=False).eval(), torch.randn(2, 4)
    optimized = _as_program(model, x)
    assert isinstance(optimized.__dict__["forward"], Replay)
    with torch.no_grad():
        first, second, expected = optimized(x), optimized(x + 1), model(x)
    for found, given in ((first, x), (second, x + 1)):
        with torch.no_grad():
            expected = model(given)
        assert type(found["cache"]) is Cache and found["cache"].length == 2
        torch.testing.assert_close(found["cache"].layers, expected["cache"].layers)
    first["cache"].layers.append(x)
    assert len(second["cache"].layers) == 2 and first["cache"] is not second["cache"]


def test_an_object_that_a_model_keeps_is_not_rebuilt() -> None:
    model, x = Caching(keeps=True).eval(), torch.randn(2, 4)
    optimized = oxytorch.optimize(model, sample_input=x, graph=True)
    assert not isinstance(optimized.__dict__.get("forward"), Replay)
    with torch.no_grad():
        assert optimized(x)["cache"] is optimized.own


class OneLayer(nn.Module):
    """Has a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


class InPlace(OneLayer):
    """Writes to its own results, through views as well."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y[:, 0] = 1.0
        torch.relu_(y[1:])
        y.add_(y.sum()).clamp_(max=3.0)
        return y


def test_writes_to_results_are_as_they_are() -> None:
    model, x = InPlace().eval(), torch.randn(3, 4)
    optimized = _as_program(model, x)
    assert isinstance(optimized.__dict__["forward"], Replay)
    with torch.no_grad():
        for given in (x, -x, x * 3):
            torch.testing.assert_close(optimized(given), model(given))


class Deciding(OneLayer):
    """Goes one of two ways by a value that it computes."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if bool((x.sum() > 0).item()) and not torch.equal(x, torch.zeros_like(x)):
            return y.relu()
        return y - 1.0


def test_a_value_that_code_reads_decides_which_program_runs() -> None:
    model, x = Deciding().eval(), torch.rand(3, 4)
    optimized = _as_program(model, x)
    replay = optimized.__dict__["forward"]
    with torch.no_grad():
        for given in (x, -x, -x, x, -x, x * 0, x):
            torch.testing.assert_close(optimized(given), model(given))
    assert 1 < len(replay.programs()) <= 4


def _aliased(x: Tensor) -> Tensor:
    y = x * 2.0
    top = y[:1]
    y.relu_()
    return top + y


def _before(x: Tensor) -> Tensor:
    y = x * 2.0
    z = y + 1.0
    y.relu_()
    return z + y


def _promoted(x: Tensor) -> Tensor:
    y = (x > 0).to(torch.float64)
    return y.add_(x).mul_(2)


def _broadcast(x: Tensor) -> Tensor:
    y = x * 2.0
    return y.add_(x[0]).sub_(1.0, alpha=2) * y.t().clamp_(min=0.0).t()


class WritingFunction(nn.Module):
    """Computes with a function that writes to what it makes."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.function(x))


@pytest.mark.parametrize("function", [_aliased, _before, _promoted, _broadcast])
def test_writes_show_where_they_show_with_torch(function: Callable[[Tensor], Tensor]) -> None:
    model, x = WritingFunction(function).eval(), torch.randn(4, 4)
    if function is _promoted:
        model.double()
    optimized = _as_program(model, x)
    assert isinstance(optimized.__dict__["forward"], Replay)
    with torch.no_grad():
        for given in (x, -x, x * 3):
            torch.testing.assert_close(optimized(given), model(given))


def _listed(x: Tensor, t: Tensor) -> Tensor:
    return x * torch.tensor([t[0], 2.0, t[1], 4.0])


def _new(x: Tensor, t: Tensor) -> Tensor:
    return x * x.new_tensor((t[0], 1.0, t[1], 4.0))


def _indexed(x: Tensor, t: Tensor) -> Tensor:
    first, second = t.long()
    return x[:, [first, second, 0, 0]]


def _printed(x: Tensor, t: Tensor) -> Tensor:
    return x * (2.0 if "2" in repr(t) else 3.0)


def _packed(x: Tensor, t: Tensor) -> Tensor:
    rows = torch.stack([x, x, x, x])
    packed = nn.utils.rnn.pack_padded_sequence(rows, t.long(), enforce_sorted=False)
    return nn.utils.rnn.pad_packed_sequence(packed, total_length=4)[0].sum(0)[:1].expand(2, 4)


def _split(x: Tensor, t: Tensor) -> Tensor:
    return torch.tensor_split(x, t.long(), dim=1)[0].sum() + x


class WithValues(nn.Module):
    """Computes with a function of two tensors."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.layer(self.function(x, t))


@pytest.mark.parametrize("function", [_listed, _new, _indexed, _printed, _packed, _split])
def test_values_that_torch_reads_unseen_are_not_frozen(
    function: Callable[[Tensor, Tensor], Tensor],
) -> None:
    model, x = WithValues(function).eval(), torch.randn(2, 4)
    sample = (x, torch.tensor([1.0, 2.0]))
    optimized = oxytorch.optimize(model, sample_input=sample, passes=["program"])
    with torch.no_grad():
        for values in ([1.0, 2.0], [3.0, 1.0], [2.0, 3.0], [1.0, 3.0]):
            t = torch.tensor(values)
            torch.testing.assert_close(optimized(x, t), model(x, t))


def _times(x: Tensor, factor: float = 2.0, *, offset: float = 0.0) -> Tensor:
    return x * factor + offset


class Defaults(nn.Module):
    """Calls a function by its defaults."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return _times(self.layer(x))


def test_other_defaults_of_functions_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Defaults().eval(), torch.randn(2, 4)
    optimized = _as_program(model, x)
    with torch.no_grad():
        monkeypatch.setattr(_times, "__defaults__", (5.0,))
        torch.testing.assert_close(optimized(x), model(x))
        monkeypatch.setattr(_times, "__kwdefaults__", {"offset": 1.0})
        torch.testing.assert_close(optimized(x), model(x))


def test_what_changes_before_every_call_is_captured_more_and_more_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = _mlp(), torch.randn(3, 8)
    optimized = _as_program(model, x)
    replay: Any = optimized.__dict__["forward"]
    captures = []
    own = replay._builder.build
    monkeypatch.setattr(replay._builder, "build", lambda *given: captures.append(1) or own(*given))
    with torch.no_grad():
        for step in range(200):
            model[0].tag = optimized[0].tag = step
            torch.testing.assert_close(optimized(x), model(x))
    assert len(captures) < 14


class Scaling(nn.Module):
    """Reads another value of its input at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) / max(x.abs().max().item(), 1e-3)


def test_values_that_differ_at_each_call_are_given_up() -> None:
    model = Scaling().eval()
    optimized = _as_program(model, torch.randn(2, 4))
    replay: Any = optimized.__dict__["forward"]
    with torch.no_grad():
        for _ in range(40):
            x = torch.randn(2, 4)
            torch.testing.assert_close(optimized(x), model(x))
    assert not replay.programs()


def test_a_nested_tensor_runs_the_models_own_code() -> None:
    model, x = _mlp(), torch.randn(3, 8)
    optimized = _as_program(model, x)
    given = torch.nested.nested_tensor([x, x[:2]])
    with torch.no_grad():
        for found, expected in zip(optimized(given).unbind(), model(given).unbind(), strict=True):
            torch.testing.assert_close(found, expected)


def test_attention_returns_the_strides_of_torchs_fast_path() -> None:
    model = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    optimized = oxytorch.optimize(model, sample_input=(x, x, x), passes=["program"])
    with torch.no_grad():
        assert optimized(x, x, x)[0].stride() == model(x, x, x)[0].stride()


def test_a_model_with_a_packed_lstm_is_no_program() -> None:
    model, x = nn.LSTM(16, 16).eval(), torch.randn(3, 2, 16)
    whole = nn.Sequential(model).eval()
    optimized = oxytorch.optimize(whole, sample_input=x, graph=True, inplace=True)
    assert "LSTM" in _reasons(optimized)
    with torch.no_grad():
        torch.testing.assert_close(optimized(x)[0], nn.LSTM.forward(model, x)[0])


def test_a_first_copy_of_its_class_leaves_a_program_current() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * 2

    model = Scaled().eval()
    optimized = oxytorch.optimize(model, sample_input=torch.randn(2, 8), graph=True, inplace=True)
    state = optimized.__dict__["forward"]._state
    copy.deepcopy(Scaled())  # Python notes in a class that it has looked for its slots
    assert "__slotnames__" in vars(Scaled)
    assert state.is_current()


def test_few_runs_make_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    context = importlib.import_module("oxytorch.optimize.context")
    monkeypatch.setattr("oxytorch.rewriting.measure.TIMED", True)
    monkeypatch.setattr(tune, "_turns", lambda runs, *_: [(*[1.0] * (len(runs) - 1), 0.5)])
    runs: list[str] = []

    def noting(name: str, inner: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            runs.append(name)
            return inner(*args, **kwargs)

        return noted

    monkeypatch.setattr(Replay, "forward", noting("own", Replay.forward))
    monkeypatch.setattr(context, "recorded", noting("recorded", context.recorded))
    for dtype in (None, torch.bfloat16):
        runs.clear()
        oxytorch.optimize(_mlp(), sample_input=torch.randn(3, 8), dtype=dtype, graph=True)
        assert runs == ["own"] * 3


class Weighted(nn.Module):
    """A product with a vector, whose dtype has to be that of the matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.parts = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.mv(self.layer(x), self.parts)


@pytest.mark.parametrize("is_timed", [True, False])
def test_what_fails_in_the_new_dtype_is_mended_before_a_program_is_made(
    monkeypatch: pytest.MonkeyPatch, is_timed: bool
) -> None:
    monkeypatch.setattr("oxytorch.rewriting.measure.TIMED", is_timed)
    monkeypatch.setattr(tune, "_turns", lambda runs, *_: [(*[1.0] * (len(runs) - 1), 0.5)])
    model, x = Weighted().eval(), torch.randn(3, 8)
    dtype = {"": torch.bfloat16, nn.Linear: torch.bfloat16}
    optimized = oxytorch.optimize(model, sample_input=x, dtype=dtype, graph=True)
    assert isinstance(optimized.__dict__["forward"], Replay)
    assert optimized.parts.dtype == torch.bfloat16
    with torch.no_grad():
        torch.testing.assert_close(optimized(x).float(), model(x), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("seconds", [0.85, 0.95, 1e-3])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_other_passes_make_is_timed_where_a_program_does_not_gain_clearly(
    monkeypatch: pytest.MonkeyPatch, seconds: float, dtype: torch.dtype | None
) -> None:
    monkeypatch.setattr("oxytorch.rewriting.measure.TIMED", True)
    timed: list[int] = []

    def turns(runs: list[Any], *_: Any) -> list[tuple[float, ...]]:
        timed.append(len(runs))
        return [(seconds / 0.5 if seconds < 0.1 else 1.0, *[seconds] * (len(runs) - 1))]

    monkeypatch.setattr(tune, "_turns", turns)
    model, x = _mlp(), torch.randn(3, 8)
    optimized = oxytorch.optimize(model, sample_input=x, dtype=dtype, graph=True)
    assert timed == ([2] if seconds == 0.85 else [2, 3])
    assert isinstance(optimized.__dict__["forward"], Replay)
    assert oxytorch.explain(optimized).tuned is None


def test_a_program_that_gains_less_than_the_other_passes_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("oxytorch.rewriting.measure.TIMED", True)
    times = {2: (1.0, 0.95), 3: (1.0, 0.8, 0.95)}
    monkeypatch.setattr(tune, "_turns", lambda runs, *_: [times[len(runs)]])
    optimized = oxytorch.optimize(_mlp(), sample_input=torch.randn(3, 8), graph=True)
    assert not isinstance(optimized.__dict__.get("forward"), Replay)
    report = oxytorch.explain(optimized)
    assert "program" not in report.tuned["passes"] and "not used" in str(report)
