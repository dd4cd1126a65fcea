"""A driver of CUDA for tests on machines without one: what libcuda answers, in Python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from oxytorch.gpu import cuda

SUCCESS, OUT_OF_MEMORY, NO_BINARY, UNSUPPORTED_PTX = 0, 2, 209, 222
ERRORS = {
    OUT_OF_MEMORY: (b"CUDA_ERROR_OUT_OF_MEMORY", b"out of memory"),
    NO_BINARY: (b"CUDA_ERROR_NO_BINARY_FOR_GPU", b"no kernel image is available"),
    UNSUPPORTED_PTX: (
        b"CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
        b"the provided PTX was compiled with an unsupported toolchain.",
    ),
    400: (b"CUDA_ERROR_INVALID_HANDLE", b"invalid resource handle"),
    500: (b"CUDA_ERROR_NOT_FOUND", b"named symbol not found"),
}
CONTEXT = 0xC0


def driver(library: FakeCuda) -> cuda.CudaDriver:
    """A driver over the library, for device 0."""
    return cuda.CudaDriver(library, 0, lambda: library.index)


class Call:
    """A function of a library: ctypes lets its `argtypes` be set."""

    def __init__(self, function: Callable[..., int]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> int:
        return self._function(*arguments)


class FakeCuda:
    """Answers as libcuda does for one device.

    load, link: what to answer to the next modules and links; success when they are used up.
    launches: programs, threads, shared memory, stream and current context of each launch.
    """

    def __init__(self, capability: tuple[int, int] = (9, 0), current: int = CONTEXT) -> None:
        self.capability = capability
        self.current = [current]
        self.index = 0
        self.other_context = 201
        self.load: list[int] = []
        self.link: list[int] = []
        self.modules: list[bytes] = []
        self.links: list[bytes] = []
        self.launches: list[dict[str, Any]] = []
        self.shared: list[int] = []
        for name in dir(self):
            if name.startswith("_cu"):
                setattr(self, name[1:], Call(getattr(self, name)))

    def _cuInit(self, flags):
        return SUCCESS

    def _cuDeviceGet(self, device, index):
        device._obj.value = index
        return SUCCESS

    def _cuDeviceGetAttribute(self, value, number, device):
        value._obj.value = self.capability[number - 75]
        return SUCCESS

    def _cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = CONTEXT
        return SUCCESS

    def _cuDriverGetVersion(self, version):
        version._obj.value = 12040
        return SUCCESS

    def _cuGetErrorName(self, status, answer):
        answer._obj.value = ERRORS[status][0]
        return SUCCESS

    def _cuGetErrorString(self, status, answer):
        answer._obj.value = ERRORS[status][1]
        return SUCCESS

    def _cuCtxPushCurrent_v2(self, context):
        self.current.append(context)
        return SUCCESS

    def _cuCtxPopCurrent_v2(self, context):
        context._obj.value = self.current.pop()
        return SUCCESS

    def _cuModuleLoadData(self, module, code):
        status = self.load.pop(0) if self.load else SUCCESS
        if status == SUCCESS:
            assert self.current[-1] == CONTEXT
            self.modules.append(code)
            module._obj.value = len(self.modules)
        return status

    def _cuModuleGetFunction(self, handle, module, name):
        handle._obj.value = 0xF0
        return SUCCESS if name == b"scale" else 500

    def _cuFuncSetAttribute(self, handle, attribute, value):
        assert attribute == 8
        self.shared.append(value)
        return SUCCESS

    def _cuLinkCreate_v2(self, count, options, values, state):
        state._obj.value = 0x11
        self._log, self._log_size = values[0], values[1]
        return SUCCESS

    def _cuLinkAddData_v2(self, state, kind, text, size, *rest):
        status = self.link.pop(0) if self.link else SUCCESS
        if status != SUCCESS:
            message = b"ptxas fatal: Unsupported .version"
            ctypes.memmove(self._log, message, len(message) + 1)
            return status
        assert text.raw[size - 1] == 0
        self.links.append(text.raw[: size - 1])
        return SUCCESS

    def _cuLinkComplete(self, state, result, size):
        self._linked = ctypes.create_string_buffer(b"cubin of the driver")
        result._obj.value = ctypes.addressof(self._linked)
        size._obj.value = 19
        return SUCCESS

    def _cuLinkDestroy(self, state):
        return SUCCESS

    def _cuLaunchKernelEx(self, config, handle, pointers, extra):
        assert extra is None
        if self.current[-1] != CONTEXT:
            return self.other_context
        given = config._obj
        self.launches.append(
            {
                "programs": given.gridDimX,
                "threads": given.blockDimX,
                "shared": given.sharedMemBytes,
                "stream": given.hStream,
                "function": handle.value,
                "context": self.current[-1],
                "pointers": list(pointers),
            }
        )
        return SUCCESS
