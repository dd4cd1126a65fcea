"""Small models of transformers, and what is seen of them and done to train them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tiny import tiny

from .compare import Log


def token_ids(rows: int = 2, columns: int = 7) -> torch.Tensor:
    return torch.randint(5, 90, (rows, columns), generator=torch.Generator().manual_seed(3))


def spread(uses: Iterable[str], forms: Sequence[str]) -> Iterator[Any]:
    """Every use in every form; one form of each use, in turn, is not slow."""
    for number, name in enumerate(uses):
        for turn, form in enumerate(forms):
            often = number % len(forms) == turn
            yield pytest.param(
                name, form, id=f"{name}-{form}", marks=() if often else pytest.mark.slow
            )


_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
_TEXT = {"vocab_size": 99, "max_position_embeddings": 64}
_LABELS = {"num_labels": 3}


def bert() -> Any:
    return tiny("BertForSequenceClassification", **_SIZES, **_TEXT, **_LABELS)


def gpt2() -> Any:
    return tiny(
        "GPT2LMHeadModel", vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64,
        eos_token_id=1, bos_token_id=2,
    )  # fmt: skip


def llama() -> Any:
    return tiny(
        "LlamaForCausalLM", **_SIZES, **_TEXT, num_key_value_heads=2, tie_word_embeddings=False,
        eos_token_id=1, bos_token_id=2, pad_token_id=0,
    )  # fmt: skip


def t5() -> Any:
    return tiny(
        "T5ForConditionalGeneration", vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=2,
        num_heads=4, decoder_start_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip


def vit() -> Any:
    return tiny("ViTForImageClassification", **_SIZES, **_LABELS, image_size=16, patch_size=4)


def resnet() -> Any:
    model = tiny(
        "ResNetForImageClassification", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1],
        layer_type="basic", **_LABELS,
    )  # fmt: skip
    with torch.no_grad():
        for m in model.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.running_mean.normal_(0, 0.3)
                m.running_var.uniform_(0.5, 2)
    return model


def image() -> torch.Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))


def text() -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 4:] = 0
    return {"input_ids": token_ids(), "attention_mask": mask}


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, torch.Tensor]]]] = {
    "bert": (bert, text),
    "gpt2": (gpt2, text),
    "llama": (llama, text),
    "t5": (t5, lambda: {**text(), "decoder_input_ids": token_ids(2, 4)}),
    "vit": (vit, lambda: {"pixel_values": image()}),
    "resnet": (resnet, lambda: {"pixel_values": image()}),
}


def see(model: Any, inputs: dict[str, Any], log: Log) -> None:
    with torch.no_grad():
        result = model(**inputs)
        log(type(result), result.logits, model(**inputs).logits)


def loss_of(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**inputs).logits.float().pow(2).mean()


def train(model: Any, inputs: dict[str, torch.Tensor], log: Log, steps: int = 2) -> None:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for _ in range(steps):
        loss = loss_of(model, inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log(loss)
