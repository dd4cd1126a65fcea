"""Trains at the edge of memory: what fits under torch's allocators and under ours, and how fast.

    PYTHONPATH=src python benchmarks/memory/edge.py --out edge.json

On one NVIDIA GPU, each part in a process of its own, within --seconds:

1. Records the loop of lora_finetuning.py with --batch and with one sequence more, and computes from
   the traces the least memory that an allocator needs (the offline bound).
2. Runs the loop with memory limited to that bound and --margin, so that --batch is the largest that
   fits, under each allocator: which ends for want of memory, and at which step.
3. Without a limit, torch's default and ours in turns: steps per second.

Without a GPU, `--trace tests/memory/data/lora_finetuning.trace` says what the replay of a trace
expects of part 2; nothing is trained then.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lora_finetuning import LOOP, SIZES, model

from oxytorch import memory
from oxytorch.memory.replay import replay
from program import parser, training

ALLOCATORS = {"native": "native-policy", "expandable": "expandable", "ours": "oxytorch"}
PAGE = 2 << 20
GiB = 1 << 30


def options() -> argparse.ArgumentParser:
    made = parser(__doc__ or "", **SIZES, **LOOP)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    made.add_argument("--margin", type=float, default=0.007, help="above the bound")
    made.add_argument("--timed-steps", type=int, default=24)
    made.add_argument("--seconds", type=float, default=150, help="for all parts")
    made.add_argument("--out", type=Path, help="write JSON here too, after each part")
    made.add_argument("--part", choices=("record", "run"), help=argparse.SUPPRESS)
    made.add_argument("--allocator", choices=tuple(ALLOCATORS), help=argparse.SUPPRESS)
    made.add_argument("--limit", type=int, help=argparse.SUPPRESS)
    return made


# One part, in a process of its own


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Trains under an allocator: how many steps there was memory for, and how long they took."""
    on_gpu = arguments.device.startswith("cuda")
    if arguments.allocator == "ours":
        memory.use("cuda" if on_gpu else "cpu")
    if arguments.limit and on_gpu:
        limit(arguments)
    torch.manual_seed(arguments.seed)
    losses: list[float] = []
    seconds: list[float] = []
    found: dict[str, Any] = {"steps": arguments.steps}
    try:
        for loss, took in training(arguments, lambda text: None, model, SIZES, clip=1.0):
            losses.append(loss)
            seconds.append(took)
    except torch.OutOfMemoryError as error:
        found["out_of_memory"] = str(error)[:1200]
    if on_gpu:
        found |= {
            "allocated": memory.max_memory_allocated(),
            "reserved": memory.max_memory_reserved(),
        }
    half = seconds[len(seconds) // 2 :]
    return found | {
        "done": len(losses),
        "last_loss": losses[-1] if losses else None,
        "seconds": seconds,
        "steps_per_second": len(half) / sum(half) if half else None,
    }


def limit(arguments: argparse.Namespace) -> None:
    if arguments.allocator == "ours":
        memory.set_memory_limit(arguments.limit)
        return
    total = torch.cuda.get_device_properties(0).total_memory
    # A little more: what is lost in rounding the fraction must not cost torch a segment.
    torch.cuda.set_per_process_memory_fraction(min(1.0, (arguments.limit + 4096) / total))


def record(arguments: argparse.Namespace) -> dict[str, Any]:
    """Trains under torch's default and writes a trace."""
    torch.manual_seed(arguments.seed)
    with memory.record(arguments.trace, stacks=False) as recording:
        for _ in training(arguments, recording.mark, model, SIZES, clip=1.0):
            pass
    properties = torch.cuda.get_device_properties(0)
    return {"device": properties.name, "total": properties.total_memory, "torch": torch.__version__}


# All parts


class Parts:
    """Runs parts while there is time, and keeps what they have found."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.began = arguments, time.perf_counter()
        self.found: dict[str, Any] = {"parts": []}
        self.longest = 0.0

    def left(self) -> float:
        return self.arguments.seconds - (time.perf_counter() - self.began)

    def part(self, part: str, **given: Any) -> dict[str, Any] | None:
        """One part; None: there was no time, or it failed. Both are kept too."""
        about: dict[str, Any] = {"part": part, **given}
        about.pop("trace", None)
        if self.left() < 1.2 * self.longest:
            self.keep(about | {"skipped": f"{self.left():.0f} s were left"})
            return None
        values = {name: getattr(self.arguments, name) for name in (*SIZES, *LOOP, "seed", "device")}
        values |= {"part": part, **given}
        command = [sys.executable, __file__]
        for name, value in values.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        environment = dict(os.environ)
        if given.get("allocator") == "expandable":
            for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
                environment[name] = "expandable_segments:True"
        began = time.perf_counter()
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=environment, timeout=self.left()
            )
        except subprocess.TimeoutExpired:
            self.keep(about | {"failed": "stopped: the time was over"})
            return None
        took = time.perf_counter() - began
        self.longest = max(self.longest, took)
        lines = done.stdout.strip().splitlines()
        if done.returncode or not lines:
            self.keep(about | {"failed": (done.stdout + done.stderr)[-1500:]})
            return None
        result: dict[str, Any] = json.loads(lines[-1])
        self.keep(about | {"process_seconds": round(took, 1)} | result)
        return result

    def keep(self, about: dict[str, Any]) -> None:
        self.found["parts"].append(about)
        print(line(about), flush=True)
        self.write()

    def write(self) -> None:
        if self.arguments.out:
            self.arguments.out.write_text(json.dumps(self.found, indent=1) + "\n")


def line(about: dict[str, Any]) -> str:
    words = [about["part"], about.get("allocator", "")]
    words.append(f"batch {about['batch']}" if "batch" in about else "")
    words.append(f"limit {about['limit'] / GiB:.3f} GiB" if about.get("limit") else "")
    if "skipped" in about or "failed" in about:
        words.append(about.get("skipped") or about["failed"])
    elif "out_of_memory" in about:
        words.append(f"OUT OF MEMORY in step {about['done']} of {about['steps']}")
    elif "done" in about:
        words.append(f"all {about['done']} steps, {about['steps_per_second']:.2f} steps/s")
    if "reserved" in about:
        words.append(f"reserved {about['reserved'] / GiB:.3f} GiB")
    return "  ".join(word for word in words if word)


def expected(path: Path, margin: float, batch: int) -> dict[str, Any]:
    """The bound of a trace, the limit above it, and what fits there by replay."""
    trace = memory.load_trace(path)
    bound = replay(trace, ["offline-bound"])[0].peak_reserved
    most = -(-int(bound * (1 + margin)) // PAGE) * PAGE
    found: dict[str, Any] = {"batch": batch, "bound": bound, "limit": most, "replay": {}}
    for name, allocator in ALLOCATORS.items():
        result = replay(trace, [allocator], most)[0]
        free = replay(trace, [allocator])[0]
        mark = [text for event, text in trace.marks if event <= (result.failed or 0)]
        found["replay"][name] = {
            "fits": result.failed is None,
            "fails_in": mark[-1] if result.failed is not None and mark else "",
            "reserved_without_limit": free.peak_reserved,
        }
    return found


def tell(found: dict[str, Any]) -> None:
    print(f"offline bound {found['bound'] / GiB:.3f} GiB; limit {found['limit'] / GiB:.3f} GiB")
    for name, each in found["replay"].items():
        words = "fits" if each["fits"] else f"out of memory, in {each['fails_in'] or 'a step'}"
        without = each["reserved_without_limit"] / GiB
        print(f"  replay of {name:<11} {words} (reserves {without:.2f} GiB without a limit)")


def main(words: Sequence[str] | None = None) -> None:
    arguments = options().parse_args(words)
    if arguments.part:
        print(json.dumps({"record": record, "run": run}[arguments.part](arguments)))
        return
    if arguments.trace:
        tell(expected(arguments.trace, arguments.margin, arguments.batch))
        return
    if not arguments.device.startswith("cuda"):
        raise SystemExit("edge.py: no NVIDIA GPU here; --trace FILE replays a recorded trace")
    parts = Parts(arguments)
    batch = arguments.batch
    with tempfile.TemporaryDirectory() as folder:
        traces = [Path(folder) / f"{number}.trace" for number in (batch, batch + 1)]
        for number, trace in zip((batch, batch + 1), traces, strict=True):
            parts.part("record", batch=number, trace=trace)
        if not traces[0].exists():
            raise SystemExit("edge.py: nothing was recorded")
        plan = parts.found["expected"] = expected(traces[0], arguments.margin, batch)
        tell(plan)
        if traces[1].exists():
            larger = replay(memory.load_trace(traces[1]), ["offline-bound"])[0].peak_reserved
            plan["bound_of_one_more"] = larger
            fits = "fits too" if larger <= plan["limit"] else "does not fit"
            print(f"batch {batch + 1}: the bound is {larger / GiB:.3f} GiB, it {fits}")
    for allocator in ("ours", "native", "expandable"):
        found = parts.part("run", allocator=allocator, batch=batch, limit=plan["limit"])
        if allocator == "ours" and found and "out_of_memory" in found:
            # How much more it needs is told, not hidden.
            wider = int(plan["bound"] * (1 + 3 * arguments.margin)) // PAGE * PAGE
            parts.part("run", allocator=allocator, batch=batch, limit=wider)
    for allocator in ("native", "ours", "native", "ours", "expandable"):
        parts.part("run", allocator=allocator, batch=batch, steps=arguments.timed_steps)
    parts.found["seconds"] = round(time.perf_counter() - parts.began, 1)
    parts.write()


if __name__ == "__main__":
    main()
