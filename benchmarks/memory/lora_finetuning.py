"""Fine-tunes a decoder of Llama's form with LoRA, checkpointed activations and any length."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from layers import MLP, Attention, Layer, RMSNorm, Rotary
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from program import Mark, parser, running

SIZES = {"layers": 22, "width": 2048, "inner": 5632, "vocabulary": 32000, "rank": 16}
LOOP = {"steps": 8, "batch": 4, "shortest": 256, "longest": 4096}


class Model(nn.Module):
    def __init__(self, layers: int, width: int, inner: int, vocabulary: int, rank: int) -> None:
        super().__init__()
        heads = width // 64
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            Layer(width, Attention(width, heads, max(1, heads // 8), rank), MLP(width, inner))
            for _ in range(layers)
        )
        self.norm, self.rotary = RMSNorm(width), Rotary(64)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(".down.weight" in name and ".mlp" not in name)
            if ".up.weight" in name and ".mlp" not in name:
                parameter.requires_grad_(True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        turn = self.rotary(x, torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = checkpoint(layer, x, turn, use_reentrant=False)
        return self.head(self.norm(x))


def training(arguments: argparse.Namespace, mark: Mark) -> Iterator[tuple[float, float]]:
    """Each step's loss and seconds; a step ends when its work on the device has."""
    lengths = random.Random(arguments.seed)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(arguments.device):
        model = Model(*(getattr(arguments, name) for name in SIZES))
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    for step in range(arguments.steps):
        began = time.perf_counter()
        length = lengths.randint(arguments.shortest, arguments.longest)
        mark(f"step {step}: {length} tokens")
        shape = arguments.batch, length
        tokens = torch.randint(arguments.vocabulary, shape, device=arguments.device)
        logits = model(tokens).float()
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found = loss.item()
        yield found, time.perf_counter() - began


def main() -> None:
    arguments = parser(__doc__ or "", **SIZES, **LOOP).parse_args()
    with running(arguments) as mark:
        for _ in training(arguments, mark):
            pass


if __name__ == "__main__":
    main()
