"""Small models that the tests of `optimize` run over, each with the input it is called with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oxytorch.benchmark.models.networks import DLRM


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    sample: Callable[[], Any]
    fused: tuple[str, ...] = ()
    """Words that must stand in the report of what was done."""


def _transformer(kind: str, **sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        config = getattr(transformers, kind + "Config")(**sizes)
        return getattr(transformers, kind + "Model")(config)

    return build


def _tokens() -> dict[str, Tensor]:
    ids = torch.randint(0, 90, (2, 9))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _image() -> tuple[Tensor]:
    return (torch.randn(2, 3, 32, 32),)


class Gated(nn.Module):
    """A gated feed-forward block around a hand-written RMS norm, with a residual connection."""

    class Norm(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(size) + 0.5)
            self.variance_epsilon = 1e-5

        def forward(self, x: Tensor) -> Tensor:
            wide = x.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            return self.weight * wide.to(x.dtype)

    def __init__(self, size: int = 24) -> None:
        super().__init__()
        self.norm = self.Norm(size)
        self.gate = nn.Linear(size, 2 * size, bias=False)
        self.up = nn.Linear(size, 2 * size, bias=False)
        self.down = nn.Linear(2 * size, size, bias=False)
        self.last = self.Norm(size)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        total = x + residual
        hidden = self.norm(total)
        hidden = self.down(nn.functional.silu(self.gate(hidden)) * self.up(hidden))
        return self.last(hidden + total)


class Attention(nn.Module):
    """Attention as users write it: three projections of one input, heads by view."""

    def __init__(self, size: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(size, size)
        self.key = nn.Linear(size, size)
        self.value = nn.Linear(size, size)
        self.out = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, size = x.shape
        q, k, v = (
            layer(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, size))


class Convolutions(nn.Module):
    """Every kind of convolution, normalization and activation that the passes know, and others."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv1d(3, 8, 3, padding=1)
        self.one_norm = nn.BatchNorm1d(8)
        self.two = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.group = nn.GroupNorm(2, 8)
        self.prelu = nn.PReLU()
        self.same = nn.Conv2d(8, 8, 3, padding="same")
        self.three = nn.Conv3d(1, 4, 3, padding=1)
        self.three_norm = nn.BatchNorm3d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.leaky_relu(self.one_norm(self.one(x)), 0.2)
        x = torch.clamp(self.two(x.unflatten(2, (4, 4))), -1.0, 2.0)
        x = self.same(self.prelu(self.group(self.up(x))))
        return torch.relu(self.three_norm(self.three(x.unsqueeze(1)))).mean((2, 3, 4))


class Classifier(nn.Module):
    """Linear layers with folded normalization, an LSTM and a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 10, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(20, 12, batch_first=True)
        self.hidden = nn.Linear(12, 16)
        self.norm = nn.BatchNorm1d(16)
        self.act = nn.Hardswish()
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.lstm(x)
        x, _ = self.gru(x)
        return self.out(self.drop(self.act(self.norm(self.hidden(x[:, -1])))))


class Tied(nn.Module):
    """An embedding whose weight is the output layer's, and two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.relu(self.first(self.embedding(ids))))))


_TEXT = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}

CASES: dict[str, Case] = {
    "bert": Case(
        _transformer("Bert", intermediate_size=48, max_position_embeddings=16, **_TEXT),
        _tokens,
        ("add + layer_norm", "linear + gelu"),
    ),
    "distilbert": Case(
        _transformer(
            "DistilBert", vocab_size=90, dim=32, hidden_dim=48, n_layers=2, n_heads=2,
            max_position_embeddings=16,
        ),
        _tokens,
        ("add + layer_norm", "linear + gelu"),
    ),
    "gpt2": Case(
        _transformer("GPT2", vocab_size=90, n_embd=32, n_layer=2, n_head=2, n_positions=16),
        _tokens,
        ("linear + gelu", "Conv1D"),
    ),
    "vit": Case(
        _transformer(
            "ViT", hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=48, image_size=32, patch_size=8,
        ),
        _image,
        ("linear + gelu", "linear + add"),
    ),
    "resnet": Case(
        _transformer(
            "ResNet", embedding_size=8, hidden_sizes=[16, 32], depths=[1, 2],
            layer_type="bottleneck",
        ),
        _image,
        ("convolution + folded batch norm + add+relu", "convolution + folded batch norm + relu"),
    ),
    "mobilenet": Case(
        _transformer("MobileNetV2", depth_multiplier=0.25, image_size=32),
        _image,
        ("convolution + folded batch norm + clamp",),
    ),
    "gated": Case(
        Gated,
        lambda: (torch.randn(2, 5, 24), torch.randn(2, 5, 24)),
        ("linear + silu", "linear + mul", "add + rms_norm"),
    ),
    "attention": Case(Attention, lambda: (torch.randn(2, 5, 32),), ("Linear",)),
    "convolutions": Case(
        Convolutions,
        lambda: (torch.randn(2, 3, 16),),
        ("leaky_relu", "clamp", "Conv3d", "Conv1d"),
    ),
    "classifier": Case(
        Classifier,
        lambda: (torch.randn(3, 7, 6),),
        ("linear + folded batch norm + hardswish", "LSTM"),
    ),
    "recommender": Case(
        lambda: DLRM(4, tables=3, rows=20, dim=16, bottom=(), top=()),
        lambda: (
            torch.randn(5, 4),
            torch.randint(0, 20, (3, 10)),
            torch.arange(0, 10, 2).repeat(3, 1),
        ),
        ("embedding bags in one", "pairwise interaction"),
    ),
    "tied": Case(Tied, lambda: (torch.randint(0, 30, (2, 6)),), ("linear + relu",)),
}  # fmt: skip


def build(name: str) -> tuple[nn.Module, Any]:
    """Return a model in evaluation mode, with lively normalization statistics, and its sample."""
    torch.manual_seed(0)
    model = CASES[name].build().eval()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.5, 2)
            module.weight.data.uniform_(0.5, 1.5)
            module.bias.data.normal_(0, 0.2)
    return model, CASES[name].sample()


def call(model: nn.Module, sample: Any) -> Tensor:
    """Run a model and return its first output tensor."""
    result = model(**sample) if isinstance(sample, dict) else model(*sample)
    if isinstance(result, Tensor):
        return result
    return result[0]
