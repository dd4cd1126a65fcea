"""Networks of sequences, sets, graphs and tables, as people write them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class GraphNetwork(nn.Module):
    """Messages along edges, summed by `index_add_`; attention over neighbours in the last layer."""

    class Layer(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.message = nn.Sequential(
                nn.Linear(2 * size, size), nn.ReLU(), nn.Linear(size, size)
            )
            self.update = nn.GRUCell(size, size)
            self.norm = nn.LayerNorm(size)

        def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
            source, target = edges
            messages = self.message(torch.cat([nodes[source], nodes[target]], dim=-1))
            total = torch.zeros_like(nodes).index_add_(0, target, messages.to(nodes.dtype))
            degree = torch.bincount(target, minlength=nodes.shape[0]).clamp(min=1).unsqueeze(-1)
            return self.norm(nodes + self.update(total / degree.to(nodes.dtype), nodes))

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(size) for _ in range(2))
        self.score = nn.Linear(size, 1)
        self.head = nn.Linear(size, 4)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            nodes = layer(nodes, edges)
        weights = torch.softmax(self.score(nodes), dim=0)
        return self.head((weights * nodes).sum(0))


class WaveNet(nn.Module):
    """Dilated causal convolutions with gates and skip connections."""

    class Block(nn.Module):
        def __init__(self, channels: int, dilation: int) -> None:
            super().__init__()
            self.pad = dilation
            self.filter = nn.Conv1d(channels, channels, 2, dilation=dilation)
            self.gate = nn.Conv1d(channels, channels, 2, dilation=dilation)
            self.residual = nn.Conv1d(channels, channels, 1)
            self.skip = nn.Conv1d(channels, 2 * channels, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            padded = F.pad(x, (self.pad, 0))
            hidden = torch.tanh(self.filter(padded)) * torch.sigmoid(self.gate(padded))
            return x + self.residual(hidden), self.skip(hidden)

    def __init__(self, channels: int = 16, blocks: int = 5) -> None:
        super().__init__()
        self.enter = nn.utils.parametrizations.weight_norm(nn.Conv1d(1, channels, 1))
        self.blocks = nn.ModuleList(self.Block(channels, 2**i) for i in range(blocks))
        self.leave = nn.Sequential(
            nn.ReLU(), nn.Conv1d(2 * channels, channels, 1), nn.ReLU(), nn.Conv1d(channels, 10, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        total: Tensor | int = 0
        for block in self.blocks:
            x, skip = block(x)
            total += skip
        return self.leave(total)


class Tagging(NamedTuple):
    """What the packed RNN returns."""

    tags: Tensor
    state: Tensor
    lengths: Tensor


class PackedRNN(nn.Module):
    """An LSTM and a GRU over packed sequences of unequal lengths; returns a named tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(12, 16, num_layers=2, bidirectional=True, batch_first=True, dropout=0.3)
        self.gru = nn.GRU(32, 20, batch_first=True)
        self.head = nn.Linear(20, 5)

    def forward(self, x: Tensor, lengths: Tensor) -> Tagging:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        packed, _ = self.lstm(packed)
        packed, state = self.gru(packed)
        padded, sizes = pad_packed_sequence(packed, batch_first=True)
        return Tagging(self.head(padded), state, sizes)


class Recommender(nn.Module):
    """Many tables: bags of three modes, deep and cross layers, and a factorization machine."""

    def __init__(self, tables: int = 12, size: int = 8) -> None:
        super().__init__()
        modes = ("sum", "mean", "max")
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(20, size, mode=modes[i % 3]) for i in range(tables)
        )
        width = (tables + 1) * size
        self.dense = nn.Sequential(nn.Linear(4, size), nn.ReLU())
        self.cross = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.deep = nn.Sequential(
            nn.Linear(width, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(32, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(),
        )
        self.out = nn.Linear(width + 16 + 1, 1)

    def forward(self, dense: Tensor, indices: list[Tensor], offsets: list[Tensor]) -> Tensor:
        vectors = [bag(i, o) for bag, i, o in zip(self.bags, indices, offsets, strict=True)]
        vectors.append(self.dense(dense).to(vectors[0].dtype))
        stacked = torch.stack(vectors, dim=1)
        pairs = 0.5 * (stacked.sum(1).pow(2) - stacked.pow(2).sum(1)).sum(1, keepdim=True)
        flat = first = stacked.flatten(1)
        for layer in self.cross:
            flat = first * layer(flat) + flat
        return torch.sigmoid(self.out(torch.cat([flat, self.deep(first), pairs], dim=1)))


class MixtureOfExperts(nn.Module):
    """Tokens go to their two best experts, gathered expert by expert."""

    def __init__(self, size: int = 24, experts: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.router = nn.Linear(size, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = self.norm(x).reshape(-1, x.shape[-1])
        scores = self.router(flat).float().softmax(-1)
        weights, chosen = scores.topk(2, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(flat.dtype)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == index)
            if rows.numel():
                given = expert(flat[rows]) * weights[rows, place].unsqueeze(-1)
                out.index_add_(0, rows, given.to(out.dtype))
        return x + out.view_as(x), scores.mean(0)


class TCN(nn.Module):
    """Temporal blocks with weight norm, causal by cutting what was padded."""

    class Block(nn.Module):
        def __init__(self, inside: int, outside: int, dilation: int) -> None:
            super().__init__()
            norm = nn.utils.parametrizations.weight_norm
            self.cut = 2 * dilation
            self.conv1 = norm(nn.Conv1d(inside, outside, 3, padding=self.cut, dilation=dilation))
            self.conv2 = norm(nn.Conv1d(outside, outside, 3, padding=self.cut, dilation=dilation))
            self.dropout = nn.Dropout(0.2)
            self.shortcut = nn.Conv1d(inside, outside, 1) if inside != outside else None

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.dropout(torch.relu(self.conv1(x)[..., : -self.cut].contiguous()))
            hidden = self.dropout(torch.relu(self.conv2(hidden)[..., : -self.cut].contiguous()))
            return torch.relu(hidden + (x if self.shortcut is None else self.shortcut(x)))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(self.Block(6 if i == 0 else 12, 12, 2**i) for i in range(3)))
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)[:, :, -1])


class HandTransformer(nn.Module):
    """A decoder as in tutorials: one projection for q, k and v, a mask from a buffer, tied head."""

    class Block(nn.Module):
        def __init__(self, size: int, heads: int, longest: int) -> None:
            super().__init__()
            self.heads = heads
            self.ln_1, self.ln_2 = nn.LayerNorm(size), nn.LayerNorm(size)
            self.c_attn, self.c_proj = nn.Linear(size, 3 * size), nn.Linear(size, size)
            self.mlp = nn.ModuleDict(
                {"fc": nn.Linear(size, 4 * size), "proj": nn.Linear(4 * size, size)}
            )
            self.drop = nn.Dropout(0.1)
            mask = torch.tril(torch.ones(longest, longest)).view(1, 1, longest, longest)
            self.register_buffer("mask", mask, persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            batch, length, size = x.shape
            q, k, v = self.c_attn(self.ln_1(x)).split(size, dim=2)
            q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
            mixed = self.drop(F.softmax(scores, dim=-1)) @ v
            x = x + self.drop(
                self.c_proj(mixed.transpose(1, 2).contiguous().view(batch, length, size))
            )
            hidden = self.mlp["fc"](self.ln_2(x))
            hidden = 0.5 * hidden * (1 + torch.tanh(0.7978845608 * (hidden + 0.044715 * hidden**3)))
            return x + self.drop(self.mlp["proj"](hidden))

    def __init__(self, vocabulary: int = 40, size: int = 32, longest: int = 32) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, size), nn.Embedding(longest, size)
        self.blocks = nn.ModuleList(self.Block(size, 2, longest) for _ in range(2))
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(this, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Logits, and the loss where targets are given."""
        x = this.tokens(ids) + this.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in this.blocks:
            x = block(x)
        logits = this.head(this.norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class TorchTransformer(nn.Module):
    """torch's own encoder and attention, with a padding mask given by keyword."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(size, 2, 48, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.pool = nn.MultiheadAttention(size, 2, batch_first=True)
        self.query = nn.Parameter(torch.randn(1, 1, size))
        self.head = nn.Linear(in_features=size, out_features=3)

    def forward(self, *, x: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        x = self.encoder(src=x, src_key_padding_mask=padding)
        query = self.query.expand(x.shape[0], -1, -1)
        pooled, weights = self.pool(query, x, x, key_padding_mask=padding, need_weights=True)
        return self.head(input=pooled.squeeze(1)), weights


class NeuralODE(nn.Module):
    """Fourth-order Runge-Kutta steps of a small network, its calls counted as papers do."""

    def __init__(self, size: int = 6, steps: int = 4) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(size + 1, 32), nn.Tanh(), nn.Linear(32, size))
        self.steps, self.evaluations = steps, 0

    def derivative(self, t: float, x: Tensor) -> Tensor:
        self.evaluations += 1
        return self.field(torch.cat([x, torch.full_like(x[:, :1], t)], dim=1))

    def forward(self, x: Tensor) -> Tensor:
        step = 1.0 / self.steps
        path = [x]
        for i in range(self.steps):
            t = i * step
            a = self.derivative(t, x)
            b = self.derivative(t + step / 2, x + step / 2 * a)
            c = self.derivative(t + step / 2, x + step / 2 * b)
            d = self.derivative(t + step, x + step * c)
            x = x + step / 6 * (a + 2 * b + 2 * c + d)
            path.append(x)
        return torch.stack(path)


class PointNet(nn.Module):
    """Points [batch, 3, points]: a learned transform, shared layers, a maximum over points."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU())
        self.matrix = nn.Linear(16, 9)
        self.conv1, self.conv2 = nn.Conv1d(3, 16, 1), nn.Conv1d(16, 32, 1)
        self.bn1, self.bn2 = nn.BatchNorm1d(16), nn.BatchNorm1d(32)
        self.head = nn.Sequential(
            nn.Linear(32, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        matrix = self.matrix(self.transform(x).amax(-1)).view(-1, 3, 3)
        matrix = matrix + torch.eye(3, dtype=matrix.dtype, device=matrix.device)
        x = torch.bmm(x.transpose(2, 1), matrix.to(x.dtype)).transpose(2, 1)
        x = F.relu(self.bn1(self.conv1(x)))
        x, _ = torch.max(self.bn2(self.conv2(x)), 2)
        return F.log_softmax(self.head(x), dim=-1), matrix


class Seq2Seq(nn.Module):
    """An LSTM encoder, and a decoder of LSTM cells that attends to it step by step."""

    def __init__(self, vocabulary: int = 40, size: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size, padding_idx=0)
        self.encoder = nn.LSTM(size, size, bidirectional=True, batch_first=True)
        self.bridge = nn.Linear(2 * size, size)
        self.energy = nn.Linear(3 * size, size)
        self.score = nn.Linear(size, 1, bias=False)
        self.cell = nn.LSTMCell(3 * size, size)
        self.out = nn.Linear(4 * size, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, (hidden, cell) = self.encoder(self.embedding(source))
        hidden = torch.tanh(self.bridge(torch.cat([hidden[0], hidden[1]], dim=1)))
        cell = torch.zeros_like(hidden)
        steps = []
        for token in target.unbind(1):
            repeated = hidden.unsqueeze(1).expand(-1, memory.shape[1], -1)
            energy = torch.tanh(self.energy(torch.cat([repeated, memory], dim=-1)))
            weights = F.softmax(self.score(energy).squeeze(-1), dim=-1)
            context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
            word = self.embedding(token)
            hidden, cell = self.cell(torch.cat([word, context], dim=1), (hidden, cell))
            steps.append(self.out(torch.cat([hidden, context, word], dim=1)))
        return torch.stack(steps, dim=1)


class TwoTower(nn.Module):
    """Retrieval: queries and items in towers of shared layers, cosine similarities of all pairs."""

    def __init__(self, vocabulary: int = 40, size: int = 16) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(vocabulary, size, mode="mean")
        self.shared = nn.Linear(size, size)
        self.query = nn.Sequential(nn.Linear(size, 32), nn.Mish(), self.shared_layer(32, size))
        self.item = nn.Sequential(nn.Linear(size, 32), nn.Softplus(), self.shared_layer(32, size))
        self.temperature = nn.Parameter(torch.tensor(2.0))

    @staticmethod
    def shared_layer(inside: int, outside: int) -> nn.Module:
        return nn.Sequential(nn.Linear(inside, outside), nn.RMSNorm(outside))

    def forward(self, query: Tensor, item: Tensor) -> dict[str, Tensor]:
        a = F.normalize(self.query(self.shared(self.words(query))), dim=-1)
        b = F.normalize(self.item(self.shared(self.words(item))), dim=-1)
        return {"similarity": a @ b.T * self.temperature.exp(), "query": a, "item": b}
