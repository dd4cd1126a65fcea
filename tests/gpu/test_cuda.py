"""On a GPU: kernels come by each way, run on the right stream and device, and fail in words."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from sample_kernels import BLOCK, KERNEL, SAMPLES, needs_triton, signatures

from oxytorch import config
from oxytorch.gpu import build, cuda, images, launch
from oxytorch.gpu.devices import BY_NAME, with_fallbacks
from oxytorch.gpu.errors import DriverError

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU of NVIDIA"),
    pytest.mark.skipif(bool(torch.version.hip), reason="a GPU of AMD"),
    pytest.mark.usefixtures("fresh"),
    needs_triton,
]
PLAIN, SHIFTED = signatures()


@pytest.fixture(scope="session")
def own_images(tmp_path_factory) -> Path:
    """Images for this machine's GPU, and PTX."""
    folder: Path = tmp_path_factory.mktemp("own")
    sys.path.insert(0, str(Path(__file__).parent))
    device = BY_NAME[cuda.driver(0).device]
    assert build.build(SAMPLES, with_fallbacks([device]), folder).failures == []
    return folder


@pytest.fixture
def use(monkeypatch, own_images):
    """Makes kernels come by one way."""

    def choose(way: str) -> None:
        monkeypatch.setattr(images, "folders", lambda: [own_images])
        monkeypatch.setattr(config, "current", dataclasses.replace(config.current, gpu=way))
        monkeypatch.setattr(launch, "_functions", {})

    return choose


def _device(index: int = 0) -> torch.device:
    return torch.device("cuda", index)


def _bind(signature, x, y, factor=2.0):
    function = launch.function(KERNEL, signature, x.device)
    return function.bind(x.data_ptr(), y.data_ptr(), x.numel(), factor)


def _run(signature, x, y, factor=2.0):
    programs = -(-x.numel() // BLOCK)
    _bind(signature, x, y, factor)(programs, launch.current_stream(x.device))


@pytest.mark.parametrize("way", ["", "aot", "jit", "triton"])
@pytest.mark.parametrize("signature", [PLAIN, SHIFTED], ids=lambda one: one.name)
@pytest.mark.parametrize("count", [1, 255, 257, 100_000])
def test_kernel_of_each_way_gives_the_same_numbers(way, signature, count, use):
    use(way)
    x = torch.randn(count, device=_device())
    y = torch.full((count + 8,), 7.0, device=_device())
    _run(signature, x, y)
    expected = torch.addcmul(
        torch.tensor(float(signature.options["shift"]), device=x.device), x, x.new_tensor(2.0)
    )
    assert torch.equal(y[:count], expected)
    assert torch.equal(y[count:], torch.full((8,), 7.0, device=_device()))


def test_log_tells_the_way_and_the_milliseconds(use, caplog):
    x = torch.ones(1, device=_device())
    with caplog.at_level(logging.INFO, "oxytorch.gpu"):
        for way in ("aot", "jit", "jit", "triton"):
            use(way)
            _bind(PLAIN, x, x)
    words = [record.getMessage() for record in caplog.records]
    for line, expected in zip(
        words,
        ["image of sm_", "compiled by the driver", "kept in the cache", "Triton "],
        strict=True,
    ):
        assert expected in line and line.endswith(" ms")


def test_launch_runs_on_the_current_stream(use):
    use("aot")
    x = torch.ones(1 << 20, device=_device())
    y = torch.zeros_like(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    bound = _bind(PLAIN, x, y)
    with torch.cuda.stream(side):
        assert launch.current_stream(x.device) == side.cuda_stream
        torch.cuda._sleep(100_000_000)
        x.fill_(3.0)
        bound(x.numel() // BLOCK, launch.current_stream(x.device))
    assert not side.query()
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(y, torch.full_like(y, 6.0))


def test_two_streams_do_not_disturb_each_other(use):
    use("aot")
    streams = [torch.cuda.Stream() for _ in range(2)]
    x = [torch.full((1 << 20,), float(n + 1), device=_device()) for n in range(2)]
    y = [torch.zeros_like(one) for one in x]
    torch.cuda.synchronize()
    bound = [_bind(PLAIN, x[n], y[n], float(n + 2)) for n in range(2)]
    for _ in range(50):
        for n in range(2):
            bound[n]((1 << 20) // BLOCK, streams[n].cuda_stream)
    torch.cuda.synchronize()
    for n in range(2):
        assert torch.equal(y[n], torch.full_like(y[n], (n + 1.0) * (n + 2.0)))


def test_launch_is_captured_in_a_graph(use):
    use("aot")
    x = torch.ones(1000, device=_device())
    y = torch.zeros_like(x)
    bound = _bind(PLAIN, x, y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bound(-(-1000 // BLOCK), launch.current_stream(x.device))
    assert torch.equal(y, torch.zeros_like(y))
    for value in (3.0, 4.0):
        x.fill_(value)
        graph.replay()
        assert torch.equal(y, torch.full_like(y, 2 * value))


def test_launch_does_not_synchronize(use):
    use("aot")
    x = torch.ones(1000, device=_device())
    bound = _bind(PLAIN, x, x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(100_000_000)
        bound(4, launch.current_stream(x.device))
        assert not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_thread_without_a_context_launches(use):
    use("aot")
    x = torch.ones(1000, device=_device())
    y = torch.zeros_like(x)
    bound = _bind(PLAIN, x, y)
    torch.cuda.synchronize()
    thread = threading.Thread(target=bound, args=(4, 0))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(y, torch.full_like(y, 2.0))


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="one GPU"
)
def test_each_device_has_its_own_kernel_whatever_device_is_current(use):
    use("aot")
    bound, results = [], []
    for index in range(2):
        x = torch.full((1000,), index + 1.0, device=_device(index))
        results.append(torch.zeros_like(x))
        bound.append((x, _bind(PLAIN, x, results[-1])))
    for current in range(2):
        with torch.cuda.device(current):
            for x, one in bound:
                one(4, launch.current_stream(x.device))
            assert torch.cuda.current_device() == current
    for index in range(2):
        torch.cuda.synchronize(index)
        assert torch.equal(results[index].cpu(), torch.full((1000,), 2.0 * (index + 1)))


def test_image_for_another_device_fails_in_the_words_of_the_driver(compiled_samples):
    driver = cuda.driver(0)
    other = "sm_80" if driver.device != "sm_80" else "sm_90"
    found = images.Collection(compiled_samples, other)
    image = found.get("scale", "plain")
    with pytest.raises(DriverError, match="cuModuleLoadData: CUDA_ERROR_NO_BINARY_FOR_GPU"):
        driver.load(found.read(image), image)


@pytest.mark.parametrize("code", [b"", b"\0" * 64, b"\x7fELF" + bytes(2000), b"nonsense"])
def test_nonsense_is_an_error_of_the_driver_and_leaves_the_device_usable(code, use, own_images):
    use("aot")
    driver = cuda.driver(0)
    image = images.Collection(own_images, driver.device).get("scale", "plain")
    with pytest.raises(DriverError, match="cuModuleLoadData: CUDA_ERROR_"):
        driver.load(code, image)
    x = torch.ones(10, device=_device())
    _run(PLAIN, x, x)
    assert torch.equal(x, torch.full_like(x, 2.0))


@pytest.mark.parametrize(
    ("text", "other", "error"),
    [
        (b".version 8.0", b".version 99.0", r"cuLinkAddData: CUDA_ERROR_.*version"),
        (b"ld.global", b"ld.nowhere", r"CUDA_ERROR_INVALID_PTX.*nowhere"),
    ],
    ids=["newer than the driver", "nonsense"],
)
def test_ptx_that_is_refused_fails_with_the_log_of_the_compiler(own_images, text, other, error):
    found = images.Collection(own_images, "compute_80")
    image = found.get("scale", "plain")
    broken = found.read(image).replace(text, other)
    with pytest.raises(DriverError, match=error):
        cuda.driver(0).compile(broken, image)


def test_process_without_triton_and_without_a_compiler_runs_the_image(own_images, tmp_path):
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import importlib.util as util\n"
        "find = util.find_spec\n"
        "hide = lambda name, *rest: None if name.startswith('triton') else find(name, *rest)\n"
        "util.find_spec = hide\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import logging; logging.basicConfig(level=logging.INFO)\n"
        "from pathlib import Path; import torch\n"
        "from oxytorch.gpu import images, launch\n"
        f"images.folders = lambda: [Path({str(own_images)!r})]\n"
        "from sample_kernels import KERNEL, signatures\n"
        "x = torch.ones(300, device='cuda:0')\n"
        "function = launch.function(KERNEL, signatures()[1], x.device)\n"
        "function.bind(x.data_ptr(), x.data_ptr(), 300, 2.0)(2, launch.current_stream(x.device))\n"
        "assert torch.equal(x, torch.full_like(x, 3.0)), x\n"
        "assert not [name for name in sys.modules if name.startswith('triton.')]\n"
    )
    environment = {**os.environ, "PATH": str(tmp_path), "CC": "", "CXX": "", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "image of sm_" in done.stderr
