"""Which calls have to run a layer's own code; its packed weight is restored once for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils.rnn import pack_sequence

import oxytorch
from oxytorch.core import modes
from oxytorch.core.packed import PackedTensor
from oxytorch.core.reordered import ReorderedTensor

pytestmark = pytest.mark.usefixtures("pack_small_layers")

WAYS: dict[str, Callable[[], Any]] = {
    "gradients": nullcontext,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference": torch.inference_mode,
}


def _layers() -> dict[str, tuple[nn.Module, Any]]:
    return {
        "linear": (nn.Linear(192, 192), torch.rand(4, 192)),
        "conv1d": (nn.Conv1d(16, 16, 3), torch.rand(2, 16, 20)),
        "conv2d": (nn.Conv2d(16, 16, 3), torch.rand(2, 16, 9, 9)),
        "lstm": (nn.LSTM(16, 16, num_layers=2, bidirectional=True), torch.rand(5, 2, 16)),
        "packed sequence": (nn.LSTM(16, 16), pack_sequence([torch.rand(5, 16), torch.rand(3, 16)])),
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", _layers())
def test_weights_are_restored_once(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, x = _layers()[name]
    layer.eval()
    sample = torch.rand(5, 2, 16) if name == "packed sequence" else x
    model = oxytorch.optimize(layer, sample_input=sample)
    assert any(isinstance(p, PackedTensor) for p in model.parameters())
    with WAYS[way]():
        wanted, first = layer(x), model(x)
        restored = []
        monkeypatch.setattr(ReorderedTensor, "restore", lambda self: restored.append(self))
        second = model(x)
    assert not restored
    for output in (first, second):
        torch.testing.assert_close(output, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.filterwarnings("ignore:Converting a tensor:torch.jit.TracerWarning")
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("name", [name for name in _layers() if name != "packed sequence"])
def test_packed_layers_are_traced(name: str, gradients: bool) -> None:
    torch.manual_seed(0)
    layer, x = _layers()[name]
    model = oxytorch.optimize(layer.eval(), sample_input=x)
    with torch.set_grad_enabled(gradients):
        traced = torch.jit.trace(model, x)
    assert {*traced.state_dict()} == {*layer.state_dict()}
    torch.testing.assert_close(traced(x), layer(x), rtol=2e-5, atol=2e-6)


def _under_transform() -> tuple[int, int]:
    return torch.vmap(lambda _: (modes._mode(), modes._asked()), out_dims=None)(torch.zeros(1))  # type: ignore[no-any-return]


def _passed_on(function: Any, args: Any, kwargs: Any) -> Any:
    return function(*args, **kwargs)


class _Own(modes.OwnFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Operators(modes.OwnDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def _recorded() -> Iterator[None]:
    with torch.no_grad(), modes.recording(), _Operators():
        yield


@contextmanager
def _without(*contexts: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for context in (torch.no_grad(), *contexts):
            stack.enter_context(context)
        yield


MODES: dict[str, tuple[Callable[[], Any], int]] = {
    "no_grad": (torch.no_grad, modes.PLAIN),
    "inference": (torch.inference_mode, modes.PLAIN),
    "gradients": (torch.enable_grad, modes.GRADIENTS),
    "autocast": (lambda: _without(torch.autocast("cpu", torch.bfloat16)), modes.OTHER),
    "function mode": (lambda: _without(modes.FunctionsTo(_passed_on)), modes.OTHER),
    "own function mode": (lambda: _without(_Own()), modes.PLAIN),
    "both": (lambda: _without(_Own(), modes.FunctionsTo(_passed_on)), modes.OTHER),
    "dispatch mode": (lambda: _without(_Operators()), modes.OTHER),
    "recording": (_recorded, modes.PLAIN),
    "own code": (lambda: _without(modes.own_code()), modes.LAYERS),
}


@pytest.mark.parametrize("name", MODES)
def test_modes_are_told_apart(name: str) -> None:
    context, wanted = MODES[name]
    plain, asks = torch.ones(1), nn.Parameter(torch.ones(1))
    with context():
        found = (modes._mode(), modes._asked())
        is_plain = modes.is_plain_inference()
        must = modes.must_run_plain(plain), modes.must_run_plain(None, asks)
    assert found == (wanted, wanted)
    assert is_plain is (wanted == modes.PLAIN)
    assert must == (wanted == modes.OTHER, wanted in (modes.OTHER, modes.GRADIENTS))


def test_transforms_traces_and_tangents_run_own_code() -> None:
    with torch.no_grad():
        assert _under_transform() == (modes.OTHER, modes.OTHER)
        found = []

        def traced(x: torch.Tensor) -> torch.Tensor:
            found.append((modes._mode(), modes._asked()))
            return x + 1

        torch.jit.trace(traced, torch.ones(1))
        assert (modes.OTHER, modes.OTHER) in found
        with forward_ad.dual_level():
            assert modes.must_run_plain()
            assert not modes.is_plain_inference()
        assert modes.is_plain_inference()


def test_runs_that_are_recorded_are_counted_for_each_thread() -> None:
    before = modes.runs_recorded()
    with modes.recording():
        assert modes.runs_recorded() == before + 1
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(modes.runs_recorded).result() == 0
    assert modes.runs_recorded() == before + 1


def test_a_first_recording_under_a_mode_leaves_later_ones_told_apart() -> None:
    modes._learn_dispatch_mode.cache_clear()
    with torch.no_grad(), _Operators(), modes.recording():
        pass
    with _recorded():
        assert modes._mode() == modes._asked() == modes.PLAIN
