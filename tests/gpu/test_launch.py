"""The way of a kernel onto a device: image, the driver's compiler, Triton, a clear error."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import sys

import pytest
import torch
from fake_cuda import CONTEXT, NO_BINARY, OUT_OF_MEMORY, UNSUPPORTED_PTX, Call, FakeCuda
from fake_cuda import driver as fake_driver
from sample_kernels import KERNEL, signatures

from oxytorch import config
from oxytorch.core import cache
from oxytorch.gpu import compilers, cuda, hip, images, launch, pack
from oxytorch.gpu.errors import DriverError, NoKernelError, OutOfDeviceMemoryError
from oxytorch.gpu.kernel import Signature

pytestmark = pytest.mark.usefixtures("fresh")
PLAIN, SHIFTED = signatures()
DEVICE = torch.device("cuda", 0)
RULES = "ops/optimizer_step/rules.py"


@pytest.fixture
def fake(monkeypatch) -> FakeCuda:
    """One GPU of capability 9.0, and a torch built for CUDA."""
    library = FakeCuda()
    driver = fake_driver(library)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(cuda, "driver", lambda index: driver)
    return library


@pytest.fixture
def no_triton(monkeypatch) -> None:
    """A machine without Triton: importing it fails, and nothing finds it."""
    find = compilers.importlib.util.find_spec
    monkeypatch.setattr(
        compilers.importlib.util,
        "find_spec",
        lambda name, *rest: None if name.split(".")[0] == "triton" else find(name, *rest),
    )
    monkeypatch.setitem(sys.modules, "triton", None)


def _use(monkeypatch, folder, way: str = "") -> None:
    monkeypatch.setattr(images, "folders", lambda: [folder])
    monkeypatch.setattr(config, "current", dataclasses.replace(config.current, gpu=way))


def _drive(monkeypatch, library: FakeCuda, folder) -> None:
    """Launches with the images of a folder go to this library."""
    driver = fake_driver(library)
    monkeypatch.setattr(cuda, "driver", lambda index: driver)
    _use(monkeypatch, folder)


def _image(folder, device: str, signature: Signature) -> bytes:
    found = images.Collection(folder, device)
    return found.read(found.get("scale", signature.name))


def test_image_of_the_device_is_taken_first(fake, samples, monkeypatch, caplog, no_triton):
    _use(monkeypatch, samples)
    with caplog.at_level(logging.INFO, "oxytorch.gpu"):
        loaded = launch.function(KERNEL, PLAIN, DEVICE)
    assert fake.modules == [_image(samples, "sm_90", PLAIN)]
    assert launch.function(KERNEL, PLAIN, DEVICE) is loaded
    assert len(fake.modules) == 1
    (record,) = caplog.records
    assert record.getMessage().startswith("scale/plain on cuda:0: image of sm_90, ")
    assert record.getMessage().endswith(" ms")


def test_image_of_an_older_chip_of_the_generation_is_taken(samples, monkeypatch, no_triton):
    library = FakeCuda((8, 9))
    _drive(monkeypatch, library, samples)
    launch.function(KERNEL, PLAIN, DEVICE)
    assert library.modules == [_image(samples, "sm_80", PLAIN)]


def test_ptx_is_compiled_once_and_kept_where_there_is_no_image(
    samples, monkeypatch, no_triton, caplog
):
    library = FakeCuda((10, 3))
    _drive(monkeypatch, library, samples)
    with caplog.at_level(logging.INFO, "oxytorch.gpu"):
        launch.function(KERNEL, PLAIN, DEVICE)
        monkeypatch.setattr(launch, "_functions", {})
        launch.function(KERNEL, PLAIN, DEVICE)
    assert library.links == [_image(samples, "compute_80", PLAIN)]
    assert library.modules == [b"cubin of the driver"] * 2
    first, second = (record.getMessage() for record in caplog.records)
    assert "compute_80 compiled by the driver" in first
    assert "compute_80 kept in the cache" in second


def test_damaged_file_of_the_cache_is_made_anew(samples, monkeypatch, no_triton):
    library = FakeCuda((10, 3))
    _drive(monkeypatch, library, samples)
    for _ in range(2):
        monkeypatch.setattr(launch, "_functions", {})
        launch.function(KERNEL, PLAIN, DEVICE)
        (kept,) = cache.folder("gpu").iterdir()
        kept.write_bytes(kept.read_bytes()[:-1])
    assert len(library.links) == 2


def test_file_of_the_cache_that_the_driver_refuses_is_made_anew(
    samples, monkeypatch, no_triton, caplog
):
    library = FakeCuda((10, 3))
    _drive(monkeypatch, library, samples)
    launch.function(KERNEL, PLAIN, DEVICE)
    monkeypatch.setattr(launch, "_functions", {})
    library.load = [NO_BINARY]
    launch.function(KERNEL, PLAIN, DEVICE)
    assert len(library.links) == 2
    assert "is compiled again" in caplog.text


def test_damaged_image_leaves_the_way_to_the_driver(fake, samples, monkeypatch, caplog, no_triton):
    path = next(samples.glob("sm_90-*.pack"))
    damaged = bytearray(path.read_bytes())
    damaged[20] ^= 1
    path.write_bytes(damaged)
    _use(monkeypatch, samples)
    launch.function(KERNEL, PLAIN, DEVICE)
    assert fake.modules == [b"cubin of the driver"]
    assert "scale/plain is damaged" in caplog.text


def test_image_that_the_driver_refuses_leaves_the_way_to_its_compiler(
    fake, samples, monkeypatch, caplog, no_triton
):
    _use(monkeypatch, samples)
    fake.load = [NO_BINARY]
    launch.function(KERNEL, PLAIN, DEVICE)
    assert fake.modules == [b"cubin of the driver"]
    assert "CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image is available" in caplog.text


def test_image_that_is_older_than_its_source_is_not_used(
    fake, samples, monkeypatch, caplog, no_triton
):
    for device in ("sm_90", "compute_80"):
        new = pack.entries(samples, device)
        pack.merge(samples, device, [pack.with_sources(one, (RULES,)) for one in new])
    monkeypatch.setattr(images, "file_digests", lambda names: dict.fromkeys(names, "changed"))
    _use(monkeypatch, samples)
    with pytest.raises(NoKernelError, match=rf"older than {RULES}; run `oxytorch aot build`"):
        launch.function(KERNEL, PLAIN, DEVICE)
    assert fake.modules == []


def test_triton_compiles_what_was_not_built(fake, tmp_path, monkeypatch, caplog):
    pytest.importorskip("triton")
    _use(monkeypatch, tmp_path / "nothing")
    with caplog.at_level(logging.INFO, "oxytorch.gpu"):
        launch.function(KERNEL, SHIFTED, DEVICE)
    assert fake.modules[0].startswith(b"\x7fELF")
    assert "scale/shifted on cuda:0: Triton " in caplog.text


def test_driver_too_old_for_the_ptx_leaves_the_way_to_triton(fake, samples, monkeypatch, caplog):
    for path in samples.glob("sm_90*"):
        path.unlink()
    _use(monkeypatch, samples)
    fake.link = [UNSUPPORTED_PTX]
    launch.function(KERNEL, PLAIN, DEVICE)
    assert fake.modules[0].startswith(b"\x7fELF")
    assert "CUDA_ERROR_UNSUPPORTED_PTX_VERSION" in caplog.text
    assert "ptxas fatal: Unsupported .version" in caplog.text


def test_no_way_left_is_an_error_that_lists_what_was_built_and_the_command(
    fake, samples, monkeypatch, no_triton
):
    _use(monkeypatch, samples)
    unbuilt = Signature("unbuilt", {"shift": 2})
    for _ in range(2):
        with pytest.raises(NoKernelError) as caught:
            launch.function(KERNEL, unbuilt, DEVICE)
        message = str(caught.value)
        assert "scale/unbuilt cannot run on cuda:0 (sm_90)" in message
        assert "sm_90 (2 images)" in message and "gfx942 (2 images)" in message
        assert "Triton is not installed" in message
        assert "oxytorch aot build --devices sm_90" in message
        assert not caught.value.forced


def test_device_that_nothing_can_be_built_for_is_told(samples, monkeypatch, no_triton):
    library = FakeCuda((7, 5))
    driver = fake_driver(library)
    library.link = [UNSUPPORTED_PTX]
    monkeypatch.setattr(cuda, "driver", lambda index: driver)
    _use(monkeypatch, samples)
    with pytest.raises(NoKernelError, match=r"\(sm_75\).*builds nothing for this device"):
        launch.function(KERNEL, PLAIN, DEVICE)


def test_failure_while_a_graph_is_captured_is_not_remembered(fake, samples, monkeypatch, no_triton):
    _use(monkeypatch, samples)
    capturing = [True]
    monkeypatch.setattr(launch, "_is_capturing", lambda device: capturing[0])
    fake.load, fake.link = [NO_BINARY], [UNSUPPORTED_PTX]
    with pytest.raises(NoKernelError):
        launch.function(KERNEL, PLAIN, DEVICE)
    capturing[0] = False
    launch.function(KERNEL, PLAIN, DEVICE)


@pytest.mark.parametrize(
    ("way", "expected"), [("aot", "image"), ("jit", "driver"), ("triton", "Triton")]
)
def test_forced_way_is_the_one_taken(way, expected, fake, samples, monkeypatch, caplog):
    _use(monkeypatch, samples, way)
    with caplog.at_level(logging.INFO, "oxytorch.gpu"):
        launch.function(KERNEL, PLAIN, DEVICE)
    assert expected in caplog.records[-1].getMessage()


@pytest.mark.parametrize("way", ["aot", "jit", "triton"])
def test_forced_way_that_fails_is_an_error(way, fake, tmp_path, monkeypatch, no_triton):
    _use(monkeypatch, tmp_path / "nothing", way)
    with pytest.raises(NoKernelError, match=f"OXYTORCH_GPU={way} leaves no other way") as caught:
        launch.function(KERNEL, PLAIN, DEVICE)
    assert caught.value.forced


def test_kernels_that_are_off_load_nothing(fake, samples, monkeypatch):
    _use(monkeypatch, samples, "off")
    with pytest.raises(NoKernelError, match="OXYTORCH_GPU=off") as caught:
        launch.function(KERNEL, PLAIN, DEVICE)
    assert not caught.value.forced
    assert fake.modules == []


def test_unknown_way_is_an_error_that_lists_the_ways(fake, monkeypatch, tmp_path):
    _use(monkeypatch, tmp_path, "cuda")
    with pytest.raises(ValueError, match="OXYTORCH_GPU: expected one of aot, jit, triton, off"):
        launch.function(KERNEL, PLAIN, DEVICE)


def test_memory_that_torch_keeps_is_given_back_before_giving_up(fake, samples, monkeypatch):
    _use(monkeypatch, samples)
    released = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: released.append(True))
    fake.load = [OUT_OF_MEMORY]
    launch.function(KERNEL, PLAIN, DEVICE)
    assert released == [True]
    assert len(fake.modules) == 1


def test_device_without_memory_is_a_clear_error_and_not_another_way(fake, samples, monkeypatch):
    _use(monkeypatch, samples)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    fake.load = [OUT_OF_MEMORY, OUT_OF_MEMORY]
    with pytest.raises(OutOfDeviceMemoryError, match="CUDA_ERROR_OUT_OF_MEMORY: out of memory"):
        launch.function(KERNEL, PLAIN, DEVICE)
    assert fake.links == []
    # The next call tries again.
    launch.function(KERNEL, PLAIN, DEVICE)


def test_driver_that_cannot_be_reached_is_told_as_no_kernel(samples, monkeypatch, no_triton):
    def absent(index):
        raise DriverError("dlopen", "libcuda.so.1", "cannot open shared object file")

    monkeypatch.setattr(cuda, "driver", absent)
    _use(monkeypatch, samples)
    with pytest.raises(NoKernelError, match=r"scale/plain on cuda:0: dlopen: libcuda.so.1"):
        launch.function(KERNEL, PLAIN, DEVICE)


def test_device_of_another_kind_is_an_error():
    with pytest.raises(NoKernelError, match="expected a device of type cuda or xpu, got cpu"):
        launch.function(KERNEL, PLAIN, torch.device("cpu"))


def _bound(fake, samples, monkeypatch, **changes):
    found = images.Collection(samples, "sm_90")
    image = found.get("scale", "plain")
    loaded = cuda.driver(0).load(found.read(image), image._replace(**changes))
    return loaded.bind(32, 64, 1000, 2.5)


def test_launch_passes_arguments_scratch_and_stream(fake, samples, monkeypatch):
    bound = _bound(fake, samples, monkeypatch)
    bound(7, 0xABC)
    bound.set(3, -1.5)
    bound.set(0, 2**40)
    bound(8, 0)
    first, second = fake.launches
    assert (first["programs"], first["stream"], first["threads"]) == (7, 0xABC, 128)
    assert (second["programs"], second["stream"]) == (8, None)
    assert first["function"] == 0xF0
    kinds = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64, ctypes.c_float)
    values = [
        kind.from_address(place).value
        for kind, place in zip(kinds, second["pointers"], strict=False)
    ]
    assert values == [2**40, 64, 1000, -1.5]
    # Two null pointers that Triton's kernels take at the end.
    assert [ctypes.c_uint64.from_address(place).value for place in second["pointers"][4:]] == [0, 0]


def test_launch_of_no_programs_does_nothing(fake, samples, monkeypatch):
    _bound(fake, samples, monkeypatch)(0, 0)
    assert fake.launches == []


@pytest.mark.parametrize("answer", [201, 400])
@pytest.mark.parametrize("index", [0, 1])
def test_launch_makes_the_context_of_its_device_current_only_as_long_as_it_lasts(
    index, answer, fake, samples, monkeypatch
):
    bound = _bound(fake, samples, monkeypatch)
    fake.current, fake.index, fake.other_context = [0xBAD], index, answer
    bound(1, 0)
    assert [one["context"] for one in fake.launches] == [CONTEXT]
    assert fake.current == [0xBAD]


def test_launch_that_fails_raises_in_the_words_of_the_driver(fake, samples, monkeypatch):
    bound = _bound(fake, samples, monkeypatch)
    bound._launch = lambda *operands: UNSUPPORTED_PTX
    with pytest.raises(DriverError, match="cuLaunchKernelEx: CUDA_ERROR_UNSUPPORTED_PTX_VERSION"):
        bound(1, 0)


def test_much_shared_memory_is_asked_for(fake, samples, monkeypatch):
    _bound(fake, samples, monkeypatch, shared=48 * 1024)
    assert fake.shared == []
    _bound(fake, samples, monkeypatch, shared=100 * 1024)
    assert fake.shared == [100 * 1024]


def test_arguments_of_the_wrong_number_or_alignment_are_errors(fake, samples, monkeypatch):
    found = images.Collection(samples, "sm_90")
    image = found.get("scale", "plain")
    function = cuda.driver(0).load(found.read(image), image)
    with pytest.raises(TypeError, match=r"scale/plain: expected 4 arguments .*, got 2"):
        function.bind(16, 32)
    with pytest.raises(ValueError, match="expected a multiple of 16 as argument 1, got 40"):
        function.bind(16, 40, 1, 1.0)
    with pytest.raises(ValueError, match="expected a multiple of 16 as argument 0, got 8"):
        function.bind(16, 32, 1, 1.0).set(0, 8)


def test_entry_that_the_image_lacks_is_an_error(fake, samples, monkeypatch):
    with pytest.raises(DriverError, match=r"cuModuleGetFunction: CUDA_ERROR_NOT_FOUND.*nothing"):
        _bound(fake, samples, monkeypatch, entry="nothing")


class FakeHip:
    """Answers as libamdhip64 does for two devices."""

    def __init__(self) -> None:
        self.device = 1
        self.modules: list[bytes] = []
        self.launches: list[tuple] = []
        self.hipGetErrorName = Call(lambda status: b"hipErrorOutOfMemory")
        self.hipGetErrorString = Call(lambda status: b"out of memory")
        self.hipGetDevice = Call(self._get)
        self.hipSetDevice = Call(self._set)
        self.hipModuleLoadData = Call(self._load)
        self.hipModuleGetFunction = Call(self._function)
        self.hipModuleLaunchKernel = Call(self._launch)

    def _get(self, device):
        device._obj.value = self.device
        return 0

    def _set(self, device):
        self.device = device
        return 0

    def _load(self, module, code):
        self.modules.append(code)
        module._obj.value = 1
        return 2 if code == b"large" else 0

    def _function(self, handle, module, name):
        handle._obj.value = 0xF1
        return 0

    def _launch(self, *operands):
        self.launches.append((self.device, *operands[1:8]))
        return 0


def test_amd_loads_an_hsaco_and_launches_on_its_device(samples, monkeypatch):
    library = FakeHip()
    driver = hip.HipDriver(library, 0, "gfx942")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(hip, "driver", lambda index: driver)
    _use(monkeypatch, samples, "aot")
    bound = launch.function(KERNEL, PLAIN, DEVICE).bind(16, 32, 5, 1.0)
    bound(3, 0)
    assert library.modules == [_image(samples, "gfx942", PLAIN)]
    assert library.launches == [(0, 3, 1, 1, 256, 1, 1, 0)]
    assert library.device == 1
    image = images.Collection(samples, "gfx942").get("scale", "plain")
    with pytest.raises(OutOfDeviceMemoryError, match="hipErrorOutOfMemory: out of memory"):
        driver.load(b"large", image)
