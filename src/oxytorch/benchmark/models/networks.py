"""The two benchmark models that `transformers` does not have: an LSTM and a DLRM.

Both are written as a plain user of PyTorch would write them, without any thought of oxytorch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class SequenceClassifier(nn.Module):
    """A stacked LSTM and a linear layer on its last step.

    [batch, sequence, features] -> [batch, classes].
    """

    def __init__(self, features: int, hidden: int, layers: int, classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, num_layers=layers, batch_first=True)
        self.classifier = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(x)
        scores: Tensor = self.classifier(states[:, -1])
        return scores


def multilayer_perceptron(sizes: Sequence[int]) -> nn.Sequential:
    """Linear layers of the given sizes with ReLU between them and none at the end."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    """Deep learning recommendation model (Naumov et al., 2019, arXiv:1906.00091).

    A bottom perceptron for the dense features, one embedding bag per categorical feature, the
    dot product of every pair of the resulting vectors, and a top perceptron on all of them.

    Args of `forward`: dense [batch, dense_features]; indices [tables, batch * lookups] and
    offsets [tables, batch], both int64. Returns the click probability, [batch, 1].
    """

    lower_rows: Tensor
    lower_columns: Tensor

    def __init__(
        self,
        dense_features: int = 13,
        tables: int = 26,
        rows: int = 50_000,
        dim: int = 128,
        bottom: Sequence[int] = (512, 256),
        top: Sequence[int] = (1024, 1024, 512, 256),
    ) -> None:
        super().__init__()
        vectors = tables + 1
        self.bottom = multilayer_perceptron([dense_features, *bottom, dim])
        self.embeddings = nn.ModuleList(
            [nn.EmbeddingBag(rows, dim, mode="sum") for _ in range(tables)]
        )
        pairs = vectors * (vectors - 1) // 2
        self.top = multilayer_perceptron([dim + pairs, *top, 1])
        lower_rows, lower_columns = torch.tril_indices(vectors, vectors, offset=-1)
        self.register_buffer("lower_rows", lower_rows, persistent=False)
        self.register_buffer("lower_columns", lower_columns, persistent=False)

    def forward(self, dense: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
        features = torch.relu(self.bottom(dense))
        bags = [bag(indices[table], offsets[table]) for table, bag in enumerate(self.embeddings)]
        vectors = torch.stack([features, *bags], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        pairs = products[:, self.lower_rows, self.lower_columns]
        return torch.sigmoid(self.top(torch.cat([features, pairs], dim=1)))
