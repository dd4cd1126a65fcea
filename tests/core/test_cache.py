"""The user's cache: whole or absent, whatever happens to its files."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oxytorch import config
from oxytorch.core import cache, whole_file

pytestmark = pytest.mark.usefixtures("own_cache")


def test_what_is_written_is_read(tmp_path):
    assert cache.read("gpu", "key") is None
    assert cache.write("gpu", "key", b"code")
    assert cache.read("gpu", "key") == b"code"
    assert [path.name for path in cache.folder("gpu").iterdir()] == ["key"]
    assert cache.folder("gpu").is_relative_to(tmp_path)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 200), st.integers(0, 255), st.booleans())
def test_damaged_file_is_as_good_as_absent(position, value, cuts):
    data = bytes(range(100))
    assert cache.write("gpu", "key", data)
    path = cache.folder("gpu") / "key"
    content = bytearray(path.read_bytes())
    position %= len(content)
    if cuts:
        del content[position:]
    else:
        content[position] = value
    path.write_bytes(content)
    found = cache.read("gpu", "key")
    assert found in (None, data)
    assert found is None or bytes(content) == path.read_bytes()


def test_cache_that_cannot_be_written_is_told_and_costs_no_answer(monkeypatch, caplog):
    def full(*arguments, **keywords):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.Path, "write_bytes", full)
    assert not cache.write("gpu", "key", b"code")
    assert "No space left" in caplog.text
    assert cache.read("gpu", "key") is None


def test_disk_that_fills_while_writing_leaves_no_file(monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(whole_file.os, "replace", full)
    assert not cache.write("gpu", "key", b"code")
    assert list(cache.folder("gpu").iterdir()) == []


def test_folder_that_is_a_file_is_told(tmp_path, caplog):
    (tmp_path / "cache").write_text("in the way")
    assert not cache.write("gpu", "key", b"code")
    assert cache.read("gpu", "key") is None
    assert "cache" in caplog.text


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes into read-only folders")
def test_read_only_folder_is_told(caplog):
    cache.folder("gpu").mkdir(parents=True)
    cache.folder("gpu").chmod(0o500)
    assert not cache.write("gpu", "key", b"code")
    assert "cannot write" in caplog.text


def test_user_without_a_home_has_no_cache(monkeypatch):
    settings = dataclasses.replace(config.current, cache_home="")
    monkeypatch.setattr(config, "current", settings)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert cache.folder("gpu") is None
    assert not cache.write("gpu", "key", b"code")
    assert cache.read("gpu", "key") is None


def test_processes_that_write_at_once_leave_one_whole_file(tmp_path):
    code = (
        "import sys; from oxytorch.core import cache\n"
        "letter = sys.argv[1].encode()\n"
        "for _ in range(200):\n"
        "    assert cache.write('gpu', 'key', letter * 50_000)\n"
        "    data = cache.read('gpu', 'key')\n"
        "    assert data is not None and len(set(data)) == 1 and len(data) == 50_000, data\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    running = [
        subprocess.Popen([sys.executable, "-c", code, letter], env=environment) for letter in "ab"
    ]
    assert [process.wait(120) for process in running] == [0, 0]
    assert [path.name for path in cache.folder("gpu").iterdir()] == ["key"]
