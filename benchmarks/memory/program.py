"""What the programs of this folder share: arguments, and recording what they allocate."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from oxytorch import memory

Mark = Callable[[str], None]


def parser(description: str, **sizes: int) -> argparse.ArgumentParser:
    """Options of all programs, and one for each of their sizes with its default."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument("--trace", type=Path, help="record allocations to this file (needs CUDA)")
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--seed", type=int, default=0)
    for name, default in sizes.items():
        made.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return made


@contextlib.contextmanager
def running(arguments: argparse.Namespace) -> Iterator[Mark]:
    """Seed, record if asked, and say at the end how long it took and what torch reserved.

    Gives the function that marks where a step begins.
    """
    torch.manual_seed(arguments.seed)
    began = time.perf_counter()
    if arguments.trace is None:
        yield lambda text: None
    else:
        with memory.record(arguments.trace, device=arguments.device) as recording:
            yield recording.mark
    found: dict[str, Any] = {"seconds": round(time.perf_counter() - began, 1)}
    if arguments.device.startswith("cuda"):
        torch.cuda.synchronize()
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        found |= {
            "allocated": allocated,
            "reserved": reserved,
            "fragmentation": round(1 - allocated / reserved, 4),
        }
    print(json.dumps(found))
