"""Building: real kernels for devices that are not here, only what changed, nothing lost."""

from __future__ import annotations

import dataclasses
import json
import linecache
import multiprocessing
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from sample_kernels import KERNEL, SAMPLES, needs_triton

from oxytorch.gpu import build, compilers, images, pack
from oxytorch.gpu.devices import BY_NAME, DEVICES, parse
from oxytorch.gpu.errors import ImageError

KERNEL_TEXT = """
import triton, triton.language as tl
from oxytorch.gpu.kernel import Kernel, Signature, TritonSource

@triton.jit
def inner(x):
    return x + {term}

@triton.jit
def first(x, y):
    tl.store(y.to(tl.pointer_type(tl.float32)), inner(tl.load(x.to(tl.pointer_type(tl.float32)))))

@triton.jit
def second(x, y):
    tl.store(y.to(tl.pointer_type(tl.float32)), 2 * tl.load(x.to(tl.pointer_type(tl.float32))))

def kernel(name, function):
    source = lambda signature: TritonSource(function, {{"x": "i64", "y": "i64"}}, {{}})
    return Kernel(name, lambda: (Signature("only", {{}}),), source, None)

KERNELS = (kernel("first", first), kernel("second", second)){more}
"""


# Both kernels call a function with a constant of its own.
SHARED_TEXT = """
import triton, triton.language as tl
from oxytorch.gpu.kernel import Kernel, Signature, TritonSource

TERM = tl.constexpr(1.0)

@triton.jit
def inner(x):
    return x + TERM

@triton.jit
def first(x):
    tl.store(x.to(tl.pointer_type(tl.float32)), inner(1.0))

@triton.jit
def second(x):
    tl.store(x.to(tl.pointer_type(tl.float32)), inner(2.0))

def kernel(name, function):
    source = lambda signature: TritonSource(function, {"x": "i64"}, {})
    return Kernel(name, lambda: (Signature("only", {}),), source, None)

KERNELS = (kernel("first", first), kernel("second", second))
"""


def _in_another_process(folder: Path, devices: str, place: str, *paths: Path) -> subprocess.Popen:
    code = (
        "import sys; from pathlib import Path; from oxytorch.gpu import build, devices\n"
        "if __name__ == '__main__':\n"
        f"    sys.path[:0] = {[str(path) for path in paths]!r}\n"
        f"    print(build.build({place!r}, devices.parse({devices!r}), Path({str(folder)!r}), 1))\n"
    )
    script = folder.parent / f"build-{devices}.py"
    script.write_text(code)
    return subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _finish(process: subprocess.Popen) -> str:
    shown, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return shown


def _write_kernels(folder: Path, term: str, more: str = "") -> None:
    (folder / "changing.py").write_text(KERNEL_TEXT.format(term=term, more=more))


def test_images_are_code_of_their_devices(compiled_samples):
    found = {one.device: one for one in images.collections([compiled_samples])}
    assert sorted(found) == ["compute_80", "gfx942", "sm_80", "sm_90"]
    for name, collection in found.items():
        assert len(collection) == 2
        for image in collection:
            code = collection.read(image)
            compilers.validate(code, BY_NAME[name], image.kernel)
            assert image.arguments == ("i64", "i64", "i64", "fp32")
            assert image.aligned == (0, 1)
            assert image.threads == (256 if name == "gfx942" else 128)
            other = "gfx942" if name != "gfx942" else "sm_90"
            with pytest.raises(ImageError, match=f"not code for {other}"):
                compilers.validate(code, BY_NAME[other], image.kernel)


def test_images_hold_no_path_of_this_machine(compiled_samples):
    for collection in images.collections([compiled_samples]):
        for image in collection:
            code = collection.read(image)
            assert b"sample_kernels" not in code
            assert str(Path.home()).encode() not in code


def test_ptx_never_leaves_contraction_to_the_driver(compiled_samples):
    collection = images.collection(compiled_samples, "compute_80")
    text = collection.read(collection.get("scale", "shifted")).decode()
    assert ".version 8.0" in text and ".target sm_80" in text
    operations = [line for line in text.splitlines() if "\tmul.f32" in line or "\tadd.f32" in line]
    assert operations == []


def _build_anew(folder: Path) -> build.Result:
    """Builds the kernels of changing.py as they are written now."""
    sys.modules.pop("changing", None)
    linecache.checkcache()
    return build.build("changing:KERNELS", parse("sm_90"), folder, 1)


@needs_triton
def test_build_compiles_only_what_changed_and_forgets_what_is_no_more(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    folder = tmp_path / "images"
    # Of two kernels and two devices: all, none, and those that call the changed function.
    for term, (compiled, unchanged) in (("1.0", (4, 0)), ("1.0", (0, 4)), ("3.0", (2, 2))):
        _write_kernels(tmp_path, term)
        result = _build_anew(folder)
        assert (result.compiled, result.unchanged, result.failures) == (compiled, unchanged, [])
    _write_kernels(tmp_path, "3.0", "[:1]")
    assert _build_anew(folder).compiled == 0
    assert [entry.image.kernel for entry in pack.entries(folder, "sm_90")] == ["first"]


@needs_triton
def test_key_does_not_depend_on_what_was_compiled_before(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "changing.py").write_text(SHARED_TEXT)
    keys = []
    for order in ((1,), (0, 1)):
        sys.modules.pop("changing", None)
        linecache.checkcache()
        kernels = build.load_kernels("changing:KERNELS")
        for index in order:
            kernel = kernels[index]
            key = compilers.key(kernel, kernel.signatures()[0], BY_NAME["sm_90"])
        keys.append(key)
    assert keys[0] == keys[1]


@needs_triton
def test_interrupted_build_keeps_what_it_has_and_ends(tmp_path):
    def interrupt(done: int, total: int, what: str) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build.build(SAMPLES, parse("sm_90"), tmp_path, 1, progress=interrupt)
    assert [entry.image.signature for entry in pack.entries(tmp_path, "sm_90")] == ["plain"]
    assert multiprocessing.active_children() == []


@needs_triton
def test_two_builds_at_once_lose_nothing(tmp_path):
    folder = tmp_path / "images"
    here = Path(__file__).parent
    wanted = ("sm_80,sm_90", "sm_90")
    running = [_in_another_process(folder, devices, SAMPLES, here) for devices in wanted]
    for process in running:
        _finish(process)
    for device in ("compute_80", "sm_80", "sm_90"):
        found = images.Collection(folder, device)
        assert [len(found.read(image)) > 500 for image in found] == [True, True]
        assert len(list(folder.glob(f"{device}-*.pack"))) == 1
    assert not list(folder.glob(".*.pack.*")) + list(folder.glob(".*.json.*"))


@needs_triton
def test_signature_that_fails_is_named_and_the_others_are_kept(tmp_path, monkeypatch):
    text = KERNEL_TEXT.replace("2 * tl.load", "tl.no_such_function")
    (tmp_path / "failing.py").write_text(text.format(term="1.0", more=""))
    monkeypatch.syspath_prepend(tmp_path)
    result = build.build("failing:KERNELS", parse("sm_90"), tmp_path / "images", 1)
    assert result.compiled == 2
    assert len(result.failures) == 1
    assert "second/only" in result.failures[0] and "no_such_function" in result.failures[0]
    assert [entry.image.kernel for entry in pack.entries(tmp_path / "images", "sm_90")] == ["first"]


def test_missing_compiler_is_named_with_its_package_before_anything_is_built(monkeypatch, tmp_path):
    find = compilers.importlib.util.find_spec
    hidden = lambda name, *rest: None if name == "triton" else find(name, *rest)  # noqa: E731
    monkeypatch.setattr(compilers.importlib.util, "find_spec", hidden)
    with pytest.raises(ValueError, match=r"cannot build for compute_80, sm_90: .*oxytorch\[aot\]"):
        build.build(SAMPLES, parse("sm_90"), tmp_path / "images")
    assert not (tmp_path / "images").exists()


@needs_triton
def test_unknown_kernel_is_an_error_that_lists_the_known_ones(compiled_samples, tmp_path):
    with pytest.raises(ValueError, match="unknown kernel nothing; known are scale"):
        build.build(SAMPLES, parse("sm_90"), tmp_path, only=["nothing"])


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", [one.name for one in DEVICES if one.vendor != "intel"])
def test_triton_compiles_for_each_device_of_nvidia_and_amd(name):
    compiled = compilers.compile_for(KERNEL, KERNEL.signatures()[0], BY_NAME[name])
    compilers.validate(compiled.code, BY_NAME[name], "scale")


def test_folder_that_cannot_be_written_is_an_error_and_keeps_what_it_had(samples, monkeypatch):
    before = {path.name: path.read_bytes() for path in samples.iterdir()}
    entries = pack.entries(samples, "sm_90")
    changed = pack.with_sources(entries[0], ("ops/optimizer_step/rules.py",))

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pack.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        pack.merge(samples, "sm_90", [changed])
    assert {path.name: path.read_bytes() for path in samples.iterdir()} == before


def test_equal_images_lie_in_the_pack_once(samples):
    entry = pack.entries(samples, "sm_90")[0]
    image = entry.image._replace(signature="twin")
    twin = pack.with_sources(dataclasses.replace(entry, image=image), ())
    before = sum(path.stat().st_size for path in samples.glob("sm_90-*.pack"))
    pack.merge(samples, "sm_90", [twin])
    found = images.Collection(samples, "sm_90")
    assert sum(path.stat().st_size for path in samples.glob("sm_90-*.pack")) == before
    assert found.read(found.get("scale", "twin")) == zlib.decompress(entry.compressed)


def test_manifest_is_json_with_a_line_for_each_image(compiled_samples):
    text = (compiled_samples / "sm_90.json").read_text()
    assert json.loads(text)["schema"] == images.SCHEMA
    assert len([line for line in text.splitlines() if '"sha256"' in line]) == 2
