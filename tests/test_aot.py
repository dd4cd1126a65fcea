"""`oxytorch aot`: what it prints, and how mistakes are told."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os

import pytest

from oxytorch import aot, config
from oxytorch.__main__ import main
from oxytorch.gpu import images, pack
from oxytorch.gpu.compilers import Compiled
from oxytorch.gpu.devices import DEVICES


@pytest.fixture
def folder(tmp_path):
    """Two images for gfx942, one of them twice."""
    elf = b"\x7fELF" + bytes(14) + (224).to_bytes(2, "little") + os.urandom(2000)
    facts = {"entry": "entry", "threads": 256, "shared": 0, "arguments": ("i64",), "aligned": ()}
    facts |= {"scratch": 2, "key": "key", "compiler": "Triton 3.6.0"}
    names = ("sgd", "adam")
    entries = [pack.entry(Compiled.of("update", name, elf, **facts), ()) for name in names]
    pack.merge(tmp_path / "images", "gfx942", entries)
    yield tmp_path / "images"
    images.collection.cache_clear()


def _settings(monkeypatch, **values):
    clean = dataclasses.replace(config.current, aot_devices=None, use_aot_devices=None)
    monkeypatch.setattr(config, "current", dataclasses.replace(clean, **values))


def test_list_shows_what_is_built_and_every_device(folder, capsys):
    assert main(["aot", "list", "--from", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "gfx942" in shown and "2 images" in shown and "Triton 3.6.0" in shown
    assert all(device.name in shown and device.chips in shown for device in DEVICES)
    assert "This machine:" in shown


def test_list_of_nothing_says_what_to_do(tmp_path, capsys):
    assert main(["aot", "list", "--from", str(tmp_path)]) == 0
    assert "Next: oxytorch aot build --devices" in capsys.readouterr().out


def test_list_and_size_as_json_agree(folder, capsys):
    assert main(["aot", "list", "--from", str(folder), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert main(["aot", "size", "--from", str(folder), "--json"]) == 0
    sizes = json.loads(capsys.readouterr().out)
    (one,) = facts["collections"]
    pack_file = next(folder.glob("*.pack"))
    assert sizes == {"gfx942": one["compressed"]} == {"gfx942": pack_file.stat().st_size}
    assert one["images"] == 2 and one["kernels"] == {"update": 2} and one["stale"] == 0


def test_check_counts_images_and_finds_damage(folder, capsys):
    assert main(["aot", "check", "--from", str(folder)]) == 0
    assert "2 images checked, 0 loaded, 0 faults" in capsys.readouterr().out
    images.collection.cache_clear()
    path = next(folder.glob("*.pack"))
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["aot", "check", "--from", str(folder)]) == 1
    shown = capsys.readouterr()
    assert "2 faults" in shown.out
    assert "update/sgd is damaged" in shown.err


def test_check_finds_a_damaged_manifest_and_code_of_another_device(folder, capsys):
    text = (folder / "gfx942.json").read_text()
    (folder / "gfx942.json").write_text(text[:-5])
    assert main(["aot", "check", "--from", str(folder)]) == 1
    assert "gfx942.json is damaged" in capsys.readouterr().err
    images.collection.cache_clear()
    (folder / "sm_90.json").write_text(text.replace('"device": "gfx942"', '"device": "sm_90"'))
    (folder / "gfx942.json").write_text(text)
    assert main(["aot", "check", "--from", str(folder)]) == 1
    assert "update/sgd: not code for sm_90" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_build_of_one_kernel_is_listed_checked_and_not_repeated(tmp_path, capsys):
    place = str(tmp_path / "images")
    command = ["aot", "build", "--devices", "h100", "--kernels", "norm", "--jobs", "1"]
    for expected in ("2 images compiled, 0 unchanged", "0 images compiled, 2 unchanged"):
        assert main([*command, "--out", place]) == 0
        shown = capsys.readouterr()
        assert expected in shown.out
        assert "do not look for images in" in shown.out and "XDG_DATA_HOME=DATA" in shown.out
        assert "2 of 2" in shown.err
    assert main(["aot", "check", "--from", place]) == 0
    assert "2 images checked" in capsys.readouterr().out
    (one, two) = aot.facts(tmp_path / "images")["collections"]
    assert (one["device"], two["device"]) == ("compute_80", "sm_90")
    assert one["kernels"] == two["kernels"] == {"norm": 1}
    assert one["stale"] == two["stale"] == 0
    images.collection.cache_clear()


def test_unknown_device_is_a_mistake_that_lists_the_known_ones(tmp_path, capsys):
    assert main(["aot", "build", "--devices", "sm_90,voodoo", "--out", str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert "--devices: unknown device 'voodoo'; known are" in shown
    assert "sm_120" in shown and "ats-m150 (= dg2-g10" in shown


@pytest.mark.parametrize("name", ["OXYTORCH_AOT_DEVLIST", "USE_AOT_DEVLIST"])
def test_list_of_the_environment_is_read_and_its_mistakes_named(name, monkeypatch):
    field = "aot_devices" if name.startswith("OXY") else "use_aot_devices"
    _settings(monkeypatch, **{field: "h100,gfx942"})
    names = [device.name for device in aot.chosen_devices(None)]
    assert names == ["compute_80", "sm_90", "gfx942"]
    assert [device.name for device in aot.chosen_devices("gfx90a")] == ["gfx90a"]
    _settings(monkeypatch, **{field: "voodoo"})
    with pytest.raises(ValueError, match=f"^{name}: unknown device 'voodoo'"):
        aot.chosen_devices(None)


def test_first_variable_wins_and_an_empty_list_is_a_list(monkeypatch):
    _settings(monkeypatch, aot_devices="", use_aot_devices="sm_90")
    assert aot.chosen_devices(None) == []


def test_empty_list_builds_nothing_and_removes_what_was_there(folder, capsys):
    command = ["aot", "build", "--devices", "", "--out", str(folder)]
    assert main(command) == 0
    assert "nothing to build" in capsys.readouterr().out
    assert (folder / "gfx942.json").exists()
    assert main([*command, "--exact"]) == 0
    assert list(folder.glob("gfx942*")) == []


def test_no_compiler_at_all_is_a_mistake_unless_that_is_allowed(monkeypatch, capsys, tmp_path):
    _settings(monkeypatch)
    monkeypatch.setattr(aot.compilers, "missing", lambda device: "absent")
    command = ["aot", "build", "--out", str(tmp_path)]
    assert main(command) == 2
    assert "pip install 'oxytorch[aot]'" in capsys.readouterr().err
    assert main([*command, "--allow-none"]) == 0


@pytest.mark.parametrize("jobs", ["0", "-1", "many"])
def test_jobs_that_are_no_number_are_a_mistake(jobs, mistake):
    told = mistake(["aot", "build", "--jobs", jobs])
    assert f"expected an integer above 0, got {jobs!r}" in told


def test_folder_that_cannot_be_written_is_told(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("in the way")

    def refuse(*arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(aot.build, "build", refuse)
    assert main(["aot", "build", "--devices", "sm_90", "--out", str(tmp_path / "file")]) == 1
    assert "Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["build", "list", "check", "size"])
def test_help_of_each_verb_explains_it(verb, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["aot", verb, "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: oxytorch aot {verb}" in shown and len(shown.splitlines()) > 5


@pytest.mark.parametrize("verb", ["list", "check", "size"])
def test_folder_that_is_absent_is_named(verb, tmp_path, capsys):
    assert main(["aot", verb, "--from", str(tmp_path / "absent")]) == 2
    told = capsys.readouterr().err
    assert f"--from: expected a folder of images, got {tmp_path / 'absent'}" in told


def test_missing_compiler_is_told_once_for_all_targets(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(aot.compilers, "missing", lambda device: f"no {device.vendor}; install it")
    assert main(["aot", "build", "--devices", "pvc,sm_90", "--out", str(tmp_path)]) == 2
    told = capsys.readouterr().err.strip()
    assert told == (
        "oxytorch aot: cannot build for compute_80, sm_90: no nvidia; install it; "
        "cannot build for spirv, pvc: no intel; install it"
    )
