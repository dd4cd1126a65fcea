"""Whole optimizers by the kernels for Intel GPUs, on SYCL's CPU device in place of one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizers import CASES, IDS, assert_same_numbers, make, train, weights
from sycl_device import SyclDevice
from test_numbers import FORMATS, _dtype
from torch import Tensor

from oxytorch.optim import executor
from oxytorch.optim.gpu import devices

HERE = Path(__file__).parent


def _cases() -> Iterator[Any]:
    """Every optimizer, its options and formats; slow but for the first options in float32."""
    names = [name for name, _ in CASES]
    for position, (name, options) in enumerate(CASES):
        for format_name in FORMATS:
            is_quick = names.index(name) == position and format_name == "fp32"
            marks = [] if is_quick else [pytest.mark.slow]
            own_id = f"{IDS[position]}-{format_name}"
            yield pytest.param(name, options, format_name, id=own_id, marks=marks)


@pytest.fixture(scope="session")
def _device(sycl_driver: Any) -> SyclDevice:
    return SyclDevice(sycl_driver)


@pytest.fixture
def device(_device: SyclDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[SyclDevice]:
    """Makes steps on CPU tensors run by SYCL."""
    monkeypatch.setitem(devices._known, torch.device("cpu"), _device)
    yield _device


def _run(name: str, options: dict[str, Any], format_name: str) -> list[Tensor]:
    own = [weight.to(_dtype(format_name)) for weight in weights()]
    optimizer = make(name, own, **options, **FORMATS[format_name])
    parameters = train(optimizer, 3)
    states = [value for p in parameters for value in optimizer.state[p].values()]
    return [p.detach() for p in parameters] + states


@pytest.mark.parametrize(("name", "options", "format_name"), [*_cases()])
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
        patch.setitem(devices._known, torch.device("cpu"), None)
        patch.setattr(executor, "is_fused", lambda parameter: False)
        expected = _run(name, options, format_name)
    assert_same_numbers(name, actual, expected)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_all_that_may_happen_between_two_steps(sycl_driver: Any) -> None:
    """The tests of steps on GPUs, on CPU tensors, with SYCL in place of Triton's interpreter."""
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "sycl_device"),
            *(str(HERE / "test_gpu.py"), str(HERE / "test_gpu_gradients.py")),
        ],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
