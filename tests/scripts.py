"""Scripts as modules, and in processes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType


def module_of(path: Path) -> ModuleType:
    """A script that is no part of a package as a module, under the name of its file."""
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[module.__name__] = module  # where dataclasses look for it
    specification.loader.exec_module(module)
    return module


def of_two_processes(command: list[str]) -> list[int]:
    """The numbers that two processes print which have run before either of them looks.

    Each says "has run", waits for a line and prints its number.
    """
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "has run\n"
    found = [process.communicate("\n")[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    return [int(each) for each in found]
