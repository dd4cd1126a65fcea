"""The `oxytorch ipexrun` subcommand: command lines of the predecessor's launcher."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
from dataclasses import dataclass
from typing import Any

from ..command_line import fail
from ..launch import command as launcher
from .errors import OLD, PAGE

DESCRIPTION = f"""\
Takes a command line of `ipexrun`, prints the `oxytorch run` that it becomes, and runs it. Python
programs find oxytorch.compat.ipex where they import {OLD}.
"""

_PASSED = (
    *("--ninstances", "--instance-idx", "--ncores-per-instance", "--nodes-list", "--cores-list"),
    *("--memory-allocator", "--omp-runtime", "--strategy", "--log-dir", "--log-file-prefix"),
    *("--dtype", "--master-addr", "--master-port", "--nnodes"),
)
"""Options with a value that `oxytorch run` has too."""

_SWITCHES = (
    *("--use-logical-cores", "--use-e-cores", "--bind-numa-node", "--skip-cross-node-cores"),
    *("--latency-mode", "--throughput-mode", "--benchmark", "--no-python", "--module"),
)
"""Options without a value that `oxytorch run` has too."""

RENAMED: dict[str, tuple[str, ...]] = {
    "--auto-ipex": ("--optimize", "--sample-first-call"),
    "--nprocs-per-node": ("--nproc-per-node",),
    "--enable-tcmalloc": ("--memory-allocator", "tcmalloc"),
    "--enable-jemalloc": ("--memory-allocator", "jemalloc"),
    "--use-default-allocator": ("--memory-allocator", "default"),
    "--disable-iomp": ("--omp-runtime", "default"),
}
"""Options, and what they are in `oxytorch run`."""

SPELLINGS = {
    "-m": "--module",
    "--use-logical-core": "--use-logical-cores",
    "--core-list": "--cores-list",
    "--node-id": "--nodes-list",
    "--log-path": "--log-dir",
    "--ncore-per-instance": "--ncores-per-instance",
    "--rank": "--instance-idx",
    "--enable-auto-ipex": "--auto-ipex",
}
"""Names of older releases and of TorchServe, which also write _ for -."""

DROPPED: dict[str, str] = {
    "--multi-task-manager": "cores are bound without numactl and taskset",
    "--disable-numactl": "numactl is not used",
    "--disable-taskset": "taskset is not used",
    "--auto-ipex-verbose": "--optimize always says what it did",
    "--disable-ipex-graph-mode": "--optimize makes no graphs",
    "--ccl-worker-count": "no cores are set apart for oneCCL",
    "--logical-cores-for-ccl": "no cores are set apart for oneCCL",
    "--extra-mpi-params": "torchrun starts the ranks, not MPI",
    "--multi-instance": "--ninstances says how many",
}
"""Options that are left out, and why."""

REFUSED = {
    "--hostfile": "start `oxytorch run --nnodes N --rdzv-endpoint HOST:29400` on each machine",
    "--convert-fp64-to-fp32": "convert float64 tensors in the program: torch.set_default_dtype",
}
"""Options that end with an error, and what to do."""

_VALUES = {*_PASSED, "--nprocs-per-node", "--multi-task-manager", "--ccl-worker-count"}
_VALUES |= {"--extra-mpi-params", "--hostfile"}
_UNSET = {"--instance-idx": "-1", "--ninstances": "0", "--nnodes": "0", "--nprocs-per-node": "0"}
"""Values that say the same as leaving the option out; so does an empty one."""


class IpexrunError(ValueError):
    """A command line that cannot be taken."""


@dataclass(frozen=True)
class Translation:
    """What a command line becomes: options and program of `oxytorch run`, and remarks."""

    options: list[str]
    program: list[str]
    notes: list[str]

    @property
    def words(self) -> list[str]:
        """All of `oxytorch run`'s words."""
        return [*self.options, *self.program]


def meanings() -> dict[str, str]:
    """What becomes of each option."""
    found = dict.fromkeys((*_PASSED, *_SWITCHES), "the same")
    found |= {name: " ".join(words) for name, words in RENAMED.items()}
    found |= {name: f"left out: {reason}" for name, reason in DROPPED.items()}
    found |= {name: f"an error: {way}" for name, way in REFUSED.items()}
    return dict(sorted(found.items()))


class _Words(argparse.Action):
    """All words of the command line; of these, help is argparse's."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        if values[:1] in (["-h"], ["--help"]):
            parser.print_help()
            parser.exit()
        namespace.words = values


def configure(parser: argparse.ArgumentParser) -> None:
    """Gives the parser its options."""
    parser.description = DESCRIPTION
    parser.usage = "oxytorch ipexrun [cpu | xpu] [options of ipexrun] script.py [arguments]"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "options of ipexrun, and what becomes of them:\n" + "\n".join(
        f"  {name:<26}{meaning}" for name, meaning in meanings().items()
    )
    parser.prefix_chars = "\0"  # all words are read by `translate`
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS, action=_Words)


def run(arguments: argparse.Namespace) -> int:
    """Runs the program; 2 for a mistake in the command line."""
    try:
        found = translate(arguments.words)
    except IpexrunError as error:
        return fail("ipexrun", error)
    for note in found.notes:
        print(f"oxytorch ipexrun: {note}", file=sys.stderr)
    print(f"oxytorch ipexrun: oxytorch run {shlex.join(found.words)}", file=sys.stderr, flush=True)
    parser = argparse.ArgumentParser(prog="oxytorch run")
    launcher.configure(parser)
    return launcher.run(parser.parse_args(found.words))


def translate(words: list[str]) -> Translation:
    """What a command line of ipexrun is in `oxytorch run`. Raises IpexrunError."""
    given, program = _read(words[1:] if words[:1] in (["cpu"], ["xpu"]) else words)
    notes = []
    for name, reason in DROPPED.items():
        if given.pop(name, None) is not None:
            notes.append(f"{name} is left out: {reason}")
    mode = next((name for name in ("--latency-mode", "--throughput-mode") if name in given), None)
    if mode is not None:
        for name in ("--ninstances", "--ncores-per-instance", "--use-logical-cores"):
            if given.pop(name, None) is not None:
                notes.append(f"{name} is left out: {mode} decides it")
    if given.get("--nnodes") == "1":
        del given["--nnodes"]
        given.setdefault("--nprocs-per-node", "auto")
    options: list[str] = []
    if "--omp-runtime" not in given and "--disable-iomp" not in given:
        options += ["--omp-runtime", "auto"]  # theirs takes Intel's where it is installed
    if "--dtype" in given and "--auto-ipex" not in given:
        del given["--dtype"]
    is_module = given.pop("--module", None) is not None
    for name, value in given.items():
        options += RENAMED.get(name, (name,))
        options += [value] if value else []
    return Translation(options, _program(program, is_module, "--no-python" in given), notes)


def _read(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """The options by their newest names, and the program with its arguments."""
    given: dict[str, str] = {}
    rest = [*words]
    while rest and rest[0].startswith("-"):
        word, has_value, value = rest.pop(0).partition("=")
        name = word if len(word) == 2 else word.replace("_", "-")
        name = SPELLINGS.get(name, name)
        if name in REFUSED:
            raise IpexrunError(f"{word}: {REFUSED[name]}")
        if name not in (*_PASSED, *_SWITCHES, *RENAMED, *DROPPED, "--dry-run"):
            raise IpexrunError(f"{word} is no option of ipexrun; {PAGE} has the table of options")
        if name in _VALUES and not has_value:
            if not rest:
                raise IpexrunError(f"{word}: expected a value")
            value = rest.pop(0)
        if name not in _VALUES or value not in ("", _UNSET.get(name)):
            given[name] = value
    if not rest:
        raise IpexrunError("expected a script to run: oxytorch ipexrun [options] script.py")
    return given, rest


def _program(program: list[str], is_module: bool, is_command: bool) -> list[str]:
    """The words of the program: Python programs find the predecessor's names."""
    if is_command:
        return program
    if _is_installed():
        return ["-m", *program] if is_module else ["--no-python", sys.executable, *program]
    return ["-m", "oxytorch.compat", *(["-m"] if is_module else []), *program]


def _is_installed() -> bool:
    """Whether the predecessor itself is here."""
    found: Any = importlib.util.find_spec(OLD)
    return found is not None and found.origin != "oxytorch.compat"
