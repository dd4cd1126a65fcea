"""What `oxytorch bench gpu-optim` measures: tensors, and who updates them how."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from oxytorch.benchmark.core.contest import Absent
from oxytorch.benchmark.optim.cases import (
    LEARNING_RATE,
    OPTIMIZERS,
    Case,
    Entrant,
    Shapes,
    own_entrants,
    small_shapes,
    stock,
)


def llama_shapes() -> Shapes:
    """Sixteen layers of a Llama of width 2048 with its embedding and head: 147 tensors, 0.95 B."""
    width, inner, words = 2048, 5632, 32000
    layer: Shapes = [(width, width)] * 4 + [(inner, width)] * 2 + [(width, inner)] + [(width,)] * 2
    return [(words, width), *layer * 16, (width,), (words, width)]


def resnet50_shapes() -> Shapes:
    """ResNet-50's bottlenecks without their shortcuts, and the classifier: 146 tensors, 22.8 M."""
    shapes: Shapes = []
    before = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for _ in range(blocks):
            for out, into, side in ((width, before, 1), (width, width, 3), (4 * width, width, 1)):
                shapes += [(out, into, side, side), (out,), (out,)]
            before = 4 * width
    return [*shapes, (1000, before), (1000,)]


CASES = {
    case.name: case
    for case in (
        Case("llama", "Llama shape", llama_shapes),
        Case("resnet50", "ResNet-50", resnet50_shapes),
        Case("small", "1000 small tensors", small_shapes),
    )
}

PEERS = {
    "foreach": "torch foreach",
    "fused": "torch fused",
    "optimi": "torch-optimi",
    "bitsandbytes": "bitsandbytes",
    "flashoptim": "FlashOptim",
    "oxytorch": "oxytorch",
}
"""Contestants in the order of the tables."""

DEFAULT_FORMATS = ("float32", "bfloat16", "split", "split+int8")
"""Formats in which oxytorch takes part unless others are asked for."""

Maker = Callable[[Sequence[Tensor]], Optimizer]

_ADAMW = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
ARGUMENTS = {"AdamW": _ADAMW, "Adam": {**_ADAMW, "weight_decay": 0.0}}
"""Arguments that peers have other defaults for than torch; else those of `OPTIMIZERS`."""


def entrants(optimizer: str, peers: Sequence[str], formats: Sequence[str]) -> Iterator[Entrant]:
    """Everybody who is asked for and has the optimizer, absent ones too.

    A peer takes part in its formats, whichever are asked for of oxytorch.
    """
    for peer, label in PEERS.items():
        if peer not in peers:
            continue
        if peer == "oxytorch":
            yield from own_entrants(optimizer, formats)
            continue
        for kept in _formats_of(peer, optimizer):
            suffix = "" if kept == "float32" else f" {kept}"
            make = _maker(peer, optimizer, kept)
            # Its square roots and quotients are approximate: a change differs by 1.3e-4.
            allowed = 1e-3 if (peer, kept) == ("bitsandbytes", "float32") else 0.0
            yield Entrant(peer + suffix, label + suffix, kept, make, allowed)


def _formats_of(peer: str, optimizer: str) -> tuple[str, ...]:
    """The formats in which a peer has the optimizer."""
    if peer in ("foreach", "fused"):
        known = hasattr(torch.optim, optimizer)
        return ("float32", "bfloat16") if known and peer == "fused" else ("float32",) * known
    of_others: dict[str, dict[str, tuple[str, ...]]] = {
        "optimi": {"AdamW": ("float32", "bfloat16"), "SGD": ("float32",), "Lion": ("float32",)},
        "bitsandbytes": {
            "AdamW": ("float32", "float32+int8"),
            "SGD": ("float32",),
            "Lion": ("float32", "float32+int8"),
        },
        "flashoptim": dict.fromkeys(("AdamW", "SGD", "Lion"), ("split+int8",)),
    }
    return of_others[peer].get(optimizer, ())


def _maker(peer: str, optimizer: str, kept: str) -> Maker:
    if peer in ("foreach", "fused"):
        return lambda parameters: stock(optimizer, parameters, **{peer: True})
    arguments = {**OPTIMIZERS[optimizer], **ARGUMENTS.get(optimizer, {})}
    names = {"optimi": optimizer, "bitsandbytes": optimizer, "flashoptim": f"Flash{optimizer}"}
    how: dict[str, dict[str, Any]] = {
        "optimi": {"triton": True, "kahan_sum": False},
        "bitsandbytes": {"optim_bits": 8 if kept.endswith("int8") else 32},
        # Of its formats the one that comes closest to split+int8.
        "flashoptim": {"quantize": True, "master_weight_bits": 24},
    }

    def make(parameters: Sequence[Tensor]) -> Optimizer:
        module = _imported("bitsandbytes.optim" if peer == "bitsandbytes" else peer)
        created: Optimizer = getattr(module, names[peer])(
            [*parameters], lr=LEARNING_RATE, **arguments, **how[peer]
        )
        return created

    return make


def _imported(name: str) -> Any:
    package = name.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        on_index = {"optimi": "torch-optimi"}.get(package, package)
        raise Absent(f"{package} is not installed (pip install {on_index})")
    return importlib.import_module(name)
