"""A GPU for the tests of steps, or Triton's interpreter on CPU tensors in its place.

The interpreter has to be chosen before Triton is imported: it is used in processes that are started
with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_device import CpuDevice
from optimizers import make, weights
from torch import Tensor

from oxytorch.gpu.kernel import Kernel, Launch, Signature
from oxytorch.optim.gpu import devices

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda:0")
NEEDS_DEVICE = pytest.mark.skipif(
    not (HAS_GPU or IS_INTERPRETED), reason="no GPU here; test_gpu_interpreted.py runs a part"
)

FORMATS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "fp32-bf16": (torch.float32, {"state_dtype": torch.bfloat16}),
    "fp32-int8": (torch.float32, {"state_dtype": torch.int8}),
    "split": (torch.bfloat16, {"master_weights": "split"}),
    "split-bf16": (torch.bfloat16, {"master_weights": "split", "state_dtype": torch.bfloat16}),
    "split-int8": (torch.bfloat16, {"master_weights": "split", "state_dtype": torch.int8}),
    "bf16": (torch.bfloat16, {}),
    "bf16-fp32": (torch.bfloat16, {"state_dtype": torch.float32}),
    "fp16": (torch.float16, {}),
    "fp16-int8": (torch.float16, {"state_dtype": torch.int8}),
}


class _InterpretedLaunch:
    def __init__(self, run: Any, kernel: Kernel, signature: Signature, values: Sequence[float]):
        self._run, self._kernel, self._signature = run, kernel, signature
        self._values = list(values)

    def set(self, position: int, value: float) -> None:
        self._values[position] = value

    def __call__(self, programs: int, stream: int) -> None:
        assert stream == Interpreter.STREAM
        self._run(self._kernel, self._signature, self._values, programs)


class _InterpretedFunction:
    def __init__(self, run: Any, kernel: Kernel, signature: Signature) -> None:
        self._bound = (run, kernel, signature)

    def bind(self, *arguments: float) -> Launch:
        return _InterpretedLaunch(*self._bound, arguments)


class Interpreter(CpuDevice):
    """A device whose kernels run in Triton's interpreter, on CPU tensors."""

    STREAM = 7

    def __init__(self) -> None:
        super().__init__()
        sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))
        import gpu_steps

        self._run = gpu_steps.interpreter()

    def function(self, kernel: Kernel, signature: Signature) -> Any:
        return _InterpretedFunction(self._run, kernel, signature)


def install() -> Interpreter:
    """Makes steps on CPU tensors run in the interpreter."""
    device = Interpreter()
    devices._known[torch.device("cpu")] = device
    return device


@contextmanager
def on_processor() -> Iterator[None]:
    """Steps on CPU tensors run by the compiled kernels inside."""
    cpu = torch.device("cpu")
    before = devices._known[cpu]
    devices._known[cpu] = None
    try:
        yield
    finally:
        devices._known[cpu] = before


def on_device(tensors: list[Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [tensor.to(DEVICE, dtype, copy=True) for tensor in tensors]


def give_gradients(parameters: list[Tensor], seed: int, scale: float = 1.0) -> None:
    """The same gradients on every device; every second time in the memory of the ones before."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=generator).bfloat16() * scale
        if seed % 2 and parameter.grad is not None:
            parameter.grad.copy_(gradient)
        else:
            parameter.grad = gradient.to(parameter.device, parameter.dtype)


def train(optimizer: Any, steps: int, first: int = 0) -> list[Tensor]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(first, first + steps):
        give_gradients(parameters, step)
        optimizer.step()
    return parameters


def both(name: str, format_name: str = "fp32", **options: Any) -> tuple[Any, Any]:
    """An optimizer on the device and the same on the processor."""
    dtype, own = FORMATS[format_name]
    plain = [w.to(dtype) for w in weights()]
    return (
        make(name, on_device(plain, dtype), **options, **own),
        make(name, [w.clone() for w in plain], **options, **own),
    )


def same(actual: Tensor, wanted: Tensor, exactly: bool = True) -> None:
    actual = actual.detach().cpu()
    assert actual.dtype == wanted.dtype and actual.shape == wanted.shape
    if exactly:
        assert torch.equal(actual, wanted)
    elif actual.is_floating_point():
        torch.testing.assert_close(actual, wanted, rtol=2e-2, atol=1e-4, equal_nan=True)
    else:
        assert actual.dtype == torch.int16 or ((actual.float() - wanted.float()).abs() <= 1).all()


def same_optimizers(ours: Any, theirs: Any, exactly: bool = True) -> None:
    for group, other in zip(ours.param_groups, theirs.param_groups, strict=True):
        for own, wanted in zip(group["params"], other["params"], strict=True):
            same(own, wanted.detach(), exactly)
            assert ours.state[own].keys() == theirs.state[wanted].keys()
            for key, value in theirs.state[wanted].items():
                same(ours.state[own][key], value, exactly)
