"""What the drivers of devices that torch calls "cuda" have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .images import Image
from .kernel import Function, Kernel, Launch, Signature


class LoadedFunction:
    """A kernel in a device's memory; stays there as long as the process.

    launch: makes a launch of its arguments.
    """

    def __init__(self, launch: Callable[[Sequence[float]], Launch]) -> None:
        self._launch = launch

    def bind(self, *arguments: float) -> Launch:
        """Arguments in the source's order; addresses as integers."""
        return self._launch(arguments)


class TorchDriver:
    """A driver whose memory torch keeps, and whose kernels Triton compiles."""

    device: str

    def load(self, code: bytes, image: Image) -> Function:
        raise NotImplementedError

    def build(self, kernel: Kernel, signature: Signature) -> tuple[Function, str]:
        """Compiles with Triton for this very device, and loads it."""
        from . import compilers

        compiled = compilers.compile_here(kernel, signature, self.device)
        return self.load(compiled.code, compiled.image), compiled.image.compiler

    def release_memory(self) -> None:
        """Gives memory back that torch keeps but does not use."""
        torch.cuda.empty_cache()
