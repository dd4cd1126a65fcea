"""The predecessor's modules, functions and operators compute what their formulas say."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import oxytorch.compat.ipex as ipex
from oxytorch.compat import NotServedError

close = torch.testing.assert_close


def test_frozen_batch_norm_is_batch_norm_that_never_changes() -> None:
    own, stock = ipex.nn.FrozenBatchNorm2d(4, eps=1e-3), nn.BatchNorm2d(4, eps=1e-3).eval()
    for name in ("weight", "bias", "running_mean", "running_var"):
        value = torch.rand(4) + 0.5
        getattr(own, name).copy_(value)
        getattr(stock, name).data.copy_(value)
    x = torch.randn(2, 4, 5, 5, requires_grad=True)
    own.train()
    close(own(x), stock(x))
    assert not [*own.parameters()] and own(x).requires_grad
    statistics = (own.weight, own.bias, own.running_mean, own.running_var, own.eps)
    close(ipex.torch_ipex.frozen_batch_norm(x, *statistics), stock(x))


def test_interaction_has_a_gradient() -> None:
    tensors = [torch.randn(3, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert ipex.nn.functional.interaction(*tensors).shape == (3, 8 + 3)
    assert torch.autograd.gradcheck(ipex.nn.functional.interaction, tensors)
    close(ipex.torch_ipex.interaction_forward(tensors), ipex.nn.functional.interaction(*tensors))


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("last", [False, True])
def test_merged_embedding_bags_are_those_of_the_tables(mode: str, last: bool) -> None:
    tables = [nn.EmbeddingBag(rows, 8, mode=mode, include_last_offset=last) for rows in (5, 9)]
    indices = [torch.randint(5, (6,)), torch.randint(9, (6,))]
    offsets = [torch.tensor([0, 1, 4] + [6] * last)] * 2
    expected = [table(*args) for table, *args in zip(tables, indices, offsets, strict=True)]
    merged = ipex.nn.modules.MergedEmbeddingBag.from_embeddingbag_list(tables)
    close(merged(indices, offsets), expected)
    close(merged((indices, offsets)), expected)
    with_cat = ipex.nn.modules.MergedEmbeddingBagWithCat.from_embeddingbag_list(tables)
    dense = torch.randn(3, 8)
    close(with_cat(indices, offsets, dense), torch.cat([dense, *expected], 1))
    sum(out.sum() for out in merged(indices, offsets)).backward()
    assert all(weight.grad is not None for weight in merged.weights)


def test_tables_of_different_kinds_are_refused() -> None:
    spec = ipex.nn.modules.EmbeddingSpec
    first = spec(4, 8, "sum", torch.float32, None, False, False)
    assert ipex.nn.modules.MergedEmbeddingBag([first]).weights[0].shape == (4, 8)
    for other in (first._replace(feature_size=4), first._replace(pooling_modes="mean")):
        with pytest.raises(ValueError, match="of one feature_size"):
            ipex.nn.modules.MergedEmbeddingBag([first, other])


def test_linear_layers_with_what_follows() -> None:
    linear, other = nn.Linear(8, 8), nn.Linear(8, 8)
    x, y, z = torch.randn(3, 4, 8).unbind()
    modules = ipex.llm.modules
    value = linear(x)
    close(modules.LinearSilu(linear)(x), functional.silu(value))
    close(modules.LinearRelu(linear)(x), functional.relu(value))
    close(modules.LinearGelu(linear)(x), functional.gelu(value))
    close(modules.LinearNewGelu(linear)(x), functional.gelu(value, approximate="tanh"))
    close(modules.LinearMul(linear)(x, y), value * y)
    close(modules.LinearAdd(linear)(x, y), value + y)
    close(modules.LinearAddAdd(linear)(x, y, z), value + y + z)
    close(modules.LinearSiluMul(linear)(x, y), functional.silu(value) * y)
    close(modules.Linear2SiluMul(linear, other)(x), functional.silu(value) * other(x))
    eltwise = ipex.nn.modules.IPEXLinearEltwise
    close(eltwise(linear)(x), value.relu())
    close(eltwise(linear, "sigmoid")(x), value.sigmoid())


def test_norms_add_and_write_back() -> None:
    x, residual = torch.randn(2, 4, 16).unbind()
    weight, bias = torch.rand(16), torch.rand(16)
    own = ipex.llm.functional
    total = x + residual
    close(
        ipex.llm.modules.RMSNorm(16, 1e-6, weight)(x), functional.rms_norm(x, (16,), weight, 1e-6)
    )
    close(own.rms_norm(x, weight, 1e-6), functional.rms_norm(x, (16,), weight, 1e-6))
    normed = functional.layer_norm(x, (16,), weight, bias, 1e-5)
    close(ipex.llm.modules.FastLayerNorm((16,), 1e-5, weight, bias)(x), normed)
    close(own.fast_layer_norm(x, (16,), weight, bias, 1e-5), normed)
    expected = functional.rms_norm(total, (16,), weight, 1e-6)
    kept = residual.clone()
    close(own.add_rms_norm(kept, x, weight, None, 1e-6), expected)
    close(kept, residual)
    close(own.add_rms_norm(kept, x, weight, bias, 1e-6, True), expected + bias)
    close(kept, total)
    expected = functional.layer_norm(total, (16,), weight, bias, 1e-5)
    kept = residual.clone()
    close(own.add_layer_norm(kept, x, weight, bias, 1e-5, True), expected)
    close(kept, total)
    close(own.add_layer_norm(None, x, weight, bias, 1e-5), normed)


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("wide", [True, False])
def test_rotary_embedding_turns_pairs_by_their_angles(half: bool, wide: bool) -> None:
    query, key = torch.randn(2, 5, 4, 16), torch.randn(2, 5, 2, 16)
    angles = torch.rand(9, 4) * 6
    table = angles
    if wide:
        table = torch.cat((angles, angles), -1) if half else angles.repeat_interleave(2, -1)
    positions = torch.tensor([[3, 4, 5, 6, 7], [0, 1, 2, 3, 8]])
    found = ipex.llm.functional.rotary_embedding(
        query, key, table.sin(), table.cos(), 8, half, positions
    )
    for x, got in zip((query, key), found, strict=True):
        turned = x[..., :8]
        first, second = turned.chunk(2, -1) if half else (turned[..., ::2], turned[..., 1::2])
        own = torch.polar(torch.ones_like(angles), angles)[positions].unsqueeze(2)
        pairs = torch.complex(first, second) * own
        parts = (pairs.real, pairs.imag)
        expected = torch.cat(parts, -1) if half else torch.stack(parts, -1).flatten(-2)
        close(got, torch.cat((expected, x[..., 8:]), -1))
    tokens = ipex.llm.functional.rotary_embedding(
        query[0], key[0], table.sin(), table.cos(), 8, half, positions[0]
    )
    close(tokens[0], found[0][0])


def test_attention_of_several_sequences() -> None:
    query, key, value = torch.randn(3, 7, 2, 8).unbind()
    starts = torch.tensor([0, 3, 7])
    out = torch.empty_like(query)
    rest = (None, 4, 4, 0.0, 8**-0.5, False, True, False, None)
    ipex.llm.functional.varlen_attention(query, key, value, out, starts, starts, *rest)
    for begin, end in ((0, 3), (3, 7)):
        q, k, v = (x[begin:end].transpose(0, 1) for x in (query, key, value))
        expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        close(out[begin:end], expected.transpose(0, 1))
    again = ipex.llm.modules.VarlenAttention()(
        query, key, value, torch.empty_like(out), starts, starts, *rest
    )
    close(again, out)
    with pytest.raises(NotServedError, match="softcap"):
        ipex.llm.functional.varlen_attention(
            query, key, value, out, starts, starts, *rest, softcap=3.0
        )


def test_gated_activations_write_out() -> None:
    x, y = torch.randn(2, 4, 8).unbind()
    own, joined = ipex.llm.functional, torch.cat((x, y), -1)
    for found, expected in (
        (own.silu_mul(x, y), functional.silu(x) * y),
        (own.gelu_mul(x, y, None, "tanh"), functional.gelu(x, approximate="tanh") * y),
        (own.silu_and_mul(joined), functional.silu(x) * y),
        (own.gelu_and_mul(joined), functional.gelu(x) * y),
        (own.gelu_quick(x), x * torch.sigmoid(1.702 * x)),
    ):
        close(found, expected)
    out = torch.empty_like(x)
    assert own.silu_mul(x, y, out) is out
    close(out, functional.silu(x) * y)


def test_split_halves_are_all_bits_of_a_float() -> None:
    values = torch.randn(5, 7) * 1e3
    own = ipex.torch_ipex
    top, trail = own.split_float_bfloat16(values)
    assert top.dtype == trail.dtype == torch.bfloat16
    assert own.cat_bfloat16_float(top, trail).equal(values)
    bits = values.view(torch.int32) & -65536
    assert top.float().equal(bits.view(torch.float32))  # truncated, not rounded
    grad = torch.randn(5, 7).bfloat16()
    own.packed_add(top, trail, grad, -0.1)
    close(own.cat_bfloat16_float(top, trail), values.add(grad.float(), alpha=-0.1), rtol=0, atol=0)
    a, b = torch.randn(2, 3, 4).unbind()
    expected = torch.softmax(a + b, -1)
    assert own.add_softmax_(a, b) is a
    close(a, expected)
    close(own.rmsnorm(b, torch.ones(4), 1e-6), functional.rms_norm(b, (4,), eps=1e-6))


def test_optimizers_step_as_there() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))
    assert ipex.optim._lamb.Lamb(model.parameters(), fused=True).defaults["eps"] == 1e-8
    lars = ipex.optim._lars.create_optimizer_lars(copy.deepcopy(model), 0.1, 0.9, 1e-4, True, 0.0)
    kinds = [(group["lars"], group["weight_decay"], len(group["params"]))
             for group in lars.param_groups]  # fmt: skip
    assert kinds == [(True, 1e-4, 2), (False, 0, 2), (False, 1e-4, 2)]
    whole = ipex.optim._lars.create_optimizer_lars(model, 0.1, 0.9, 1e-4, False, 0.0)
    assert len(whole.param_groups) == 1
    assert isinstance(ipex.cpu.autocast._grad_scaler.GradScaler(), torch.amp.GradScaler)
