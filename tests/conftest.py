"""Settings and tools that every test shares."""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import module_of

# Torch refuses operators whose results are views that no schema tells of, as it does under CI.
os.environ["TORCHINDUCTOR_ERROR_ON_CUSTOM_OP_ALIASING"] = "1"


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _interrupts_arrive() -> None:
    """A shell has what it starts in the background ignore Ctrl-C, which some tests send."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _no_cache_of_the_users(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What the user's machine has learnt decides no test, and tests leave nothing with the user."""
    from oxytorch import config

    folder = str(tmp_path_factory.mktemp("cache"))
    config.current = dataclasses.replace(config.current, cache_home=folder)


@pytest.fixture
def mistake(capfd: pytest.CaptureFixture[str]) -> Callable[[Sequence[str]], str]:
    """Runs `oxytorch` with words that argparse refuses: what it says, in one line."""
    from oxytorch.__main__ import main

    def told(words: Sequence[str]) -> str:
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == 2
        return " ".join(capfd.readouterr().err.split())

    return told


@pytest.fixture
def gone_reader() -> Callable[[Sequence[str]], int]:
    """Runs `oxytorch` with an output that nobody reads any more: its exit status."""
    from oxytorch.__main__ import main

    def status(words: Sequence[str]) -> int:
        reading, writing = os.pipe()
        os.close(reading)
        with os.fdopen(writing, "w") as output, redirect_stdout(output):
            return main(words)  # closing flushes, as Python does at its end: nothing may be left

    return status


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, for the test alone."""
    from oxytorch import config

    folder = tmp_path / "cache"
    settings = dataclasses.replace(config.current, cache_home=str(folder))
    monkeypatch.setattr(config, "current", settings)
    return folder


@pytest.fixture
def pack_small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of a test are small; their layers are packed all the same, whatever was timed."""
    from oxytorch.optimize.passes import pack
    from oxytorch.rewriting import measure

    monkeypatch.setattr(pack, "SMALLEST_LINEAR", 0)
    monkeypatch.setattr(measure, "TIMED", False)


@pytest.fixture(scope="session")
def sycl_driver() -> Any:
    """SYCL's CPU device, from the packages dpctl and intel-opencl-rt."""
    from oxytorch.gpu import sycl
    from oxytorch.gpu.errors import NoKernelError

    # The file that tells the loader of OpenCL names another folder when pip has installed it.
    library = Path(sys.prefix) / "lib" / "libintelocl.so"
    if library.exists():
        os.environ.setdefault("OCL_ICD_FILENAMES", str(library))
    try:
        return sycl.driver(torch.device("cpu"))
    except NoKernelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def ocloc_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of an ocloc that is installed, or that apt fetches."""
    from oxytorch.gpu import ocloc

    if not ocloc.missing():
        return str(ocloc.find().parent)
    path = Path(__file__).parents[1] / "tools" / "fetch_ocloc.py"
    try:
        return str(module_of(path).fetch(tmp_path_factory.mktemp("ocloc")))
    except RuntimeError as error:
        pytest.skip(f"no ocloc on PATH, and apt cannot fetch it: {error}")


@pytest.fixture
def ocloc_on_path(ocloc_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts ocloc on PATH."""
    monkeypatch.setenv("PATH", ocloc_folder, prepend=os.pathsep)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """At most 2 GiB more than now: what asks for more gets torch's error, not the kernel's."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (2 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)
