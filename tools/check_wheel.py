"""Checks what a wheel or a source distribution holds, and says what is missing or too much.

python tools/check_wheel.py dist/oxytorch-*.whl dist/oxytorch-*.tar.gz
"""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LARGEST = 60 << 20
"""Bytes of a wheel. Every level's kernels are the most of it."""

NEEDED = (
    "oxytorch/py.typed",
    "oxytorch/lib/liboxytorch.so",
    "oxytorch/lib/liboxytorch_kernels.so",
    "oxytorch/lib/liboxytorch_memory.so",
    "oxytorch/include/oxytorch/kernels.h",
    "oxytorch/share/cmake/oxytorch/oxytorch-config.cmake",
    "oxytorch/demo/data/LICENSE.python.txt",
    r"oxytorch-[^/]+\.dist-info/entry_points.txt",
    r"oxytorch-[^/]+\.dist-info/licenses/LICENSE",
    r"oxytorch-[^/]+\.dist-info/licenses/src/oxytorch/demo/data/LICENSE.python.txt",
)
REFUSED = (
    r"(?!oxytorch(-[^/]+\.dist-info)?/).*",  # beside the package
    r"(?!oxytorch/(include|share)/).*\.(cpp|h)",
    r".*\.(o|a|pyc)|.*/exports\.txt",
    r".*(__pycache__|/_template/|/\.).*",
    r".*\.libs/.*",  # a library that auditwheel would have copied
)
ENTRIES = ("oxytorch = oxytorch.__main__:main", "oxytorch = oxytorch.program.backend:compile_graph")


def version() -> str:
    """The one place of the version: `oxytorch.__version__`."""
    text = (ROOT / "src" / "oxytorch" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    if found is None:
        raise ValueError("src/oxytorch/__init__.py: expected a line `__version__ = ...`")
    return found[1]


def wrong_metadata(text: str) -> list[str]:
    """What is wrong in METADATA or PKG-INFO."""
    fields = email.message_from_string(text)
    wrong = []
    if fields["Version"] != version():
        wrong.append(f"version: expected {version()}, got {fields['Version']}")
    required = [line for line in fields.get_all("Requires-Dist", []) if "extra ==" not in line]
    if required != ["torch>=2.10"]:
        wrong.append(f"dependencies: expected torch>=2.10 alone, got {required}")
    for name in ("Summary", "License-Expression", "Requires-Python", "Classifier"):
        if not fields[name]:
            wrong.append(f"metadata: expected {name}, found none")
    if not fields.get_payload():
        wrong.append("metadata: expected the README as description, found none")
    return wrong


def wrong_in_wheel(path: Path) -> list[str]:
    """What is wrong in a wheel."""
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        text = {
            name.rpartition("/")[2]: archive.read(name).decode()
            for name in names
            if re.fullmatch(r"oxytorch-[^/]+\.dist-info/(METADATA|entry_points\.txt)", name)
        }
    wrong = [
        f"expected {pattern}, found none"
        for pattern in NEEDED
        if not any(re.fullmatch(pattern, name) for name in names)
    ]
    wrong += [name for name in names if any(re.fullmatch(pattern, name) for pattern in REFUSED)]
    wrong += wrong_metadata(text.get("METADATA", ""))
    wrong += [
        f"entry points: expected {entry!r}"
        for entry in ENTRIES
        if entry not in text.get("entry_points.txt", "")
    ]
    if not re.fullmatch(r"oxytorch-[^-]+-py3-none-manylinux_2_28_\w+\.whl", path.name):
        wrong.append(f"tag: expected py3-none-manylinux_2_28, got {path.name}")
    if path.stat().st_size > LARGEST:
        wrong.append(f"size: expected at most {LARGEST} bytes, got {path.stat().st_size}")
    return wrong


def wrong_in_sdist(path: Path) -> list[str]:
    """What is wrong in a source distribution: it holds what git knows, and no more."""
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    wanted = {
        name
        for name in filter(None, listing.split("\0"))
        if not name.startswith(("benchmarks/results/", ".ci/", ".github/"))
    }
    with tarfile.open(path) as archive:
        files = [member for member in archive.getmembers() if member.isfile()]
        found = {member.name.partition("/")[2] for member in files}
        info = [member for member in files if member.name.count("/") == 1]
        text = next(
            (archive.extractfile(m).read().decode() for m in info if m.name.endswith("/PKG-INFO")),  # type: ignore[union-attr]
            "",
        )
    left_out = [f"expected {name}, found none" for name in sorted(wanted - found)]
    too_much = [f"{name} is not known to git" for name in sorted(found - wanted - {"PKG-INFO"})]
    return left_out + too_much + wrong_metadata(text)


def main(names: list[str]) -> int:
    """Prints what is wrong; the exit status."""
    if not names:
        print(__doc__)
        return 2
    failed = 0
    for name in names:
        path = Path(name)
        wrong = wrong_in_wheel(path) if path.suffix == ".whl" else wrong_in_sdist(path)
        print(f"{path.name}: {path.stat().st_size / 2**20:.1f} MiB, {'wrong' if wrong else 'ok'}")
        for line in wrong[:50]:
            print(f"  {line}")
        failed |= bool(wrong)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
