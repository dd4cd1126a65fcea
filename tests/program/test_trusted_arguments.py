"""Operators of torch in programs whose arguments torch takes on trust are checked first."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from oxytorch.program import check
from oxytorch.program.program import Program


@dataclass(frozen=True)
class Case:
    """A call, what it gives, and others that end the process in torch.

    text: of its arguments.
    others: texts in place of it.
    altered: tensors in place of those at a place.
    results: how many it has.
    """

    text: str
    given: list[Tensor]
    expected: Tensor
    others: list[str] = field(default_factory=list)
    altered: list[tuple[int, Tensor]] = field(default_factory=list)
    results: int = 1


torch.manual_seed(0)
_IMAGES, _GRID = torch.randn(2, 3, 4, 6), torch.rand(2, 5, 5, 2) * 2 - 1
_TABLE, _IDS, _OFFSETS = torch.randn(9, 4), torch.tensor([1, 2, 3, 1]), torch.tensor([0, 1, 3])
_SIGNAL = torch.randn(2, 3, 8)
_SPECTRUM = torch.fft.rfft(_SIGNAL)
_CHANNELS = [torch.rand(3) + 0.5 for _ in range(4)]
_BAGS = "%0 %1 %2 false {} false none false some {}"
_BAG = F.embedding_bag(_IDS, _TABLE, _OFFSETS, mode="mean", padding_idx=1)
_OUTSIDE = 1 << 31
CASES: dict[str, Case] = {
    "aten::_native_batch_norm_legit_no_training": Case(
        "%0 some %1 some %2 %3 %4 0.1 1e-05",
        [_IMAGES, *_CHANNELS],
        F.batch_norm(_IMAGES, _CHANNELS[2], _CHANNELS[3], _CHANNELS[0], _CHANNELS[1]),
        altered=[(place, torch.ones(size)) for place in (1, 2, 3, 4) for size in (0, 2, 4)],
        results=3,
    ),
    "aten::embedding_bag.padding_idx": Case(
        _BAGS.format(1, 1),
        [_TABLE, _IDS, _OFFSETS],
        _BAG,
        [_BAGS.format(mode, row) for mode, row in ((3, 1), (-1, 1), (1 << 40, 1), (1, 9))],
        [(2, torch.tensor(offsets)) for offsets in ([0, 3, 1], [0, 5, 4], [1, 2, 3], [0, -1, 3])],
        results=4,
    ),
    "aten::_embedding_bag_forward_only": Case(
        "%0 %1 %2 false 1 false none false 1",
        [_TABLE, _IDS, _OFFSETS],
        _BAG,
        ["%0 %1 %2 false 1 false none false 1000"],
        [(2, torch.empty(0, dtype=torch.int64)), (0, _TABLE[0])],
        results=4,
    ),
    "aten::_fft_r2c": Case(
        "%0 [ 2 ] 0 true",
        [_SIGNAL],
        _SPECTRUM,
        [f"%0 [ {dims} ] 0 true" for dims in ("-2", "3", _OUTSIDE, "1 1")]
        + ["%0 [ 2 ] 3 true", "%0 [ 2 ] -1 true"],
        [(0, torch.tensor(1.0))],
    ),
    "aten::_fft_c2c": Case(
        "%0 [ 2 ] 0 true",
        [_SPECTRUM],
        torch.fft.fft(_SPECTRUM),
        [f"%0 [ {dims} ] 0 true" for dims in (f"{_OUTSIDE} 2", "-1", "2 2")],
        [(0, _SPECTRUM[0, 0, 0])],
    ),
    "aten::_fft_c2r": Case(
        "%0 [ 2 ] 2 8",
        [_SPECTRUM],
        torch.fft.irfft(_SPECTRUM),
        ["%0 [ -7 ] 2 8", "%0 [ ] 2 8", "%0 [ 2 ] 2 -7", "%0 [ 2 ] 2 10", "%0 [ 2 ] 9 8"],
        [(0, _SPECTRUM[..., :1])],
    ),
    "aten::grid_sampler": Case(
        "%0 %1 0 0 false",
        [_IMAGES, _GRID],
        F.grid_sample(_IMAGES, _GRID, align_corners=False),
        ["%0 %1 3 0 false", "%0 %1 -1 0 false", "%0 %1 0 7 false", f"%0 %1 {_OUTSIDE} 0 true"],
    ),
    "aten::_upsample_bilinear2d_aa": Case(
        "%0 [ 2 3 ] false some 0.5 some 0.5",
        [_IMAGES],
        F.interpolate(_IMAGES, scale_factor=0.5, mode="bilinear", antialias=True),
        [
            "%0 [ 1000 3 ] false some 0.5 some 0.5",
            "%0 [ 2 3 ] false some 1e+300 none",
            "%0 [ 2 3 ] false some nan none",
            "%0 [ 2 ] false none none",
        ],
        [(0, _IMAGES[0])],
    ),
    "aten::_weight_norm_interface": Case(
        "%0 %1 0",
        [torch.ones(4, 9), torch.full((4, 1), 3.0)],
        torch.ones(4, 9),
        ["%0 %1 1", "%0 %1 2", "%0 %1 -2"],
        [(1, torch.ones(3, 1)), (1, torch.ones(0))],
        results=2,
    ),
    "aten::_pad_circular": Case(
        "%0 [ 1 2 ]",
        [_SIGNAL],
        F.pad(_SIGNAL, (1, 2), mode="circular"),
        ["%0 [ 9 0 ]", "%0 [ 1 ]", "%0 [ -5 -5 ]", "%0 [ 1 1 1 1 1 1 1 1 ]"],
    ),
    "aten::repeat_interleave.Tensor": Case(
        "%0 some 6",
        [torch.tensor([1, 2, 3])],
        torch.repeat_interleave(torch.tensor([1, 2, 3])),
        ["%0 some 0", "%0 some 7", "%0 some -1"],
        [(0, torch.tensor([1, 2, 4])), (0, torch.tensor([9, -6, 3]))],
    ),
    "aten::_reshape_alias": Case(
        "%0 [ 6 8 ] [ 8 1 ]",
        [_SIGNAL],
        _SIGNAL.view(6, 8),
        ["%0 [ 6 8 ] [ 9 1 ]", "%0 [ 6 9 ] [ 8 1 ]", "%0 [ 6 8 ] [ -8 1 ]", "%0 [ 48 ] [ 1 1 ]"],
    ),
    "aten::binary_cross_entropy": Case(
        "%0 %1 none 1",
        [torch.full((3,), 0.5), torch.ones(3)],
        torch.tensor(0.5).log().neg(),
        altered=[(0, torch.empty(0))],
    ),
}


def _program(name: str, case: Case, text: str) -> Program:
    count = len(case.given)
    results = " ".join([f"%{count}", *["_"] * (case.results - 1)])
    whole = f"inputs {count} 0 0\n{results} = {name} {text}\noutputs %{count}"
    check.check(whole)  # a file may hold it
    return Program(whole, [])


@pytest.mark.parametrize("name", CASES)
def test_calls_that_fit_are_torchs(name: str) -> None:
    case = CASES[name]
    found, _ = _program(name, case, case.text)(case.given, [])
    torch.testing.assert_close(found[0], case.expected)


@pytest.mark.parametrize("name", CASES)
def test_arguments_that_do_not_fit_are_refused(name: str) -> None:
    case = CASES[name]
    for text in case.others:
        with pytest.raises((RuntimeError, ValueError), match=r"fails: expected|number|integer"):
            _program(name, case, text)(case.given, [])
    for place, tensor in case.altered:
        given = [*case.given]
        given[place] = tensor
        with pytest.raises(RuntimeError, match="fails: expected"):
            _program(name, case, case.text)(given, [])


@pytest.mark.parametrize(
    "text",
    [
        "%3 %4 = aten::lstm.data %0 %1 [ %2 ] [ %2 ] true 1 0.0 false false",
        "%3 %4 %5 = aten::lu_unpack %0 %1 true true",
        "%3 = aten::max_pool2d_with_indices_backward %0 %1 [ 2 ] [ 2 ] [ 0 ] [ 1 ] false %2",
        "%3 = aten::ctc_loss.Tensor %0 %1 %2 %2 0 1 false",
    ],
)
def test_files_may_not_call_what_cannot_be_checked(text: str) -> None:
    with pytest.raises(ValueError, match="takes its arguments on trust"):
        check.check(f"inputs 3 0 0\n{text}\noutputs %3")
