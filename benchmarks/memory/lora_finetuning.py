"""Fine-tunes a decoder of Llama's form with LoRA, checkpointed activations and any length."""

from __future__ import annotations

import torch
from layers import MLP, Attention, Layer, RMSNorm, Rotary
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from program import train_language_model


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


SIZES = {"layers": 22, "width": 2048, "inner": 5632, "vocabulary": 32000, "rank": 16}

if __name__ == "__main__":
    train_language_model(__doc__ or "", Model, SIZES, shortest=256, longest=4096, clip=1.0)
