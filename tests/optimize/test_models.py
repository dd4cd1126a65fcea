"""`optimize` on whole models: the same answers, the same state, nothing of the user's changed."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from zoo import CASES, build, call

import oxytorch
from oxytorch.core.packed import PackedTensor

NAMES = sorted(CASES)
DTYPES = [None, torch.bfloat16]
bfloat16_only = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 here"
)


def _close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    limit = 2e-5 if dtype is None else 5e-2
    gap = (found.double() - expected.double()).abs().max()
    assert gap <= limit * expected.abs().max().clamp_min(1e-3), f"{float(gap):.3e}"


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def _same_state(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    found = model.state_dict()
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert type(found[key]) is torch.Tensor, key
        assert torch.equal(found[key], value.to(found[key].dtype)), key


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_answers_and_state_are_the_users(name: str, dtype: torch.dtype | None) -> None:
    model, sample = build(name)
    before = _state(model)
    pointers = {key: value.data_ptr() for key, value in model.state_dict().items()}
    with torch.no_grad():
        expected = call(model, sample)
    optimized = oxytorch.optimize(model, dtype=dtype, sample_input=sample)
    with torch.no_grad():
        _close(call(optimized, sample), expected, dtype)
        assert torch.equal(call(model, sample), expected)
    with torch.inference_mode():
        _close(call(optimized, sample), expected, dtype)
    _same_state(optimized, before)
    _same_state(model, before)
    assert {key: value.data_ptr() for key, value in model.state_dict().items()} == pointers
    assert not any("forward" in module.__dict__ for module in model.modules())
    theirs = {p.data_ptr() for p in model.parameters()}
    assert not any(
        p.data_ptr() in theirs
        for p in optimized.parameters()
        if not isinstance(p, PackedTensor) and p.numel()
    )
    done = " | ".join(entry.detail for entry in oxytorch.explain(optimized).applied)
    for words in CASES[name].fused:
        assert words in done


@pytest.mark.parametrize("name", NAMES)
def test_without_sample_input(name: str) -> None:
    model, sample = build(name)
    with torch.no_grad():
        expected = call(model, sample)
        _close(call(oxytorch.optimize(model), sample), expected)


@pytest.mark.parametrize("name", NAMES)
def test_every_pass_alone_and_all_together(name: str) -> None:
    from oxytorch.optimize import PASSES

    model, sample = build(name)
    with torch.no_grad():
        expected = call(model, sample)
        for passes in [[p] for p in PASSES] + [["fold", "pack"], list(PASSES)]:
            optimized = oxytorch.optimize(model, sample_input=sample, passes=passes)
            _close(call(optimized, sample), expected)


@bfloat16_only
@pytest.mark.parametrize("name", NAMES)
def test_every_pass_alone_in_bfloat16(name: str) -> None:
    from oxytorch.optimize import PASSES

    model, sample = build(name)
    with torch.no_grad():
        expected = call(model, sample)
        for extra in PASSES:
            optimized = oxytorch.optimize(
                model, dtype=torch.bfloat16, sample_input=sample, passes=["cast", extra]
            )
            _close(call(optimized, sample), expected, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_undo_brings_the_original_back(name: str, dtype: torch.dtype | None) -> None:
    model, sample = build(name)
    before = _state(model)
    kinds = {key: (value.dtype, value.stride()) for key, value in before.items()}
    ties = len({id(p) for m in model.modules() for p in m._parameters.values()})
    with torch.no_grad():
        expected = call(model, sample)
    oxytorch.optimize(model, dtype=dtype, sample_input=sample, inplace=True)
    assert oxytorch.undo(model) is model
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert not any(isinstance(p, PackedTensor) for p in model.parameters())
    assert {k: (v.dtype, v.stride()) for k, v in model.state_dict().items()} == kinds
    assert len({id(p) for m in model.modules() for p in m._parameters.values()}) == ties
    with torch.no_grad():
        if dtype is None:
            _same_state(model, before)
            assert torch.equal(call(model, sample), expected)
        else:
            _close(call(model, sample), expected, dtype)
    with pytest.raises(ValueError, match="undo"):
        oxytorch.undo(model)


@pytest.mark.parametrize("join", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_load_state_dict_packs_again(name: str, join: bool) -> None:
    from oxytorch.optimize import DEFAULT

    model, sample = build(name)
    passes = (*DEFAULT, "join") if join else None
    optimized = oxytorch.optimize(model, sample_input=sample, passes=passes)
    other = {
        key: torch.rand_like(value) + 0.5
        if "running_var" in key
        else (torch.randn_like(value) * 0.2 if value.is_floating_point() else value)
        for key, value in _state(model).items()
    }
    model.load_state_dict(other)
    result = optimized.load_state_dict(model.state_dict())
    assert not result.missing_keys and not result.unexpected_keys
    _same_state(optimized, _state(model))
    with torch.no_grad():
        _close(call(optimized, sample), call(model, sample))
    assigned = oxytorch.optimize(model, sample_input=sample, passes=passes)
    assigned.load_state_dict(_state(model), assign=True)
    with torch.no_grad():
        _close(call(assigned, sample), call(model, sample))


@pytest.mark.parametrize("join", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_deepcopy_and_pickle(name: str, join: bool) -> None:
    from oxytorch.optimize import DEFAULT

    model, sample = build(name)
    before = _state(model)
    passes = (*DEFAULT, "join") if join else None
    optimized = oxytorch.optimize(model, sample_input=sample, passes=passes)
    with torch.no_grad():
        expected = call(optimized, sample)
    buffer = io.BytesIO()
    torch.save(optimized, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(optimized),
        pickle.loads(pickle.dumps(optimized)),
        torch.load(buffer, weights_only=False),
    ]
    for other in copies:
        with torch.no_grad():
            assert torch.allclose(call(other, sample), expected, atol=1e-6)
            for parameter in optimized.parameters():
                parameter.mul_(1.0)
            for parameter in other.parameters():
                parameter.zero_()
            assert torch.equal(call(optimized, sample), expected)
        _same_state(optimized, before)
        assert str(oxytorch.explain(other)) == str(oxytorch.explain(optimized))
    fresh = copy.deepcopy(optimized)
    oxytorch.undo(fresh)
    with torch.no_grad():
        _close(call(fresh, sample), expected)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_right(name: str) -> None:
    model, sample = build(name)
    optimized = oxytorch.optimize(model, sample_input=sample)
    call(model, sample).float().square().sum().backward()
    call(optimized, sample).float().square().sum().backward()
    ours = dict(optimized.named_parameters())
    for key, parameter in model.named_parameters():
        if parameter.grad is None:
            assert ours[key].grad is None, key
            continue
        assert ours[key].grad is not None, key
        _close(ours[key].grad, parameter.grad, torch.float32)


@pytest.mark.parametrize("name", ["bert", "resnet", "gated", "attention", "mobilenet"])
def test_other_shapes_than_the_sample(name: str) -> None:
    model, sample = build(name)
    optimized = oxytorch.optimize(model, sample_input=sample)

    def grown(value: torch.Tensor) -> torch.Tensor:
        return torch.cat([value, value], 0)

    other = (
        {key: grown(value) for key, value in sample.items()}
        if isinstance(sample, dict)
        else tuple(grown(value) for value in sample)
    )
    with torch.no_grad():
        _close(call(optimized, other), call(model, other))
        _close(call(optimized, sample), call(model, sample))
