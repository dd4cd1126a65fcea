"""The compiled library: schemas, symbols, and what it needs at run time."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from marks import NEEDS_LIBRARY
from oxytorch import _library, config
from oxytorch.ops.panels.epilogues import ACTIVATIONS
from oxytorch.ops.panels.formats import FORMATS, WeightFormat
from scripts import module_of

ROOT = Path(__file__).parents[2]

needs_library = NEEDS_LIBRARY


def _tool(name: str) -> ModuleType:
    return module_of(ROOT / "tools" / f"{name}.py")


@needs_library
def test_schemas_are_those_on_file() -> None:
    saved = json.loads((Path(__file__).parent / "schemas.json").read_text())
    assert _tool("write_schemas").schemas() == saved, "run: python tools/write_schemas.py"


def test_environment_page_is_current() -> None:
    page = (ROOT / "docs" / "environment.md").read_text()
    assert page == _tool("write_environment").page(), "run: python tools/write_environment.py"


def test_kernels_ask_for_capabilities_and_not_for_levels() -> None:
    """Vectors of a width are told by the compiler's macros; all else by the table of levels."""
    processor = re.compile(r"__AVX512(BF16|FP16|VNNI)|__AVXVNNI|__AMX|oxytorch_level_name")
    names = re.findall(r"oxytorch_level\(NAME (\w+)", (ROOT / "cmake" / "isa.cmake").read_text())
    assert len(set(names)) > 5
    level = re.compile(rf"[\"']({'|'.join(names)})[\"']")
    for path in (ROOT / "src" / "oxytorch" / "ops").rglob("*"):
        if path.suffix in (".h", ".cpp", ".py"):
            text = path.read_text()
            assert not processor.search(text) and not level.search(text), path


def test_header_of_panels_has_every_format_and_epilogue(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = _tool("write_panel_tables")
    header = tool.header()
    for format in FORMATS.values():
        assert f'{{"{format.name}", {format.bits}, {format.stored_bits}, ' in header
    assert f"enum class PanelEpilogue : std::int32_t {{ {', '.join(ACTIVATIONS)} }};" in header
    lists = {"formats": tool._load("formats"), "epilogues": tool._load("epilogues")}
    monkeypatch.setattr(tool, "_load", lists.get)
    wide = WeightFormat("wide", 8, table=tuple(map(float, range(256))))
    monkeypatch.setitem(lists["formats"].FORMATS, "wide", wide)
    with pytest.raises(ValueError, match="expected a table of 4 bits, got wide"):
        tool.header()
    monkeypatch.setattr(lists["formats"], "FORMATS", {})
    monkeypatch.setitem(lists["epilogues"].ACTIVATIONS, "late", ACTIVATIONS["none"])
    with pytest.raises(ValueError, match="expected sums of activations and gated ones last"):
        tool.header()


def test_every_variable_is_read() -> None:
    read = config.Config.read({"OXYTORCH_ISA": " avx2 ", "ATEN_CPU_CAPABILITY": "default"})
    assert (read.isa, read.cpu_capability) == ("avx2", "default")
    assert config.Config.read({}) == config.Config()
    assert config.Config().aot_devices is None
    assert config.Config.read({"OXYTORCH_AOT_DEVLIST": " "}).aot_devices == ""


def _listing(tool: str, *options: str, path: Path = _library.PATH) -> str:
    """What a tool of binutils prints about a library."""
    found = shutil.which(tool)
    if found is None:
        pytest.skip(f"{tool} is not installed")
    command = [found, *options, str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _needed(path: Path) -> list[str]:
    listing = _listing("readelf", "-d", path=path)
    return [line.split("[")[1].rstrip("]") for line in listing.splitlines() if "(NEEDED)" in line]


@needs_library
def test_library_needs_torch_and_the_c_runtime_only() -> None:
    allowed = {
        "libtorch_cpu.so",
        "libc10.so",
        "libstdc++.so.6",
        "libm.so.6",
        "libgcc_s.so.1",
        "libdl.so.2",
        "libpthread.so.0",
        "libc.so.6",
        "ld-linux-x86-64.so.2",
    }
    assert set(_needed(_library.PATH)) <= allowed


# The newest versions of manylinux_2_28.
NEWEST = {
    "GLIBC": (2, 28),
    "GLIBCXX": (3, 4, 24),
    "CXXABI": (1, 3, 11),
    "GCC": (7, 0, 0),
}


@needs_library
@pytest.mark.skipif(platform.machine() != "x86_64", reason="versions are those of x86-64")
@pytest.mark.parametrize("path", sorted(_library.PATH.parent.glob("*.so")), ids=lambda p: p.name)
def test_library_needs_no_newer_c_library_than_manylinux_2_28(path: Path) -> None:
    """See core/old_runtime.h."""
    listing = _listing("objdump", "-T", path=path)
    found = re.findall(r"\*UND\*.*\((GLIBC|GLIBCXX|CXXABI|GCC)_([0-9.]+)\) (\S+)", listing)
    assert len(found) > 20
    newer = [
        f"{name}@{kind}_{version}"
        for kind, version, name in found
        if tuple(map(int, version.split("."))) > NEWEST[kind]
    ]
    assert newer == []


@needs_library
def test_library_exports_its_plain_c_functions_only() -> None:
    listing = _listing("nm", "-D", "--defined-only")
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
0000000000000000 T _ZN8oxytorch4avx28rms_norm17rms_norm_at_levelERKNS_8NormArgsEll
0000000000000000 W _ZN8oxytorch4avx27softmax7productEv
0000000000000000 T _ZN8oxytorch4avx27productEv
0000000000000000 W _ZSt3maxIfERKT_S2_S2_
0000000000000000 u _ZGVZN5other1fEvE1x
                 U memcpy
"""

INSIDE = """
0000000000000000 T _ZN8oxytorch4avx28rms_norm17rms_norm_at_levelERKNS_8NormArgsEll
0000000000000000 W _ZN8oxytorch4avx28rms_norm6kernelIfEEvPT_
0000000000000000 V _ZZN8oxytorch4avx28rms_norm6kernelIfEEvPT_E5table
0000000000000000 t _ZN12_GLOBAL__N_14helpEv
                 w __gmon_start__
"""


def test_symbols_outside_an_op_and_level_are_found() -> None:
    tool = _tool("check_objects")
    assert tool.symbols_outside(OUTSIDE, "avx2", "rms_norm") == [
        "_ZN8oxytorch4avx27softmax7productEv",
        "_ZN8oxytorch4avx27productEv",
        "_ZSt3maxIfERKT_S2_S2_",
        "_ZGVZN5other1fEvE1x",
    ]
    assert tool.symbols_outside(INSIDE, "avx2", "rms_norm") == []
    assert len(tool.symbols_outside(INSIDE, "avx512", "rms_norm")) == 3
    assert len(tool.symbols_outside(INSIDE, "avx2", "rms")) == 3


SOURCE = """
namespace oxytorch::NAMESPACE {
__attribute__((noinline)) inline int depth(int x) { return x / DEPTH; }
int OP_at_level(int x) { return depth(x); }
}
"""


@pytest.mark.parametrize("namespace", ["avx2", "avx2::OP"])
def test_two_ops_with_different_functions_of_one_name_fail_the_build(
    namespace: str, tmp_path: Path
) -> None:
    """The linker would take one op's `depth` for both, where they lie in one namespace."""
    compiler, nm = shutil.which("c++"), shutil.which("nm")
    if compiler is None or nm is None:
        pytest.skip("no C++ compiler or nm is installed")
    objects = []
    for op, depth in (("first", "1"), ("second", "2")):
        folder = tmp_path / op
        folder.mkdir()
        source = folder / "kernel.cpp"
        text = SOURCE.replace("NAMESPACE", namespace).replace("OP", op).replace("DEPTH", depth)
        source.write_text(text)
        objects.append(source.with_suffix(".o"))
        command = [compiler, "-std=c++20", "-c", str(source), "-o", str(objects[-1])]
        subprocess.run(command, check=True)
    tool = ROOT / "tools" / "check_objects.py"
    result = subprocess.run(
        [sys.executable, str(tool), "--nm", nm, "--level", "avx2", *map(str, objects)],
        capture_output=True,
        text=True,
        check=False,
    )
    if namespace == "avx2::OP":
        assert (result.returncode, result.stderr) == (0, "")
        return
    assert result.returncode == 1
    for op in ("first", "second"):
        assert f"move its code into namespace oxytorch::avx2::{op}" in result.stderr
    assert result.stderr.count("5depthEi") == 2
