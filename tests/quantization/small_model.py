"""A small model with everything that quantization has to tell apart."""

from __future__ import annotations

import torch
from torch import nn


class Small(nn.Module):
    """An embedding, two linear layers with a norm between them, and an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 256)
        self.up = nn.Linear(256, 128)
        self.norm = nn.LayerNorm(128)
        self.down = nn.Linear(128, 64, bias=False)
        self.recurrent = nn.LSTM(64, 8, batch_first=True)
        self.register_buffer("offset", torch.full((64,), 0.25))
        self.register_buffer("steps", torch.arange(3), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.down(torch.relu(self.norm(self.up(self.table(ids))))) + self.offset
        result: torch.Tensor = self.recurrent(hidden)[0]
        return result
