"""How the models of the zoo are built: small, seeded, of lively weights, with two inputs each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Inputs = Callable[[int], Any]
"""0 or 1 -> an input of a model, of its first or its second shape."""


class Case(NamedTuple):
    """A model in evaluation mode, arguments of two shapes, and what draws more of them.

    Arguments are a mapping of keywords or a tuple.
    """

    model: nn.Module
    first: Any
    second: Any
    draw: Inputs


Build = Callable[[], Case]


def architecture(model: str, inputs: Inputs, **settings: Any) -> Build:
    """Return what builds a class of `transformers` from its configuration's settings."""

    def build() -> Case:
        import transformers

        torch.manual_seed(0)
        kind = getattr(transformers, model)
        return case(kind(kind.config_class(**settings)), inputs)

    return build


def network(kind: Callable[[], nn.Module], inputs: Inputs) -> Build:
    """Return what builds a hand-written model."""

    def build() -> Case:
        torch.manual_seed(0)
        return case(kind(), inputs)

    return build


def case(model: nn.Module, inputs: Inputs) -> Case:
    """Give a model lively weights, and draw its two inputs."""
    model.eval().requires_grad_(True)
    enliven(model)
    return Case(model, inputs(0), inputs(1), inputs)


@torch.no_grad()
def enliven(model: nn.Module) -> None:
    """Write weights in which no part of a model goes unheard.

    Initial weights hide mistakes: biases of 0, norms of 1, layer scales of 1e-6 and statistics of
    (0, 1) leave out what they multiply or add.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_floating_point():
                continue
            if parameter.dim() > 1 and isinstance(module, nn.Embedding):
                parameter.normal_(0, 0.5)
            elif parameter.dim() > 1 and name == "weight":
                parameter.normal_(0, 1 / math.sqrt(max(1, parameter[0].numel())))
            elif parameter.dim() == 1 and name == "weight":
                parameter.uniform_(0.6, 1.4)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.5, 2)


def shape(which: int, length: int = 9) -> tuple[int, int]:
    """Batch and length of the first or the second input."""
    return (2, length) if which == 0 else (3, length + 4)


def tokens(which: int, vocabulary: int = 90, length: int = 9) -> dict[str, Tensor]:
    """Ids from 3 on, the last two of one row padded."""
    ids = torch.randint(3, vocabulary, shape(which, length))
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def ids_only(which: int) -> dict[str, Tensor]:
    """Ids without padding."""
    return {"input_ids": tokens(which)["input_ids"]}


def of_length(length: int) -> Inputs:
    """Ids whose two lengths are multiples of `length`, for models that work in blocks."""

    def inputs(which: int) -> dict[str, Tensor]:
        ids = torch.randint(3, 90, (2, length * (which + 1)))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    return inputs


def fixed_length(length: int) -> Inputs:
    """Ids of one length, two rows and then three."""

    def inputs(which: int) -> dict[str, Tensor]:
        ids = torch.randint(3, 90, (2 + which, length))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    return inputs


def translation(which: int) -> dict[str, Tensor]:
    """Ids for an encoder and for a decoder."""
    return {**tokens(which), "decoder_input_ids": torch.randint(3, 90, shape(which, 5))}


def images(size: int = 32, other: int | None = None, channels: int = 3) -> Inputs:
    """Two images of `size`; then three, of the size `other` where one is given."""

    def inputs(which: int) -> dict[str, Tensor]:
        batch, edge = (2, size) if which == 0 else (3, other or size)
        return {"pixel_values": torch.randn(batch, channels, edge, edge)}

    return inputs


def waves(samples: int = 800) -> Inputs:
    """Sound waves."""

    def inputs(which: int) -> dict[str, Tensor]:
        return {"input_values": torch.randn(2 + which, samples + 400 * which)}

    return inputs


def together(*parts: Inputs) -> Inputs:
    """The inputs of several kinds in one call."""
    return lambda which: {key: value for part in parts for key, value in part(which).items()}


def tensors(**draw: Callable[[int], Tensor]) -> Inputs:
    """Keyword arguments, each drawn by a function of which input it is for."""
    return lambda which: {name: one(which) for name, one in draw.items()}
