"""Files that are replaced in one step: where they cannot be written, and what is left behind."""

import os
from pathlib import Path

import pytest

from oxytorch.core.whole_file import check_destination, replacing


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    for ask in (check_destination, lambda path: replacing(path).__enter__()):
        with pytest.raises(IsADirectoryError, match="models: expected the name of a file"):
            ask(tmp_path / "models")
    assert os.listdir(tmp_path) == ["models"]


def test_the_folder_must_exist(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"found no .*nowhere; create it first"):
        check_destination(tmp_path / "nowhere" / "model.oxy")


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "model.oxy"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), replacing(path) as unfinished:
        unfinished.write_bytes(b"new")
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == ["model.oxy"]
    assert path.read_bytes() == b"old"


def test_what_the_work_reads_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "run.trace").write_bytes(b"read")
    (tmp_path / "link.trace").symlink_to(tmp_path / "run.trace")
    with pytest.raises(FileExistsError, match="is the file that is read; name another"):
        check_destination(tmp_path / "link.trace", tmp_path / "run.trace")
    check_destination(tmp_path / "other.trace", tmp_path / "run.trace")
