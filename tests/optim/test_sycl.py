"""Whole optimizers by the kernels for Intel GPUs, on SYCL's CPU device in place of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from optimizers import CASES, IDS, MEASURED, make, train, weights
from test_numbers import FORMATS, _assert_near, _dtype
from torch import Tensor

from oxytorch.gpu.kernel import Kernel, Signature
from oxytorch.optim import _devices, _reference, _step


class _Waiting:
    """A launch that returns when its programs have ended: torch's tensors here know no queue."""

    def __init__(self, device: SyclDevice, launch: Any) -> None:
        self._device, self._launch = device, launch
        self.set = launch.set

    def __call__(self, programs: int, stream: int) -> None:
        self._launch(programs, stream)
        self._device.driver.wait()
        self._device.launches += 1


class _Function:
    def __init__(self, device: SyclDevice, function: Any) -> None:
        self._device, self._function = device, function

    def bind(self, *arguments: float) -> _Waiting:
        return _Waiting(self._device, self._function.bind(*arguments))


class SyclDevice:
    """SYCL's CPU device, as `_devices.Accelerator` is an Intel GPU. launches: how many so far."""

    device = torch.device("cpu")

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.launches = 0
        self._functions: dict[tuple[str, str], _Function] = {}

    def function(self, kernel: Kernel, signature: Signature) -> Any:
        name = kernel.name, signature.name
        if name not in self._functions:
            self._functions[name] = _Function(self, self.driver.build(kernel, signature)[0])
        return self._functions[name]

    def stream(self) -> int:
        return 0

    def is_capturing(self) -> bool:
        return False

    def staging(self, like: Tensor) -> Tensor:
        return torch.empty_like(like)

    def upload(self, target: Tensor, source: Tensor, staging: Tensor) -> None:
        target.copy_(staging.copy_(source))

    def use_on_stream(self, tensors: Sequence[Tensor]) -> None:
        raise AssertionError("there is one queue")


@pytest.fixture(scope="session")
def _device(sycl_driver: Any) -> SyclDevice:
    return SyclDevice(sycl_driver)


@pytest.fixture
def device(_device: SyclDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[SyclDevice]:
    """Makes steps on CPU tensors run by SYCL."""
    monkeypatch.setitem(_devices._known, torch.device("cpu"), _device)
    yield _device


def _run(name: str, options: dict[str, Any], format_name: str) -> list[Tensor]:
    own = [weight.to(_dtype(format_name)) for weight in weights()]
    optimizer = make(name, own, **options, **FORMATS[format_name])
    parameters = train(optimizer, 3)
    states = [value for p in parameters for value in optimizer.state[p].values()]
    return [p.detach() for p in parameters] + states


@pytest.mark.parametrize(
    "format_name",
    ["fp32", *(pytest.param(n, marks=pytest.mark.slow) for n in FORMATS if n != "fp32")],
)
@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_steps_compute_the_bits_of_the_reference(
    name: str,
    options: dict[str, Any],
    format_name: str,
    device: SyclDevice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = device.launches
    actual = _run(name, options, format_name)
    assert device.launches > before
    with monkeypatch.context() as patch:
        patch.setitem(_devices._known, torch.device("cpu"), None)
        patch.setattr(_step, "run", _reference.run)
        expected = _run(name, options, format_name)
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        if name in MEASURED:
            # Norms are summed in another order, which may turn a random rounding over.
            _assert_near(a, b)
        else:
            assert torch.equal(a, b)
