"""Compiles kernels for a list of devices: several at once, and only what has changed."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

from . import compilers, pack
from .devices import BY_NAME, Device
from .errors import ImageError
from .images import Image
from .kernel import Kernel, Signature

# What is compiled is kept at least this often, so that an interruption loses little.
_SECONDS_BETWEEN_WRITES = 20.0


@dataclass(frozen=True)
class Task:
    """One signature to compile for several devices, by names: it goes to another process."""

    kernel: str
    signature: str
    devices: tuple[str, ...]


@dataclass
class Result:
    """What a build did: counts of images, seconds, and what failed with the reason."""

    compiled: int = 0
    unchanged: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


def load_kernels(place: str) -> tuple[Kernel, ...]:
    """The kernels at `module:attribute`."""
    module, _, attribute = place.partition(":")
    kernels: tuple[Kernel, ...] = tuple(getattr(importlib.import_module(module), attribute))
    return kernels


def build(
    place: str,
    devices: Sequence[Device],
    folder: Path,
    jobs: int | None = None,
    only: Collection[str] = (),
    rules: Collection[str] = (),
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Result:
    """Brings the images of devices in a folder up to date.

    place: the kernels, as in `load_kernels`; other processes import them from there.
    only, rules: names of kernels to build, and options "rule" of signatures to build of any kernel;
        all if both are empty, and then images of kernels that are no more are removed.
    progress: called with the number of images done, of all, and the latest.

    Raises ValueError where a compiler or a kernel is missing, before anything is compiled.
    """
    begin = time.perf_counter()
    kernels = _checked_kernels(place, devices, only)
    is_whole = not only and not rules
    wanted = [
        (kernel, signature)
        for kernel in kernels
        for signature in kernel.signatures()
        if is_whole or kernel.name in only or signature.options.get("rule") in rules
    ]
    names = {(kernel.name, signature.name) for kernel, signature in wanted}
    result = Result()
    tasks, unchanged = _compare(wanted, devices, folder)
    result.unchanged = len(unchanged)
    total = sum(len(task.devices) for task in tasks) + result.unchanged
    progress(result.unchanged, total, "")
    writer = _Writer(folder, devices, _kept(names) if is_whole else lambda image: True)
    for device, entry in unchanged:
        writer.refresh(device, entry)
    try:
        for task, outcome in _run(place, tasks, jobs):
            if isinstance(outcome, str):
                result.failures.append(outcome)
                continue
            for device, entry in outcome:
                writer.add(device, entry)
                result.compiled += 1
            progress(result.compiled + result.unchanged, total, f"{task.kernel}/{task.signature}")
    finally:
        writer.write()
    result.seconds = time.perf_counter() - begin
    return result


def _checked_kernels(
    place: str, devices: Sequence[Device], only: Collection[str]
) -> tuple[Kernel, ...]:
    """The kernels of a place; raises ValueError where a compiler or a named kernel is missing."""
    absent = compilers.compilers_of(list(devices))
    if absent:
        names: dict[str, list[str]] = {}
        for device, reason in absent.items():
            names.setdefault(reason, []).append(device)
        raise ValueError(
            "; ".join(f"cannot build for {', '.join(of)}: {why}" for why, of in names.items())
        )
    pack.remember_sources()
    kernels = load_kernels(place)
    unknown = set(only) - {kernel.name for kernel in kernels}
    if unknown:
        known = ", ".join(kernel.name for kernel in kernels)
        raise ValueError(f"unknown kernel {', '.join(sorted(unknown))}; known are {known}")
    return kernels


def _kept(names: Collection[tuple[str, str]]) -> Callable[[Image], bool]:
    return lambda image: (image.kernel, image.signature) in names


def _compare(
    wanted: Sequence[tuple[Kernel, Signature]], devices: Sequence[Device], folder: Path
) -> tuple[list[Task], list[tuple[str, pack.Entry]]]:
    """What has to be compiled, and what is in the folder already as it would be compiled now."""
    present = {
        (device.name, entry.image.kernel, entry.image.signature): entry
        for device in devices
        for entry in pack.entries(folder, device.name)
    }
    tasks, unchanged = [], []
    for kernel, signature in wanted:
        changed = []
        for device in devices:
            entry = present.get((device.name, kernel.name, signature.name))
            if entry is None or entry.image.key != compilers.key(kernel, signature, device):
                changed.append(device.name)
            else:
                sources = compilers.sources(kernel, signature, device)
                unchanged.append((device.name, pack.with_sources(entry, sources)))
        if changed:
            tasks.append(Task(kernel.name, signature.name, tuple(changed)))
    return tasks, unchanged


_Outcome = list[tuple[str, pack.Entry]] | str


def _run(place: str, tasks: Sequence[Task], jobs: int | None) -> Iterator[tuple[Task, _Outcome]]:
    """Compiles in other processes; yields what each task made, or why it failed."""
    if not tasks:
        return
    workers = max(1, min(jobs or len(os.sched_getaffinity(0)), len(tasks)))
    # Not a fork: torch and Triton have threads by now.
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="oxytorch-aot-", ignore_cleanup_errors=True) as scratch:
        pool = ProcessPoolExecutor(workers, context, _start, (place, scratch))
        futures: dict[Future[_Outcome], Task] = {
            pool.submit(_compile, task): task for task in tasks
        }
        try:
            for future in as_completed(futures):
                task = futures[future]
                try:
                    yield task, future.result()
                except BrokenProcessPool as error:
                    raise ImageError(
                        f"a compiler ended its process, perhaps at {task.kernel}/{task.signature}; "
                        "out of memory? Try fewer --jobs"
                    ) from error
        except BaseException:
            # An interruption waits for no compiler.
            for process in list((pool._processes or {}).values()):
                process.terminate()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


_kernels: dict[str, Kernel] = {}


def _start(place: str, scratch: str) -> None:
    """Prepares a process that compiles: one thread, caches in a folder that goes away."""
    import torch

    # Ctrl-C is for the process that started this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    pack.remember_sources()
    _kernels.update({kernel.name: kernel for kernel in load_kernels(place)})
    try:
        from triton import knobs
    except ImportError:
        return
    knobs.cache.dir = scratch
    # Line tables hold paths of this machine, and are as large as the code.
    knobs.compilation.disable_line_info = True


def _compile(task: Task) -> _Outcome:
    kernel = _kernels[task.kernel]
    signature = next(one for one in kernel.signatures() if one.name == task.signature)
    made = []
    for name in task.devices:
        try:
            compiled = compilers.compile_for(kernel, signature, BY_NAME[name])
        except Exception as error:
            return f"{task.kernel}/{task.signature} for {name}: {type(error).__name__}: {error}"
        sources = compilers.sources(kernel, signature, BY_NAME[name])
        made.append((name, pack.entry(compiled, sources)))
    return made


class _Writer:
    """Gathers images and writes them from time to time."""

    def __init__(
        self, folder: Path, devices: Sequence[Device], keep: Callable[[Image], bool]
    ) -> None:
        self._folder, self._keep = folder, keep
        self._new: dict[str, list[pack.Entry]] = {device.name: [] for device in devices}
        self._written = time.monotonic()

    def add(self, device: str, entry: pack.Entry) -> None:
        """An image is compiled."""
        self._new[device].append(entry)
        if time.monotonic() - self._written > _SECONDS_BETWEEN_WRITES:
            self.write()

    def refresh(self, device: str, entry: pack.Entry) -> None:
        """An image is as its sources are now, which may be written in another way."""
        self._new[device].append(entry)

    def write(self) -> None:
        """Puts everything into the folder."""
        for device, entries in self._new.items():
            pack.merge(self._folder, device, entries, self._keep)
            entries.clear()
        self._written = time.monotonic()
