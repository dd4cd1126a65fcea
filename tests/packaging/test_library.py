"""The compiled library: schemas, symbols, and what it needs at run time."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from oxytorch import _library, config

ROOT = Path(__file__).parents[2]

needs_library = pytest.mark.skipif(
    not _library.loaded, reason=f"no compiled library: {_library.why_missing}"
)


def _tool(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@needs_library
def test_schemas_are_those_on_file() -> None:
    saved = json.loads((Path(__file__).parent / "schemas.json").read_text())
    assert _tool("write_schemas").schemas() == saved, "run: python tools/write_schemas.py"


def test_environment_page_is_current() -> None:
    page = (ROOT / "docs" / "environment.md").read_text()
    assert page == _tool("write_environment").page(), "run: python tools/write_environment.py"


def test_every_variable_is_read() -> None:
    read = config.Config.read({"OXYTORCH_ISA": " avx2 ", "ATEN_CPU_CAPABILITY": "default"})
    assert (read.isa, read.cpu_capability) == ("avx2", "default")
    assert config.Config.read({}) == config.Config()
    assert config.Config().aot_devices is None
    assert config.Config.read({"OXYTORCH_AOT_DEVLIST": " "}).aot_devices == ""


def _needed(path: Path) -> list[str]:
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("readelf is not installed")
    listing = subprocess.run(
        [readelf, "-d", str(path)], check=True, capture_output=True, text=True
    ).stdout
    return [line.split("[")[1].rstrip("]") for line in listing.splitlines() if "(NEEDED)" in line]


@needs_library
def test_library_needs_torch_and_the_c_runtime_only() -> None:
    allowed = {
        "libtorch_cpu.so",
        "libc10.so",
        "libstdc++.so.6",
        "libm.so.6",
        "libgcc_s.so.1",
        "libc.so.6",
        "ld-linux-x86-64.so.2",
    }
    assert set(_needed(_library.PATH)) <= allowed


@needs_library
def test_library_exports_its_plain_c_functions_only() -> None:
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("nm is not installed")
    listing = subprocess.run(
        [nm, "-D", "--defined-only", str(_library.PATH)], check=True, capture_output=True, text=True
    ).stdout
    names = {line.split()[-1] for line in listing.splitlines()}
    ours = {name for name in names if name.startswith("oxytorch_")}
    assert "oxytorch_active_level" in ours
    # The C++ runtime's own templates are unavoidably shared; torch's and ours are not.
    others = {name for name in names - ours if "torch" in name}
    assert others == set()


@needs_library
def test_library_is_small() -> None:
    assert _library.PATH.stat().st_size < 30 << 20


OUTSIDE = """
0000000000000000 T _ZN8oxytorch4avx217rms_norm_at_levelERKNS_8NormArgsEll
0000000000000000 W _ZSt3maxIfERKT_S2_S2_
0000000000000000 u _ZGVZN5other1fEvE1x
                 U memcpy
"""

INSIDE = """
0000000000000000 T _ZN8oxytorch4avx217rms_norm_at_levelERKNS_8NormArgsEll
0000000000000000 W _ZN8oxytorch4avx26kernelIfEEvPT_
0000000000000000 V _ZZN8oxytorch4avx26kernelIfEEvPT_E5table
0000000000000000 t _ZN12_GLOBAL__N_14helpEv
                 w __gmon_start__
"""


def test_shared_symbols_outside_a_level_are_found() -> None:
    tool = _tool("check_objects")
    assert tool.shared_symbols(OUTSIDE, "avx2") == [
        "_ZSt3maxIfERKT_S2_S2_",
        "_ZGVZN5other1fEvE1x",
    ]
    assert tool.shared_symbols(INSIDE, "avx2") == []
    assert len(tool.shared_symbols(INSIDE, "avx512")) == 2


def test_check_objects_fails_the_build(tmp_path: Path) -> None:
    listing = tmp_path / "nm"
    listing.write_text(f"#!{sys.executable}\nprint({OUTSIDE!r})\n")
    listing.chmod(0o755)
    result = subprocess.run(
        [
            sys.executable,
            str(ROOT / "tools" / "check_objects.py"),
            "--nm",
            str(listing),
            "--level",
            "avx2",
            "kernel.o",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "move its code into namespace oxytorch::avx2" in result.stderr
