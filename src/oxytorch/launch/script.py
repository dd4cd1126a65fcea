"""Runs a script or a module as Python does, with models optimized on the way (`codeless`)."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import torch

from .codeless import Settings, install


def main(words: list[str]) -> None:
    """Install the hook, then run the program in this process."""
    parser = argparse.ArgumentParser(prog="oxytorch.launch.script")
    parser.add_argument("--dtype", default="")
    parser.add_argument("--sample", action="store_true")
    parser.add_argument("--module", action="store_true")
    parser.add_argument("program", nargs="+")
    at = words.index("--")
    options = parser.parse_args([*words[:at], "program"])
    dtype = getattr(torch, options.dtype) if options.dtype else None
    install(Settings(dtype, options.sample))
    sys.argv = words[at + 1 :]
    if options.module:
        sys.path[0] = os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        run_script(sys.argv[0])


def run_script(path: str) -> None:
    """Execute a file as the module `__main__`, which it stays until the process ends."""
    file = os.path.abspath(path)
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    loader = SourceFileLoader("__main__", file)
    module = ModuleType("__main__")
    vars(module).update(
        __file__=file, __loader__=loader, __spec__=None, __cached__=None, __builtins__=__builtins__
    )
    sys.modules["__main__"] = module
    code = compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)
    exec(code, vars(module))
