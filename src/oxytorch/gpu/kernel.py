"""The record of a GPU kernel: which signatures are built ahead of time, and from what."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Signature:
    """One compiled form of a kernel.

    name: unique within the kernel, of lower-case letters, digits, '_' and '-'.
    options: what the name stands for, for the kernel's own functions to read.
    """

    name: str
    options: Mapping[str, str | int | bool]


@dataclass(frozen=True)
class TritonSource:
    """What Triton compiles for NVIDIA and AMD.

    function: made by `triton.jit`.
    arguments: each argument that is left at run time with its type in Triton's words ("*fp32",
        "i64", "fp64"), in order.
    constants: the others with their values.
    aligned: pointers to, and numbers that are, multiples of 16.
    registers: the most that a thread may have on NVIDIA's chips; 0 leaves it to the compiler.
        Floating-point expressions are never contracted.
    """

    function: Any
    arguments: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: frozenset[str] = frozenset()
    num_warps: int = 4
    num_stages: int = 1
    registers: int = 0


@dataclass(frozen=True)
class OpenClSource:
    """What `ocloc` or SYCL's run time compiles for Intel.

    text: OpenCL C with one kernel, called `function`.
    arguments: as in TritonSource; pointers are passed as addresses.
    group: work items of a group, which together do the work of one program.
    """

    text: str
    function: str
    arguments: Mapping[str, str]
    group: int
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kernel:
    """A kernel, and what its signatures are compiled from.

    signatures: all that are built ahead of time.
    triton, opencl: the source of a signature; they import Triton, or make text, when they are
        called.
    """

    name: str
    signatures: Callable[[], Sequence[Signature]]
    triton: Callable[[Signature], TritonSource]
    opencl: Callable[[Signature], OpenClSource]


def kernel_of(
    package: str,
    name: str,
    signatures: Callable[[], Sequence[Signature]],
    triton: Callable[[Signature], TritonSource],
) -> Kernel:
    """The record of a kernel whose OpenCL C comes from `source(name, signature)` in `opencl.py`.

    package: the op's package, in which `opencl.py` is. It is imported when a source is asked for.
    """

    def opencl(signature: Signature) -> OpenClSource:
        source: OpenClSource = importlib.import_module(".opencl", package).source(name, signature)
        return source

    return Kernel(name, signatures, triton, opencl)


class Launch(Protocol):
    """A loaded kernel with arguments, ready to run again and again."""

    def set(self, position: int, value: float) -> None:
        """Replaces an argument: an address, an integer or a floating-point number."""

    def __call__(self, programs: int, stream: int) -> None:
        """Starts `programs` programs on a stream; returns before they end."""


class Function(Protocol):
    """A kernel on one device."""

    def bind(self, *arguments: float) -> Launch:
        """Arguments in the source's order; addresses as integers."""
