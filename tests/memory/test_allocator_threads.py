"""Threads on the fake source: for long, and under ThreadSanitizer where the compiler has it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from oxytorch.memory._core import POLICIES

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "oxytorch" / "memory").glob("*.cpp"))
COMPILER = shutil.which("g++") or shutil.which("clang++")
OPERATIONS = int(os.environ.get("OXYTORCH_STRESS", "2000000"))
"""Of the long tests; under ThreadSanitizer a tenth."""


def built(folder: Path, *flags: str) -> Path:
    """The program, with the allocator's sources in it."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    command = [COMPILER, "-std=c++20", "-pthread", *flags]
    probe = folder / "probe.cpp"
    probe.write_text("int main() {}\n")
    tried = subprocess.run(
        [*command, str(probe), "-o", str(folder / "probe")], capture_output=True, text=True
    )
    if tried.returncode or subprocess.run([folder / "probe"], capture_output=True).returncode:
        pytest.skip(f"this compiler or system cannot build or run programs with {flags}")
    program = folder / "stress"
    source = ROOT / "tests" / "cpp" / "memory" / "stress.cpp"
    include = f"-I{ROOT / 'src' / 'oxytorch'}"
    files = [str(path) for path in (source, *SOURCES)]
    command += [include, *files, "-o", str(program), "-ldl"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return program


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("sanitized"), "-O1", "-g", "-fsanitize=thread")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("plain"), "-O2")


def hammer(stress: Path, policy: str, operations: int, *, physical: bool = False) -> None:
    """Eight threads, four streams and two devices, of which memory runs out now and then.

    physical: whether blocks are compared by the pages behind their addresses.
    """
    command = [str(stress), str(POLICIES.index(policy)), "8", str(operations), str(int(physical))]
    run = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    assert "WARNING: ThreadSanitizer" not in run.stderr


@pytest.mark.parametrize("policy", POLICIES)
def test_threads_race_for_nothing(sanitized: Path, policy: str) -> None:
    hammer(sanitized, policy, 40_000, physical=policy != "native")


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_threads_race_for_nothing_for_long(sanitized: Path, policy: str) -> None:
    hammer(sanitized, policy, OPERATIONS // 10)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_threads_share_no_memory_for_long(plain: Path, policy: str) -> None:
    hammer(plain, policy, OPERATIONS)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mapped", "expandable"])
def test_threads_share_no_pages_for_long(plain: Path, policy: str) -> None:
    hammer(plain, policy, OPERATIONS // 4, physical=True)
