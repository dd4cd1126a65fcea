"""The first step of an optimizer in a process of its own, with the time of every stage.

`cold_start.py` runs this text with `python -c`, so that no peer pays for importing oxytorch. Reads
a job from standard input: {"way", "shapes", "device", "began"}; writes seconds as one line of JSON.
Nothing is imported here but what the way needs.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

LOG: list[str] = []
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}


class Keep(logging.Handler):
    """Keeps what oxytorch tells about how its kernels were loaded."""

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the text."""
        LOG.append(record.getMessage())


def maker(way: str) -> Callable[[list[Any]], Callable[[], object]]:
    """Imports what the way needs; parameters -> what makes one step.

    The step is a method of the optimizer, which is made here and makes its states in the step.
    """
    import torch

    if way.startswith("oxytorch"):
        from oxytorch import optim

        logger = logging.getLogger("oxytorch")
        logger.setLevel(logging.INFO)
        logger.addHandler(Keep())
        return lambda parameters: optim.AdamW(parameters, **ADAMW).step
    if way == "optimi":
        optimi = importlib.import_module("optimi")
        how = {"triton": True, "kahan_sum": False}
        return lambda parameters: optimi.AdamW(parameters, **how, **ADAMW).step
    if way == "bitsandbytes":
        bitsandbytes = importlib.import_module("bitsandbytes.optim")
        return lambda parameters: bitsandbytes.AdamW(parameters, **ADAMW).step
    if way == "flashoptim":
        flashoptim = importlib.import_module("flashoptim")
        return lambda parameters: flashoptim.FlashAdamW(parameters, **ADAMW).step
    if way == "compile":
        return lambda parameters: torch.compile(torch.optim.AdamW(parameters, **ADAMW).step)
    stock: Any = torch.optim.AdamW
    return lambda parameters: stock(parameters, **{way: True}, **ADAMW).step


def main() -> None:
    """Does the job."""
    job = json.load(sys.stdin)
    import torch

    make = maker(job["way"])
    imported = time.time()
    device = torch.device(job["device"])
    # FlashOptim's own format wants bfloat16 parameters.
    dtype = torch.bfloat16 if job["way"] == "flashoptim" else torch.float32

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    parameters = [
        torch.full(shape, 0.125, device=device, dtype=dtype).requires_grad_()
        for shape in job["shapes"]
    ]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.5)
    wait()
    up = time.time()
    step = make(parameters)
    wait()
    made = time.time()
    step()
    wait()
    first = time.time()
    step()
    wait()
    second = time.time()
    # Every element has moved by about twice the learning rate.
    moved = [0.125 - parameter.detach().float().mean().item() for parameter in parameters]
    print(
        json.dumps(
            {
                "imported": imported - job["began"],
                "device_up": up - job["began"],
                "done": first - job["began"],
                "making": made - up,
                "first_step": first - made,
                "second_step": second - first,
                "least_moved": min(moved),
                "most_moved": max(moved),
                "log": LOG,
                "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            }
        )
    )


main()
