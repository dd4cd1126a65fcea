"""The programs of docs/migrate.md run as printed, and give the same before and after."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "migrate.md").read_text()
BLOCKS = re.findall(r"^```(py|python)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PAIRS = [(BLOCKS[index][1], BLOCKS[index + 1][1]) for index in range(0, len(BLOCKS), 2)]
NAMES = ["inference", "training", "language model"]
ERRORS = dict(zip(NAMES, (2e-2, 1e-6, 2e-2), strict=True))


def test_programs_come_in_pairs() -> None:
    assert [kind for kind, _ in BLOCKS] == ["py", "python"] * len(NAMES)
    assert all("import intel_extension_for_pytorch as ipex" in before for before, _ in PAIRS)


@pytest.mark.parametrize(("pair", "name"), [*zip(PAIRS, NAMES, strict=True)], ids=NAMES)
def test_program_gives_the_same_before_and_after(
    pair: tuple[str, str], name: str, installed: None
) -> None:
    found: list[dict[str, Any]] = [{"__name__": "__main__"}, {"__name__": "__main__"}]
    for program, names in zip(pair, found, strict=True):
        exec(compile(program, f"<{name}>", "exec"), names)
    before, after = (names["outputs"].float() for names in found)
    assert (before - after).norm() <= ERRORS[name] * after.norm()


def test_first_program_runs_by_the_command_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PAIRS[0][0] + "print(tuple(outputs.shape))\n")
    done = subprocess.run(
        [sys.executable, "-m", "oxytorch.compat", "script.py", "--your", "arguments"],
        capture_output=True, text=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(1, 64, 256)"
