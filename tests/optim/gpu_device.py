"""A GPU for the tests of steps, or Triton's interpreter on CPU tensors in its place.

The interpreter has to be chosen before Triton is imported: it is used in processes that are started
with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oxytorch.gpu.kernel import Kernel, Launch, Signature
from oxytorch.optim import _devices

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda:0")


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


class Interpreter:
    """A device whose kernels run in Triton's interpreter, on CPU tensors.

    capturing: makes the device say that it captures a graph. uploads: how many there were.
    """

    STREAM = 7
    device = torch.device("cpu")

    def __init__(self) -> None:
        sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))
        import gpu_steps

        self._run = gpu_steps.interpreter()
        self.capturing = False
        self.uploads = 0

    def function(self, kernel: Kernel, signature: Signature) -> Any:
        return _InterpretedFunction(self._run, kernel, signature)

    def stream(self) -> int:
        return self.STREAM

    def is_capturing(self) -> bool:
        return self.capturing

    def staging(self, like: Tensor) -> Tensor:
        assert not self.capturing
        return torch.empty_like(like)

    def upload(self, target: Tensor, source: Tensor, staging: Tensor) -> None:
        self.uploads += 1
        target.copy_(staging.copy_(source))

    def use_on_stream(self, tensors: Sequence[Tensor]) -> None:
        raise AssertionError("there is one stream")


def install() -> Interpreter:
    """Makes steps on CPU tensors run in the interpreter."""
    device = Interpreter()
    _devices._known[torch.device("cpu")] = device
    return device
