"""The one list of GPUs that kernels are built for, and what users call them.

A table in Python: it is read without a parser on every Python that the package supports (`tomllib`
is not in 3.10), and its rows are checked by type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Device(NamedTuple):
    """One target of a compiler.

    name: names images and manifests.
    chips: products that run it.
    aliases: other names that users write, in lower case.
    runs_on: devices that run its images although they are not the same.
    compiler_names: what the compiler calls it, tried in turn.
    fallback: not one chip, but code that drivers of the vendor compile when it is loaded; built
        beside every device of the vendor.
    """

    name: str
    vendor: str
    chips: str
    aliases: tuple[str, ...] = ()
    runs_on: tuple[str, ...] = ()
    compiler_names: tuple[str, ...] = ()
    fallback: bool = False


# Compiled code of NVIDIA runs on later chips of the same major number up to 8.9; from 9.0 on Triton
# uses instructions of one chip alone.
DEVICES = (
    Device(
        "compute_80",
        "nvidia",
        "every NVIDIA GPU from 8.0 on, compiled by its driver",
        ("ptx",),
        fallback=True,
    ),
    Device("sm_80", "nvidia", "A100, A30", ("a100", "a30", "ampere"), ("sm_86", "sm_89")),
    Device(
        "sm_86",
        "nvidia",
        "A10, A40, RTX A6000, GeForce 30",
        ("a10", "a40", "a6000", "rtx3090"),
        ("sm_89",),
    ),
    Device(
        "sm_89",
        "nvidia",
        "L4, L40, L40S, RTX 6000 Ada, GeForce 40",
        ("l4", "l40", "l40s", "rtx4090", "ada"),
    ),
    Device("sm_90", "nvidia", "H100, H200, GH200", ("h100", "h200", "gh200", "hopper")),
    Device("sm_100", "nvidia", "B200, GB200", ("b200", "gb200", "b100", "blackwell")),
    Device("sm_103", "nvidia", "B300, GB300", ("b300", "gb300")),
    Device("sm_120", "nvidia", "RTX PRO 6000 Blackwell, GeForce 50", ("rtx5090", "rtxpro6000")),
    Device("sm_121", "nvidia", "GB10, DGX Spark", ("gb10", "dgx-spark")),
    Device("gfx90a", "amd", "MI210, MI250, MI250X", ("mi210", "mi250", "mi250x")),
    Device("gfx942", "amd", "MI300A, MI300X, MI325X", ("mi300a", "mi300x", "mi300", "mi325x")),
    Device("gfx950", "amd", "MI350X, MI355X", ("mi350x", "mi355x", "mi350")),
    Device("gfx1100", "amd", "Radeon RX 7900, PRO W7900", ("rx7900", "rx7900xtx", "w7900")),
    Device("gfx1200", "amd", "Radeon RX 9060", ("rx9060", "rx9060xt")),
    Device("gfx1201", "amd", "Radeon RX 9070", ("rx9070", "rx9070xt")),
    Device(
        "spirv",
        "intel",
        "every Intel GPU, compiled by its driver",
        ("spir-v",),
        fallback=True,
    ),
    Device(
        "pvc",
        "intel",
        "Data Center GPU Max 1100, 1550",
        ("ponte-vecchio", "max1100", "max1550"),
        compiler_names=("pvc",),
    ),
    # One chip; the names are those of Intel's documents, of ocloc's releases and of its steppings.
    Device(
        "ats-m150",
        "intel",
        "Data Center GPU Flex 170, Arc A770, A750",
        ("dg2-g10", "acm-g10", "dg2-g10-c0", "flex170", "a770", "a750"),
        compiler_names=("ats-m150", "dg2-g10", "acm-g10", "dg2-g10-c0"),
    ),
    Device(
        "dg2-g11",
        "intel",
        "Data Center GPU Flex 140, Arc A380, A310",
        ("ats-m75", "acm-g11", "dg2-g11-b1", "flex140", "a380", "a310"),
        compiler_names=("dg2-g11", "acm-g11", "ats-m75", "dg2-g11-b1"),
    ),
    Device(
        "dg2-g12",
        "intel",
        "Arc A570M, A530M, Pro A60",
        ("acm-g12", "dg2-g12-a0"),
        compiler_names=("dg2-g12", "acm-g12", "dg2-g12-a0"),
    ),
    Device(
        "mtl",
        "intel",
        "Core Ultra 100 (Meteor Lake)",
        ("mtl-u", "mtl-s", "meteor-lake"),
        compiler_names=("mtl", "mtl-u", "mtl-s"),
    ),
    Device(
        "mtl-h",
        "intel",
        "Core Ultra 100 H (Meteor Lake)",
        ("mtl-p",),
        compiler_names=("mtl-h", "mtl-p"),
    ),
    Device(
        "arl-h",
        "intel",
        "Core Ultra 200 H (Arrow Lake)",
        ("arrow-lake",),
        compiler_names=("arl-h",),
    ),
    Device(
        "lnl",
        "intel",
        "Core Ultra 200 V (Lunar Lake)",
        ("lnl-m", "lnl-b0", "lnl-a0", "lunar-lake"),
        compiler_names=("lnl-m", "lnl", "lnl-b0", "lnl-a0"),
    ),
    Device(
        "bmg",
        "intel",
        "Arc B580, B570, Pro B50, B60",
        ("bmg-g21", "bmg-g21-a0", "battlemage", "b580", "b570"),
        compiler_names=("bmg-g21", "bmg", "bmg-g21-a0"),
    ),
)
BY_NAME = {name: device for device in DEVICES for name in (device.name, *device.aliases)}
DEFAULT_NVIDIA = ("sm_80", "sm_90", "sm_100", "sm_120")
DEFAULT_INTEL = ("pvc", "ats-m150", "dg2-g11")


def parse(text: str, argument: str = "--devices") -> list[Device]:
    """The devices of a comma-separated list, each once, in the table's order.

    Fallbacks of their vendors are added. Spaces and upper case do not matter; an empty list is
    allowed. argument: what the text was given as, for the error.
    """
    words = [word.strip().lower().replace(" ", "-") for word in text.split(",")]
    words = [word for word in words if word]
    unknown = [word for word in words if word not in BY_NAME]
    if unknown:
        raise ValueError(
            f"{argument}: unknown device {', '.join(map(repr, unknown))}; known are {known()}"
        )
    return with_fallbacks([BY_NAME[word] for word in words])


def with_fallbacks(devices: Sequence[Device]) -> list[Device]:
    """The devices with the fallbacks of their vendors, each once, in the table's order."""
    vendors = {device.vendor for device in devices}
    return [
        device
        for device in DEVICES
        if device in devices or (device.fallback and device.vendor in vendors)
    ]


def known() -> str:
    """Every name, with its aliases."""
    return ", ".join(
        device.name + (f" (= {', '.join(device.aliases)})" if device.aliases else "")
        for device in DEVICES
    )


def usable_images(name: str) -> list[Device]:
    """Devices whose compiled images run on the device `name`, the best one first."""
    exact = [device for device in DEVICES if device.name == name and not device.fallback]
    others = [device for device in DEVICES if name in device.runs_on]
    return exact + others[::-1]
