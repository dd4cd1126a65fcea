"""Programs of SYCL from native images, which dpctl has no function for.

The driver loads the image (Level Zero: `zeModuleCreate`, OpenCL: `clCreateProgramWithBinary`), and
SYCL's library takes the driver's handle, as it does for SPIR-V inside dpctl. What is called of the
library has C++ names; without them there is an error, and SPIR-V is the next way.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..core.c_members import members
from .errors import DriverError, OutOfDeviceMemoryError

_NATIVE_CONTEXT = "_ZNK4sycl3_V17context9getNativeEv"
_NATIVE_DEVICE = "_ZNK4sycl3_V16device9getNativeEv"
# std::shared_ptr make_kernel_bundle(handle, const context&, bool keeps, bundle_state, backend)
_MAKE_BUNDLE = (
    "_ZN4sycl3_V16detail18make_kernel_bundleEmRKNS0_7contextEbNS0_12bundle_stateENS0_7backendE"
)
_EXECUTABLE = 2
_OPENCL, _LEVEL_ZERO = 1, 2

_CL_OUT_OF_MEMORY = (-4, -5, -6)
_ZE_OUT_OF_DEVICE_MEMORY = 0x70000003
_ZE_STRUCTURE_TYPE_MODULE_DESC = 0x1B
_ZE_MODULE_FORMAT_NATIVE = 1


class _ModuleDescription(ctypes.Structure):
    """ze_module_desc_t."""

    _fields_ = (
        ("stype", ctypes.c_uint),
        ("pNext", ctypes.c_void_p),
        ("format", ctypes.c_uint),
        ("inputSize", ctypes.c_size_t),
        *members(ctypes.c_char_p, "pInputModule", "pBuildFlags"),
        ("pConstants", ctypes.c_void_p),
    )


def program(queue: Any, code: bytes) -> Any:
    """The program (`dpctl.program.SyclProgram`) of a native image, for a queue's device.

    Stays as long as the process. Raises DriverError, and OutOfDeviceMemoryError.
    """
    from dpctl.program import _program

    library = _library()
    context_address = queue.sycl_context.addressof_ref()
    context = library[_NATIVE_CONTEXT](ctypes.c_void_p(context_address))
    device = library[_NATIVE_DEVICE](ctypes.c_void_p(queue.sycl_device.addressof_ref()))
    is_level_zero = queue.backend.name == "level_zero"
    handle = (_level_zero_module if is_level_zero else _opencl_program)(context, device, code)
    # The two words of a std::shared_ptr, which is all that a bundle holds.
    bundle = (ctypes.c_uint64 * 2)()
    library[_MAKE_BUNDLE](
        *(ctypes.byref(bundle), ctypes.c_uint64(handle), ctypes.c_void_p(context_address)),
        *(ctypes.c_bool(False), ctypes.c_char(_EXECUTABLE)),
        ctypes.c_char(_LEVEL_ZERO if is_level_zero else _OPENCL),
    )
    copy = library["DPCTLKernelBundle_Copy"](ctypes.byref(bundle))
    make = _python_function(_program.__pyx_capi__["SyclProgram_Make"])
    return make(copy)


@lru_cache
def _library() -> dict[str, Any]:
    """Functions of SYCL's library and of dpctl's part in C, by name."""
    import dpctl

    loaded = ctypes.CDLL(str(Path(dpctl.__file__).parent / "libDPCTLSyclInterface.so"))
    found: dict[str, Any] = {}
    for name in (_NATIVE_CONTEXT, _NATIVE_DEVICE, _MAKE_BUNDLE, "DPCTLKernelBundle_Copy"):
        try:
            # Libraries that it depends on are searched, too.
            found[name] = getattr(loaded, name)
        except AttributeError as error:
            what = f"dpctl {dpctl.__version__} comes with a SYCL that lacks it"
            raise DriverError("dlsym", name, what) from error
        found[name].restype = ctypes.c_void_p
    return found


def _python_function(capsule: Any) -> Any:
    """A C function that makes a Python object from an address."""
    get_name = ctypes.pythonapi.PyCapsule_GetName
    get_name.restype, get_name.argtypes = ctypes.c_char_p, (ctypes.py_object,)
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    address = get(capsule, get_name(capsule))
    return ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p)(address)


def _opencl_program(context: int, device: int, code: bytes) -> int:
    library = _loaded("libOpenCL.so.1")
    create = library.clCreateProgramWithBinary
    create.restype = ctypes.c_void_p
    devices = (ctypes.c_void_p * 1)(device)
    length, binary = ctypes.c_size_t(len(code)), ctypes.c_char_p(code)
    status, error = ctypes.c_int(), ctypes.c_int()
    found = create(
        *(ctypes.c_void_p(context), 1, devices, ctypes.byref(length), ctypes.byref(binary)),
        *(ctypes.byref(status), ctypes.byref(error)),
    )
    _check_opencl(error.value or status.value, "clCreateProgramWithBinary")
    built = library.clBuildProgram(ctypes.c_void_p(found), 1, devices, b"", None, None)
    _check_opencl(built, "clBuildProgram")
    return int(found)


def _check_opencl(status: int, call: str) -> None:
    if status:
        kind = OutOfDeviceMemoryError if status in _CL_OUT_OF_MEMORY else DriverError
        raise kind(call, f"error {status}", "the image is damaged or for another device")


def _level_zero_module(context: int, device: int, code: bytes) -> int:
    library = _loaded("libze_loader.so.1")
    description = _ModuleDescription(
        _ZE_STRUCTURE_TYPE_MODULE_DESC, None, _ZE_MODULE_FORMAT_NATIVE, len(code), code, b"", None
    )
    module = ctypes.c_void_p()
    status = library.zeModuleCreate(
        *(ctypes.c_void_p(context), ctypes.c_void_p(device)),
        *(ctypes.byref(description), ctypes.byref(module), None),
    )
    if status:
        kind = OutOfDeviceMemoryError if status == _ZE_OUT_OF_DEVICE_MEMORY else DriverError
        what = "the image is damaged or for another device"
        raise kind("zeModuleCreate", f"error {status & 0xFFFFFFFF:#x}", what)
    assert module.value is not None
    return module.value


def _loaded(name: str) -> Any:
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise DriverError("dlopen", name, str(error)) from error
