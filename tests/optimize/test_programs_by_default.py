"""Models of convolutions run as programs where nothing else is asked for, made of their calls."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxytorch
from oxytorch.core.watched import WatchedParameter
from oxytorch.program import patience
from oxytorch.program import replay as replay_module
from oxytorch.program.replay import Replay
from oxytorch.rewriting import measure, turns


class Net(nn.Module):
    """Convolutions with most of the weights."""

    def __init__(self, width: int = 192, classes: int = 10) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.first(images)).relu()
        return self.head((x + self.second(x)).mean((2, 3)))


def _net(**options: Any) -> Net:
    net = Net(**options).eval()
    net.norm.running_mean.uniform_(-0.5, 0.5)  # type: ignore[union-attr]
    return net


def _images(batch: int = 1, side: int = 16) -> Tensor:
    return torch.randn(batch, 3, side, side)


def _program_of(model: nn.Module) -> Replay | None:
    forward = model.__dict__.get("forward")
    return forward if isinstance(forward, Replay) else None


def _served(model: nn.Module, x: Tensor) -> Replay:
    """The model's replay once calls of this form run as a program."""
    replay = _program_of(model)
    assert replay is not None, oxytorch.explain(model)
    _called(model, x, 3)
    assert replay.programs(), oxytorch.explain(model)
    return replay


def _called(model: nn.Module, x: Tensor, times: int) -> None:
    with torch.no_grad():
        for _ in range(times):
            model(x)


def _doubled(*weights: Tensor) -> None:
    with torch.no_grad():
        for weight in weights:
            weight.mul_(2.0)


def _close(model: nn.Module, reference: nn.Module, x: Tensor, tolerance: float = 1e-5) -> None:
    with torch.no_grad():
        expected = reference(x.float())
        assert (model(x).float() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_calls_become_programs(dtype: torch.dtype | None, inplace: bool) -> None:
    net = _net()
    fast = oxytorch.optimize(copy.deepcopy(net), dtype=dtype, inplace=inplace)
    tolerance = 1e-5 if dtype is None else 3e-2
    for x in (_images(), _images(3), _images(2, 24), _images(5, 32)):
        replay = _served(fast, x)
        _close(fast, net, x, tolerance)
    served = replay._patience.served
    with torch.no_grad():
        fast(x)
    assert replay._patience.served == served + 1
    report = oxytorch.explain(fast)
    assert "one program for each input signature, made when such calls come again" in str(report)
    assert report.calls[0] == "programs for 4 input signatures"


def test_other_models_are_left_to_the_other_passes() -> None:
    small, large = nn.Conv2d(3, 64, 3), nn.Conv2d(64, 512, 3)
    for model in (
        small,  # too small to gain
        nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 8)),
        nn.Sequential(large, nn.Flatten(), nn.Linear(4096, 512)),  # most weights are of others
    ):
        assert _program_of(oxytorch.optimize(model.eval())) is None
    assert _program_of(oxytorch.optimize(nn.Sequential(small, large).eval())) is not None


@pytest.mark.parametrize("options", [{"graph": False}, {"passes": ["pack"]}])
def test_who_asks_for_none_gets_none(options: dict[str, Any]) -> None:
    assert _program_of(oxytorch.optimize(_net(), **options)) is None


def test_embeddings_do_not_count() -> None:
    class Texts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(30_000, 128)
            self.layers = nn.Conv1d(128, 768, 3, padding=1)

        def forward(self, words: Tensor) -> Tensor:
            return self.layers(self.words(words).transpose(1, 2)).amax(2)

    model = Texts().eval()
    words = torch.randint(0, 30_000, (2, 20))
    fast = oxytorch.optimize(model)
    _served(fast, words)
    with torch.no_grad():
        torch.testing.assert_close(fast(words), model(words), rtol=1e-4, atol=1e-5)


def test_a_sample_makes_the_program_at_once() -> None:
    net, x = _net(), _images()
    fast = oxytorch.optimize(net, sample_input=x)
    replay = _program_of(fast)
    assert replay is not None and len(replay.programs()) == 1
    _close(fast, net, x)


@pytest.mark.parametrize("seconds", [1.0, 3.0])
def test_a_program_stays_only_where_it_is_faster(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    net, x = _net(), _images()
    fast = oxytorch.optimize(net)
    replay = _program_of(fast)
    assert replay is not None

    def taken(runs: Any, warm: Any = (), known: Any = None) -> turns.Turns:
        for run in runs:
            run()
        return [(2.0, seconds)]

    monkeypatch.setattr(measure, "TIMED", True)
    monkeypatch.setattr(turns, "taken", taken)
    _called(fast, x, 4)
    calls = "\n".join(oxytorch.explain(fast).calls)
    assert ("its program is not faster: 2000 ms -> 3000 ms" in calls) == (seconds > 2)
    assert len(replay.programs()) == (seconds < 2)
    assert len(replay._builder._families) == (seconds < 2)  # with what they have packed
    _close(fast, net, x)


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "data": lambda p: p.data.mul_(0.5),
    "a row of data": lambda p: p.data[3].zero_(),
    "a view of data": lambda p: p.data.view(-1)[70:71].fill_(9.0),
    "data itself": lambda p: setattr(p, "data", torch.full_like(p, 0.01)),
    "detached": lambda p: p.detach()[:, 1].mul_(-1),
    "in place": lambda p: p.mul_(0.5),
    "foreach": lambda p: torch._foreach_mul_([p.data], 0.5),
}


@pytest.mark.parametrize("graph", [None, True])
@pytest.mark.parametrize("write", [*WRITES])
def test_writes_to_large_weights_are_seen(write: str, graph: bool | None) -> None:
    net, x = _net(), _images()
    sample = None if graph is None else x
    fast = oxytorch.optimize(net, graph=graph, sample_input=sample)
    _served(fast, x)
    assert net.second.weight.nbytes > 64 << 10
    held = [model.second.weight.data for model in (fast, net)]
    for _ in range(2):
        with torch.no_grad():
            for model in (fast, net):
                WRITES[write](model.second.weight)
        _close(fast, net, x)
        _served(fast, x)
    for alias in held:  # taken before the calls above
        alias.mul_(0.5)
    _close(fast, net, x)


def test_parameters_are_as_they_were_after_undo() -> None:
    net, x = _net(), _images()
    before = {name: (p, p.clone()) for name, p in net.named_parameters()}
    fast = oxytorch.optimize(net, inplace=True)
    _served(fast, x)
    assert type(fast.second.weight) is WatchedParameter
    assert isinstance(fast.second.weight, nn.Parameter)
    oxytorch.undo(fast)
    for name, p in net.named_parameters():
        assert type(p) is nn.Parameter and p is before[name][0] and torch.equal(p, before[name][1])


def test_watched_parameters_are_parameters() -> None:
    fast = oxytorch.optimize(_net())
    _served(fast, _images())
    weight = fast.second.weight
    plain = nn.Parameter(weight.detach().clone())
    assert repr(weight) == repr(plain)
    again = nn.Parameter(weight)
    assert again.data_ptr() == weight.data_ptr() and isinstance(again, nn.Parameter)
    assert again.requires_grad and again.is_leaf
    made = type(weight)(torch.zeros(2), requires_grad=False)
    assert type(made) is nn.Parameter and not made.requires_grad
    assert type(copy.deepcopy(weight)) is nn.Parameter
    torch.nn.utils.parametrizations.weight_norm(fast.second)
    _close(fast, copy.deepcopy(fast), _images())


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("is_used", [False, True])
def test_copies_make_programs_of_their_own(how: Callable[..., Any], is_used: bool) -> None:
    net, x = _net(), _images()
    fast = oxytorch.optimize(net)
    if is_used:
        _served(fast, x)
    other = how(fast)
    replay = _served(other, x)
    assert replay.must_gain and replay is not _program_of(fast)
    with torch.no_grad():
        other.second.weight.zero_()
    _close(fast, net, x)


def _compiled(model: nn.Module, x: Tensor) -> Tensor:
    return torch.compile(model, backend="aot_eager", fullgraph=True)(x)  # type: ignore[no-any-return]


def _exported(model: nn.Module, x: Tensor) -> Tensor:
    return torch.export.export(model, (x,)).module()(x)  # type: ignore[no-any-return]


def _called_with_others(model: nn.Module, x: Tensor) -> Tensor:
    values = dict(model.named_parameters()), dict(model.named_buffers())
    return torch.func.functional_call(model, values, (x,))  # type: ignore[no-any-return]


def _mapped(model: nn.Module, x: Tensor) -> Tensor:
    return torch.vmap(lambda own: model(own[None])[0])(x)


WAYS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "compile": _compiled,
    "export": _exported,
    "trace": lambda model, x: torch.jit.trace(model, x)(x),
    "functional_call": _called_with_others,
    "vmap": _mapped,
    "double": lambda model, x: copy.deepcopy(model).double()(x.double()).float(),
    "converted twice": lambda model, x: copy.deepcopy(model).half().float()(x),
    "shared": lambda model, x: copy.deepcopy(model).share_memory()(x),
}


@pytest.mark.parametrize("way", [*WAYS])
def test_it_composes(way: str) -> None:
    net, x = _net(), _images(2)
    fast = oxytorch.optimize(net)
    _served(fast, x)
    with torch.no_grad():
        found, expected = WAYS[way](fast, x), WAYS[way](net, x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    _served(fast, x)


def test_gradients_are_torchs() -> None:
    net, x = _net(), _images(2)
    fast = oxytorch.optimize(net)
    _served(fast, x)
    for model in (fast, net):
        model(x).square().sum().backward()
    for p, expected in zip(fast.parameters(), net.parameters(), strict=True):
        assert p.grad is not None and torch.equal(p.grad, expected.grad)  # type: ignore[arg-type]
    for model in (fast, net):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    _close(fast, net, x)


def test_threads_call_it_from_the_first_call_on() -> None:
    net = _net()
    fast = oxytorch.optimize(net)
    inputs = [_images(1 + n % 3, 16 + 8 * (n % 2)) for n in range(6)]
    with torch.no_grad():
        expected = [net(x) for x in inputs]

    def calls(start: int) -> float:
        worst = 0.0
        with torch.no_grad():
            for n in range(start, start + 30):
                difference = fast(inputs[n % 6]) - expected[n % 6]
                worst = max(worst, float(difference.abs().max()))
        return worst

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(calls, range(4))) <= 1e-4


def test_hooks_run_the_models_own_code() -> None:
    net, x = _net(), _images()
    fast = oxytorch.optimize(net)
    seen: list[Tensor] = []
    handle = fast.second.register_forward_hook(lambda module, given, found: seen.append(found))
    _called(fast, x, 4)
    assert len(seen) == 4
    line = "no program is made for now: a module has a hook or is in training mode"
    assert line in oxytorch.explain(fast).calls
    handle.remove()
    _served(fast, x)
    _close(fast, net, x)


def test_a_hook_that_is_there_leaves_the_model_to_the_other_passes() -> None:
    net = _net()
    net.second.register_forward_hook(lambda module, given, found: None)
    fast = oxytorch.optimize(net, dtype=torch.bfloat16)
    assert _program_of(fast) is None
    assert "a module has a hook" in str(oxytorch.explain(fast))
    _close(fast, net, _images(), 3e-2)


def test_code_that_keeps_a_state_runs_itself() -> None:
    class Counting(Net):
        calls = 0

        def forward(self, images: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(images) * self.calls

    fast = oxytorch.optimize(Counting().eval())
    x = _images()
    with torch.no_grad():
        found = [fast(x) for _ in range(5)]
    assert fast.calls == 5
    torch.testing.assert_close(found[4], 5 * found[0])
    assert "keeps a state" in "\n".join(oxytorch.explain(fast).calls)


def test_graph_without_a_sample() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)).eval()
    x = torch.randn(3, 64)
    fast = oxytorch.optimize(model, graph=True)
    _served(fast, x)
    _close(fast, model, x)
    with pytest.raises(TypeError, match="expected graph to be True, False or None, got 'yes'"):
        oxytorch.optimize(model, graph="yes")  # type: ignore[call-overload]


@pytest.mark.parametrize("graph", [None, True])
def test_programs_that_nobody_asked_for_take_a_part_of_the_time(
    graph: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = _net()
    fast = oxytorch.optimize(net, graph=graph, sample_input=None if graph is None else _images(2))
    replay = _program_of(fast)
    assert replay is not None
    monkeypatch.setattr(patience, "FREE_SECONDS", 0.0)
    with torch.no_grad():
        for side in range(16, 40):
            fast(_images(1, side))
    found = replay._patience
    if graph is True:
        assert found.tries >= 20
    else:
        assert 1 <= found.tries < 8
        found.seconds, tries = 0.0, found.tries
        for seconds, more in ((0.0, 0), (11 * found.spent, 1)):
            found.seconds = seconds
            with torch.no_grad():
                fast(_images(1, 48))
            assert found.tries == tries + more
    _close(fast, net, _images(3, 20))


def test_memory_that_another_tensor_holds_keeps_a_model_from_programs() -> None:
    net, x = _net(), _images()
    alias, reference = net.second.weight.data, copy.deepcopy(net)
    left = oxytorch.optimize(net, inplace=True)
    assert _program_of(left) is None
    assert "the memory of a parameter is that of another tensor" in str(oxytorch.explain(left))
    _called(left, x, 3)
    _doubled(alias, reference.second.weight)
    _close(left, reference, x)
    del alias
    _served(oxytorch.optimize(oxytorch.undo(left), inplace=True), x)


def test_an_alias_from_before_the_first_call_is_followed() -> None:
    net, x = _net(), _images()
    fast = oxytorch.optimize(net)
    alias = fast.second.weight.data.view(-1)
    _served(fast, x)
    _doubled(alias, net.second.weight)
    _close(fast, net, x)


def test_copies_that_others_hold_have_no_program_until_these_let_go() -> None:
    net, x = _net(), _images()
    fast = pickle.loads(pickle.dumps(oxytorch.optimize(net)))
    alias = fast.second.weight.data
    _called(fast, x, 4)
    _doubled(alias, net.second.weight)
    _close(fast, net, x)
    line = "no program is made for now: the memory of a parameter is that of another tensor, too"
    assert line in oxytorch.explain(fast).calls
    del alias
    _served(fast, x)
    _close(fast, net, x)


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_make_fx_traces_it_after_calls(pre_dispatch: bool) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    net, x = _net(), _images()
    fast = oxytorch.optimize(net)
    _served(fast, x)
    with torch.no_grad():
        traced = make_fx(fast, pre_dispatch=pre_dispatch)(x)
        torch.testing.assert_close(traced(x), net(x), rtol=1e-4, atol=1e-5)
    _served(fast, x)
    _doubled(fast.second.weight.data, net.second.weight)
    _close(fast, net, x)


def test_an_error_while_code_is_looked_at_fails_no_call() -> None:
    numpy = pytest.importorskip("numpy")

    class Augmenting(Net):
        def forward(self, images: Tensor) -> Tensor:
            if self.training and numpy.random.rand() < 0.5:  # a method of a class of Cython's
                images = images.flip(-1)
            return super().forward(images)

    net, x = Augmenting().eval(), _images()
    fast = oxytorch.optimize(net)
    for _ in range(4):
        _close(fast, net, x)
    assert "its code can read a RandomState" in str(oxytorch.explain(fast))


@pytest.mark.parametrize("where", ["Reachable", "Codes"])
def test_whatever_fails_in_a_look_fails_no_call(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x = _net(), _images()
    fast = oxytorch.optimize(net)

    def fails(*given: Any) -> Any:
        raise ZeroDivisionError("not ours")

    if where == "Codes":
        monkeypatch.setattr(replay_module.Codes, "add", fails)
    else:
        monkeypatch.setattr(replay_module, "Reachable", fails)
    for _ in range(4):
        _close(fast, net, x)
    assert "a run of it fails, ZeroDivisionError: not ours" in str(oxytorch.explain(fast).calls)


def test_calls_that_have_no_program_say_why() -> None:
    class Adding(Net):
        def forward(self, images: Tensor, more: Any = None) -> Tensor:
            return super().forward(images)

    fast, x = oxytorch.optimize(Adding().eval()), _images()
    with torch.no_grad():
        for _ in range(3):
            fast(x, iter([1]))
    assert any("the latest call has no program: " in line for line in oxytorch.explain(fast).calls)


def test_errors_name_types_as_torch_does() -> None:
    net, x = _net(), _images()
    fast = oxytorch.optimize(net)
    _served(fast, x)
    told = []
    for model in (fast, net):
        with torch.no_grad(), pytest.raises(TypeError) as raised:
            model(None)
        told.append(str(raised.value))
    assert told[0] == told[1]


def test_weights_of_weight_norm_count() -> None:
    net = _net()
    for layer in (net.first, net.second):
        torch.nn.utils.parametrizations.weight_norm(layer)
    fast = oxytorch.optimize(net.eval())
    _served(fast, _images())
    _close(fast, net, _images())


def _raises(*given: Any) -> Any:
    raise ZeroDivisionError("the user's")


@pytest.mark.parametrize("base", [dict, OrderedDict, list, set])
@pytest.mark.parametrize(
    "methods",
    [["__getitem__"], ["keys"], ["__iter__", "items", "__getitem__"], ["__len__", "get", "__eq__"]],
)
def test_methods_of_containers_are_not_called(base: type, methods: list[str]) -> None:
    kind = type("Odd", (base,), {**dict.fromkeys(methods, _raises), "__hash__": None})
    net, x = _net(), _images()
    held = kind()
    for add in ("__setitem__", "append", "add"):
        if add in vars(base) and not (add == "__setitem__" and base is list):
            getattr(base, add)(held, *(("a", 1) if add == "__setitem__" else ("a",)))
            break
    fast = oxytorch.optimize(net)
    fast.odd = held
    for _ in range(4):
        _close(fast, net, x)


def test_sparse_parameters_fail_no_call() -> None:
    net, x = _net(), _images()
    net.mask = nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)
    fast = pickle.loads(pickle.dumps(oxytorch.optimize(net)))
    for _ in range(4):
        _close(fast, net, x)
