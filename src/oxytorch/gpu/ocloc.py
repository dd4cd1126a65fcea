"""Compiles OpenCL C for Intel GPUs with `ocloc`, the compiler of Intel's compute runtime.

No GPU is needed. Native images run on one chip; SPIR-V is compiled by the driver of any Intel GPU
when it is loaded. ocloc makes both, so that nothing else has to be installed.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from .devices import BY_NAME
from .kernel import OpenClSource

PACKAGE = "intel-opencl-icd"
SPIRV = "spirv"
"""The device for which SPIR-V is made, in place of code of one chip."""

SPIRV_DEVICE = "ats-m150"
"""The chip that the compiler of SPIR-V has in mind: without float64, so that every chip can run
it."""

# The format of images that drivers of today read; from 23 on the only one.
_ZEBIN = "-ze-allow-zebin"
_EM_INTELGT = 205
_SECONDS = 600
# The words of releases from 2021 to 2025 for a device that they do not know.
_UNKNOWN = re.compile(
    r"Cannot get HW Info|Could not determine (?:device )?target|Invalid device|Unknown acronym"
)


class OclocError(RuntimeError):
    """ocloc is absent, does not know a device, or failed."""


def find() -> Path:
    """Where ocloc is. Raises OclocError with the package to install if it is not on PATH."""
    found = shutil.which("ocloc")
    if found is None:
        raise OclocError(
            "ocloc, which compiles kernels for Intel GPUs, is not on PATH; install the package "
            f"{PACKAGE} (Debian, Ubuntu; called intel-ocloc in newer releases)"
        )
    return Path(found)


def missing() -> str:
    """What is absent; "" if ocloc is there."""
    return "" if shutil.which("ocloc") else "`ocloc` is not installed"


def version() -> str:
    """The release of the compute runtime that ocloc belongs to, such as "22.43.24595"."""
    return _version(find())


@functools.cache
def _version(path: Path) -> str:
    with tempfile.TemporaryDirectory() as folder:
        answer = _run(["query", "OCL_DRIVER_VERSION"], Path(folder))
        file = Path(folder) / "OCL_DRIVER_VERSION"
        # Some releases print the answer, others write it.
        text = file.read_text() if file.exists() else answer.stdout
    found = re.search(r"\d+(\.\d+)+", text)
    if answer.returncode or not found:
        raise OclocError(f"{path} does not tell its version: {_said(answer)}")
    return found[0]


def compile_opencl(source: OpenClSource, device: str) -> bytes:
    """The native image of a kernel for a device of `devices.DEVICES`, or SPIR-V for "spirv".

    Releases of ocloc have different names for one chip; the first that this ocloc knows is taken.
    Raises OclocError if it knows none, and with the compiler's words if the source is wrong.
    """
    kind = "-spv_only" if device == SPIRV else "-exclude_ir"
    names = BY_NAME[SPIRV_DEVICE if device == SPIRV else device].compiler_names
    if not names:
        raise ValueError(f"compile_opencl: expected a device of Intel or {SPIRV!r}, got {device!r}")
    find()
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        (folder / "kernel.cl").write_text(source.text)
        for name in names:
            command = ["compile", "-file", "kernel.cl", "-device", name, kind, "-64"]
            command += ["-options", " ".join(source.options)] if source.options else []
            command += ["-internal_options", _ZEBIN] if int(version().split(".")[0]) < 23 else []
            answer = _run([*command, "-output", "image", "-output_no_suffix"], folder)
            if not _UNKNOWN.search(answer.stdout + answer.stderr):
                break
        else:
            raise OclocError(
                f"ocloc {version()} does not know {' = '.join(names)}; install a newer {PACKAGE}"
            )
        endings = (".spv",) if device == SPIRV else ("", ".bin")
        written = [path for path in (folder / f"image{e}" for e in endings) if path.exists()]
        if answer.returncode or len(written) != 1:
            raise OclocError(f"ocloc, {source.function} for {name}: {_said(answer)}")
        return written[0].read_bytes()


def check(image: bytes, device: str) -> None:
    """Takes the native image of a device apart; raises OclocError if it is damaged."""
    find()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "image.bin").write_bytes(image)
        command = ["disasm", "-file", "image.bin", "-dump", "parts"]
        if _is_zebin(image):
            command = ["validate", "-file", "image.bin"]
        answer = _run(command, folder)
        said = _said(answer)
        wrong = ("Error", "not found", "contains 0 kernels")
        if answer.returncode or any(words in said for words in wrong):
            raise OclocError(f"the image for {device} is damaged: {said}")


def _is_zebin(image: bytes) -> bool:
    """Whether an image has the format that `validate` knows: ELF for a machine of its own."""
    return image.startswith(b"\x7fELF") and image[18:20] == _EM_INTELGT.to_bytes(2, "little")


def _run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [find(), *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise OclocError(f"ocloc {arguments[0]} did not end within {_SECONDS} s") from error
    except OSError as error:
        raise OclocError(f"ocloc cannot be run: {error}") from error


def _said(answer: subprocess.CompletedProcess[str]) -> str:
    words = (answer.stdout + answer.stderr).strip()
    return words or f"exit status {answer.returncode} without a word"
