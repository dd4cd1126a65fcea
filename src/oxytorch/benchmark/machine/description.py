"""What a reader has to know about the machine behind a number. Never a host or user name."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path

PACKAGES = (
    "torch",
    "oxytorch",
    "transformers",
    "onnx",
    "onnxruntime",
    "openvino",
    "intel_extension_for_pytorch",
    "numpy",
    "triton",
    "torch-optimi",
    "bitsandbytes",
    "flashoptim",
    "llama_cpp_python",
    "nncf",
    "torchao",
)

FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
)


def _cpu_info() -> dict[str, str]:
    """The first processor's fields of /proc/cpuinfo; empty where there is none."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    fields: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    return fields


def _caches() -> dict[str, str]:
    """Cache sizes as the system states them, such as {"L2": "1024K"}."""
    sizes: dict[str, str] = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        if (index / "type").read_text().strip() != "Instruction":
            level = (index / "level").read_text().strip()
            sizes[f"L{level}"] = (index / "size").read_text().strip()
    return sizes


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_gib() -> float | None:
    if not hasattr(os, "sysconf"):
        return None
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def _isa() -> str | None:
    """The level that oxytorch's kernels run at; None without the library."""
    oxytorch = importlib.import_module("oxytorch")
    isa = getattr(oxytorch, "isa", None)
    return None if isa is None else str(isa.active())


def describe_machine() -> dict[str, object]:
    """Processor, cores, caches, memory, system, and the active ISA levels."""
    import torch

    info = _cpu_info()
    flags = set(info.get("flags", "").split())
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "cpu": info.get("model name") or platform.processor() or platform.machine(),
        "cpu_family_model": f"{info.get('cpu family', '?')}/{info.get('model', '?')}",
        "features": [feature for feature in FEATURES if feature in flags],
        "cores": usable_cores(),
        "caches": _caches(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "huge_pages": huge_pages.read_text().strip() if huge_pages.exists() else None,
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "oxytorch_isa": _isa(),
    }


def describe_versions() -> dict[str, str]:
    """Version of Python and of every package that takes part; "absent" where not installed."""
    versions = {"python": ".".join(str(part) for part in sys.version_info[:3])}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    return versions


def machine_name(machine: dict[str, object]) -> str:
    """A folder name such as `amd-epyc-2-cores`."""
    words = re.sub(r"\(.*?\)|\bCPU\b|@.*$", " ", str(machine["cpu"]))
    slug = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")
    return f"{slug}-{machine['cores']}-cores"
