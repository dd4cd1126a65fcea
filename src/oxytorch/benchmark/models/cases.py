"""The whole models that `oxytorch bench models` measures.

All have random weights: speed does not depend on their values, and nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from oxytorch.benchmark.models.networks import DLRM, SequenceClassifier

Inputs = tuple[Tensor, ...] | dict[str, Tensor]
"""Positional or keyword arguments of a model's `forward`."""

Configuration = TypeVar("Configuration", bound=Any)

TEXT_LENGTH = 128
IMAGE_SIZE = 224


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


def _text(batch: int, vocabulary: int) -> dict[str, Tensor]:
    """What a tokenizer returns for sentences without padding."""
    shape = (batch, TEXT_LENGTH)
    return {
        "input_ids": torch.randint(0, vocabulary, shape),
        "attention_mask": torch.ones(shape, dtype=torch.int64),
    }


def _images(batch: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, IMAGE_SIZE, IMAGE_SIZE)}


def _with_imagenet_classes(config: Configuration) -> Configuration:
    """The configuration with ImageNet's thousand classes instead of the default two."""
    config.num_labels = 1000
    return config


def _set_batch_norm_statistics(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    """Give every batch norm the statistics of one random batch.

    Left at mean 0 and variance 1, the activations of an untrained network grow from layer to
    layer, and a comparison of its outputs would say little.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = None
        norm.reset_running_stats()
    model.train()
    with torch.no_grad():
        model(**inputs)
    model.eval()
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def _bert(batch: int) -> tuple[nn.Module, Inputs]:
    from transformers import BertConfig, BertModel

    config = BertConfig()
    inputs = _text(batch, config.vocab_size)
    inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    return BertModel(config), inputs


def _distilbert(batch: int) -> tuple[nn.Module, Inputs]:
    from transformers import DistilBertConfig, DistilBertModel

    config = DistilBertConfig()
    return DistilBertModel(config), _text(batch, config.vocab_size)


def _gpt2(batch: int) -> tuple[nn.Module, Inputs]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(use_cache=False)
    return GPT2LMHeadModel(config), _text(batch, config.vocab_size)


def _resnet50(batch: int) -> tuple[nn.Module, Inputs]:
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(_with_imagenet_classes(ResNetConfig()))
    _set_batch_norm_statistics(model, _images(4))
    return model, _images(batch)


def _mobilenet_v2(batch: int) -> tuple[nn.Module, Inputs]:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    model = MobileNetV2ForImageClassification(_with_imagenet_classes(MobileNetV2Config()))
    _set_batch_norm_statistics(model, _images(4))
    return model, _images(batch)


def _vit(batch: int) -> tuple[nn.Module, Inputs]:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(_with_imagenet_classes(ViTConfig())), _images(batch)


def _lstm(batch: int) -> tuple[nn.Module, Inputs]:
    model = SequenceClassifier(features=256, hidden=512, layers=2, classes=32)
    return model, (torch.randn(batch, 64, 256),)


def _dlrm(batch: int) -> tuple[nn.Module, Inputs]:
    tables, rows, lookups = 26, 50_000, 10
    indices = torch.randint(0, rows, (tables, batch * lookups))
    offsets = torch.arange(0, batch * lookups, lookups).repeat(tables, 1)
    return DLRM(tables=tables, rows=rows), (torch.randn(batch, 13), indices, offsets)


def _seeded(
    build: Callable[[int], tuple[nn.Module, Inputs]],
) -> Callable[[int], tuple[nn.Module, Inputs]]:
    def seeded_build(batch: int) -> tuple[nn.Module, Inputs]:
        torch.manual_seed(0)
        model, inputs = build(batch)
        return model.eval(), inputs

    return seeded_build


CASES: dict[str, ModelCase] = {
    case.name: case
    for case in (
        ModelCase("bert", "BERT-base, 128 tokens", 1, _seeded(_bert)),
        ModelCase("distilbert", "DistilBERT-base, 128 tokens", 1, _seeded(_distilbert)),
        ModelCase("gpt2", "GPT-2 prefill, 128 tokens", 1, _seeded(_gpt2)),
        ModelCase("resnet50", "ResNet-50, 224 x 224", 1, _seeded(_resnet50)),
        ModelCase("mobilenet_v2", "MobileNetV2, 224 x 224", 1, _seeded(_mobilenet_v2)),
        ModelCase("vit", "ViT-base, 224 x 224", 1, _seeded(_vit)),
        ModelCase("lstm", "LSTM, 2 layers of 512, 64 steps", 1, _seeded(_lstm)),
        ModelCase("dlrm", "DLRM, 26 tables", 128, _seeded(_dlrm)),
    )
}
"""Every model by name, in the order of the tables."""
