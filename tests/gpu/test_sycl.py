"""Kernels on SYCL's CPU device, by every way that Intel GPUs have."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from oxytorch.gpu import build, devices, images, launch, ocloc, sycl, sycl_native
from oxytorch.gpu.errors import DriverError, NoKernelError
from oxytorch.gpu.kernel import Kernel, OpenClSource, Signature

FILL = """
__attribute__((reqd_work_group_size(64, 1, 1)))
kernel void fill(ulong target, int count, float value) {
  const int i = (int)get_global_id(0);
  if (i < count) ((global float*)target)[i] += sqrt(value) / 3.0f;
}
"""
SOURCE = OpenClSource(
    FILL, "fill", {"target": "i64", "count": "i32", "value": "fp32"}, 64, ("-cl-std=CL1.2",)
)
SIGNATURE = Signature("only", {})
KERNEL = Kernel("fill", lambda: (SIGNATURE,), lambda s: pytest.fail("Triton"), lambda s: SOURCE)

KERNELS = (KERNEL,)


def _image(code: bytes) -> images.Image:
    return images.Image(
        *("fill", "only", "fill", 64, 0, ("i64", "i32", "fp32"), (), 0),
        *(0, 0, len(code), "", "", "", ""),
    )


def _fills(driver: Any, function: Any, stream: int = 0) -> bool:
    """Whether a function does what FILL says."""
    target = torch.zeros(1000)
    ready = function.bind(target.data_ptr(), 999, 9.0)
    ready(16, stream)
    driver.wait()
    ready.set(2, 36.0)
    ready(16, stream)
    ready(0, stream)
    driver.wait()
    return bool((target[:999] == 3.0).all()) and target[999] == 0.0


def _native_code(driver: Any) -> bytes:
    """The device's own code, as its driver of OpenCL gives it."""
    library, called = ctypes.CDLL("libOpenCL.so.1"), sycl_native._library()
    queue = driver.own
    context = called[sycl_native._NATIVE_CONTEXT](
        ctypes.c_void_p(queue.sycl_context.addressof_ref())
    )
    device = called[sycl_native._NATIVE_DEVICE](ctypes.c_void_p(queue.sycl_device.addressof_ref()))
    text, devices_ = ctypes.c_char_p(FILL.encode()), (ctypes.c_void_p * 1)(device)
    library.clCreateProgramWithSource.restype = ctypes.c_void_p
    program = ctypes.c_void_p(
        library.clCreateProgramWithSource(
            *(ctypes.c_void_p(context), 1, ctypes.byref(text), None, None)
        )
    )
    assert library.clBuildProgram(program, 1, devices_, b"", None, None) == 0
    size = ctypes.c_size_t()
    sizes, binaries = 0x1165, 0x1166
    assert library.clGetProgramInfo(program, sizes, 8, ctypes.byref(size), None) == 0
    code = ctypes.create_string_buffer(size.value)
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(code))
    assert library.clGetProgramInfo(program, binaries, 8, pointers, None) == 0
    return code.raw


def test_source_runs(sycl_driver: Any) -> None:
    function, how = sycl_driver.build(KERNEL, SIGNATURE)
    assert _fills(sycl_driver, function)
    assert how == "OpenCL C, compiled by the driver"


def test_native_image_runs(sycl_driver: Any) -> None:
    code = _native_code(sycl_driver)
    assert _fills(sycl_driver, sycl_driver.load(code, _image(code)))


@pytest.mark.usefixtures("ocloc_on_path")
def test_spirv_runs(sycl_driver: Any) -> None:
    code = ocloc.compile_opencl(SOURCE, ocloc.SPIRV)
    function, how = sycl_driver.compile(code, _image(code))
    assert _fills(sycl_driver, function)
    assert how == "compiled by the driver"


@pytest.mark.usefixtures("ocloc_on_path")
def test_shipped_images_lead_to_a_function(
    sycl_driver: Any, fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The CPU is no device of the list: SPIR-V, which is built beside them, is what it takes."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    result = build.build("test_sycl:KERNELS", devices.parse("pvc,ats-m150"), tmp_path)
    assert result.failures == []
    assert {path.stem for path in tmp_path.glob("*.json")} == {"spirv", "pvc", "ats-m150"}
    monkeypatch.setattr(launch, "driver", lambda device: sycl_driver)
    monkeypatch.setattr(images, "folders", lambda: [tmp_path])
    monkeypatch.setattr(sycl_driver, "build", lambda *_: pytest.fail("compiled from source"))
    assert _fills(sycl_driver, launch.function(KERNEL, SIGNATURE, torch.device("xpu", 0)))


def test_launches_go_to_the_queue_at_an_address(sycl_driver: Any) -> None:
    import dpctl

    other = dpctl.SyclQueue(
        sycl_driver.own.sycl_context, sycl_driver.own.sycl_device, property="in_order"
    )
    target = torch.zeros(64)
    ready = sycl_driver.from_source(SOURCE).bind(target.data_ptr(), 64, 9.0)
    for _ in range(3):
        ready(1, other.addressof_ref())
    assert sycl_driver.queue(other.addressof_ref()) == other
    other.wait()
    assert (target == 3.0).all()


def test_shared_memory_of_sycl_is_reached_through_its_address(sycl_driver: Any) -> None:
    from dpctl.memory import MemoryUSMShared

    memory = MemoryUSMShared(4 * 64, queue=sycl_driver.own)
    target = torch.frombuffer(memory, dtype=torch.float32).zero_()
    sycl_driver.from_source(SOURCE).bind(memory._pointer, 64, 9.0)(1, 0)
    sycl_driver.wait()
    assert (target == 1.0).all()


def test_damaged_code_is_an_error(sycl_driver: Any, ocloc_folder: str) -> None:
    code = _native_code(sycl_driver)
    for damaged in (b"", code[:100], code[: len(code) // 2], b"x" * 1000):
        with pytest.raises(DriverError, match="clCreateProgramWithBinary"):
            sycl_driver.load(damaged, _image(damaged))
    good = (0x07230203).to_bytes(4, "little") + bytes(16)
    for damaged in (b"", good[:8], good + b"abc", good + (9 << 16).to_bytes(4, "little")):
        with pytest.raises(DriverError, match="damaged"):
            sycl_driver.compile(damaged, _image(damaged))


def test_another_kernel_than_was_asked_for_is_an_error(sycl_driver: Any) -> None:
    code = _native_code(sycl_driver)
    program = sycl_native.program(sycl_driver.own, code)
    with pytest.raises(DriverError, match="drain is not in the image"):
        sycl_driver._function(program, "drain", ("i64",), 64)
    with pytest.raises(DriverError, match="fill has 3 arguments, expected 1"):
        sycl_driver._function(program, "fill", ("i64",), 64)
    function = sycl_driver._function(program, "fill", ("i64", "i32", "fp32"), 64)
    with pytest.raises(TypeError, match=r"fill: expected 3 arguments \(i64, i32, fp32\), got 1"):
        function.bind(0)


def test_source_that_does_not_compile_is_an_error(sycl_driver: Any) -> None:
    wrong = OpenClSource("kernel void fill() { nonsense; }", "fill", {}, 64)
    with pytest.raises(DriverError, match="does not compile the OpenCL C of fill"):
        sycl_driver.from_source(wrong)


def test_chips_are_devices_of_the_list_and_have_numbers_of_their_own() -> None:
    numbers = [number for own in sycl._CHIPS.values() for number in own]
    assert len(numbers) == len({*numbers})
    assert {devices.BY_NAME[name].vendor for name in sycl._CHIPS} == {"intel"}


def test_queues_of_another_sycl_library_are_refused(
    sycl_driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(sycl._libraries()) == 1
    stream = types.SimpleNamespace(sycl_queue=sycl_driver.own.addressof_ref())
    monkeypatch.setattr(torch.xpu, "current_stream", lambda device: stream)
    xpu = torch.device("xpu", 0)
    assert sycl.driver.__wrapped__(xpu).own == sycl_driver.own
    monkeypatch.setattr(sycl, "_libraries", lambda: ["libsycl.so.8", "libsycl.so.9"])
    with pytest.raises(NoKernelError, match=r"\(libsycl.so.8, libsycl.so.9\)"):
        sycl.driver.__wrapped__(xpu)


def test_absent_dpctl_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "dpctl" else find(name)
    )
    with pytest.raises(NoKernelError, match=r"pip install 'oxytorch\[intel\]'"):
        sycl.driver.__wrapped__(torch.device("cpu"))


@pytest.mark.skipif(importlib.util.find_spec("dpctl") is None, reason="dpctl is not installed")
def test_absent_cpu_device_names_what_to_install() -> None:
    code = (
        "import torch; from oxytorch.gpu import sycl\n"
        "try: sycl.driver(torch.device('cpu'))\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    environment = {**os.environ, "OCL_ICD_FILENAMES": "/nowhere.so"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100
    )
    assert "NoKernelError SYCL has no CPU device: install intel-opencl-rt" in done.stdout
