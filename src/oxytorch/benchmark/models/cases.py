"""The whole models that `oxytorch bench models` measures.

All have random weights: speed does not depend on their values, and nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from oxytorch.benchmark.models.networks import DLRM, SequenceClassifier

Inputs = tuple[Tensor, ...] | dict[str, Tensor]
"""Positional or keyword arguments of a model's `forward`."""

Draw = Callable[[int], Inputs]
"""Batch size -> inputs."""

TOKENS, VOCABULARY = 128, 30_000


@dataclass(frozen=True)
class ModelCase:
    """One model of the benchmark.

    Attributes:
        name: the word used in `--only`, in file names and in results.
        title: what the model is, for tables.
        batch: the batch size unless `--batch` says otherwise.
        build: batch size -> (model in evaluation mode, example inputs), seeded.
    """

    name: str
    title: str
    batch: int
    build: Callable[[int], tuple[nn.Module, Inputs]]


def call_model(model: Callable[..., object], inputs: Inputs) -> object:
    """The model's output for positional or keyword inputs."""
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def output_tensors(output: object) -> list[Tensor]:
    """All tensors of a model's output, in order: a tensor, a sequence or a mapping of them."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, (tuple, list)):
        return [tensor for part in output for tensor in output_tensors(part)]
    if output is None:
        return []
    raise TypeError(
        f"benchmark: expected a model output of tensors, tuples, lists and mappings, "
        f"got {type(output).__name__}"
    )


def cast_tensors(value: Any, dtype: torch.dtype) -> Any:
    """The value with every floating-point tensor in it, through containers, in the dtype."""

    def cast(part: Any) -> Any:
        is_float = isinstance(part, Tensor) and part.is_floating_point()
        return part.to(dtype) if is_float else part

    return pytree.tree_map(cast, value)


def named(inputs: Inputs) -> dict[str, Tensor]:
    """Inputs that are keyword arguments, as such."""
    assert isinstance(inputs, dict)
    return inputs


def tokens(batch: int) -> Inputs:
    """What a tokenizer returns for sentences without padding."""
    shape = (batch, TOKENS)
    return {
        "input_ids": torch.randint(3, VOCABULARY, shape),
        "attention_mask": torch.ones(shape, dtype=torch.int64),
    }


def images(size: int = 224) -> Draw:
    """Images of that height and width."""
    return lambda batch: {"pixel_values": torch.randn(batch, 3, size, size)}


def architecture(
    name: str, title: str, kind: str, inputs: Draw, batch: int = 1, **settings: Any
) -> ModelCase:
    """A class of `transformers` in its default configuration but for these settings."""

    def make() -> nn.Module:
        import transformers

        chosen = getattr(transformers, kind)
        return chosen(chosen.config_class(**settings))  # type: ignore[no-any-return]

    return network(name, title, make, inputs, batch)


def network(
    name: str, title: str, make: Callable[[], nn.Module], inputs: Draw, batch: int = 1
) -> ModelCase:
    """A module in evaluation mode; weights and inputs are random, and the same at every call."""

    def build(batch: int) -> tuple[nn.Module, Inputs]:
        torch.manual_seed(0)
        model = make().eval()
        _set_statistics(model, inputs)
        torch.manual_seed(1)
        return model, inputs(batch)

    return ModelCase(name, title, batch, build)


def _set_statistics(model: nn.Module, inputs: Draw) -> None:
    """Give batch norms the statistics of a batch, or activations grow from layer to layer."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train()
        norm.momentum = None
        norm.reset_running_stats()
    with torch.no_grad():
        given = inputs(2)
        model(**given) if isinstance(given, dict) else model(*given)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval()
        norm.momentum = momentum


def _sentences(batch: int) -> Inputs:
    ids = named(tokens(batch))
    return {**ids, "token_type_ids": torch.zeros_like(ids["input_ids"])}


def _lookups(batch: int) -> Inputs:
    """Dense features, and ten rows of each of 26 tables."""
    indices = torch.randint(0, 50_000, (26, batch * 10))
    return torch.randn(batch, 13), indices, torch.arange(0, batch * 10, 10).repeat(26, 1)


_IMAGENET: dict[str, Any] = {"inputs": images(), "num_labels": 1000}

CASES: dict[str, ModelCase] = {case.name: case for case in (
    architecture("bert", "BERT-base, 128 tokens", "BertModel", _sentences),
    architecture("distilbert", "DistilBERT-base, 128 tokens", "DistilBertModel", tokens),
    architecture("gpt2", "GPT-2 prefill, 128 tokens", "GPT2LMHeadModel", tokens, use_cache=False),
    architecture("resnet50", "ResNet-50, 224 x 224", "ResNetForImageClassification", **_IMAGENET),
    architecture("mobilenet_v2", "MobileNetV2, 224 x 224", "MobileNetV2ForImageClassification",
                 **_IMAGENET),
    architecture("efficientnet", "EfficientNet-B0, 224 x 224",
                 "EfficientNetForImageClassification", **_IMAGENET, width_coefficient=1.0,
                 depth_coefficient=1.0, image_size=224, hidden_dim=1280, initializer_range=0.2),
    architecture("regnet", "RegNetY-4GF, 224 x 224", "RegNetForImageClassification", **_IMAGENET),
    architecture("convnext", "ConvNeXt-T, 224 x 224", "ConvNextForImageClassification",
                 **_IMAGENET),
    architecture("vit", "ViT-base, 224 x 224", "ViTForImageClassification", **_IMAGENET),
    network("lstm", "LSTM, 2 layers of 512, 64 steps",
            lambda: SequenceClassifier(features=256, hidden=512, layers=2, classes=32),
            lambda batch: (torch.randn(batch, 64, 256),)),
    network("dlrm", "DLRM, 26 tables", DLRM, _lookups, batch=128),
)}  # fmt: skip
"""Every model by name, in the order of the tables."""
