"""Gets a kernel onto a device, by the first way that works.

1. an image compiled ahead of time for the device;
2. code that the device's driver compiles (PTX, SPIR-V), kept in the user's cache;
3. Triton's compiler, where Triton is installed;
4. an error that lists what was built and names the command to build for the device.

OXYTORCH_GPU leaves one of them. Each kernel makes one line in the log `oxytorch.gpu`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from .. import config
from . import images
from .devices import BY_NAME, usable_images
from .errors import DriverError, ImageError, NoKernelError, OutOfDeviceMemoryError
from .images import Collection, Image
from .kernel import Function, Kernel, Signature

WAYS = ("aot", "jit", "triton", "off")
_log = logging.getLogger("oxytorch.gpu")
_lock = threading.RLock()
_functions: dict[tuple[str, str, torch.device], Function] = {}
_failures: dict[tuple[str, str, torch.device], str] = {}


class Driver(Protocol):
    """What is asked of a device's driver.

    device: the device's name in `devices.DEVICES`, or the driver's own name for a device that is
        not in it.
    fallback: the name of the images that the driver compiles; "" if it compiles none.
    """

    device: str
    fallback: str

    def load(self, code: bytes, image: Image) -> Function:
        """Loads compiled code."""

    def compile(self, code: bytes, image: Image) -> tuple[Function, str]:
        """Compiles and loads the code of a fallback; returns also how it went, in words."""

    def build(self, kernel: Kernel, signature: Signature) -> tuple[Function, str]:
        """Compiles and loads from source with a compiler that is installed here, or raises
        NoKernelError; returns also which compiler it was."""

    def release_memory(self) -> None:
        """Gives memory back that torch keeps but does not use."""


def forced_way() -> str:
    """The way that OXYTORCH_GPU leaves; "" if it leaves all."""
    way = config.current.gpu.lower()
    if way and way not in WAYS:
        raise ValueError(f"OXYTORCH_GPU: expected one of {', '.join(WAYS)}, got {way!r}")
    return way


# torch.cuda.current_stream makes a Stream object, ten times as slow.
_current_cuda_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def current_stream(device: torch.device) -> int:
    """The address of the stream on which torch runs in this thread; of its queue on xpu."""
    if device.type == "xpu":
        return int(torch.xpu.current_stream(device).sycl_queue)
    index = torch.cuda.current_device() if device.index is None else device.index
    if _current_cuda_stream is None:
        return int(torch.cuda.current_stream(index).cuda_stream)
    stream: int = _current_cuda_stream(index)
    return stream


def function(kernel: Kernel, signature: Signature, device: torch.device) -> Function:
    """The kernel, ready for the device; loaded once per process.

    Loading may allocate and wait: it has no place in the capture of a graph. Raises NoKernelError
    where no way is left. A device that is out of memory is no reason to try another way:
    OutOfDeviceMemoryError.
    """
    if device.index is None and device.type in ("cuda", "xpu"):
        device = torch.device(device.type, torch.accelerator.current_device_index())
    name = (kernel.name, signature.name, device)
    found = _functions.get(name)
    if found is not None:
        return found
    with _lock:
        if name in _failures:
            raise NoKernelError(_failures[name], forced=forced_way() not in ("", "off"))
        if name not in _functions:
            try:
                _functions[name] = _load(kernel, signature, device)
            except NoKernelError as error:
                # What a driver refuses while a graph is captured it may do afterwards.
                if not _is_capturing(device):
                    _failures[name] = str(error)
                raise
        return _functions[name]


def _is_capturing(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        and torch.cuda.is_current_stream_capturing()
    )


def driver(device: torch.device) -> Driver:
    """The driver of a device; raises NoKernelError where there is none."""
    if device.type == "cuda" and torch.version.hip:
        from . import hip

        return hip.driver(device.index)
    if device.type == "cuda":
        from . import cuda

        return cuda.driver(device.index)
    if device.type == "xpu":
        from . import sycl

        return sycl.driver(device)
    raise NoKernelError(f"expected a device of type cuda or xpu, got {device}")


def _load(kernel: Kernel, signature: Signature, device: torch.device) -> Function:
    way = forced_way()
    subject = f"{kernel.name}/{signature.name}"
    if way == "off":
        raise NoKernelError(f"{subject} on {device}: GPU kernels are off (OXYTORCH_GPU=off)")
    try:
        here = driver(device)
    except DriverError as error:
        _give_up(error, [])
        raise NoKernelError(f"{subject} on {device}: {error}", forced=bool(way)) from error
    ways: tuple[tuple[str, _Way], ...] = (
        ("aot", _from_images),
        ("jit", _from_fallback),
        ("triton", _from_source),
    )
    reasons = []
    for name, attempt in ways:
        if way and way != name:
            continue
        begin = time.perf_counter()
        try:
            try:
                found, how = attempt(here, kernel, signature)
            except OutOfDeviceMemoryError:
                here.release_memory()
                found, how = attempt(here, kernel, signature)
        except NoKernelError as error:
            reasons.append(str(error))
            continue
        milliseconds = (time.perf_counter() - begin) * 1000
        _log.info("%s on %s: %s, %.1f ms", subject, device, how, milliseconds)
        return found
    only = f", and OXYTORCH_GPU={way} leaves no other way" if way else ""
    next_step = (
        f"to build for this device: oxytorch aot build --devices {here.device}"
        if here.device in BY_NAME
        else "oxytorch builds nothing for this device (oxytorch aot list): install Triton"
    )
    raise NoKernelError(
        f"{subject} cannot run on {device} ({here.device}): {'; '.join(reasons)}{only}. "
        f"{_what_is_built()}; {next_step}",
        forced=bool(way),
    )


_Way = Callable[[Driver, Kernel, Signature], tuple[Function, str]]


def _from_images(here: Driver, kernel: Kernel, signature: Signature) -> tuple[Function, str]:
    reasons: list[str] = []
    for device in usable_images(here.device):
        for found, image in _find(device.name, kernel, signature, reasons):
            try:
                return here.load(found.read(image), image), f"image of {device.name}"
            except (ImageError, DriverError) as error:
                _give_up(error, reasons)
    raise NoKernelError("; ".join(reasons) or f"no image for {here.device}")


def _from_fallback(here: Driver, kernel: Kernel, signature: Signature) -> tuple[Function, str]:
    reasons: list[str] = []
    for found, image in _find(here.fallback, kernel, signature, reasons):
        try:
            loaded, how = here.compile(found.read(image), image)
            return loaded, f"{here.fallback} {how}"
        except (ImageError, DriverError) as error:
            _give_up(error, reasons)
    raise NoKernelError("; ".join(reasons) or "no code that the driver can compile")


def _from_source(here: Driver, kernel: Kernel, signature: Signature) -> tuple[Function, str]:
    try:
        return here.build(kernel, signature)
    except DriverError as error:
        if isinstance(error, OutOfDeviceMemoryError):
            raise
        raise NoKernelError(str(error)) from error


def _find(
    device: str, kernel: Kernel, signature: Signature, reasons: list[str]
) -> Iterator[tuple[Collection, Image]]:
    """Images of a device that are whole and current; others are reported and skipped."""
    for folder in images.folders() if device else []:
        try:
            found = images.collection(folder, device)
            image = found and found.get(kernel.name, signature.name)
            if not found or not image:
                continue
            changed = found.stale(image)
        except ImageError as error:
            _give_up(error, reasons)
            continue
        if changed:
            _give_up(ImageError(f"{found.path} is older than {changed}; {images.REBUILD}"), reasons)
        else:
            yield found, image


def _give_up(error: Exception, reasons: list[str]) -> None:
    if isinstance(error, OutOfDeviceMemoryError):
        raise error
    _log.warning("%s", error)
    reasons.append(str(error))


def _what_is_built() -> str:
    count = images.built()
    listed = ", ".join(f"{device} ({number} images)" for device, number in count.items())
    return f"built are {listed}" if listed else "nothing is built"
