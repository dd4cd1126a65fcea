"""find_package(oxytorch): the examples of examples/cpp build against the package and run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import oxytorch
from oxytorch import _library

ROOT = Path(__file__).parents[2]
CMAKE = shutil.which("cmake")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _library.loaded, reason=f"no library: {_library.why_missing}"),
    pytest.mark.skipif(CMAKE is None, reason="cmake is not on PATH"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler on PATH"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def _cmake(*words: str | Path) -> subprocess.CompletedProcess[str]:
    assert CMAKE is not None
    command = [CMAKE, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _configure(source: Path, build: Path, *prefixes: str) -> subprocess.CompletedProcess[str]:
    return _cmake("-S", source, "-B", build, f"-DCMAKE_PREFIX_PATH={';'.join(prefixes)}")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the compiled examples."""
    folder = tmp_path_factory.mktemp("examples")
    prefixes = oxytorch.cmake_prefix_path, torch.utils.cmake_prefix_path
    done = _configure(ROOT / "examples" / "cpp", folder, *prefixes)
    assert done.returncode == 0, done.stderr
    done = _cmake("--build", folder, "-j2")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def _run(program: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [program, *map(str, words)], capture_output=True, text=True, check=False, env={}
    )
    assert done.returncode >= 0, f"signal {-done.returncode}: {done.stdout} {done.stderr}"
    return done


def test_a_saved_program_runs(built: Path, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1568, 4)).eval()
    path = tmp_path / "model.oxy"
    oxytorch.save(model, path, sample_input=torch.randn(2, 3, 16, 16))
    done = _run(built / "run_program", path, "2,3,16,16")
    assert done.returncode == 0, done.stderr
    assert "tensor input\nresult [2, 4] mean " in done.stdout
    done = _run(built / "run_program", path, "2,3,16")
    assert done.returncode == 1
    assert "expected input of shape [ 2 3 16 16 ], got [ 2 3 16 ]" in done.stderr
    done = _run(built / "run_program", tmp_path / "none.oxy", "1")
    assert "none.oxy: expected a file, found none" in done.stderr


def test_operators_are_registered(built: Path) -> None:
    done = _run(built / "register_ops")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["float32", "float64", "meta", "gradient"]
    assert float(lines[0].split()[1]) < 1e-5 and float(lines[1].split()[1]) < 1e-5
    assert "layer_norm: expected weight of shape [768], got [5]" in lines[4]
    assert "oxytorch::pack_panels" in lines[5]


def test_kernels_run_without_libtorch(built: Path) -> None:
    done = _run(built / "kernels")
    assert done.returncode == 0, done.stderr + done.stdout
    linked = subprocess.run(
        ["ldd", built / "kernels"], capture_output=True, text=True, check=True
    ).stdout
    assert "liboxytorch_kernels.so" in linked
    assert "libtorch" not in linked and "libc10" not in linked


def _project(folder: Path, text: str) -> Path:
    folder.mkdir()
    head = "cmake_minimum_required(VERSION 3.18)\nproject(user LANGUAGES CXX)\n"
    (folder / "CMakeLists.txt").write_text(head + text)
    return folder


def test_what_the_package_lacks_is_named(tmp_path: Path) -> None:
    wrong = _project(tmp_path / "wrong", "find_package(oxytorch CONFIG REQUIRED COMPONENTS x)")
    done = _configure(wrong, tmp_path / "a", oxytorch.cmake_prefix_path)
    assert "expected components program, ops or kernels, got x" in " ".join(done.stderr.split())
    newer = _project(tmp_path / "newer", "find_package(oxytorch 99 CONFIG REQUIRED)")
    done = _configure(newer, tmp_path / "b", oxytorch.cmake_prefix_path)
    assert oxytorch.__version__ in done.stderr


def test_components_without_libtorch_say_so(tmp_path: Path) -> None:
    """A copy of the package, beside which no torch lies."""
    package = tmp_path / "site" / "oxytorch"
    shutil.copytree(Path(oxytorch.cmake_prefix_path).parent, package / "share")
    for name in ("lib", "include"):
        os.symlink(_library.PATH.parents[1] / name, package / name)
    shutil.copy(_library.PATH.parents[1] / "__init__.py", package)
    find = "find_package(oxytorch CONFIG REQUIRED COMPONENTS program)"
    done = _configure(
        _project(tmp_path / "user", find), tmp_path / "build", str(package / "share" / "cmake")
    )
    assert done.returncode != 0
    said = " ".join(done.stderr.split())
    assert "component program lacks libtorch; add torch.utils.cmake_prefix_path" in said


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unpacked wheel, with this machine's levels and without images for GPUs."""
    pytest.importorskip("scikit_build_core", reason="scikit-build-core is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--quiet",
        "--wheel-dir", str(folder), "--config-settings=cmake.define.OXYTORCH_LEVELS=native",
        f"--config-settings=build-dir={folder / 'build'}", str(ROOT),
    ]  # fmt: skip
    environment = {**os.environ, "OXYTORCH_AOT_DEVLIST": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    (made,) = folder.glob("*.whl")
    with zipfile.ZipFile(made) as archive:
        archive.extractall(folder / "site")
    return folder / "site" / "oxytorch"


def test_examples_build_against_the_wheel(wheel: Path, tmp_path: Path) -> None:
    prefixes = str(wheel / "share" / "cmake"), torch.utils.cmake_prefix_path
    done = _configure(ROOT / "examples" / "cpp", tmp_path, *prefixes)
    assert done.returncode == 0, done.stderr
    done = _cmake("--build", tmp_path, "-j2")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("kernels", "register_ops"):
        done = _run(tmp_path / name)
        assert done.returncode == 0, done.stderr + done.stdout
    assert (wheel / "include" / "oxytorch" / "program.h").exists()
    assert not [path for path in wheel.rglob("*.cpp") if "share" not in path.parts]
