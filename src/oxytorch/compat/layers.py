"""The predecessor's layers, and what makes its optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import ops, optim


class FrozenBatchNorm2d(nn.Module):
    """Batch normalization whose statistics and affine parameters are buffers, and never change."""

    def __init__(self, num_features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.num_features, self.eps = num_features, eps
        self.weight: Tensor
        self.bias: Tensor
        self.running_mean: Tensor
        self.running_var: Tensor
        self.register_buffer("weight", torch.ones(num_features))
        self.register_buffer("bias", torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def forward(self, x: Tensor) -> Tensor:
        statistics = self.running_mean, self.running_var
        return functional.batch_norm(x, *statistics, self.weight, self.bias, False, 0.0, self.eps)

    def extra_repr(self) -> str:
        """For people."""
        return f"{self.num_features}, eps={self.eps}"


def interaction(*args: Tensor) -> Tensor:
    """The first of some features of [batch, dim], then the dot products of all pairs of them."""
    return ops.interaction(args[0], args[1:])


class EmbeddingSpec(NamedTuple):
    """One table of a `MergedEmbeddingBag`."""

    num_of_features: int
    feature_size: int
    pooling_modes: str
    dtype: torch.dtype
    weight: Tensor | None
    sparse: bool
    include_last_offset: bool


class MergedEmbeddingBag(nn.Module):
    """Embedding bags over several tables in one call: a list of [bags, dim], one for each table.

    embedding_specs: tables of one dimension, dtype and mode, "sum" or "mean".
    """

    def __init__(self, embedding_specs: Sequence[EmbeddingSpec]) -> None:
        super().__init__()
        first = embedding_specs[0]
        for spec in embedding_specs:
            if (spec.feature_size, spec.dtype, spec.pooling_modes) != (
                first.feature_size, first.dtype, first.pooling_modes,
            ):  # fmt: skip
                raise ValueError(
                    f"{type(self).__name__}: expected tables of one feature_size, dtype and "
                    f"pooling mode, got {first} and {spec}"
                )
        if first.pooling_modes not in ("sum", "mean"):
            raise ValueError(
                f"{type(self).__name__}: expected the pooling mode 'sum' or 'mean', got "
                f"{first.pooling_modes!r}"
            )
        self.mode = first.pooling_modes
        self.include_last_offset = first.include_last_offset
        self.n_tables = len(embedding_specs)
        self.weights = nn.ParameterList(nn.Parameter(_values(spec)) for spec in embedding_specs)

    @classmethod
    def from_embeddingbag_list(
        cls, tables: Sequence[nn.EmbeddingBag], **options: Any
    ) -> MergedEmbeddingBag:
        """One of several `nn.EmbeddingBag`, with their weights."""
        return cls(
            [
                EmbeddingSpec(
                    table.num_embeddings, table.embedding_dim, table.mode, table.weight.dtype,
                    table.weight.detach(), table.sparse, table.include_last_offset,
                )
                for table in tables
            ],
            **options,
        )  # fmt: skip

    def forward(self, *args: Any) -> Any:
        """The lookups; args: indices and offsets, a tensor each per table, or a pair of both."""
        return self._looked_up(*(args[0] if len(args) == 1 else args[:2]))

    def _looked_up(self, indices: Sequence[Tensor], offsets: Sequence[Tensor]) -> list[Tensor]:
        begins = [own[:-1] if self.include_last_offset else own for own in offsets]
        joined = ops.merged_embedding_bag([*self.weights], [*indices], begins, self.mode)
        return [*joined.chunk(self.n_tables, dim=1)]

    def extra_repr(self) -> str:
        """For people."""
        return f"{self.n_tables} tables, mode={self.mode!r}"


class MergedEmbeddingBagWithCat(MergedEmbeddingBag):
    """The same, with the lookups joined behind dense features: [bags, dim + tables * dim]."""

    def forward(self, *args: Any) -> Any:
        """The joined features; args: indices, offsets, dense features."""
        indices, offsets, dense = args
        return torch.cat((dense, *self._looked_up(indices, offsets)), dim=1)


def _values(spec: EmbeddingSpec) -> Tensor:
    if spec.weight is not None:
        return spec.weight.detach().clone()
    table = torch.empty(spec.num_of_features, spec.feature_size, dtype=spec.dtype)
    return nn.init.normal_(table)


class IPEXLinearEltwise(nn.Module):
    """A linear layer and an activation, "relu" or "sigmoid"."""

    def __init__(self, ipex_linear_module: nn.Module, eltwise: str = "relu") -> None:
        super().__init__()
        if eltwise not in ("relu", "sigmoid"):
            raise ValueError(
                f"IPEXLinearEltwise: expected eltwise 'relu' or 'sigmoid', got {eltwise!r}"
            )
        self.m, self.eltwise = ipex_linear_module, eltwise

    def forward(self, x: Tensor) -> Tensor:
        value = self.m(x)
        return torch.relu(value) if self.eltwise == "relu" else torch.sigmoid(value)


class Lamb(optim.Lamb):
    """`oxytorch.optim.Lamb`; fused: accepted, the step is fused in any case."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        fused: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, **options)


def create_optimizer_lars(
    model: nn.Module,
    lr: float,
    momentum: float,
    weight_decay: float,
    bn_bias_separately: bool,
    epsilon: float,
) -> optim.Lars:
    """Lars over a model's parameters; bn_bias_separately: those of normalizations, without decay,
    and biases are in groups of their own, which step as SGD does."""
    settings: dict[str, Any] = {
        "lr": lr,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "epsilon": epsilon,
    }
    if not bn_bias_separately:
        return optim.Lars(model.parameters(), **settings)
    norms = [
        parameter
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        for parameter in module.parameters(recurse=False)
    ]
    known = {id(parameter) for parameter in norms}
    named = [(name, p) for name, p in model.named_parameters() if id(p) not in known]
    biases = [p for name, p in named if name.endswith("bias")]
    others = [p for name, p in named if not name.endswith("bias")]
    groups = [
        {"params": others, "lars": True},
        {"params": norms, "lars": False, "weight_decay": 0},
        {"params": biases, "lars": False},
    ]
    return optim.Lars([group for group in groups if group["params"]], **settings)
