"""AMD's driver, through ctypes: loads code and launches it.

Names are those of the HIP Runtime API reference. It is tested against a driver that a test made,
not on a GPU of AMD: none was at hand.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from .arguments import Arguments
from .errors import DriverError, NoKernelError, OutOfDeviceMemoryError
from .images import Image
from .kernel import Function
from .torch_driver import LoadedFunction, TorchDriver

_HIP_ERROR_OUT_OF_MEMORY = 2


class HipLaunch:
    """A kernel with arguments; a launch allocates nothing and waits for nothing."""

    def __init__(self, driver: HipDriver, handle: int, image: Image, values: Sequence[float]):
        self._arguments = Arguments(image, values)
        self.set = self._arguments.set
        self._driver, self._image = driver, image
        self._handle = ctypes.c_void_p(handle)

    def __call__(self, programs: int, stream: int) -> None:
        """Starts `programs` programs; none is allowed."""
        if programs == 0:
            return
        image = self._image
        with self._driver.active():
            status = self._driver.library.hipModuleLaunchKernel(
                *(self._handle, programs, 1, 1, image.threads, 1, 1, image.shared),
                *(ctypes.c_void_p(stream), self._arguments.pointers, None),
            )
        self._driver.check(status, "hipModuleLaunchKernel")


class HipDriver(TorchDriver):
    """The driver for one device. AMD has no code for all its devices: images, else Triton."""

    fallback = ""

    def __init__(self, library: Any, index: int, device: str) -> None:
        self.library, self.index, self.device = library, index, device
        pointer = ctypes.c_void_p
        library.hipModuleLoadData.argtypes = (pointer, ctypes.c_char_p)
        library.hipModuleGetFunction.argtypes = (pointer, pointer, ctypes.c_char_p)
        for text in (library.hipGetErrorName, library.hipGetErrorString):
            text.restype = ctypes.c_char_p

    def check(self, status: int, call: str, detail: str = "") -> None:
        """Raises DriverError, in the driver's words, unless `status` is success."""
        if status == 0:
            return
        name = self.library.hipGetErrorName(status) or b"unknown"
        meaning = self.library.hipGetErrorString(status) or b"unknown"
        kind = OutOfDeviceMemoryError if status == _HIP_ERROR_OUT_OF_MEMORY else DriverError
        raise kind(call, name.decode(), meaning.decode(), detail)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Makes the device the current one of this thread."""
        before = ctypes.c_int()
        self.check(self.library.hipGetDevice(ctypes.byref(before)), "hipGetDevice")
        if before.value == self.index:
            yield
            return
        self.check(self.library.hipSetDevice(self.index), "hipSetDevice")
        try:
            yield
        finally:
            self.check(self.library.hipSetDevice(before.value), "hipSetDevice")

    def load(self, code: bytes, image: Image) -> Function:
        """Loads an hsaco."""
        module, handle = ctypes.c_void_p(), ctypes.c_void_p()
        with self.active():
            status = self.library.hipModuleLoadData(ctypes.byref(module), code)
            self.check(status, "hipModuleLoadData", f"{image.kernel}/{image.signature}")
            name = image.entry.encode()
            status = self.library.hipModuleGetFunction(ctypes.byref(handle), module, name)
            self.check(status, "hipModuleGetFunction", image.entry)
        assert handle.value is not None
        return LoadedFunction(functools.partial(HipLaunch, self, handle.value, image))

    def compile(self, code: bytes, image: Image) -> tuple[Function, str]:
        """Never asked for: there is no fallback to compile."""
        raise NoKernelError(f"{self.device}: no code that AMD's driver can compile")


@lru_cache
def _library() -> Any:
    """The library that torch has loaded: another copy of it would not know torch's context."""
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else []:
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith("libamdhip64.so"):
            return ctypes.CDLL(path)
    raise DriverError("dlopen", "libamdhip64.so", "torch has not loaded it")


@lru_cache
def driver(index: int) -> HipDriver:
    """The driver for torch's device of this index."""
    name = torch.cuda.get_device_properties(index).gcnArchName.split(":")[0]
    return HipDriver(_library(), index, name)
