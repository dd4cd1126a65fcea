"""The `oxytorch aot` subcommand: GPU kernels compiled ahead of time."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from . import config, optim
from .command_line import fail, positive, report_errors
from .gpu import build, compilers, devices, images, launch, pack
from .gpu.devices import Device
from .gpu.errors import DriverError, ImageError, NoKernelError
from .ops.global_norm import gpu as global_norm
from .ops.mean_squares import gpu as mean_squares

# Faults that are listed one by one.
_SHOWN = 20
KERNELS = "oxytorch.ops.gpu_kernels:KERNELS"
FUNCTIONS = {"clip_grad_norm_": tuple(kernel.name for kernel in global_norm.KERNELS)}
"""Functions that users call, and the kernels that they need."""

DESCRIPTION = """\
Compile the GPU kernels of oxytorch ahead of time, for any list of devices, on any machine.

What is compiled ahead of time needs no compiler when a program runs, and starts in milliseconds.
A device that is not in the list still runs: its driver compiles the kernels once, or Triton does.
"""

EXAMPLES = """\
examples:
  oxytorch aot build --devices sm_90             for H100 and H200
  oxytorch aot build --devices h100,mi300x       chips by their product names, AMD ones too
  oxytorch aot build --devices pvc,ats-m150      for Intel, with `ocloc` of intel-opencl-icd
  oxytorch aot build                             the devices of a wheel that compilers here can do
  oxytorch aot list                              what is built, and what this machine would use
  oxytorch aot check                             whether every image is whole
  oxytorch aot size                              what each device costs in bytes

environment:
  OXYTORCH_AOT_DEVLIST=sm_90,pvc pip wheel .     the same list for a wheel; empty: CPU only
  OXYTORCH_GPU=aot python train.py               images only: fail where one is missing
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Gives the parser its options."""
    parser.description, parser.epilog = DESCRIPTION, EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    builds = verbs.add_parser(
        "build",
        help="compile kernels for a list of devices",
        description="Compiles what has changed since the last build; no GPU is needed.",
        epilog="devices: " + devices.known(),
    )
    builds.add_argument(
        "--devices",
        metavar="LIST",
        help="names separated by commas; without it OXYTORCH_AOT_DEVLIST, else "
        f"{','.join(devices.DEFAULT_NVIDIA)} with Triton and "
        f"{','.join(devices.DEFAULT_INTEL)} with ocloc",
    )
    builds.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where the images go; without it the package's own folder, or the user's where that "
        "is read-only. Programs find DATA/oxytorch/images with XDG_DATA_HOME=DATA",
    )
    builds.add_argument("--jobs", type=positive, metavar="N", help="compilers at once (all cores)")
    builds.add_argument(
        "--kernels",
        metavar="LIST",
        default="",
        help="only what these optimizers or functions need: adamw,clip_grad_norm_ (or kernels by "
        "their own names)",
    )
    builds.add_argument(
        "--allow-none", action="store_true", help="having no compiler at all is no error"
    )
    builds.add_argument(
        "--exact", action="store_true", help="remove images of other devices from the folder"
    )
    for verb, summary in (
        ("list", "what is built, and what this machine would use"),
        ("check", "read every image and compare its checksum; load those of this machine's GPUs"),
        ("size", "bytes per device"),
    ):
        reads = verbs.add_parser(verb, help=summary, description=summary.capitalize() + ".")
        reads.add_argument(
            "--from", dest="folder", type=Path, metavar="DIR", help="only the images in this folder"
        )
        if verb != "check":
            reads.add_argument("--json", action="store_true", help="print the same facts as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb; 1 where something failed, 2 for a mistake in the command."""
    verbs: dict[str, Callable[[argparse.Namespace], int]] = {
        "build": _build,
        "list": _list,
        "check": _check,
        "size": _size,
    }
    statuses: dict[type[Exception], int] = {ValueError: 2, ImageError: 1, OSError: 1}
    return report_errors("aot", lambda: verbs[arguments.verb](arguments), statuses)


def chosen_devices(given: str | None) -> list[Device]:
    """The devices of --devices, else of the environment, else those of a wheel.

    Raises ValueError for an unknown name.
    """
    sources = {
        "--devices": given,
        "OXYTORCH_AOT_DEVLIST": config.current.aot_devices,
        "USE_AOT_DEVLIST": config.current.use_aot_devices,
    }
    for name, text in sources.items():
        if text is not None:
            return devices.parse(text, name)
    return compilers.default_devices()


def chosen_kernels(given: str) -> tuple[list[str], list[str]]:
    """The kernels of --kernels, and the rules whose kernels are meant: those of optimizers.

    Raises ValueError for a name that is neither an optimizer's, a function's nor a kernel's.
    """
    names = [name.strip() for name in given.split(",") if name.strip()]
    optimizers = {
        name.lower(): kind.rule
        for name, kind in ((name, getattr(optim, name)) for name in optim.__all__)
        if isinstance(kind, type) and hasattr(kind, "rule")
    }
    kernels = [kernel.name for kernel in build.load_kernels(KERNELS)]
    unknown = [n for n in names if n.lower() not in (*optimizers, *FUNCTIONS, *kernels)]
    if unknown:
        raise ValueError(
            f"--kernels: expected optimizers ({', '.join(sorted(optimizers))}), "
            f"{', '.join(FUNCTIONS)} or kernels ({', '.join(kernels)}), got {', '.join(unknown)}"
        )
    only: dict[str, None] = dict.fromkeys(name for name in names if name.lower() in kernels)
    for name in names:
        only.update(dict.fromkeys(FUNCTIONS.get(name.lower(), ())))
    rules = [optimizers[name.lower()] for name in names if name.lower() in optimizers]
    if "adafactor" in rules:
        only.update(dict.fromkeys(kernel.name for kernel in mean_squares.KERNELS))
    return [*only], rules


def default_folder() -> Path:
    """Where a build puts its images: the package, or the user's folder where that is read-only."""
    user = images.user_folder()
    place = images.SHIPPED if images.SHIPPED.exists() else images.SHIPPED.parent
    return images.SHIPPED if user is None or os.access(place, os.W_OK) else user


def _build(arguments: argparse.Namespace) -> int:
    wanted = chosen_devices(arguments.devices)
    folder = arguments.out or default_folder()
    if arguments.exact and folder.exists():
        stay = {device.name for device in wanted}
        for path in folder.glob("*.json"):
            if path.stem not in stay:
                pack.remove(folder, path.stem)
    if not wanted:
        asked = arguments.devices is not None or config.current.aot_devices is not None
        if asked or config.current.use_aot_devices is not None or arguments.allow_none:
            print("oxytorch aot: no devices, nothing to build: GPUs run plain PyTorch or Triton")
            return 0
        install = "; ".join(sorted({f"{how} ({who})" for who, how in compilers.INSTALL.items()}))
        raise ValueError(f"no compiler for GPUs is installed here; {install}")
    only, rules = chosen_kernels(arguments.kernels)
    names = ", ".join(device.name for device in wanted)
    with _progress(f"oxytorch aot: {names}") as progress:
        result = build.build(KERNELS, wanted, folder, arguments.jobs, only, rules, progress)
    print(
        f"oxytorch aot: {result.compiled} images compiled, {result.unchanged} unchanged, "
        f"{result.seconds:.1f} s, in {folder}"
    )
    if folder.resolve() not in [place.resolve() for place in images.folders()]:
        print(
            f"oxytorch aot: programs do not look for images in {folder} by themselves; "
            + _how_found(folder)
        )
    for failure in result.failures:
        fail("aot", f"failed: {failure}")
    return 1 if result.failures else 0


def _how_found(folder: Path) -> str:
    """How programs find images there, or where they find them."""
    if folder.resolve().parts[-2:] == ("oxytorch", "images"):
        return f"run them with XDG_DATA_HOME={folder.resolve().parents[1]}"
    return "give --out DATA/oxytorch/images, and run them with XDG_DATA_HOME=DATA"


@contextlib.contextmanager
def _progress(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar in a terminal, else a line for each tenth."""
    if sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()),
            *(TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[what]}")),
        )
        with Progress(*columns, console=Console(stderr=True)) as bar:
            row = bar.add_task(title, total=None, what="")

            def draw(done: int, total: int, what: str) -> None:
                bar.update(row, completed=done, total=total, what=what)

            yield draw
        return
    told = -1

    def tell(done: int, total: int, what: str) -> None:
        nonlocal told
        tenth = 10 * done // max(1, total)
        if tenth > told:
            told = tenth
            print(f"{title}: {done} of {total}", file=sys.stderr, flush=True)

    yield tell


def _places(folder: Path | None) -> list[Path]:
    """Where `--from` says to look, or where programs look; raises ValueError for no folder."""
    if folder is not None and not folder.is_dir():
        raise ValueError(f"--from: expected a folder of images, got {folder}, which is none")
    return images.folders() if folder is None else [folder]


def facts(folder: Path | None = None) -> dict[str, Any]:
    """What is built and what this machine would use, as data."""
    collections = []
    places = _places(folder)
    for found in images.collections(places):
        listed = list(found)
        collections.append(
            {
                "device": found.device,
                "folder": str(found.folder),
                "images": len(listed),
                "compressed": sum({one.offset: one.length for one in listed}.values()),
                "bytes": sum(one.size for one in listed),
                "compilers": sorted({one.compiler for one in listed}),
                "stale": sum(bool(found.stale(one)) for one in listed),
                "kernels": _counts(one.kernel for one in listed),
            }
        )
    return {"collections": collections, "machine": _machine(places)}


def _counts(names: Iterator[str]) -> dict[str, int]:
    count: dict[str, int] = {}
    for name in names:
        count[name] = count.get(name, 0) + 1
    return count


def _machine(places: list[Path]) -> list[dict[str, str]]:
    """Each GPU of this machine, and where its kernels would come from."""
    found = []
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind)
        for index in range(module.device_count() if module.is_available() else 0):
            row = {"device": f"{kind}:{index}", "name": module.get_device_name(index)}
            try:
                here = launch.driver(torch.device(kind, index))
            except (NoKernelError, DriverError) as error:
                found.append({**row, "kind": "", "way": str(error)})
                continue
            found.append({**row, "kind": here.device, "way": _way(here, images.built(places))})
    return found


def _way(here: launch.Driver, built: Mapping[str, int]) -> str:
    forced = launch.forced_way()
    if forced:
        return f"OXYTORCH_GPU={forced}"
    for device in devices.usable_images(here.device):
        if built.get(device.name):
            return f"images of {device.name}"
    if built.get(here.fallback):
        return f"{here.fallback}, compiled by the driver once"
    if importlib.util.find_spec("triton") is not None:
        return "Triton, compiled when first used"
    return f"plain PyTorch; to change that: oxytorch aot build --devices {here.device}"


def _list(arguments: argparse.Namespace) -> int:
    found = facts(arguments.folder)
    if arguments.json:
        print(json.dumps(found, indent=2))
        return 0
    if not found["collections"]:
        print("Nothing is built. Next: oxytorch aot build --devices NAMES")
    for one in found["collections"]:
        stale = f", {one['stale']} OLDER THAN THEIR SOURCE" if one["stale"] else ""
        print(
            f"{one['device']:<12}{one['images']:>5} images {_kib(one['compressed']):>10}  "
            f"{', '.join(one['compilers'])}{stale}  ({one['folder']})"
        )
        for kernel, number in one["kernels"].items():
            print(f"{'':<12}{number:>5} {kernel}")
    print("\nDevices that can be built for:")
    for device in devices.DEVICES:
        names = f" ({', '.join(device.aliases)})" if device.aliases else ""
        print(f"  {device.name:<12}{device.chips}{names}")
    print("\nThis machine:")
    for row in found["machine"]:
        print(f"  {row['device']:<8}{row['name']} ({row['kind']}): {row['way']}")
    if not found["machine"]:
        print("  no GPU that this torch can use")
    return 0


def _kib(count: int) -> str:
    return f"{count / 1024:.0f} KiB"


def _size(arguments: argparse.Namespace) -> int:
    found = facts(arguments.folder)["collections"]
    if arguments.json:
        print(json.dumps({one["device"]: one["compressed"] for one in found}, indent=2))
        return 0
    print(f"{'device':<12}{'images':>8}{'in the wheel':>16}{'uncompressed':>16}")
    for one in found:
        sizes = f"{_kib(one['compressed']):>16}{_kib(one['bytes']):>16}"
        print(f"{one['device']:<12}{one['images']:>8}{sizes}")
    total = _kib(sum(one["compressed"] for one in found))
    print(f"{'together':<12}{sum(one['images'] for one in found):>8}{total:>16}")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    places = _places(arguments.folder)
    here = {row["kind"]: torch.device(row["device"]) for row in _machine(places)}
    failures, number, loaded = [], 0, 0
    for folder in places:
        for path in sorted(folder.glob("*.json")):
            try:
                found = images.collection(folder, path.stem)
            except ImageError as error:
                failures.append(str(error))
                continue
            for record in found.manifest["images"] if found is not None else []:
                number += 1
                try:
                    loaded += _check_image(found, record, here)
                except (ImageError, DriverError) as error:
                    failures.append(str(error))
    for failure in failures[:_SHOWN]:
        fail("aot", failure)
    if len(failures) > _SHOWN:
        fail("aot", f"and {len(failures) - _SHOWN} more")
    print(f"oxytorch aot: {number} images checked, {loaded} loaded, {len(failures)} faults")
    return 1 if failures else 0


def _check_image(found: Any, record: Any, here: dict[str, torch.device]) -> bool:
    """Checks one image; returns whether a GPU of this machine has loaded it."""
    image = images.Image.from_record(record, found.path)
    code = found.read(image)
    changed = found.stale(image)
    if changed:
        raise ImageError(f"{image.kernel}/{image.signature} is older than {changed}")
    compilers.validate(code, devices.BY_NAME[found.device], f"{image.kernel}/{image.signature}")
    if found.device not in here:
        return False
    launch.driver(here[found.device]).load(code, image)
    return True
