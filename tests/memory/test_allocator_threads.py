"""Threads on the fake source, under ThreadSanitizer where the compiler has it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from oxytorch.memory._core import POLICIES

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "oxytorch" / "memory").glob("*.cpp"))
COMPILER = shutil.which("g++") or shutil.which("clang++")


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, with the allocator's sources in it."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("stress")
    probe = folder / "probe.cpp"
    probe.write_text("int main() {}\n")
    flags = ["-std=c++20", "-O1", "-g", "-fsanitize=thread", "-pthread"]
    tried = subprocess.run(
        [COMPILER, *flags, str(probe), "-o", str(folder / "probe")], capture_output=True, text=True
    )
    if tried.returncode or subprocess.run([folder / "probe"], capture_output=True).returncode:
        pytest.skip("this compiler or system has no ThreadSanitizer")
    program = folder / "stress"
    source = ROOT / "tests" / "cpp" / "memory" / "stress.cpp"
    include = f"-I{ROOT / 'src' / 'oxytorch'}"
    files = [str(path) for path in (source, *SOURCES)]
    command = [COMPILER, *flags, include, *files, "-o", str(program), "-ldl"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return program


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_threads_race_for_nothing(stress: Path, policy: str) -> None:
    command = [str(stress), str(POLICIES.index(policy)), "8", "60000"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    assert "WARNING: ThreadSanitizer" not in run.stderr
