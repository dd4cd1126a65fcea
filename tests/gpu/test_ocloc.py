"""Compiling for Intel GPUs with the real ocloc, and what is said when it is absent or refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from oxytorch.gpu import ocloc
from oxytorch.gpu.devices import BY_NAME
from oxytorch.gpu.kernel import OpenClSource

FILL = """
__attribute__((reqd_work_group_size(64, 1, 1)))
kernel void fill(ulong target, int count, float value) {
  const int i = (int)get_global_id(0);
  if (i < count) ((global float*)target)[i] = sqrt(value) / 3.0f;
}
"""
SOURCE = OpenClSource(
    FILL, "fill", {"target": "i64", "count": "i32", "value": "fp32"}, 64, ("-cl-std=CL1.2",)
)


def test_absent_ocloc_names_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for call in (
        ocloc.version,
        lambda: ocloc.compile_opencl(SOURCE, "pvc"),
        lambda: ocloc.compile_opencl(SOURCE, "spirv"),
        lambda: ocloc.check(b"", "pvc"),
    ):
        with pytest.raises(ocloc.OclocError, match="install the package intel-opencl-icd"):
            call()


@pytest.mark.usefixtures("ocloc_on_path")
def test_version_is_numbers() -> None:
    assert all(part.isdigit() for part in ocloc.version().split("."))


@pytest.mark.usefixtures("ocloc_on_path")
@pytest.mark.parametrize("device", ["pvc", "ats-m150"])
def test_native_image_is_made_and_is_whole(device: str) -> None:
    image = ocloc.compile_opencl(SOURCE, device)
    assert b"fill" in image
    ocloc.check(image, device)
    half = len(image) // 2
    damages = (image[:300], image[:half], image[:half] + bytes(half), b"", bytes(len(image)))
    for damaged in damages:
        with pytest.raises(ocloc.OclocError, match="damaged"):
            ocloc.check(damaged, device)


@pytest.mark.usefixtures("ocloc_on_path")
def test_images_of_chips_differ_and_are_the_same_each_time() -> None:
    images = [ocloc.compile_opencl(SOURCE, name) for name in ("pvc", "pvc", "ats-m150", "dg2-g10")]
    assert images[0] == images[1] and images[2] == images[3]
    assert images[0] != images[2]


@pytest.mark.usefixtures("ocloc_on_path")
def test_spirv_begins_with_its_magic_number() -> None:
    assert ocloc.compile_opencl(SOURCE, "spirv").startswith(bytes.fromhex("03022307"))


@pytest.mark.usefixtures("ocloc_on_path")
def test_names_of_a_chip_are_tried_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's ocloc does not know the name of the first releases."""

    def name(*names: str) -> None:
        device = BY_NAME["ats-m150"]._replace(compiler_names=names)
        monkeypatch.setitem(BY_NAME, "ats-m150", device)

    wanted = ocloc.compile_opencl(SOURCE, "ats-m150")
    name("dg2-g10-c0", "dg2-g10")
    assert ocloc.compile_opencl(SOURCE, "ats-m150") == wanted
    name("mars", "moon")
    with pytest.raises(ocloc.OclocError, match=rf"{ocloc.version()} does not know mars = moon"):
        ocloc.compile_opencl(SOURCE, "ats-m150")


@pytest.mark.usefixtures("ocloc_on_path")
def test_wrong_source_gives_the_compilers_words() -> None:
    wrong = OpenClSource("kernel void fill() { nonsense; }", "fill", {}, 64)
    for compile_wrong in (
        lambda: ocloc.compile_opencl(wrong, "pvc"),
        lambda: ocloc.compile_opencl(wrong, "spirv"),
    ):
        with pytest.raises(ocloc.OclocError, match=r"(?s)fill for .*nonsense"):
            compile_wrong()
