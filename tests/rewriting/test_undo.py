"""`undo` gives a model its own parameters back, with what hangs on them."""

from __future__ import annotations

import io
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import oxytorch
from oxytorch import llm
from oxytorch.quantization import (
    Float8Weight,
    Int4Weight,
    Int8DynamicActivationInt8Weight,
    Int8Weight,
    quantize_,
)
from tiny import tiny

DTYPES = (torch.float32, torch.bfloat16)


def _language_model(is_tied: bool, name: str = "LlamaForCausalLM", **options: Any) -> Any:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 96,
        "max_position_embeddings": 64,
    }
    return tiny(name, **{**sizes, **options}, tie_word_embeddings=is_tied, eos_token_id=None)


def _gpt2(is_tied: bool) -> Any:
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 64}
    return tiny("GPT2LMHeadModel", **sizes, tie_word_embeddings=is_tied, eos_token_id=None)


class _Network(nn.Module):
    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 256)
        self.recurrent = nn.LSTM(256, 256, batch_first=True)
        self.convolution = nn.Conv1d(256, 256, 3, padding=1)
        self.norm = nn.LayerNorm(256)
        self.head = nn.Linear(256, 300)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.recurrent(self.embedding(ids))[0]
        return self.head(self.norm(self.convolution(x.transpose(1, 2)).transpose(1, 2)))


MODELS: dict[str, Callable[[bool], Any]] = {
    "llama": _language_model,
    "qwen2": lambda is_tied: _language_model(is_tied, "Qwen2ForCausalLM"),  # biases
    "mixtral": lambda is_tied: _language_model(
        is_tied, "MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2
    ),
    "gpt2": _gpt2,
    "network": _Network,
}


def _ids() -> torch.Tensor:
    return torch.arange(12).reshape(2, 6)


def _optimized(model: Any, dtype: torch.dtype) -> None:
    oxytorch.optimize(model, sample_input=_ids(), dtype=dtype, inplace=True)


def _without_sample(model: Any, dtype: torch.dtype) -> None:
    oxytorch.optimize(model, dtype=dtype, inplace=True)


def _llm(model: Any, dtype: torch.dtype, **options: Any) -> None:
    llm.optimize(model, dtype, **options, inplace=True)


def _quantized(config: Any) -> Callable[[Any, torch.dtype], None]:
    return lambda model, dtype: quantize_(model, config) and None


def _quantized_llm(model: Any, dtype: torch.dtype) -> None:
    quantize_(model, Int8Weight())
    llm.optimize(model, dtype, inplace=True)


WAYS: dict[str, Callable[[Any, torch.dtype], None]] = {
    "optimize": _optimized,
    "without_sample": _without_sample,
    "llm": _llm,
    "llm_int8": lambda model, dtype: _llm(model, dtype, weights="int8"),
    "llm_int4": lambda model, dtype: _llm(model, dtype, weights="int4", group_size=32),
    "int8": _quantized(Int8Weight()),
    "int4": _quantized(Int4Weight(group_size=32)),
    "fp8": _quantized(Float8Weight()),
    "bytes": _quantized(Int8DynamicActivationInt8Weight(only_faster=False)),
    "int8_llm": _quantized_llm,
}


def _cases() -> Iterator[Any]:
    number = 0
    for way in WAYS:
        for name in MODELS:
            if name == "network" and "llm" in way:
                continue
            for is_tied in (False, True):
                for dtype in DTYPES:
                    number += 1
                    marks = [] if number % 5 == 0 else [pytest.mark.slow]
                    kind = "tied" if is_tied else "untied"
                    title = f"{way}-{name}-{kind}-{str(dtype).removeprefix('torch.')}"
                    yield pytest.param(way, name, is_tied, dtype, id=title, marks=marks)


def _undone(model: Any) -> None:
    while True:
        try:
            oxytorch.undo(model)
        except ValueError:
            return


def _loss(model: Any) -> torch.Tensor:
    found = model(_ids())
    return (getattr(found, "logits", found).float() ** 2).mean()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("way", "name", "is_tied", "dtype"), [*_cases()])
def test_undo_gives_back_the_parameters(
    way: str, name: str, is_tied: bool, dtype: torch.dtype
) -> None:
    if name != "network":
        pytest.importorskip("transformers")
    model = MODELS[name](is_tied).eval()
    own = dict(model.named_parameters(remove_duplicate=False))
    frozen = next(iter(reversed(own)))
    own[frozen].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    _loss(model).backward()
    gradients = {n: p.grad for n, p in own.items()}
    called: list[str] = []
    for n, p in own.items():
        p.title = n
        if p.requires_grad:
            p.register_hook(lambda _, n=n: called.append(n))
            p.register_post_accumulate_grad_hook(lambda p: called.append(p.title))
    values = {n: p.detach().clone() for n, p in own.items()}
    WAYS[way](model, dtype)
    _loss(model).backward()  # leaves nothing behind that keeps the parameters
    for n, p in model.named_parameters(remove_duplicate=False):
        assert p is own[n] or is_tied
    called.clear()
    _undone(model)
    for n, p in model.named_parameters(remove_duplicate=False):
        assert p is own[n] and type(p) is nn.Parameter and p.dtype == values[n].dtype
        assert p.requires_grad == (n != frozen and p is not own[frozen]) and p.title in own
        assert (p.grad is None) == (gradients[n] is None)
        torch.testing.assert_close(p.detach(), values[n], rtol=0.3, atol=0.1)
    optimizer.zero_grad()
    _loss(model).backward()
    optimizer.step()
    for n, p in model.named_parameters():
        if p.grad is None:
            continue
        assert called.count(n) >= 1 and not torch.allclose(p, values[n], atol=0.05)


@pytest.mark.parametrize("holder", ["graph", "reference"])
def test_what_torch_cannot_swap_comes_back_with_the_values_of_then(
    holder: str,
) -> None:
    model = nn.Sequential(nn.Linear(256, 256))
    weight = model[0].weight
    held: Any = weakref.ref(weight) if holder == "reference" else model(torch.ones(1, 256))
    quantize_(model, Int8Weight())
    with torch.no_grad():
        model[0].weight.fill_(2.0)
    oxytorch.undo(model)
    assert held is not None and model[0].weight is weight
    assert (weight == 2).all()


@pytest.mark.parametrize("way", ["without_sample", "int8", "int4", "fp8"])
@pytest.mark.parametrize("holder", ["weight_norm", "spectral_norm", "pruned"])
def test_states_of_parametrized_layers_are_plain(way: str, holder: str) -> None:
    model = nn.Sequential(nn.Linear(256, 256)).eval()
    WAYS[way](model, torch.bfloat16)
    if holder == "pruned":
        prune.l1_unstructured(model[0], "weight", 0.5)
    else:
        getattr(nn.utils.parametrizations, holder)(model[0])
    assert {type(tensor) for tensor in model.state_dict().values()} == {torch.Tensor}
    kept = model.state_dict(keep_vars=True)
    assert all(kept[name] is p for name, p in model.named_parameters())


@pytest.mark.parametrize("way", ["without_sample", "int8"])
def test_files_of_packed_tensors_that_users_hold_are_plain(way: str) -> None:
    model = nn.Sequential(nn.Linear(256, 256)).eval()
    WAYS[way](model, torch.bfloat16)
    file = io.BytesIO()
    torch.save({"held": model[0].weight.detach()}, file)
    held = torch.load(io.BytesIO(file.getvalue()), weights_only=True)["held"]
    assert type(held) is torch.Tensor
    torch.testing.assert_close(held, model[0].weight.detach() * 1, rtol=0, atol=0)
