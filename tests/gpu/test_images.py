"""Manifests and packs: what is damaged, foreign or old is an error, never a wrong image."""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oxytorch.gpu import images, pack
from oxytorch.gpu.compilers import Compiled
from oxytorch.gpu.errors import ImageError

CODES = {"one": bytes(range(256)) * 5, "two": b"code" * 100, "three": b"\x7fELF" + os.urandom(300)}


def _entry(name: str, code: bytes, sources: Sequence[str] = ()) -> pack.Entry:
    return pack.entry(_compiled(name, code), sources)


def _compiled(name: str, code: bytes) -> Compiled:
    return Compiled.of(
        *("kernel", name, code),
        entry="entry",
        threads=128,
        shared=0,
        arguments=("i64", "fp32"),
        aligned=(0,),
        scratch=2,
        key="key",
        compiler="a compiler",
    )


def _image(name: str) -> images.Image:
    return _compiled(name, CODES[name]).image


@pytest.fixture
def folder(tmp_path) -> Path:
    """Three images for sm_90."""
    entries = [_entry(name, code) for name, code in CODES.items()]
    pack.merge(tmp_path, "sm_90", entries)
    return tmp_path


def _read_all(folder: Path) -> dict[str, bytes]:
    found = images.Collection(folder, "sm_90")
    return {image.signature: found.read(image) for image in found}


def test_images_are_read_as_they_were_written(folder):
    assert _read_all(folder) == CODES
    found = images.Collection(folder, "sm_90")
    assert found.get("kernel", "four") is None
    assert found.get("other", "one") is None
    image = found.get("kernel", "one")
    assert (image.entry, image.threads, image.arguments) == ("entry", 128, ("i64", "fp32"))
    assert (image.aligned, image.scratch, image.size) == ((0,), 2, len(CODES["one"]))


# Each reading of a folder with changed bytes ends in one of two ways.
fuzzed = settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def _expect_same_or_error(folder: Path, path: Path, whole: bytes) -> None:
    """Reads a folder in which the file `path` is damaged, and makes the file whole again."""
    try:
        found = images.Collection(folder, "sm_90")
        _read_each(found)
    except ImageError:
        return
    finally:
        path.write_bytes(whole)


def _read_each(found: images.Collection) -> None:
    for name, code in CODES.items():
        try:
            image = found.get("kernel", name)
            if image is None:
                continue
            assert found.read(image) == code
            assert image._replace(offset=0, length=0, sha256="") == _image(name)
        except ImageError:
            continue


@fuzzed
@given(position=st.integers(0, 10_000), value=st.integers(0, 255))
def test_pack_with_a_changed_byte_is_the_same_or_an_error(folder, position, value):
    path = next(folder.glob("*.pack"))
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[position % len(whole)] = value
    path.write_bytes(damaged)
    _expect_same_or_error(folder, path, whole)


@fuzzed
@given(
    begin=st.integers(0, 10_000),
    count=st.integers(0, 40),
    text=st.one_of(
        st.binary(max_size=20),
        st.sampled_from([b"-1", b"1e400", b"null", b"[]", b"{}", b'"', b"99999999999999", b"NaN"]),
    ),
)
def test_manifest_with_changed_text_is_the_same_or_an_error(folder, begin, count, text):
    path = folder / "sm_90.json"
    whole = path.read_bytes()
    begin %= len(whole)
    path.write_bytes(whole[:begin] + text + whole[begin + count :])
    _expect_same_or_error(folder, path, whole)


@fuzzed
@given(
    change=st.dictionaries(
        st.sampled_from(["schema", "device", "pack", "sources", "images"]),
        st.recursive(
            st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=5)),
            lambda inner: st.one_of(
                st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=9), inner, max_size=3)
            ),
            max_leaves=6,
        ),
        min_size=1,
    )
)
def test_manifest_with_other_values_is_the_same_or_an_error(folder, change):
    path = folder / "sm_90.json"
    whole = path.read_bytes()
    path.write_text(json.dumps({**json.loads(whole), **change}))
    _expect_same_or_error(folder, path, whole)


@pytest.mark.parametrize("name", images.Image._fields)
@pytest.mark.parametrize("value", [None, -1, 2**70, "", "other", [], [None], {}, True, 1.5])
def test_entry_with_another_value_is_the_same_or_an_error(name, value, folder):
    path = folder / "sm_90.json"
    whole = path.read_bytes()
    manifest = json.loads(whole)
    manifest["images"][0][name] = value
    path.write_text(json.dumps(manifest))
    _expect_same_or_error(folder, path, whole)


def _truncate(path: Path, part: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])


@pytest.mark.parametrize("part", [0, 0.5, 0.99])
def test_truncated_files_are_errors_that_say_what_to_do(folder, part):
    for path in (next(folder.glob("*.pack")), folder / "sm_90.json"):
        _truncate(path, part)
        with pytest.raises(ImageError, match="oxytorch aot build"):
            _read_all(folder)


def test_manifest_of_another_schema_is_an_error(folder):
    path = folder / "sm_90.json"
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 2'))
    with pytest.raises(ImageError, match="expected schema 1, got 2"):
        _read_all(folder)


def test_manifest_of_another_device_is_an_error(folder):
    (folder / "sm_90.json").rename(folder / "sm_80.json")
    with pytest.raises(ImageError, match="holds images for sm_90"):
        images.Collection(folder, "sm_80")


def test_manifest_that_names_a_file_elsewhere_is_an_error(folder):
    path = folder / "sm_90.json"
    manifest = {**json.loads(path.read_text()), "pack": "../../etc/passwd"}
    path.write_text(json.dumps(manifest))
    with pytest.raises(ImageError, match="expected a file's name"):
        _read_all(folder)


def test_absent_pack_is_an_error(folder):
    next(folder.glob("*.pack")).unlink()
    with pytest.raises(ImageError, match="is absent"):
        _read_all(folder)


def test_stream_that_is_larger_than_said_is_an_error(folder):
    bomb = _entry("bomb", bytes(10_000_000))
    small = dataclasses.replace(bomb, image=bomb.image._replace(size=100))
    pack.merge(folder, "sm_90", [pack.with_sources(small, ())])
    found = images.Collection(folder, "sm_90")
    with pytest.raises(ImageError, match="expected 100 bytes"):
        found.read(found.get("kernel", "bomb"))


def test_reader_keeps_reading_while_the_pack_is_replaced(folder):
    found = images.Collection(folder, "sm_90")
    pack.merge(folder, "sm_90", [_entry("one", b"new")])
    assert {image.signature: found.read(image) for image in found} == CODES
    assert _read_all(folder) == {**CODES, "one": b"new"}


def test_merge_leaves_damaged_images_out_and_keeps_the_others(folder, caplog):
    path = next(folder.glob("*.pack"))
    damaged = bytearray(path.read_bytes())
    damaged[images.Collection(folder, "sm_90").get("kernel", "two").offset] ^= 1
    path.write_bytes(damaged)
    pack.merge(folder, "sm_90", [_entry("four", b"four")])
    expected = {name: code for name, code in CODES.items() if name != "two"}
    assert _read_all(folder) == {**expected, "four": b"four"}
    assert "kernel/two is damaged" in caplog.text


def test_image_names_the_source_files_that_have_changed(folder, monkeypatch, tmp_path):
    root = tmp_path / "package"
    root.mkdir()
    for name in ("a.py", "b.py"):
        (root / name).write_text("x = 1\n")
    digests = images.file_digests
    monkeypatch.setattr(pack, "file_digests", lambda names: digests(names, root))
    monkeypatch.setattr(images, "file_digests", lambda names: digests(names, root))
    pack._digests.cache_clear()
    entry = _entry("made", b"made", ("a.py", "b.py"))
    pack.merge(folder, "sm_90", [entry])
    found = images.Collection(folder, "sm_90")
    image = found.get("kernel", "made")
    for change, expected in (("x = 1\n", ""), ("x = 2\n", "b.py"), (None, "b.py")):
        images._changed.cache_clear()
        if change is None:
            (root / "b.py").unlink()
        else:
            (root / "b.py").write_text(change)
        assert found.stale(image) == expected
    pack._digests.cache_clear()
    images._changed.cache_clear()


def test_source_that_is_edited_while_kernels_compile_makes_the_image_stale(
    folder, monkeypatch, tmp_path
):
    root = tmp_path / "package"
    root.mkdir()
    (root / "a.py").write_text("x = 1\n")
    digests = images.file_digests
    for module in (pack, images):
        monkeypatch.setattr(module, "file_digests", lambda names: digests(names, root))
    monkeypatch.setattr(pack, "PACKAGE", root)
    monkeypatch.setattr(pack, "_before", {})
    pack._digests.cache_clear()
    images._changed.cache_clear()
    pack.remember_sources()
    (root / "a.py").write_text("x = 2\n")
    pack.merge(folder, "sm_90", [_entry("made", b"made", ["a.py"])])
    found = images.Collection(folder, "sm_90")
    assert found.stale(found.get("kernel", "made")) == "a.py"
    pack._digests.cache_clear()
    images._changed.cache_clear()


def test_compression_is_zlib(folder):
    found = images.Collection(folder, "sm_90")
    assert zlib.decompress(found.compressed(found.get("kernel", "two"))) == CODES["two"]
