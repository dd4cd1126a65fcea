"""Programs whose operators nobody looks at: ours are called, and views made, without torch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import oxytorch
from oxytorch import isa
from oxytorch.core.modes import is_unseen
from oxytorch.program.program import Program
from threads import errors_in_threads

_OWN = "oxytorch::run_program"


def _seen(run: Callable[[], Any]) -> set[str]:
    """The operators that torch's dispatcher was asked for."""
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU]) as profiled:
        run()
    keys = {event.key for event in profiled.key_averages()} - {_OWN}
    return {key for key in keys if key.startswith(("aten::", "oxytorch::"))}


def _list(numbers: Any) -> str:
    return f"[ {' '.join(map(str, numbers))} ]"


_pick = random.Random(0)


def _dim(x: Tensor) -> int:
    return _pick.randrange(-x.dim(), x.dim())


def _cut(x: Tensor) -> str:
    ends = [_pick.choice(["none", f"some {_pick.randint(-9, 9)}"]) for _ in range(2)]
    return f"{_dim(x)} {' '.join(ends)} {_pick.randint(1, 3)}"


def _selected(x: Tensor) -> str:
    dim = _dim(x)
    return f"{dim} {_pick.randrange(-x.shape[dim], x.shape[dim])}"


def _permuted(x: Tensor) -> str:
    order = _pick.sample(range(x.dim()), x.dim())
    return _list(place - _pick.choice([0, x.dim()]) for place in order)


def _expanded(x: Tensor) -> str:
    sizes = [_pick.choice([-1, s]) if s != 1 else _pick.choice([-1, 1, 3]) for s in x.shape]
    return f"{_list([*_pick.choice([(), (2,), (3, 2)]), *sizes])} false"


def _viewed(x: Tensor) -> str:
    count = x.numel()
    first = _pick.choice([d for d in range(1, count + 1) if count % d == 0])
    return _list(_pick.choice([(count,), (first, count // first), (1, first, 1, count // first)]))


MADE: dict[str, Callable[[Tensor], str]] = {
    "aten::view": _viewed,
    "aten::_unsafe_view": _viewed,
    "aten::reshape": _viewed,
    "aten::transpose.int": lambda x: f"{_dim(x)} {_dim(x)}",
    "aten::permute": _permuted,
    "aten::slice.Tensor": _cut,
    "aten::select.int": _selected,
    "aten::unsqueeze": lambda x: str(_pick.randrange(-x.dim() - 1, x.dim() + 1)),
    "aten::expand": _expanded,
}
"""Views that the library makes, and arguments for a tensor."""


def _tensor() -> Tensor:
    """A tensor whose values are dense but for gaps, in some order, and may begin anywhere."""
    shape = [_pick.randint(1, 4) for _ in range(_pick.randint(1, 5))]
    x = torch.arange(4.0 * torch.Size(shape).numel()).reshape(2, *shape, 2)[1, ..., 1]
    if _pick.random() < 0.5:
        x = x.contiguous()
    return x.permute(_pick.sample(range(x.dim()), x.dim())) if _pick.random() < 0.5 else x


def _form(x: Tensor) -> Any:
    return x.shape, x.stride(), x.storage_offset(), x.dtype


@pytest.mark.parametrize("target", MADE)
def test_views_are_those_of_torch(target: str) -> None:
    for _ in range(300):
        x = _tensor()
        if target in ("aten::view", "aten::_unsafe_view") and not x.is_contiguous():
            x = x.contiguous()
        program = Program(f"inputs 1 0 0\n%1 = {target} %0 {MADE[target](x)}\noutputs %1", [])
        with torch.inference_mode():
            (theirs,), _ = program([x])
            (ours,), _ = program([x], is_unseen=True)
        assert _form(ours) == _form(theirs), (str(program), x.shape, x.stride())
        assert torch.equal(ours, theirs)
        is_view = theirs.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert is_view == (ours.untyped_storage().data_ptr() == x.untyped_storage().data_ptr())


@pytest.mark.parametrize("target", MADE)
def test_views_are_made_without_torch(target: str) -> None:
    x = torch.ones(2, 3, 4)
    program = Program(f"inputs 1 0 0\n%1 = {target} %0 {MADE[target](x)}\noutputs %1", [])
    assert _seen(lambda: program([x]))
    assert not _seen(lambda: program([x], is_unseen=True))


LEFT = {
    "a size to find": ("aten::view", "[ 2 -1 ]", torch.ones(2, 3)),
    "gaps": ("aten::view", "[ 2 2 ]", torch.ones(4, 2)[:, 0]),
    "nothing": ("aten::view", "[ 0 7 ]", torch.ones(0, 3)),
    "a copy": ("aten::reshape", "[ 6 ]", torch.ones(2, 3).t()),
    "many dimensions": ("aten::transpose.int", "0 8", torch.ones(1, 2, 1, 2, 1, 2, 1, 2, 3)),
    "many sizes": ("aten::view", "[ 1 1 1 1 1 1 1 1 6 ]", torch.ones(2, 3)),
    "a number": ("aten::unsqueeze", "0", torch.tensor(2.0)),
    "no dimension": ("aten::permute", "[ ]", torch.tensor(2.0)),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_views_are_those_of_torch_too(name: str) -> None:
    target, words, x = LEFT[name]
    program = Program(f"inputs 1 0 0\n%1 = {target} %0 {words}\noutputs %1", [])
    with torch.inference_mode():
        (theirs,), _ = program([x])
        (ours,), _ = program([x], is_unseen=True)
    assert _form(ours) == _form(theirs) and torch.equal(ours, theirs)


WRONG = {
    "elements": ("aten::view", "[ 7 ]"),
    "too many": ("aten::view", "[ 4611686018427387904 4 ]"),
    "a dimension": ("aten::transpose.int", "0 2"),
    "a dimension twice": ("aten::permute", "[ 0 0 ]"),
    "few dimensions": ("aten::permute", "[ 0 ]"),
    "a step": ("aten::slice.Tensor", "0 none none 0"),
    "an index": ("aten::select.int", "1 3"),
    "a place": ("aten::unsqueeze", "4"),
    "a size": ("aten::expand", "[ 2 5 ] false"),
    "fewer sizes": ("aten::expand", "[ 3 ] false"),
    "a new size": ("aten::expand", "[ -1 2 3 ] false"),
}


@pytest.mark.parametrize("name", WRONG)
def test_torch_says_what_is_wrong_with_a_view(name: str) -> None:
    target, words = WRONG[name]
    program = Program(f"inputs 1 0 0\n%1 = {target} %0 {words}\noutputs %1", [])
    said = []
    for is_unseen_ in (False, True):
        with pytest.raises(RuntimeError, match=f"{target.partition('.')[0]} fails") as error:
            program([torch.ones(2, 3)], is_unseen=is_unseen_)
        said.append(str(error.value))
    assert said[0] == said[1]


def test_views_of_oneDNNs_tensors_are_left_to_torch() -> None:
    program = Program("inputs 1 0 0\n%1 = aten::transpose.int %0 0 1\noutputs %1", [])
    x = torch.arange(6.0).reshape(2, 3)
    with torch.inference_mode():
        (found,), _ = program([x.to_mkldnn()], is_unseen=True)
    assert torch.equal(found.to_dense(), x.t())


OURS = """inputs 2 0 0
%2 = oxytorch::rms_norm %0 some %1 1e-06
%3 _ = oxytorch::add_rms_norm %2 %0 some %1 1e-06 false
%4 = oxytorch::softmax %3 1.0 none
outputs %2 %4"""


@pytest.mark.parametrize("level", [each.name for each in isa.levels() if each.supported])
def test_our_operators_are_called_without_torch(level: str) -> None:
    program = Program(OURS, [])
    given = [torch.randn(5, 32), torch.rand(32)]
    with isa.use(level):
        assert {"oxytorch::rms_norm", "oxytorch::softmax"} <= _seen(lambda: program(given))
        assert not any("oxytorch" in name for name in _seen(lambda: program(given, is_unseen=True)))
        with torch.inference_mode():
            pairs = zip(program(given)[0], program(given, is_unseen=True)[0], strict=True)
            assert all(torch.equal(theirs, ours) for theirs, ours in pairs)


def test_an_operator_of_ours_that_fails_is_named() -> None:
    program = Program(OURS, [])
    with (
        torch.inference_mode(),
        pytest.raises(RuntimeError, match="oxytorch::rms_norm fails: rms_norm: expected w"),
    ):
        program([torch.randn(5, 32), torch.rand(31)], is_unseen=True)


def test_double_precision_is_that_of_the_reference() -> None:
    program = Program(OURS, [])
    given = [torch.randn(5, 32, dtype=torch.float64), torch.rand(32, dtype=torch.float64)]
    with torch.inference_mode():
        pairs = zip(program(given)[0], program(given, is_unseen=True)[0], strict=True)
        assert all(torch.equal(theirs, ours) for theirs, ours in pairs)


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_who_looks_at_operators_is_noticed() -> None:
    assert not is_unseen()  # gradients can be asked for
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert is_unseen()
            with torch.autocast("cpu"):
                assert not is_unseen()
            with profile(activities=[ProfilerActivity.CPU]):
                assert not is_unseen()
            with _Mode():
                assert not is_unseen()
            assert is_unseen()


# An optional tensor that is given and one that is not, lists, texts, numbers, and a size of a call.
LENT = """inputs 2 1 1
%3 = oxytorch::pool %0 [ 2 2 ] [ 2 2 ] [ 0 0 0 0 ] [ 1 1 ] "max"
%4 = oxytorch::rms_norm %3 some %1 1e-06
%5 = oxytorch::rms_norm %4 none 1e-06
%6 = oxytorch::softmax %5 1.0 none
outputs %3 %6"""


def _lent() -> tuple[Program, list[Tensor]]:
    x = torch.randn(2, 3, 8, 64).to(memory_format=torch.channels_last)
    return Program(LENT, [torch.ones(1)]), [x, torch.rand(32)]


def test_what_is_lent_is_given_back() -> None:
    program, given = _lent()
    with torch.inference_mode():
        wanted, _ = program(given, [1])
        before = [tensor._use_count() for tensor in given]
        for _ in range(20):
            found, _ = program(given, [1], is_unseen=True)
            assert all(map(torch.equal, found, wanted))
        assert [tensor._use_count() for tensor in given] == before
        assert all(tensor._use_count() == 1 for tensor in found)


def test_what_is_lent_is_given_back_after_an_error() -> None:
    program, (x, _) = _lent()
    given = [x, torch.rand(31)]
    before = [tensor._use_count() for tensor in given]
    with torch.inference_mode():
        for _ in range(20):
            with pytest.raises(RuntimeError, match="oxytorch::rms_norm fails: rms_norm: expected"):
                program(given, [1], is_unseen=True)
    assert [tensor._use_count() for tensor in given] == before


def test_threads_are_lent_arguments_of_their_own() -> None:
    program, (x, weight) = _lent()
    with torch.inference_mode():
        wanted = {scale: program([x * scale, weight], [1])[0] for scale in range(1, 5)}

    def call(scale: int) -> None:
        with torch.inference_mode():
            for _ in range(50):
                found, _ = program([x * scale, weight], [1], is_unseen=True)
                assert all(map(torch.equal, found, wanted[scale]))

    assert errors_in_threads(call, wanted) == []


def test_programs_of_models_leave_signs_that_are_turned_when_read_to_torch() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(8, 16, 3), torch.nn.ReLU()).eval()
    x = torch.randn(1, 8, 20, 20)
    optimized = oxytorch.optimize(model, sample_input=(x,), graph=True)
    with torch.no_grad():
        assert _seen(lambda: optimized(x)), "a profiler sees the operators"
        turned = torch._neg_view(x)
        torch.testing.assert_close(optimized(turned), model(-x))
        torch.testing.assert_close(optimized(x), model(x))
