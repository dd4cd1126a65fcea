"""Float32 times panels of float32: where tiles, pieces and items end, and who does them."""

from __future__ import annotations

import ctypes
from itertools import pairwise

import pytest
import torch
from harness import LEVELS, arguments, call

from marks import NEEDS_LIBRARY
from oxytorch import _library, ops, testing
from oxytorch.ops import Sample
from oxytorch.ops.linear_panels import linear
from oxytorch.ops.panels import PanelWeight

pytestmark = NEEDS_LIBRARY

WIDTHS = (1, 13, 95, 96, 97, 200, 255, 256, 257, 700)
OUTPUTS = (1, 15, 16, 17, 65, 130, 260)


def _sample(rows: int, width: int, outputs: int, epilogue: str) -> Sample:
    weight = torch.randn(outputs, width) / width**0.5
    panels = ops.pack_panels(weight, "fp32")
    other = torch.randn(rows, outputs) if epilogue == "add" else None
    bias = torch.randn(outputs) if rows % 2 else None
    x = torch.randn(rows, width)
    return Sample("", (x, "fp32", panels, None, None, None, outputs, bias, other, epilogue))


def _check(sample: Sample, level: str) -> None:
    op = ops.registry()["linear_panels"]
    exact = op.reference(*testing.widen(sample.args))
    plain = op.reference(*sample.args)
    with testing.settings(split=True, guard=testing.GUARD):
        (result,) = call(op, arguments(op, sample), level)
    testing.assert_close(result, exact, plain, f"{op.name} at {level}")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rows", [1, 3, 12, 13, 47, 48, 49, 71, 150])
def test_every_end_of_tiles_and_pieces(rows: int, level: str) -> None:
    torch.manual_seed(rows)
    for width in WIDTHS:
        # Torch sums a single long output in many chains, and is off by less than one chain is.
        for outputs in OUTPUTS if width <= 200 else OUTPUTS[1:]:
            epilogue = ("none", "add", "gelu")[(width + outputs) % 3]
            _check(_sample(rows, width, outputs, epilogue), level)


def test_more_rows_than_an_item_has() -> None:
    torch.manual_seed(0)
    for outputs in (48, 300):
        _check(_sample(700, 100, outputs, "none"), LEVELS[-1])


def test_rows_of_x_may_be_apart() -> None:
    torch.manual_seed(0)
    weight = PanelWeight.from_dense(torch.randn(40, 30), "fp32")
    x = torch.randn(20, 2, 64)[:, 1, 5:35]
    torch.testing.assert_close(linear(x, weight), linear(x.contiguous(), weight), rtol=0, atol=0)


@pytest.mark.parametrize("epilogue", ["none", "gelu", "relu", "tanh", "sigmoid", "hardswish"])
@pytest.mark.parametrize("rows", [1, 9])
def test_what_is_not_finite_is_as_in_torch(rows: int, epilogue: str) -> None:
    weight = PanelWeight.from_dense(torch.eye(20), "fp32")
    for value in (torch.nan, torch.inf, -torch.inf):
        x = torch.zeros(rows, 20)
        x[0] = value
        bias = torch.zeros(20)
        bias[3] = value
        found = linear(x.nan_to_num(1.0), weight, bias, epilogue=epilogue)[:, 3]
        sums = torch.nn.functional.linear(x.nan_to_num(1.0), torch.eye(20), bias).double()
        wanted = ops.panels.epilogues.ACTIVATIONS[epilogue](sums)[:, 3].float()
        torch.testing.assert_close(found, wanted, equal_nan=True)
        assert linear(x, weight)[0].isnan().all()


def test_small_results_of_tanh_keep_their_digits() -> None:
    weight = PanelWeight.from_dense(torch.eye(64), "fp32")
    x = torch.logspace(-30, 1, 64 * 10).view(10, 64)
    found = linear(x, weight, epilogue="tanh").double()
    exact = x.double().tanh()
    assert ((found - exact).abs() <= 4e-7 * exact).all()


@pytest.mark.parametrize(("rows", "width"), [(70, 200), (8, 700), (48, 700), (300, 700)])
def test_results_do_not_depend_on_the_number_of_threads(rows: int, width: int) -> None:
    torch.manual_seed(0)
    weight = PanelWeight.from_dense(torch.randn(150, width), "fp32")
    x, results = torch.randn(rows, width), []
    before = torch.get_num_threads()
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        with testing.settings(split=True):
            results.append(linear(x, weight))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def _split(rows: int, outputs: int, width: int, threads: int) -> tuple[int, ...]:
    """Rows of an item, groups of panels and of what they have multiples, items, and items of a
    thread."""
    found = (ctypes.c_int64 * 5)()
    address = ctypes.addressof(found)
    _library.functions().oxytorch_split_float_product(rows, outputs, width, threads, address)
    return tuple(found)


@pytest.mark.parametrize("threads", [1, 2, 12, 16, 32])
def test_all_threads_have_about_as_much_to_do(threads: int) -> None:
    """Of products that are worth so many; the busiest has at most a third more than its share."""
    for rows in (64, 128, 197, 512, 1000):
        for width, outputs in ((768, 768), (768, 3072), (3072, 768), (768, 2304), (1024, 1000)):
            chunk, groups, step, items, grain = _split(rows, outputs, width, threads)
            all_panels = -(-outputs // 16)
            assert items == -(-rows // chunk) * groups
            used = -(-items // grain)
            steps = -(-all_panels // step)
            ends = [min(i * steps // groups * step, all_panels) for i in range(groups + 1)]
            assert all(begin < end for begin, end in pairwise(ends)) and ends[-1] == all_panels
            assert all(chunk * (end - begin) <= 2304 for begin, end in pairwise(ends))
            shares = [ends[i % groups + 1] - ends[i % groups] for i in range(items)]
            panels = max(sum(shares[i : i + grain]) for i in range(0, items, grain))
            busiest = panels * min(chunk, rows)
            share = rows * all_panels / threads
            assert busiest <= 4 / 3 * share, (rows, width, outputs, chunk, groups, items, grain)
            assert used >= 3 / 4 * threads


@pytest.mark.parametrize("threads", [2, 16])
def test_small_products_have_as_many_threads_as_they_are_worth(threads: int) -> None:
    for rows, width, outputs in ((9, 13, 512), (16, 128, 256), (1024, 512, 1), (1, 256, 64)):
        *_, items, grain = _split(rows, outputs, width, threads)
        numbers = width * -(-outputs // 16) * 16
        worth = max(1, rows * numbers >> 19, 4 * numbers >> 16)
        assert -(-items // grain) <= min(worth, threads)
    for rows in (1, 8):
        *_, items, grain = _split(rows, 768, 768, threads)
        assert -(-items // grain) >= 3 / 4 * threads
