"""NVIDIA's driver, through ctypes: loads code and launches it.

Only libcuda is called, which torch has loaded already; so one wheel serves every CUDA version of
torch. Names and numbers are those of NVIDIA's CUDA Driver API reference.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch

from ..core import cache
from ..core.c_members import members
from .arguments import Arguments
from .errors import DriverError, OutOfDeviceMemoryError
from .images import Image
from .kernel import Function
from .torch_driver import LoadedFunction, TorchDriver

_CUDA_ERROR_OUT_OF_MEMORY = 2
# What a launch answers in a thread whose current context is another one, or that has none yet.
_OTHER_CONTEXT = 201
_OTHER_CONTEXTS = (201, 400)
_CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_CU_JIT_INPUT_PTX = 1
_CU_JIT_ERROR_LOG_BUFFER = 5
_CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES = 6
# More has to be asked for.
_SHARED_WITHOUT_ASKING = 48 * 1024
_LOG_BYTES = 8192


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig: passed by one pointer, so that a launch converts four arguments, not 11."""

    _fields_ = (
        *members(ctypes.c_uint, "gridDimX", "gridDimY", "gridDimZ"),
        *members(ctypes.c_uint, "blockDimX", "blockDimY", "blockDimZ", "sharedMemBytes"),
        *members(ctypes.c_void_p, "hStream", "attrs"),
        ("numAttrs", ctypes.c_uint),
    )


class CudaLaunch:
    """A kernel with arguments, for one thread at a time.

    A launch allocates nothing and waits for nothing: it can be captured in a graph.
    """

    def __init__(self, driver: CudaDriver, handle: int, image: Image, values: Sequence[float]):
        self._arguments = Arguments(image, values)
        self.set = self._arguments.set
        self._driver = driver
        self._config = _LaunchConfig(1, 1, 1, image.threads, 1, 1, image.shared, None, None, 0)
        self._operands = (
            ctypes.byref(self._config),
            ctypes.c_void_p(handle),
            self._arguments.pointers,
            None,
        )
        self._launch = driver.library.cuLaunchKernelEx
        self._current_index = driver.current_index
        self._index = driver.index

    def __call__(self, programs: int, stream: int) -> None:
        """Starts `programs` programs; none is allowed."""
        if programs == 0:
            return
        self._config.gridDimX = programs
        self._config.hStream = stream
        if self._current_index() == self._index:
            status = self._launch(*self._operands)
        else:
            status = _OTHER_CONTEXT
        if status in _OTHER_CONTEXTS:
            with self._driver.active():
                status = self._launch(*self._operands)
        if status:
            self._driver.check(status, "cuLaunchKernelEx")


class CudaDriver(TorchDriver):
    """The driver for one device, in the context that torch uses there."""

    fallback = "compute_80"

    def __init__(
        self, library: Any, index: int, current_index: Callable[[], int] | None = None
    ) -> None:
        self.library, self.index = library, index
        self.current_index = current_index or _current_index
        _declare(library)
        self.check(library.cuInit(0), "cuInit")
        device = ctypes.c_int()
        self.check(library.cuDeviceGet(ctypes.byref(device), index), "cuDeviceGet")
        self.device = f"sm_{self._attribute(75, device)}{self._attribute(76, device)}"
        context = ctypes.c_void_p()
        # Kept as long as the process: torch keeps it, too.
        status = library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        self.check(status, "cuDevicePrimaryCtxRetain")
        self.context = context.value
        version = ctypes.c_int()
        self.check(library.cuDriverGetVersion(ctypes.byref(version)), "cuDriverGetVersion")
        self.version = version.value

    def _attribute(self, number: int, device: ctypes.c_int) -> int:
        value = ctypes.c_int()
        status = self.library.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        self.check(status, "cuDeviceGetAttribute")
        return value.value

    def check(self, status: int, call: str, detail: str = "") -> None:
        """Raises DriverError, in the driver's words, unless `status` is success."""
        if status == 0:
            return
        words = []
        for text in (self.library.cuGetErrorName, self.library.cuGetErrorString):
            answer = ctypes.c_char_p()
            text(status, ctypes.byref(answer))
            words.append(answer.value.decode() if answer.value else f"error {status}")
        kind = OutOfDeviceMemoryError if status == _CUDA_ERROR_OUT_OF_MEMORY else DriverError
        raise kind(call, words[0], words[1], detail)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Makes the device's context the current one of this thread."""
        self.check(self.library.cuCtxPushCurrent_v2(self.context), "cuCtxPushCurrent")
        try:
            yield
        finally:
            popped = ctypes.c_void_p()
            status = self.library.cuCtxPopCurrent_v2(ctypes.byref(popped))
            self.check(status, "cuCtxPopCurrent")

    def load(self, code: bytes, image: Image) -> Function:
        """Loads a cubin."""
        library, module, handle = self.library, ctypes.c_void_p(), ctypes.c_void_p()
        with self.active():
            status = library.cuModuleLoadData(ctypes.byref(module), code)
            self.check(status, "cuModuleLoadData", f"{image.kernel}/{image.signature}")
            name = image.entry.encode()
            status = library.cuModuleGetFunction(ctypes.byref(handle), module, name)
            self.check(status, "cuModuleGetFunction", image.entry)
            if image.shared > _SHARED_WITHOUT_ASKING:
                attribute = _CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                status = library.cuFuncSetAttribute(handle, attribute, image.shared)
                self.check(status, "cuFuncSetAttribute", f"{image.shared} bytes of shared memory")
        assert handle.value is not None
        return LoadedFunction(functools.partial(CudaLaunch, self, handle.value, image))

    def compile(self, code: bytes, image: Image) -> tuple[Function, str]:
        """Compiles PTX and loads it, from the user's cache where it was compiled before."""
        digest = hashlib.sha256(code).hexdigest()[:32]
        key = f"{image.kernel}-{digest}-{self.device}-{self.version}.cubin"
        kept = cache.read("gpu", key)
        if kept is not None:
            try:
                return self.load(kept, image), "kept in the cache"
            except OutOfDeviceMemoryError:
                raise
            except DriverError as error:
                cache.log.warning("%s of the cache is compiled again: %s", key, error)
        compiled = self._link(code, image)
        cache.write("gpu", key, compiled)
        return self.load(compiled, image), "compiled by the driver"

    def _link(self, code: bytes, image: Image) -> bytes:
        """The cubin that the driver makes of PTX."""
        library, state = self.library, ctypes.c_void_p()
        log = ctypes.create_string_buffer(_LOG_BYTES)
        options = (ctypes.c_int * 2)(_CU_JIT_ERROR_LOG_BUFFER, _CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), _LOG_BYTES)
        text, size = ctypes.create_string_buffer(code), ctypes.c_size_t()
        result = ctypes.c_void_p()
        with self.active():
            status = library.cuLinkCreate_v2(2, options, values, ctypes.byref(state))
            self.check(status, "cuLinkCreate")
            try:
                status = library.cuLinkAddData_v2(
                    state, _CU_JIT_INPUT_PTX, text, len(text), image.entry.encode(), 0, None, None
                )
                self.check(status, "cuLinkAddData", log.value.decode(errors="replace").strip())
                status = library.cuLinkComplete(state, ctypes.byref(result), ctypes.byref(size))
                self.check(status, "cuLinkComplete", log.value.decode(errors="replace").strip())
                assert result.value is not None
                return ctypes.string_at(result.value, size.value)
            finally:
                self.check(library.cuLinkDestroy(state), "cuLinkDestroy")


def _declare(library: Any) -> None:
    """Types of the arguments that ctypes would pass as an int of 32 bits."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.cuModuleLoadData.argtypes = (pointer, ctypes.c_char_p)
    library.cuModuleGetFunction.argtypes = (pointer, pointer, ctypes.c_char_p)
    library.cuFuncSetAttribute.argtypes = (pointer, ctypes.c_int, ctypes.c_int)
    library.cuDevicePrimaryCtxRetain.argtypes = (pointer, ctypes.c_int)
    library.cuCtxPushCurrent_v2.argtypes = (pointer,)
    library.cuLinkCreate_v2.argtypes = (ctypes.c_uint, pointer, pointer, pointer)
    library.cuLinkAddData_v2.argtypes = (
        *(pointer, ctypes.c_int, pointer, size),
        *(ctypes.c_char_p, ctypes.c_uint, pointer, pointer),
    )
    library.cuLinkComplete.argtypes = (pointer, pointer, pointer)
    library.cuLinkDestroy.argtypes = (pointer,)


# torch.cuda.current_device also asks whether CUDA is initialized, at three times the cost.
_current_index = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


@lru_cache
def _library() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError("dlopen", "libcuda.so.1", str(error)) from error


@lru_cache
def driver(index: int) -> CudaDriver:
    """The driver for torch's device of this index."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return CudaDriver(_library(), index)
