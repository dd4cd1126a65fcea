"""What the programs of this folder share: arguments, and recording what they allocate."""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

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


def training(
    arguments: argparse.Namespace,
    mark: Mark,
    model: Callable[..., nn.Module],
    sizes: dict[str, int],
    clip: float | None = None,
) -> Iterator[tuple[float, float]]:
    """Train what requires gradients, in bfloat16, with sequences of another length in each step.

    Gives each step's loss and seconds; a step ends when its work on the device has.
    """
    lengths = random.Random(arguments.seed)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(arguments.device):
        made = model(*(getattr(arguments, name) for name in sizes))
    trained = [each for each in made.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    for step in range(arguments.steps):
        began = time.perf_counter()
        length = lengths.randint(arguments.shortest, arguments.longest)
        mark(f"step {step}: {length} tokens")
        shape = arguments.batch, length
        tokens = torch.randint(arguments.vocabulary, shape, device=arguments.device)
        logits = made(tokens).float()
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(trained, clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found = loss.item()
        yield found, time.perf_counter() - began


def train_language_model(
    description: str,
    model: Callable[..., nn.Module],
    sizes: dict[str, int],
    loop: dict[str, int],
    *,
    clip: float | None = None,
) -> None:
    """Train as the command line says; `training` does it.

    Args:
        model: makes the model from the values of `sizes`.
        sizes: options of the command line, with their defaults.
        loop: the same of steps, batch, and the shortest and longest sequence.
        clip: the largest norm of all gradients.
    """
    arguments = parser(description, **sizes, **loop).parse_args()
    with running(arguments) as mark:
        for _ in training(arguments, mark, model, sizes, clip):
            pass
