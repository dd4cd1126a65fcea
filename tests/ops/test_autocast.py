"""Under autocast each op does what torch does with operators like it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import arguments, results_of, samples_of
from torch import Tensor

from marks import NEEDS_LIBRARY
from oxytorch import ops
from oxytorch.ops import Op
from oxytorch.ops.linear_panels import linear
from oxytorch.ops.panels import PanelWeight

pytestmark = NEEDS_LIBRARY
OPS = [pytest.param(op, id=name) for name, op in ops.registry().items()]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return [_cast(each, dtype) for each in value]
    is_cast = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_cast and value.dtype != torch.float64 else value


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16], ids=["to_bf16", "to_fp16"])
@pytest.mark.parametrize("short", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_op_takes_what_its_rule_says(op: Op, short: str, lower: torch.dtype) -> None:
    for sample in samples_of(op, DTYPES[short]):
        named = arguments(op, sample)
        wanted = dict(named)
        if op.autocast.rule == "lower":
            wanted.update({name: _cast(named[name], lower) for name in op.autocast.arguments})
        wanted_results = results_of(op, op.function, wanted)
        with torch.autocast("cpu", lower):
            results = results_of(op, op.function, named)
        for found, own in zip(results, wanted_results, strict=True):
            assert found.dtype == own.dtype
            assert torch.equal(found.nan_to_num(), own.nan_to_num()), sample.name


WITH_LIKE = ["add_layer_norm", "add_rms_norm", "attention", "embedding_bag", "gelu_mul",
             "interaction", "layer_norm", "merged_embedding_bag", "rms_norm",
             "rotary_embedding", "silu_mul", "softmax"]  # fmt: skip


@pytest.mark.parametrize("short", DTYPES)
@pytest.mark.parametrize("name", WITH_LIKE)
def test_dtypes_are_those_of_torch_operators(name: str, short: str) -> None:
    op = ops.registry()[name]
    sample = samples_of(op, DTYPES[short])[0]
    with torch.autocast("cpu", torch.bfloat16):
        ours = results_of(op, op.function, arguments(op, sample))
        theirs = results_of(op, op.reference, arguments(op, sample))
    assert [each.dtype for each in ours] == [each.dtype for each in theirs]


@pytest.mark.parametrize("name", [n for n, op in ops.registry().items()
                                  if op.autocast.rule == "widest"])  # fmt: skip
def test_operands_of_two_dtypes_are_promoted(name: str) -> None:
    op = ops.registry()[name]
    named = arguments(op, samples_of(op, torch.bfloat16)[0])
    # As in a model under autocast, whose parameters are float32.
    named.update(
        {key: _cast(named[key], torch.float32) for key in {"weight", "bias"} & named.keys()}
    )
    first, *others = op.autocast.arguments
    mixed = dict(named)
    if others:
        mixed[first] = _cast(named[first], torch.float32)
    else:  # a list
        mixed[first] = [_cast(named[first][0], torch.float32), *named[first][1:]]
    wide = {key: _cast(value, torch.float32) if key in op.autocast.arguments else value
            for key, value in named.items()}  # fmt: skip
    with torch.autocast("cpu", torch.bfloat16):
        found = results_of(op, op.function, mixed)
    for result, own in zip(found, results_of(op, op.function, wide), strict=True):
        assert torch.equal(result, own)


@pytest.mark.parametrize("op", OPS)
def test_rule_names_arguments_of_the_op(op: Op) -> None:
    named = arguments(op, samples_of(op, torch.float32)[0])
    assert {*op.autocast.arguments} <= {*named}
    assert op.autocast.rule in ("lower", "widest", "given")
    assert (op.autocast.rule == "given") is not bool(op.autocast.arguments)
    assert not {*op.autocast.arguments} & {*op.writes}


@pytest.mark.parametrize("short", DTYPES)
@pytest.mark.parametrize("rows", [1, 40])
def test_linear_layer_is_lowered_as_that_of_torch(rows: int, short: str) -> None:
    weight = PanelWeight.from_dense(torch.randn(24, 32))
    x, bias = torch.randn(rows, 32, dtype=DTYPES[short]), torch.randn(24)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        ours = linear(x, weight, bias)
        theirs = torch.nn.functional.linear(x, weight.restore().float(), bias)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0.02)


def test_gradient_passes_the_cast() -> None:
    query, key, value = (torch.randn(1, 2, 6, 8, requires_grad=True) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        result = ops.attention(query, key, value)
    assert result.dtype == torch.bfloat16
    result.float().sum().backward()
    assert query.grad is not None
    assert query.grad.dtype == torch.float32
    assert value.grad is not None
    assert value.grad.abs().sum() > 0


def test_float64_and_disabled_autocast_stay() -> None:
    tensors = [torch.randn(1, 2, 6, 8) for _ in range(3)]
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.attention(*(t.double() for t in tensors)).dtype == torch.float64
        with torch.autocast("cpu", enabled=False):
            assert ops.attention(*tensors).dtype == torch.float32
        with torch.inference_mode():
            assert ops.attention(*tensors).dtype == torch.bfloat16


def test_compiled_call_is_cast_too() -> None:
    tensors = [torch.randn(1, 2, 6, 8) for _ in range(3)]
    compiled = torch.compile(lambda *t: ops.attention(*t), backend="aot_eager", fullgraph=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(*tensors), ops.attention(*tensors))
