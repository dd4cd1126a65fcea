"""Intel GPUs through SYCL: `dpctl` gives devices, queues and kernels.

A kernel is made from a native image, from SPIR-V, which the device's driver compiles, or from
OpenCL C, which only SYCL's OpenCL devices take. On torch's xpu devices kernels run on torch's own
current queue; that, and native images on Level Zero, were not tested on an Intel GPU: none was at
hand. SYCL's CPU device runs the same code on CPU tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from .arguments import ARGUMENT_TYPES
from .errors import DriverError, NoKernelError
from .images import Image
from .kernel import Function, Kernel, OpenClSource, Signature

INSTALL = "pip install 'oxytorch[intel]'"

# PCI numbers, as in Linux's include/drm/intel/pciids.h.
_CHIPS = {
    "pvc": (0x0B69, 0x0B6E, *range(0x0BD4, 0x0BDC), 0x0BE0, 0x0BE1, 0x0BE5),
    "ats-m150": (
        *(0x5690, 0x5691, 0x5692, 0x56A0, 0x56A1, 0x56A2),
        *(0x56BE, 0x56BF, 0x56C0, 0x56C2),
    ),
    "dg2-g11": (
        *(0x5693, 0x5694, 0x5695, 0x56A5, 0x56A6, 0x56B0, 0x56B1),
        *(0x56BA, 0x56BB, 0x56BC, 0x56BD, 0x56C1),
    ),
    "dg2-g12": (0x5696, 0x5697, 0x56A3, 0x56A4, 0x56B2, 0x56B3),
    "mtl": (0x7D40, 0x7D45),
    "mtl-h": (0x7D55, 0x7DD5),
    "arl-h": (0x7D51, 0x7DD1),
    "lnl": (0x6420, 0x64A0, 0x64B0),
    "bmg": (0xE202, 0xE209, 0xE20B, 0xE20C, 0xE20D),
}
_ROUNDING = "fp32-correctly-rounded-divide-sqrt"


class SyclLaunch:
    """A kernel with arguments. A launch waits for nothing."""

    def __init__(self, function: SyclFunction, values: Sequence[float]) -> None:
        expected = function.arguments
        if len(values) != len(expected):
            raise TypeError(
                f"{function.name}: expected {len(expected)} arguments ({', '.join(expected)}), "
                f"got {len(values)}"
            )
        self._values = [
            ctypes.c_uint64() if kind.startswith("*") else ARGUMENT_TYPES[kind]()
            for kind in expected
        ]
        self._function = function
        for position, value in enumerate(values):
            self.set(position, value)

    def set(self, position: int, value: float) -> None:
        """Replaces an argument."""
        self._values[position].value = value

    def __call__(self, programs: int, stream: int) -> None:
        """Starts `programs` programs on the queue at the address `stream`; none is allowed.

        0 is the driver's own queue.
        """
        if programs == 0:
            return
        group = self._function.group
        queue = self._function.driver.queue(stream)
        queue.submit_async(self._function.kernel, self._values, [programs * group], [group])


class SyclFunction:
    """A kernel on one device.

    arguments: their types.
    group: work items of a program.
    """

    def __init__(
        self, driver: SyclDriver, kernel: Any, name: str, arguments: Sequence[str], group: int
    ) -> None:
        self.driver, self.kernel, self.name = driver, kernel, name
        self.arguments, self.group = tuple(arguments), group

    def bind(self, *arguments: float) -> SyclLaunch:
        """Arguments in the source's order; addresses as integers."""
        return SyclLaunch(self, arguments)


class SyclDriver:
    """SYCL for one device. own: the queue of launches that name no other, in order."""

    fallback = "spirv"

    def __init__(self, own: Any) -> None:
        self.own = own
        self.device = _chip(own.sycl_device)
        self.is_level_zero = own.backend.name == "level_zero"
        self._queues: dict[int, Any] = {0: own}

    def queue(self, address: int) -> Any:
        """The queue at an address, which is a `sycl::queue` that lives as long as the process."""
        found = self._queues.get(address)
        if found is None:
            found = self._queues[address] = _queue_at(address)
        return found

    def wait(self) -> None:
        """Waits for all launches on the driver's own queue."""
        self.own.wait()

    def load(self, code: bytes, image: Image) -> Function:
        """Loads a native image."""
        from . import sycl_native

        program = sycl_native.program(self.own, code)
        return self._function(program, image.entry, image.arguments, image.threads)

    def compile(self, code: bytes, image: Image) -> tuple[Function, str]:
        """Has the driver compile SPIR-V; Intel's drivers keep what they compile in a cache."""
        program = self._from_spirv(code)
        function = self._function(program, image.entry, image.arguments, image.threads)
        return function, "compiled by the driver"

    def build(self, kernel: Kernel, signature: Signature) -> tuple[Function, str]:
        """Compiles from source: the driver of an OpenCL device does, ocloc for others."""
        from . import ocloc

        source = kernel.opencl(signature)
        if not self.is_level_zero:
            return self.from_source(source), "OpenCL C, compiled by the driver"
        try:
            program = self._from_spirv(ocloc.compile_opencl(source, ocloc.SPIRV))
        except ocloc.OclocError as error:
            raise NoKernelError(str(error)) from error
        how = f"SPIR-V of ocloc {ocloc.version()}, compiled by the driver"
        return self._from(program, source), how

    def from_source(self, source: OpenClSource) -> Function:
        """Has the driver of an OpenCL device compile OpenCL C."""
        from dpctl import program

        options = " ".join(source.options)
        try:
            made = program.create_program_from_source(self.own, source.text, options)
        except program.SyclProgramCompilationError as error:
            what = f"it does not compile the OpenCL C of {source.function}"
            raise DriverError("create_program_from_source", type(error).__name__, what) from error
        return self._from(made, source)

    def release_memory(self) -> None:
        """Gives memory back that torch keeps but does not use."""
        if torch.xpu.is_available():
            # An allocator of others (`oxytorch.memory.use`) keeps its memory: torch cannot ask it.
            with contextlib.suppress(RuntimeError):
                torch.xpu.empty_cache()

    def _from_spirv(self, code: bytes) -> Any:
        from dpctl import program

        _check_spirv(code)
        options = f"-{'ze' if self.is_level_zero else 'cl'}-{_ROUNDING}"
        try:
            return program.create_program_from_spirv(self.own, code, options)
        except program.SyclProgramCompilationError as error:
            what = f"it does not compile {len(code)} bytes of SPIR-V"
            raise DriverError("create_program_from_spirv", type(error).__name__, what) from error

    def _from(self, program: Any, source: OpenClSource) -> Function:
        return self._function(program, source.function, [*source.arguments.values()], source.group)

    def _function(self, program: Any, entry: str, arguments: Sequence[str], group: int) -> Function:
        if not program.has_sycl_kernel(entry):
            raise DriverError("get_sycl_kernel", "no such kernel", f"{entry} is not in the image")
        kernel = program.get_sycl_kernel(entry)
        if kernel.num_args != len(arguments):
            what = f"{entry} has {kernel.num_args} arguments, expected {len(arguments)}"
            raise DriverError("get_sycl_kernel", "wrong kernel", what)
        return SyclFunction(self, kernel, entry, arguments, group)


def _check_spirv(code: bytes) -> None:
    """Walks the instructions: a compiler may end the process where one is cut off.

    The format is that of the SPIR-V specification, section 2.3.
    """
    words = memoryview(code[: len(code) // 4 * 4]).cast("I")
    place = 5
    if len(code) % 4 or len(words) < place or words[0] != 0x07230203:
        raise DriverError("check", "damaged", f"{len(code)} bytes are not SPIR-V")
    while place < len(words) and words[place] >> 16:
        place += words[place] >> 16
    if place != len(words):
        raise DriverError("check", "damaged", f"{len(code)} bytes of SPIR-V are cut off")


def _chip(device: Any) -> str:
    """The device's name in `devices.DEVICES`, or what SYCL calls it."""
    from dpctl.utils import intel_device_info

    number = intel_device_info(device).get("device_id") if device.is_gpu else None
    names = [name for name, numbers in _CHIPS.items() if number in numbers]
    return names[0] if names else str(device.name)


def _libraries() -> list[str]:
    """The SYCL libraries in this process: a queue of one must not be given to another."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return sorted({*re.findall(r"\S*/libsycl\.so\S*", maps)})


_CAPSULE_NAME = b"SyclQueueRef"


def _queue_at(address: int) -> Any:
    """A queue of dpctl that shares the `sycl::queue` at an address."""
    import dpctl

    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = (
        ctypes.py_object,
        (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
    )
    return dpctl.SyclQueue(make(address, _CAPSULE_NAME, None))


@lru_cache
def driver(device: torch.device) -> SyclDriver:
    """The driver of a device of torch: an xpu, or the CPU as SYCL's OpenCL device.

    Raises NoKernelError where dpctl or the device is absent.
    """
    if importlib.util.find_spec("dpctl") is None:
        raise NoKernelError(f"dpctl, which reaches Intel GPUs, is not installed; {INSTALL}")
    import dpctl

    if device.type == "xpu":
        address = int(torch.xpu.current_stream(device).sycl_queue)
        several = _libraries()
        if len(several) > 1:
            raise NoKernelError(
                f"torch and dpctl brought different SYCL libraries ({', '.join(several)}); install "
                "the release of dpctl whose intel-sycl-rt is the one that torch asks for"
            )
        return SyclDriver(_queue_at(address))
    if device.type != "cpu":
        raise NoKernelError(f"expected a device of type xpu or cpu, got {device}")
    try:
        return SyclDriver(dpctl.SyclQueue("opencl:cpu", property="in_order"))
    except dpctl.SyclQueueCreationError as error:
        raise NoKernelError(
            "SYCL has no CPU device: install intel-opencl-rt, and where it is not found set "
            "OCL_ICD_FILENAMES to its libintelocl.so (docs/intel.md)"
        ) from error
