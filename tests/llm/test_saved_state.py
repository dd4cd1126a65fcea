"""The state dictionary of an optimized language model: each weight has a storage of its own, over
the model's memory, as formats of files want it."""

from __future__ import annotations

import gc
from pathlib import Path

import language_models
import pytest
import safetensors.torch
import torch

from oxytorch import llm
from oxytorch.core.own_storage import is_part, with_own_storage

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2"])
def test_safetensors_save_and_load(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = language_models.build(name)
    fast = llm.optimize(model, dtype=dtype)
    path = str(tmp_path / "model.safetensors")
    safetensors.torch.save_model(fast, path)
    kept = safetensors.torch.load_file(path)
    stock = str(tmp_path / "stock.safetensors")
    safetensors.torch.save_model(model, stock)
    assert len(kept) == len(safetensors.torch.load_file(stock))
    for key, value in kept.items():
        assert torch.equal(value.to(dtype), model.state_dict()[key].to(dtype)), key
    tokens = torch.arange(1, 9)[None]
    wanted = fast(tokens).logits
    with torch.no_grad():
        for parameter in fast.parameters():
            parameter.copy_(torch.zeros(parameter.shape, dtype=parameter.dtype))
    assert not torch.equal(fast(tokens).logits, wanted)
    safetensors.torch.load_model(fast, path)
    torch.testing.assert_close(fast(tokens).logits, wanted, rtol=1e-5, atol=1e-5)


def test_writes_to_the_state_reach_the_model() -> None:
    model = language_models.build("llama")
    fast = llm.optimize(model, dtype=torch.float32)
    tokens = torch.arange(1, 9)[None]
    before = fast(tokens).logits
    state = fast.state_dict()
    name = next(key for key in state if key.endswith("k_proj.weight"))
    assert state[name].untyped_storage().nbytes() == state[name].nbytes
    state[name].mul_(3)
    del state
    gc.collect()
    stock = language_models.build("llama")
    with torch.no_grad():
        stock.state_dict()[name].mul_(3)
        wanted = stock(tokens).logits
    found = fast(tokens).logits
    assert not torch.equal(found, before)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_own_storage_holds_the_memory() -> None:
    whole = torch.arange(24.0).view(4, 6)
    for part in (whole[1:3], whole[1:3].t(), whole[:, 2:4]):
        assert is_part(part)
        own = with_own_storage(part)
        assert torch.equal(own, part) and own.data_ptr() == part.data_ptr()
        assert own.stride() == part.stride()
    own = with_own_storage(whole[2:])
    wanted = whole[2:].clone()
    del whole, part
    gc.collect()
    junk = [torch.full((4, 6), -1.0) for _ in range(50)]
    assert torch.equal(own, wanted) and len(junk) == 50
    assert not is_part(own) and not is_part(torch.empty(0)[:0])
