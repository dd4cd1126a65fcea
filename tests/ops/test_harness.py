"""The harness itself: it passes the template and finds every mistake of a faulty kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from harness import DTYPES, LEVELS, check_memory, check_numbers, samples_of
from torch import Tensor

from oxytorch import _library, ops, testing
from oxytorch.ops import Cost, Op, Sample, _op

pytestmark = pytest.mark.skipif(
    not (_library.loaded and hasattr(torch.ops.oxytorch, "faulty")),
    reason="the library was built without the ops that only tests use (a wheel)",
)

FAULTS = [
    "none",
    "last_element_not_written",
    "write_past_the_end",
    "read_past_the_end",
    "wrong_at_one_level",
    "rounded_towards_zero",
    "input_changed",
    "level_ignored",
]


def _run_all(op: Op) -> None:
    """What test_all_ops does with one op, for all dtypes and levels."""
    layouts: list[Callable[[Tensor], Tensor]] = [
        lambda tensor: testing.misaligned(tensor, 1),
        testing.transposed_storage,
    ]
    for dtype in DTYPES.values():
        for index in range(len(samples_of(op, dtype))):
            for level in LEVELS:
                check_numbers(op, dtype, index, level)
                for layout in layouts:
                    check_memory(op, dtype, index, level, layout, guard=64, stream=True)


def _faulty_op(fault: int) -> Op:
    def faulty(x: Tensor, factor: float) -> Tensor:
        result: Tensor = torch.ops.oxytorch.faulty.default(x, factor, fault)
        return result

    def reference(x: Tensor, factor: float) -> Tensor:
        return (x * factor).contiguous()

    def samples(dtype: torch.dtype, size: str) -> Iterator[Sample]:
        for width in (1, 16, 33):
            yield Sample(str(width), (torch.randn(width).to(dtype), 0.3))

    return Op(faulty, reference, samples, lambda x, factor: Cost(2 * x.nbytes, x.numel()))


@pytest.mark.parametrize("fault", range(len(FAULTS)), ids=FAULTS)
def test_faulty_kernel_is_found(fault: int) -> None:
    op = _faulty_op(fault)
    if fault == 0:
        _run_all(op)
        return
    with pytest.raises(AssertionError):
        _run_all(op)


def test_template_is_a_working_op() -> None:
    try:
        from oxytorch.ops._template import op
    finally:
        _op._registry.pop("scale", None)
    _run_all(op)
    assert op.name not in ops.registry()
