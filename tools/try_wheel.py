"""Installs a wheel in a clean environment, as a user does, and tries it there.

    python tools/try_wheel.py dist/oxytorch-*.whl --torch '2.10.*' --torch '2.15.*'

Each torch has an environment of its own: the wheel is installed with its `demo` extra, imported,
asked for `oxytorch info`, run on the README's example and the demo, and tested with a spread of
this repository's tests. Nothing is built, and no compiler is used. Prints how long each step took.

Where pip finds torch is pip's business: `PIP_EXTRA_INDEX_URL` or `PIP_FIND_LINKS` for a build for
CPUs; the ordinary one brings CUDA's libraries. `--environment` takes an environment that has torch.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SPREAD = (
    "tests/packaging/test_library.py",
    "tests/packaging/test_kernels_library.py",
    "tests/ops/test_errors.py",
    "tests/optimize/test_behaviour.py",
    "tests/program/test_passes.py",
    "tests/program/test_files.py",
    "tests/optim/test_numbers.py",
)
FOR_TESTS = ("pytest>=8", "hypothesis>=6", "numpy")

IMPORTS = """
import sys, torch
before = set(sys.modules)
import oxytorch
assert oxytorch._library.loaded, oxytorch._library.why_missing
allowed = {"oxytorch", *sys.stdlib_module_names, *(name.partition(".")[0] for name in before)}
more = {name.partition(".")[0] for name in set(sys.modules) - before} - allowed
assert not more, f"import oxytorch imports {sorted(more)}"
print(f"oxytorch {oxytorch.__version__}, torch {torch.__version__}, level {oxytorch.isa.active()}")
"""


def readme_example() -> str:
    """The README's first block of Python."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    if found is None:
        raise ValueError("README.md: expected a block of Python, found none")
    return found[1]


def copy_of_the_tests(folder: Path) -> None:
    """All that git knows but the package itself, which has to be the wheel's."""
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in filter(None, listing.split("\0")):
        if not name.startswith("src/oxytorch/") and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)


class Trial:
    """One environment, and what each step in it took."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python, self.folder = python, folder
        self.seconds: dict[str, float] = {}

    def run(self, what: str, *command: str | Path) -> None:
        """Runs a command outside this repository, with none of its paths; raises if it fails."""
        print(f"--- {what}: {' '.join(map(str, command))[:200]}", flush=True)
        variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        begin = time.monotonic()
        subprocess.run([*map(str, command)], cwd=self.folder, env=variables, check=True)
        self.seconds[what] = time.monotonic() - begin

    def pip(self, what: str, *words: str) -> None:
        """Installs something, from wheels alone."""
        options = ("--quiet", "--disable-pip-version-check", "--only-binary", ":all:")
        self.run(what, self.python, "-m", "pip", "install", *options, *words)

    def try_wheel(self, wheel: Path, tests: list[str]) -> None:
        """Every step after torch's installation."""
        self.run("import", self.python, "-c", IMPORTS)
        self.run("info", self.python, "-m", "oxytorch", "info")
        self.run("README's example", self.python, "-c", readme_example())
        self.run("demo", self.python, "-m", "oxytorch", "demo", "--seconds", "1")
        if tests:
            copy_of_the_tests(self.folder)
            self.run("tests", self.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch", action="append", help="a version of torch, as pip takes it")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of environments")
    parser.add_argument("--environment", type=Path, help="one that exists and has torch")
    parser.add_argument("--tests", nargs="*", default=list(SPREAD), help="default: a spread")
    arguments = parser.parse_args()
    wheel = arguments.wheel.resolve(strict=True)
    if bool(arguments.torch) == bool(arguments.environment):
        parser.error("expected either --torch or --environment")
    for version in arguments.torch or [""]:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "outside"
            folder.mkdir()
            made = arguments.environment or Path(scratch) / "environment"
            trial = Trial((made / "bin" / "python").absolute(), folder)
            if arguments.environment:
                trial.pip("wheel", "--no-deps", "--force-reinstall", str(wheel))
            else:
                trial.run("environment", arguments.python, "-m", "venv", made)
                trial.pip("torch", f"torch=={version}")
                trial.pip("wheel and extra", f"{wheel}[demo]", *FOR_TESTS)
            trial.try_wheel(wheel, arguments.tests)
            for what, seconds in trial.seconds.items():
                print(f"{seconds:8.1f} s  {what}")


if __name__ == "__main__":
    main()
