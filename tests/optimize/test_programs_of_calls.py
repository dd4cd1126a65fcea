"""Models are packed, and become programs where calls of one form come again and gain by it."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import oxytorch
from oxytorch.core.packed import PackedTensor
from oxytorch.optimize import later
from oxytorch.optimize.later import Gate, Plan, WaitingForward
from oxytorch.optimize.passes import program
from oxytorch.program import looks, passes
from oxytorch.program.replay import Replay
from oxytorch.rewriting import measure


class Encoder(nn.Module):
    """Linear layers, a norm and a sum, with 268,000 weights."""

    def __init__(self, width: int = 256, inner: int = 512, classes: int = 10) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(x + self.down(nn.functional.gelu(self.up(self.norm(x)))))
        return found


def _encoder(**options: Any) -> Encoder:
    return Encoder(**options).eval()


def _rows(batch: int = 2, length: int = 9) -> Tensor:
    return torch.randn(batch, length, 256)


def _called(model: nn.Module, x: Tensor, times: int = later.CALLS) -> Any:
    found = None
    with torch.no_grad():
        for _ in range(times):
            found = model(x)
    return found


def _forward_of(model: nn.Module) -> Any:
    return model.__dict__.get("forward")


def _waiting(model: nn.Module) -> WaitingForward:
    forward = _forward_of(model)
    assert isinstance(forward, WaitingForward), oxytorch.explain(model)
    return forward


def _program_of(model: nn.Module, x: Tensor, times: int = later.CALLS) -> Replay:
    """What runs the calls as a program, once there are enough of them."""
    _called(model, x, times)
    forward = _forward_of(model)
    assert isinstance(forward, Replay) and forward.programs(), oxytorch.explain(model).full()
    return forward


def _close(model: nn.Module, reference: nn.Module, x: Tensor, tolerance: float = 1e-5) -> None:
    with torch.no_grad():
        expected = reference(x.float())
        assert (model(x).float() - expected).abs().max() <= tolerance * expected.abs().max()


def _packed(model: nn.Module) -> int:
    return sum(isinstance(p, PackedTensor) for p in model.parameters())


@pytest.fixture(autouse=True)
def packs_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether packing and programs gain is not what most of these are about."""
    monkeypatch.setattr(measure, "TIMED", False)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_calls_become_programs(dtype: torch.dtype | None, inplace: bool) -> None:
    net, x = _encoder(), _rows()
    fast = oxytorch.optimize(copy.deepcopy(net), dtype=dtype, inplace=inplace)
    before = [*fast.parameters()]
    tolerance = 1e-5 if dtype is None else 3e-2
    assert _packed(fast) == 3
    expected = [f"a program is tried at call {later.CALLS} of an input signature"]
    for _ in range(later.CALLS):
        assert oxytorch.explain(fast).calls == expected
        _close(fast, net, x, tolerance)
    replay = _program_of(fast, x, 1)
    assert replay._patience.served and not _packed(fast)
    assert all(a is b for a, b in zip(fast.parameters(), before, strict=True))
    assert {p.dtype for p in fast.parameters()} == {p.dtype for p in before}
    for other in (_rows(1, 9), _rows(3, 4), x):
        for _ in range(3):
            _close(fast, net, other, tolerance)
    assert "one program for each input signature" in str(oxytorch.explain(fast))
    oxytorch.undo(fast)
    assert _forward_of(fast) is None and all(type(p) is nn.Parameter for p in fast.parameters())
    _close(fast, net, x, tolerance)


def test_a_sample_makes_the_program_at_once() -> None:
    net, x = _encoder(), _rows()
    fast = oxytorch.optimize(net, sample_input=x)
    _program_of(fast, x, 1)
    _close(fast, net, x)


class Generates(Encoder):
    def generate(self) -> None:
        raise NotImplementedError


def test_others_are_left_to_the_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    x = _rows()
    for model in (_encoder(inner=64), Generates().eval()):
        assert not isinstance(_forward_of(oxytorch.optimize(model)), WaitingForward)
        fast = oxytorch.optimize(model, sample_input=x)
        assert not isinstance(_forward_of(fast), (WaitingForward, Replay))
    monkeypatch.setattr(program, "MOST_BYTES", 1 << 20)
    assert not isinstance(_forward_of(oxytorch.optimize(_encoder())), WaitingForward)


@pytest.mark.parametrize("options", [{"graph": False}, {"passes": ["pack"]}])
def test_who_asks_for_none_gets_none(options: dict[str, Any]) -> None:
    fast = oxytorch.optimize(_encoder(), **options)
    assert not isinstance(_forward_of(fast), (WaitingForward, Replay))


WRITES: dict[str, Callable[[Any], Any]] = {
    "copied": lambda m: m.up.weight.copy_(torch.full_like(m.up.weight, 0.01)),
    "data": lambda m: m.up.weight.data.mul_(0.5),
    "data itself": lambda m: setattr(m.up.weight, "data", torch.full_like(m.up.weight, 0.02)),
    "detached": lambda m: m.down.weight.detach()[1].zero_(),
    "bias": lambda m: m.down.bias.add_(1.0),
    "norm": lambda m: m.norm.weight.mul_(2.0),
    "a new parameter": lambda m: setattr(m.up, "weight", nn.Parameter(m.up.weight * 0.5)),
    "a new layer": lambda m: setattr(m, "head", _same_head(m)),
    "state": lambda m: m.load_state_dict({k: v * 0.5 for k, v in m.state_dict().items()}),
}


def _same_head(model: Any) -> nn.Module:
    head = nn.Linear(256, 10)
    with torch.no_grad():
        head.weight.copy_(model.head.weight * 0.5)
        head.bias.zero_()
    return head


@pytest.mark.parametrize("calls", range(later.CALLS + 2))
@pytest.mark.parametrize("write", [*WRITES])
def test_writes_are_seen_at_any_time(write: str, calls: int) -> None:
    net, x = _encoder(), _rows()
    fast = oxytorch.optimize(net)
    _called(fast, x, calls)
    for _ in range(2):
        with torch.no_grad():
            for model in (fast, net):
                WRITES[write](model)
        for _ in range(later.CALLS + 1):
            _close(fast, net, x)


ALIASES: dict[str, Callable[[Any], Any]] = {
    "parameter": nn.Parameter,
    "without gradient": lambda w: nn.Parameter(w, requires_grad=False),
    "detached": lambda w: w.detach(),
    "buffer": nn.Buffer,
    "alias": torch.ops.aten.alias.default,
    "data": lambda w: w.data,
    "view": lambda w: w.t(),
    "rows": lambda w: w[2:],
}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["", "bfloat16"])
@pytest.mark.parametrize("calls", range(later.CALLS + 1))
@pytest.mark.parametrize("kind", [*ALIASES])
def test_writes_through_tensors_that_were_taken_before(
    kind: str, calls: int, dtype: torch.dtype | None
) -> None:
    net, x = _encoder(), _rows()
    fast = oxytorch.optimize(net, dtype=dtype)
    _called(fast, x, calls)
    with torch.no_grad():
        taken = [ALIASES[kind](model.up.weight) for model in (net, fast)]
        _called(fast, x, later.CALLS + 1)
        for each in taken:
            each.mul_(1.5)
    for _ in range(2):
        _close(fast, net, x, 1e-5 if dtype is None else 3e-2)
    torch.testing.assert_close(fast.up.weight.float(), net.up.weight, rtol=1e-2, atol=1e-3)


def test_weights_that_others_hold_are_left_packed() -> None:
    fast, x = oxytorch.optimize(_encoder()), _rows()
    taken = nn.Parameter(fast.up.weight)
    _called(fast, x, later.CALLS + later.MOST_DELAYS)
    assert "others hold tensors" in _waiting(fast).why
    assert taken.shape == fast.up.weight.shape


@pytest.mark.parametrize("kind", ["parameter", "detached", "buffer", "alias", "data", "view"])
def test_undo_keeps_the_memory_that_others_hold(kind: str) -> None:
    fast = oxytorch.optimize(_encoder(), graph=False)
    taken = ALIASES[kind](fast.up.weight)
    oxytorch.undo(fast)
    before = fast.up.weight._version
    with torch.no_grad():
        taken.zero_()
    assert not fast.up.weight.any()
    assert fast.up.weight._version > before or kind in ("data", "view")


class Reading(Encoder):
    """Adds a buffer to its input, and asks whether both are one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("own", _rows())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - self.own if x is self.own else x + self.own)


@pytest.mark.parametrize("graph", [None, True], ids=["", "graph"])
@pytest.mark.parametrize("order", ["xxoxxo", "oooxxo", "xxxooxo", "oxoxoxx", "xooxxox"])
def test_an_input_that_the_code_can_read_is_no_other_one(order: str, graph: bool | None) -> None:
    net = Reading().eval()
    fast = oxytorch.optimize(net, graph=graph)
    with torch.no_grad():
        for letter in order * 2:
            x = _rows() if letter == "x" else None
            for _ in range(2):
                found, expected = (m(m.own if x is None else x) for m in (fast, net))
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert isinstance(_forward_of(fast), Replay) or later.KNOWN_ARGUMENTS in _waiting(fast).why


class Views(Encoder):
    """Takes views of its weights, which takes their plain values out of packed ones."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = (
            super().forward(x) + x @ self.up.weight.t()[:, :10] + self.down.weight[:10, 0]
        )
        return found


@pytest.mark.parametrize("calls", range(later.CALLS + 2))
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_code_that_takes_views_of_weights_becomes_a_program(mode: Any, calls: int) -> None:
    net, x = Views().eval(), _rows()
    fast = oxytorch.optimize(net)
    for number in range(later.CALLS + 4):
        if number == calls:
            with torch.no_grad():
                for model in (fast, net):
                    model.up.weight.t().mul_(0.5)
        with mode():
            torch.testing.assert_close(fast(x), net(x), rtol=1e-5, atol=1e-5)
    assert _program_of(fast, x, 1)


@pytest.mark.parametrize("calls", range(later.CALLS + 1))
@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_go_their_own_way(how: Callable[..., Any], calls: int) -> None:
    net, x = _encoder(), _rows()
    fast = oxytorch.optimize(net)
    _called(fast, x, calls)
    other = how(fast)
    assert _program_of(other, x) is not _forward_of(fast)
    with torch.no_grad():
        other.up.weight.zero_()
    _close(fast, net, x)
    _program_of(fast, x)
    _close(fast, net, x)
    oxytorch.undo(other)
    assert _forward_of(other) is None


WAYS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "compile": lambda m, x: torch.compile(m, backend="aot_eager", fullgraph=True)(x),
    "export": lambda m, x: torch.export.export(m, (x,)).module()(x),
    "trace": lambda m, x: torch.jit.trace(m, x)(x),  # type: ignore[no-untyped-call]
    "functional_call": lambda m, x: torch.func.functional_call(
        m, (dict(m.named_parameters()), dict(m.named_buffers())), (x,)
    ),
    "vmap": lambda m, x: torch.vmap(lambda own: m(own[None])[0])(x),
    "double": lambda m, x: copy.deepcopy(m).double()(x.double()).float(),
    "shared": lambda m, x: copy.deepcopy(m).share_memory()(x),
    "gradients": lambda m, x: _gradient(m, x),
}


def _gradient(model: nn.Module, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(model(x).square().sum(), x)
    return found


@pytest.mark.parametrize("calls", range(later.CALLS + 1))
@pytest.mark.parametrize("way", [*WAYS])
def test_it_composes_at_any_time(way: str, calls: int) -> None:
    net, x = _encoder(), _rows()
    fast = oxytorch.optimize(net)
    _called(fast, x, calls)
    with torch.no_grad():
        found, expected = WAYS[way](fast, x), WAYS[way](net, x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for _ in range(later.CALLS + 1):
        _close(fast, net, x)


def test_inference_mode_makes_programs_that_follow_writes() -> None:
    net, x = _encoder(), _rows()
    fast = oxytorch.optimize(net)
    with torch.inference_mode():
        for _ in range(later.CALLS):
            fast(x)
    _program_of(fast, x, 1)
    assert not any(p.is_inference() for p in fast.parameters())
    with torch.no_grad():
        for model in (fast, net):
            model.up.weight.mul_(0.5)
    _close(fast, net, x)


def test_what_gains_nothing_stays_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = _encoder(), _rows()
    fast = oxytorch.optimize(net)
    monkeypatch.setattr(measure, "TIMED", True)
    monkeypatch.setattr(later, "GAIN", 0.0)
    monkeypatch.setattr(Replay, "_refuse_loss", lambda replay, call: None)
    _called(fast, x)
    assert not isinstance(_forward_of(fast), (WaitingForward, Replay))
    assert "its program is not faster than what the other passes made" in str(
        oxytorch.explain(fast)
    )
    monkeypatch.undo()
    _close(fast, net, x)
    oxytorch.undo(fast)
    assert all(type(p) is nn.Parameter for p in fast.parameters())


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["run", "prepare"])
def test_what_fails_leaves_the_packed_model(
    monkeypatch: pytest.MonkeyPatch, place: str, error: type[BaseException]
) -> None:
    net, x = _encoder(), _rows()
    fast = oxytorch.optimize(net)
    packed = _packed(fast)
    _called(fast, x, later.CALLS - 1)
    run = Plan.run

    def fails(plan: Plan, waiting: WaitingForward, as_program: bool) -> Any:
        found = run(plan, waiting, as_program)
        if as_program:
            raise error("here")
        return found

    def fails_later(*args: Any) -> None:
        raise error("here")

    if place == "run":
        monkeypatch.setattr(Plan, "run", fails)
    else:
        monkeypatch.setattr(Replay, "prepare", fails_later)
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            _called(fast, x, 1)
    else:
        _called(fast, x, 1)
        assert "here" in str(oxytorch.explain(fast))
    assert _packed(fast) == packed and not isinstance(_forward_of(fast), Replay)
    _close(fast, net, x)


class Random(Encoder):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0 * torch.rand(())


class Counting(Encoder):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) + self.calls


class Writing(Encoder):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.add_(1.0))


class Averaging(nn.Module):
    """Writes to its own weight, of which no kernel of ours has a packed form."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(600, 600))

    def forward(self, x: Tensor) -> Tensor:
        found = x @ self.weight
        self.weight.data.mul_(0.9)
        return found


SELF_WRITES: dict[str, Callable[[Tensor], Any]] = {
    "row": lambda w: w[4].add_(1),
    "rows": lambda w: w[:3].mul_(2),
    "transposed": lambda w: w.t().mul_(1.1),
    "flat": lambda w: w.view(-1)[:5].add_(1),
    "whole": lambda w: w.add_(0.1),
    "data": lambda w: w.data.add_(0.1),
    "detached row": lambda w: w.detach()[1].add_(1),
    "foreach": lambda w: torch._foreach_add_([w[0], w[1]], 1),
    "mask": lambda w: w.masked_fill_(w > 0.03, 0.5),
}


class SelfWriting(Encoder):
    """Writes to its own weight, which it reads before or afterwards."""

    def __init__(self, kind: str, is_first: bool) -> None:
        super().__init__()
        self.kind, self.is_first = kind, is_first

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            SELF_WRITES[self.kind](self.up.weight)
        found = super().forward(x)
        if not self.is_first:
            SELF_WRITES[self.kind](self.up.weight)
        return found


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "last"])
@pytest.mark.parametrize("kind", [*SELF_WRITES])
def test_code_that_writes_to_a_packed_weight_runs_as_often_as_it_is_called(
    kind: str, is_first: bool, mode: Any
) -> None:
    net, x = SelfWriting(kind, is_first).eval(), _rows()
    fast = oxytorch.optimize(net)
    with mode():
        for _ in range(later.CALLS + 3):
            torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(fast.up.weight.dense(), net.up.weight, rtol=1e-5, atol=1e-5)
    if kind != "mask":  # which writes nothing more
        assert "keeps a state" in _waiting(fast).why


def test_code_that_writes_to_weights_runs_as_often_as_it_is_called() -> None:
    net, x = Averaging().eval(), torch.ones(2, 600)
    fast = oxytorch.optimize(net)
    for _ in range(later.CALLS + 2):
        torch.testing.assert_close(_called(fast, x, 1), _called(net, x, 1), rtol=1e-5, atol=0)
        torch.testing.assert_close(fast.weight, net.weight, rtol=0, atol=0)
    oxytorch.undo(fast)
    assert all(type(p) is nn.Parameter for p in fast.parameters())


@pytest.mark.parametrize(
    ("kind", "why"),
    [(Random, "draws random numbers"), (Counting, "keeps a state"), (Writing, "keeps a state")],
)
def test_code_that_is_not_pure_runs_as_often_as_it_is_called(kind: Any, why: str) -> None:
    net, x = kind().eval(), _rows()
    fast = oxytorch.optimize(net)
    torch.manual_seed(0)
    for model in (net, fast):
        torch.manual_seed(0)
        given = x.clone()
        found = _called(model, given, 7)
        if model is net:
            expected, left, drawn = found, given, torch.rand(1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(given, left, rtol=0, atol=0)
    assert torch.equal(torch.rand(1), drawn)
    assert why in "\n".join(oxytorch.explain(fast).calls) and _packed(fast)


class Renewed(Encoder):
    factors: ClassVar[list[float]] = [1.0]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factors[0]


def test_explain_tells_why_a_model_still_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = Renewed().eval(), _rows()
    fast = oxytorch.optimize(net)
    with torch.no_grad():
        for number in range(later.CALLS + 2):
            monkeypatch.setattr(Renewed, "factors", [1.0 + number])
            torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-4)
    assert oxytorch.explain(fast).calls == [f"no program is made for now: {looks.CHANGES}"]


class Options:
    scale = 2.0


class Foreign(Encoder):
    def forward(self, x: Tensor, options: Options | None = None) -> Tensor:
        return super().forward(x) * (1.0 if options is None else options.scale)


def test_a_pass_that_fails_is_left_out_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("no kernel for it")

    monkeypatch.setattr(passes, "ALWAYS", (fail, *passes.ALWAYS))
    net, x = _encoder(), _rows()
    fast = oxytorch.optimize(net)
    program = _program_of(fast, x)
    why = "a program is made without the pass test_programs_of_calls.fail: it fails: no kernel"
    assert f"{why} for it" in oxytorch.explain(fast).calls
    assert "oxytorch::" in str(program.programs()[0])
    _close(fast, net, x)


def test_who_is_called_with_objects_stays_packed() -> None:
    net, x = Foreign().eval(), _rows()
    fast = oxytorch.optimize(net)
    with torch.no_grad():
        fast(x, Options())
    _called(fast, x, 5)
    assert "Options" in "\n".join(oxytorch.explain(fast).calls) and _packed(fast) == 3


def _hooked(model: Any) -> Any:
    return model.up.register_forward_hook(lambda m, args, out: out + 1)


def test_hooks_put_it_off() -> None:
    net, x = _encoder(), _rows()
    fast = oxytorch.optimize(net)
    handles = [_hooked(model) for model in (net, fast)]
    for _ in range(5):
        _close(fast, net, x)
    assert _packed(fast) == 3
    for handle in handles:
        handle.remove()
    _program_of(fast, x)
    _close(fast, net, x)


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "another dtype": lambda m: m.double().float().bfloat16(),
    "a forward of its own": lambda m: setattr(m, "forward", _twice(m.forward)),
}


def _twice(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x: 2 * forward(x)


@pytest.mark.parametrize("calls", range(later.CALLS + 1))
@pytest.mark.parametrize("change", [*CHANGES])
def test_a_model_that_was_changed_is_left_alone(change: str, calls: int) -> None:
    net, x = _encoder(), _rows()
    fast = oxytorch.optimize(net)
    _called(fast, x, calls)
    for model in (net, fast):
        CHANGES[change](model)
    x = x.to(next(net.parameters()).dtype)
    expected = _called(net, x, 1)
    for _ in range(later.CALLS + 1):
        torch.testing.assert_close(_called(fast, x, 1), expected, rtol=2e-2, atol=2e-2)
    assert [p.dtype for p in fast.parameters()] == [p.dtype for p in net.parameters()]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_threads_call_it_from_the_first_call_on(dtype: torch.dtype | None) -> None:
    net = _encoder()
    fast = oxytorch.optimize(net, dtype=dtype)
    inputs = [_rows(1 + n % 3, 4 + n) for n in range(6)]
    with torch.no_grad():
        expected = [net(x) for x in inputs]

    def calls(start: int) -> float:
        worst = 0.0
        with torch.inference_mode():
            for n in range(60):
                own = (start + n) % len(inputs)
                error = (fast(inputs[own]).float() - expected[own]).abs().max()
                worst = max(worst, (error / expected[own].abs().max()).item())
        return worst

    with ThreadPoolExecutor(4) as pool:
        errors = [*pool.map(calls, range(4))]
    assert max(errors) <= (1e-5 if dtype is None else 3e-2), errors
    assert isinstance(_forward_of(fast), Replay), oxytorch.explain(fast)


def test_a_gate_lets_one_in_alone() -> None:
    gate, order = Gate(), []
    inside, leave = threading.Event(), threading.Event()

    def run(name: str) -> None:
        with gate.entered(), gate.entered():  # a call within another
            order.append(name)
            inside.set()
            assert leave.wait(10)

    first = threading.Thread(target=run, args=("first",))
    first.start()
    assert inside.wait(10)
    began = time.perf_counter()
    with gate.alone() as is_alone:
        assert not is_alone  # the first is under way, for longer than anyone waits
    assert time.perf_counter() - began >= later.LONGEST_WAIT
    leave.set()
    first.join()
    with gate.alone() as is_alone:
        assert is_alone
        second = threading.Thread(target=run, args=("second",))
        second.start()
        with gate.alone() as other:
            assert not other
        time.sleep(0.05)
        order.append("alone")
    second.join()
    assert order == ["first", "alone", "second"]
    with gate.entered():
        began = time.perf_counter()
        with gate.alone() as is_alone:
            assert not is_alone  # within a call of its own thread there is nothing to wait for
        assert time.perf_counter() - began < later.LONGEST_WAIT


def test_optimizers_go_on_holding_the_parameters() -> None:
    net, x = _encoder(), _rows()
    stock = copy.deepcopy(net)
    fast = oxytorch.optimize(net, inplace=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (fast, stock)]
    for _ in range(2):
        _called(fast, x)
        for model, own in zip((fast, stock), optimizers, strict=True):
            own.zero_grad()
            model(x).square().mean().backward()
            own.step()
        _close(fast, stock, x, 1e-4)
    _program_of(fast, x, 2)


def test_undo_while_it_waits() -> None:
    net, x = _encoder(), _rows()
    for calls in range(later.CALLS):
        fast = oxytorch.optimize(net)
        _called(fast, x, calls)
        assert _waiting(fast)
        oxytorch.undo(fast)
        assert _forward_of(fast) is None
        for _ in range(later.CALLS):
            _close(fast, net, x, 0)
