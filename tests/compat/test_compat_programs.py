"""The predecessor's documented CPU examples run, with the answers of stock PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

PROGRAMS = sorted(Path(__file__).with_name("programs").glob("*.py"))
IMPORTS = {
    "import intel_extension_for_pytorch as ipex": "import oxytorch.compat.ipex as ipex",
    "from intel_extension_for_pytorch": "from oxytorch.compat.ipex",
}
ERRORS = {
    "float32": 1e-5,
    "bfloat16": 3e-2,
    "int8": 4e-2,
    "int4": 0.3,
    "smooth": 4e-2,
    "weight_only": 2e-2,
    "language_model": 3e-2,
    "switches": 1e-2,
}
"""The largest difference over the norm of the stock result, by a word of the program's name."""


def run(path: Path, text: str) -> dict[str, Any]:
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, str(path), "exec"), names)
    return names


def check(path: Path, names: dict[str, Any]) -> None:
    words = [word for word in ERRORS if word in path.stem]
    limit = min((ERRORS[word] for word in words), default=1e-5)
    if "language_model_int4" in path.stem:
        limit = ERRORS["int4"]
    outputs, expected = names["outputs"].detach().float(), names["expected"].detach()
    assert outputs.shape == expected.shape
    assert (outputs - expected).norm() <= limit * expected.norm()


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_program_runs_unmodified_after_install(path: Path, installed: None) -> None:
    check(path, run(path, path.read_text()))


WITHOUT_INSTALL = [path for path in PROGRAMS if path.stem != "compile_backend"]


@pytest.mark.parametrize("path", WITHOUT_INSTALL, ids=lambda path: path.stem)
def test_program_runs_with_its_import_replaced(path: Path) -> None:
    text = path.read_text()
    for old, new in IMPORTS.items():
        text = text.replace(old, new)
    assert "intel_extension_for_pytorch" not in text
    check(path, run(path, text))


def test_module_command_runs_a_script_unmodified(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n" + (PROGRAMS[0].parent / "inference_float32.py").read_text()
        + "\nprint(__name__, sys.argv[1:], sys.path[0], tuple(outputs.shape))\n"
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "oxytorch.compat", str(script), "--rate", "1"],
        capture_output=True,
        text=True,
        env=os.environ,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"__main__ ['--rate', '1'] {tmp_path} (4, 10)"
