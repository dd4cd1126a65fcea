"""Puts Debian's ocloc, Intel's compiler for its GPUs, into a folder, without installing it.

Prints the folder to put on PATH. For tests and builds where nobody may install packages; needs
apt's package lists (`apt-get update`) and downloads about 60 MB.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

PACKAGE = "intel-opencl-icd"


def fetch(folder: Path) -> Path:
    """The folder with `ocloc` in it, under `folder`. Raises RuntimeError where apt cannot help."""
    programs = folder / "bin"
    if (programs / "ocloc").exists():
        return programs
    for name in ("apt-get", "dpkg-deb"):
        if shutil.which(name) is None:
            raise RuntimeError(f"{name} is not on PATH")
    root, packages = folder / "root", folder / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    wanted = _run(["apt-get", "install", "-qq", "--print-uris", "--no-install-recommends", PACKAGE])
    # Lines such as: 'http://.../libigc1_1.0-6_amd64.deb' libigc1_1.0-6_amd64.deb 9287496 MD5Sum:...
    names = [line.split()[1].split("_")[0] for line in wanted.splitlines() if ".deb" in line]
    _run(["apt-get", "download", "-qq", *(names or [PACKAGE])], packages)
    for package in packages.glob("*.deb"):
        _run(["dpkg-deb", "-x", str(package), str(root)])
    libraries = next(root.glob("**/libocloc.so*")).parent
    programs.mkdir(exist_ok=True)
    starter = programs / "ocloc"
    starter.write_text(
        f'#!/bin/sh\nLD_LIBRARY_PATH="{libraries}" exec "{root}/usr/bin/ocloc" "$@"\n'
    )
    starter.chmod(0o755)
    return programs


def _run(command: list[str], folder: Path | None = None) -> str:
    answer = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    if answer.returncode:
        last = (answer.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise RuntimeError(f"{' '.join(command[:3])}: {last}")
    return answer.stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    print(fetch(parser.parse_args().folder.resolve()))
