"""Trains a decoder of Mixtral's form: each token goes to two of eight experts."""

from __future__ import annotations

import torch
from layers import MLP, Attention, Decoder, Layer
from torch import Tensor, nn

from program import train_language_model


class Experts(nn.Module):
    def __init__(self, width: int, inner: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(MLP(width, inner) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).float().softmax(-1).topk(2)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        result = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            row, place = torch.where(chosen == index)
            result = result.index_add(0, row, expert(rows[row]) * weights[row, place, None])
        return result.view_as(x)


def model(layers: int, width: int, inner: int, vocabulary: int, experts: int) -> Decoder:
    heads = width // 64

    def make() -> Layer:
        return Layer(width, Attention(width, heads, heads // 4), Experts(width, inner, experts))

    return Decoder(width, vocabulary, layers, make)


SIZES = {"layers": 8, "width": 1024, "inner": 3584, "vocabulary": 32000, "experts": 8}
LOOP = {"steps": 8, "batch": 4, "shortest": 128, "longest": 2048}

if __name__ == "__main__":
    train_language_model(__doc__ or "", model, SIZES, LOOP)
