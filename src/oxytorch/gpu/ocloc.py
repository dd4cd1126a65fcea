"""Intel's offline compiler, `ocloc`: OpenCL C into code of a device, or into SPIR-V."""

from __future__ import annotations

import shutil
import subprocess
from functools import lru_cache

from .kernel import OpenClSource


def missing() -> str:
    """What is absent; "" if ocloc is there."""
    return "" if shutil.which("ocloc") else "`ocloc` is not installed"


@lru_cache
def version() -> str:
    """What ocloc calls its version."""
    done = subprocess.run(["ocloc", "query", "NEO_REVISION"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def compile_opencl(source: OpenClSource, device: str) -> bytes:
    """Code for a device of `devices.DEVICES`, or SPIR-V for "spirv"."""
    raise NotImplementedError("written by the Intel back end")
