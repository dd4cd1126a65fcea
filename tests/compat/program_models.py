"""Models of the programs in `programs/`, with random weights."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn


def layers(*sizes: int) -> nn.Sequential:
    """Linear layers from size to size, with ReLU between them, in evaluation mode."""
    made: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        made += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*made[:-1]).eval()


def image_network(classes: int = 10) -> nn.Sequential:
    """A convolution, batch normalization and a linear layer, for images of 16 x 16 pixels."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4096, classes),
    ).eval()


def language_model(kind: str, vocabulary: int = 128, **settings: Any) -> Any:
    """Two layers of a model of transformers by the name of its class, in evaluation mode."""
    import transformers

    model = getattr(transformers, kind)
    config = model.config_class(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        **settings,
    )
    return model(config).eval()


def training_data() -> list[tuple[Any, Any]]:
    """Five batches of inputs of 16 numbers, and one of four classes for each."""
    return [(torch.rand(8, 16), torch.randint(4, (8,))) for _ in range(5)]


def train(model: nn.Module, optimizer: Any, batches: Any, dtype: Any = None) -> None:
    """A step for each batch; dtype: of autocast."""
    model.train()
    for data, target in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = nn.functional.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
