"""What `oxytorch bench optim` measures: tensors, storage formats and optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Shapes = list[tuple[int, ...]]


def bert_shapes() -> Shapes:
    """The parameters of BERT-base (bert-base-uncased without its heads): 199 tensors."""
    width, inner = 768, 3072
    norm: Shapes = [(width,), (width,)]
    embeddings: Shapes = [(30522, width), (512, width), (2, width), *norm]
    square: Shapes = [(width, width), (width,)]
    layer = [*square * 4, *norm, (inner, width), (inner,), (width, inner), (width,), *norm]
    return [*embeddings, *layer * 12, *square]


def small_shapes() -> Shapes:
    """1000 small tensors: 500 matrices and 500 vectors."""
    return [shape for _ in range(500) for shape in ((256, 256), (256,))]


@dataclass(frozen=True)
class Case:
    """Tensors that an optimizer updates in one step."""

    name: str
    title: str
    shapes: Callable[[], Shapes]

    def elements(self) -> int:
        """How many numbers they hold."""
        return sum(math.prod(shape) for shape in self.shapes())


CASES = {
    case.name: case
    for case in (
        Case("bert", "BERT-base", bert_shapes),
        Case("small", "1000 small tensors", small_shapes),
    )
}


@dataclass(frozen=True)
class Format:
    """How parameters and states are kept.

    Attributes:
        parameter_dtype: of parameters and gradients.
        options: of oxytorch's optimizers.
        allowed: how far three steps may be from float64, see `runs.check`.
    """

    parameter_dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    allowed: float = 1e-4


_SPLIT = {"master_weights": "split"}
FORMATS = {
    "float32": Format(),
    "float32+bfloat16": Format(options={"state_dtype": torch.bfloat16}, allowed=0.05),
    "float32+int8": Format(options={"state_dtype": torch.int8}, allowed=0.15),
    "bfloat16": Format(torch.bfloat16, allowed=0.15),
    "split": Format(torch.bfloat16, _SPLIT),
    "split+bfloat16": Format(torch.bfloat16, {**_SPLIT, "state_dtype": torch.bfloat16}, 0.05),
    "split+int8": Format(torch.bfloat16, {**_SPLIT, "state_dtype": torch.int8}, 0.15),
}
"""Parameters, and states where they are kept otherwise than float32 (bfloat16: everything)."""

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "Adam": {},
    "AdamW": {},
    "Adagrad": {},
    "RMSprop": {},
    "Lamb": {"weight_decay": 0.01},
    "Lars": {"momentum": 0.9, "weight_decay": 1e-4, "eeta": 0.1},
    "Lion": {},
    "Adafactor": {},
}
"""Name of the class -> its arguments besides the learning rate."""

LEARNING_RATE = 0.01
