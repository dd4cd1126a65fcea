"""Trains a decoder of Mixtral's form: each token goes to two of eight experts."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from layers import MLP, Attention, Layer, RMSNorm, Rotary
from torch import Tensor, nn

from program import parser, running


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


class Model(nn.Module):
    def __init__(self, layers: int, width: int, inner: int, vocabulary: int, experts: int) -> None:
        super().__init__()
        heads = width // 64
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            Layer(width, Attention(width, heads, heads // 4), Experts(width, inner, experts))
            for _ in range(layers)
        )
        self.norm, self.rotary = RMSNorm(width), Rotary(64)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        turn = self.rotary(x, torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x, turn)
        return self.head(self.norm(x))


def main() -> None:
    sizes = {"layers": 8, "width": 1024, "inner": 3584, "vocabulary": 32000, "experts": 8}
    arguments = parser(
        __doc__ or "", **sizes, steps=8, batch=4, shortest=128, longest=2048
    ).parse_args()
    lengths = random.Random(arguments.seed)
    with running(arguments) as mark:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(arguments.device):
            model = Model(*(getattr(arguments, name) for name in sizes))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for step in range(arguments.steps):
            length = lengths.randint(arguments.shortest, arguments.longest)
            mark(f"step {step}: {length} tokens")
            shape = arguments.batch, length
            tokens = torch.randint(arguments.vocabulary, shape, device=arguments.device)
            logits = model(tokens).float()
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
