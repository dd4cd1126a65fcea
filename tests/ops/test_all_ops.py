"""Tests of every registered op at every level of this machine, generated from the registry."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import (
    DTYPES,
    LEVELS,
    arguments,
    check_memory,
    check_numbers,
    expected,
    moved_by,
    results_of,
    samples_of,
    written_tensors,
)
from torch.library import opcheck

from marks import NEEDS_LIBRARY
from oxytorch import isa, ops, testing
from oxytorch.ops import Op

pytestmark = NEEDS_LIBRARY

REGISTRY = ops.registry()
ONEDNN = ops.registry("onednn")
WITH_GRADIENT = [pytest.param(op, id=name) for name, op in REGISTRY.items() if op.has_gradient]


def _each_sample(registry: dict[str, Op] = REGISTRY) -> Iterator[Any]:
    for name, op in registry.items():
        for short, dtype in DTYPES.items():
            for index, sample in enumerate(samples_of(op, dtype)):
                yield pytest.param(op, dtype, index, id=f"{name}-{sample.name}-{short}")


def _each_op() -> Iterator[Any]:
    for name, op in REGISTRY.items():
        yield pytest.param(op, id=name)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("op", "dtype", "index"), list(_each_sample()))
def test_numbers(op: Op, dtype: torch.dtype, index: int, level: str) -> None:
    check_numbers(op, dtype, index, level)


@pytest.mark.parametrize(("op", "dtype", "index"), list(_each_sample(ONEDNN)))
def test_numbers_of_onednn(op: Op, dtype: torch.dtype, index: int) -> None:
    named = arguments(op, samples_of(op, dtype)[index])
    exact, plain = expected(op, dtype, index)
    for layout in (torch.Tensor.clone, *LAYOUTS.values()):
        moved = {name: moved_by(layout, value) for name, value in named.items()}
        results = results_of(op, op.function, moved)
        for actual, wanted, usual in zip(results, exact, plain, strict=True):
            testing.assert_close(actual, wanted, usual, op.name)


@pytest.mark.parametrize(("op", "dtype", "index"), list(_each_sample(ONEDNN)))
def test_cost_of_onednn_counts_what_the_call_touches(
    op: Op, dtype: torch.dtype, index: int
) -> None:
    named = arguments(op, samples_of(op, dtype)[index])
    touched = [value for value in named.values() if isinstance(value, torch.Tensor)]
    cost = op.cost(**named)
    results = results_of(op, op.function, named)
    assert cost.bytes >= sum(tensor.nbytes for tensor in (*touched, *results))
    assert cost.operations > 0


LAYOUTS = {
    "misaligned_1": functools.partial(testing.misaligned, offset=1),
    "misaligned_7": functools.partial(testing.misaligned, offset=7),
    "padded_rows": testing.padded_rows,
    "transposed": testing.transposed_storage,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("short", DTYPES)
@pytest.mark.parametrize("op", list(_each_op()))
def test_memory(op: Op, short: str, level: str, layout: str) -> None:
    dtype = DTYPES[short]
    for index in range(len(samples_of(op, dtype))):
        # Guards of 64 and 67 elements make aligned and misaligned outputs.
        check_memory(op, dtype, index, level, LAYOUTS[layout], guard=64, stream=False)
        check_memory(op, dtype, index, level, LAYOUTS[layout], guard=64, stream=True)
        check_memory(op, dtype, index, level, LAYOUTS[layout], guard=67, stream=True)


@pytest.mark.parametrize("op", list(_each_op()))
def test_schema_has_the_signature_of_the_function(op: Op) -> None:
    schema = getattr(torch.ops.oxytorch, op.name).default._schema
    parameters = inspect.signature(op.function).parameters.values()
    assert [argument.name for argument in schema.arguments] == [item.name for item in parameters]
    for argument, item in zip(schema.arguments, parameters, strict=True):
        given = item.default if item.default is not inspect.Parameter.empty else None
        assert argument.default_value == given, item.name
    assert inspect.signature(op.reference).parameters.keys() == {item.name for item in parameters}
    aliases = {argument.name: argument.alias_info for argument in schema.arguments}
    assert op.writes == tuple(name for name, own in aliases.items() if own and own.is_write)


@pytest.mark.parametrize("op", list(_each_op()))
def test_opcheck(op: Op) -> None:
    overload = getattr(torch.ops.oxytorch, op.name).default
    filled = [
        sample
        for sample in samples_of(op, torch.float32)
        if all(tensor.numel() for tensor in testing.tensors_in(sample.args))
    ]
    for sample in (filled[0], filled[-1]):
        named = arguments(op, sample)
        given = named if op.has_gradient else {}
        opcheck(overload, tuple((named | _with_gradients(given)).values()))


@pytest.mark.parametrize("op", WITH_GRADIENT)
def test_gradients(op: Op) -> None:
    sample = _small(op)
    args = testing.widen(tuple(arguments(op, sample).values()))
    args = testing.map_tensors(_with_gradient, args)
    names = list(inspect.signature(op.function).parameters)
    flat = [tensor for tensor in testing.tensors_in(args) if tensor.requires_grad]

    def of_leaves(*leaves: torch.Tensor) -> Any:
        remaining = iter(leaves)
        again = testing.map_tensors(
            lambda tensor: next(remaining) if tensor.requires_grad else tensor, args
        )
        return op.function(**dict(zip(names, again, strict=True)))

    assert torch.autograd.gradcheck(of_leaves, flat, fast_mode=True)


@pytest.mark.parametrize("op", WITH_GRADIENT)
def test_gradients_in_float32_are_those_of_the_reference(op: Op) -> None:
    sample = _small(op)
    found = []
    for function in (op.function, op.reference):
        args = testing.map_tensors(_with_gradient, sample.args)
        results = testing.tensors_in(function(*args, **sample.kwargs))
        sum(result.square().sum() for result in results).backward()
        found.append([tensor.grad for tensor in testing.tensors_in(args)])
    for ours, usual in zip(*found, strict=True):
        assert (ours is None) == (usual is None)
        if ours is not None:
            torch.testing.assert_close(ours, usual)


@pytest.mark.parametrize("op", [op for op in REGISTRY.values() if not op.has_gradient])
def test_an_op_without_gradient_says_so(op: Op) -> None:
    named = _with_gradients(arguments(op, _small(op)))
    if op.writes:
        with pytest.raises(RuntimeError, match=f"{op.name}: has no gradient; call it under"):
            op.function(**named)
    else:
        results = testing.tensors_in(op.function(**named))
        assert not any(result.requires_grad for result in results)


@pytest.mark.parametrize("op", list(_each_op()))
def test_compiles_into_one_graph(op: Op) -> None:
    sample = _small(op)
    torch._dynamo.reset()
    compiled = torch.compile(op.function, fullgraph=True, backend="aot_eager")
    named = arguments(op, sample)
    results = results_of(op, compiled, named)
    for one, other in zip(results, results_of(op, op.function, named), strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("op", list(_each_op()))
def test_runs_on_other_devices_through_the_reference(op: Op) -> None:
    sample = _small(op)
    named = arguments(op, sample)
    eager = results_of(op, op.function, named)
    there = {name: testing.map_tensors(_to_meta, value) for name, value in named.items()}
    with torch.no_grad():
        results = testing.tensors_in(op.function(**there))
    results += written_tensors(op, there)
    for meta, real in zip(results, eager, strict=True):
        assert (meta.device.type, meta.shape, meta.dtype) == ("meta", real.shape, real.dtype)
        assert meta.stride() == real.stride()


@pytest.mark.parametrize("op", list(_each_op()))
def test_repeats_bit_for_bit_with_any_number_of_threads(op: Op) -> None:
    sample = _small(op)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            with testing.settings(split=True):
                results.append(results_of(op, op.function, arguments(op, sample)))
    finally:
        torch.set_num_threads(before)
    for later in results[1:]:
        for one, other in zip(results[0], later, strict=True):
            assert torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("op", list(_each_op()))
def test_cost_counts_what_the_call_touches(op: Op) -> None:
    for sample in samples_of(op, torch.float32):
        cost = op.cost(*sample.args, **sample.kwargs)
        named = arguments(op, sample)
        results = results_of(op, op.reference, named)
        new = len(results) - len(written_tensors(op, named))
        assert cost.bytes >= sum(result.nbytes for result in results[:new])
        assert cost.operations >= 0


def test_every_level_of_this_machine_is_tested() -> None:
    assert [level.name for level in isa.levels() if level.supported] == LEVELS


def _with_gradient(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.clone()
    return copy.requires_grad_() if copy.is_floating_point() else copy


def _with_gradients(named: dict[str, Any]) -> dict[str, Any]:
    return {name: testing.map_tensors(_with_gradient, value) for name, value in named.items()}


def _to_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _small(op: Op) -> ops.Sample:
    """A sample without empty tensors, of few elements."""
    filled = [
        sample
        for sample in samples_of(op, torch.float32)
        if all(tensor.numel() > 1 for tensor in testing.tensors_in(sample.args))
    ]
    return filled[min(2, len(filled) - 1)]
