"""Hints: how arguments of every form are split, how results are joined, and what cannot be."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor

from oxytorch.runtime import MultiStreamModuleHint
from oxytorch.runtime.splitting import join, split

Hint = MultiStreamModuleHint


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Opaque:
    """No container that torch knows."""

    first: Tensor


X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(18.0).reshape(3, 6)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (tuple, list)):
        return type(left) is type(right) and all(map(same, left, right))
    return left == right


@pytest.mark.parametrize(
    "hint, args, kwargs",
    [
        (Hint(0), (X,), {}),
        (Hint(-2), (X,), {}),
        (Hint(0, None, 1), (X, X, Y), {}),
        (Hint(0, None, 0), (X, False, X), {}),
        (Hint(0), (X, False, None, 3, "mean", (1, 2)), {"flag": True, "dtype": torch.float32}),
        (Hint(x=0, y=1), (), {"x": X, "y": Y}),
        (Hint(0, y=1, other=0), (X,), {"y": Y}),
        (Hint(0, 0), (X,), {}),
        (Hint(0), ((X, [X, X], {"a": X, "b": None}),), {}),
        (Hint((0, 1, None)), ([X, Y, Y],), {}),
        (Hint([0, (1, 0)]), ((X, (Y, X)),), {}),
        (Hint({"a": 0, "b": {"c": 1}}), ({"a": X, "b": {"c": Y}, "flag": True},), {}),
        (Hint((0, 1)), (Pair(X, Y),), {}),
        (Hint(0), (Pair(X, X),), {}),
        (Hint(0), (OrderedDict(a=X),), {}),
    ],
)
@pytest.mark.parametrize("streams", [1, 2, 4, 8])
def test_pieces_joined_again_are_the_arguments(
    hint: Hint, args: tuple, kwargs: dict, streams: int
) -> None:
    pieces = split(hint, args, kwargs, streams)
    assert len(pieces) == min(streams, 6)
    for index, value in enumerate(args):
        given = hint.args[index] if index < len(hint.args) else None
        whole = join(_whole(given, value), [piece[index] for piece, _ in pieces])
        assert same(whole, value)
    for name, value in kwargs.items():
        assert same(join(hint.kwargs.get(name), [piece[name] for _, piece in pieces]), value)


def _whole(hint: Any, value: Any) -> Any:
    """The hint with None for members of dicts that it leaves out."""
    if isinstance(hint, dict):
        return {key: _whole(hint.get(key), item) for key, item in value.items()}
    return hint


def test_pieces_are_views_of_the_arguments() -> None:
    pieces = split(Hint(0), (X,), {}, 2)
    assert [piece[0].data_ptr() for piece, _ in pieces] == [X.data_ptr(), X[3:].data_ptr()]


@pytest.mark.parametrize(
    "hint, args, kwargs, error, message",
    [
        (
            Hint(0, 0),
            (X, Y),
            {},
            ValueError,
            r"args\[1\]: expected 6 items .* as args\[0\] has.*3, 6",
        ),
        (Hint(0, y=0), (X,), {"y": Y}, ValueError, "y: expected 6 items along dimension 0"),
        (Hint(0), (X, Y), {}, ValueError, r"args\[1\]: expected a hint for a tensor of shape"),
        (Hint(0), (X,), {"mask": X}, ValueError, "mask: expected a hint"),
        (Hint(0), (X, [1, X]), {}, ValueError, r"args\[1\]: expected a hint for a list of 2"),
        (Hint(0), (X, object()), {}, ValueError, r"args\[1\]: expected a hint for a object"),
        (Hint(2), (X,), {}, ValueError, "a dimension 2 to split, got a tensor of shape"),
        (Hint(0), (torch.tensor(1.0),), {}, ValueError, r"a dimension 0 .* shape \[\]"),
        (Hint(0), (3,), {}, ValueError, "expected an argument to split"),
        (Hint(None), (X,), {}, ValueError, "expected an argument to split"),
        (Hint(0), (), {}, ValueError, "expected an argument to split"),
        (Hint(0), (numpy.ones(4),), {}, TypeError, "expected tensors to split, got a ndarray"),
        (Hint((0, 0)), ((X,),), {}, ValueError, r"a tuple or list of 2, .* got a tuple of 1"),
        (Hint((0, 0)), (X,), {}, ValueError, "a tuple or list of 2, .* got a tensor"),
        (
            Hint({"a": 0}),
            ({"b": X},),
            {},
            ValueError,
            r"a dict with \['a'\], got a dict with \['b'\]",
        ),
        (Hint({"a": 0}), ({"a": X, "b": X},), {}, ValueError, r"args\[0\]\['b'\]: expected a hint"),
    ],
)
def test_arguments_that_cannot_be_split_are_refused(
    hint: Hint, args: tuple, kwargs: dict, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"MultiStreamModule: .*{message}"):
        split(hint, args, kwargs, 2)


@pytest.mark.parametrize(
    "hint, results, message",
    [
        (0, [torch.tensor(1.0)] * 2, r"output cannot be joined .* dimension 0: .* shape \[\]"),
        (0, [X, Y], r"cannot be joined .* \[6, 2\], a tensor of shape \[3, 6\]"),
        (5, [X, X], "cannot be joined .* dimension 5"),
        (0, [X, 3], "cannot be joined .* got|cannot be joined .* 3"),
        (0, [1, 2], "streams return 1 and 2"),
        (0, [X.numpy(), X.numpy()], "streams return"),
        (0, [Opaque(X), Opaque(X)], "streams return"),
        (0, [(X, 1), (X, 2)], "streams return 1 and 2"),
        (0, [(X,), [X]], "cannot be joined"),
        ((0, 0), [(X,), (X,)], "output: expected a tuple or list of 2"),
        ({"a": 0}, [{"a": X, "b": X}] * 2, r"output\['b'\]: expected a hint in output_concat_hint"),
        ({"a": 0}, [X, X], r"output: expected a dict with \['a'\]"),
    ],
)
def test_results_that_cannot_be_joined_are_refused(
    hint: Any, results: list[Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"MultiStreamModule: .*{message}"):
        join(hint, results)


def test_results_without_a_hint_are_those_of_the_first_stream() -> None:
    assert join(None, [X, Y]) is X
    assert join((0, None), [(X, 1), (X, 2)])[1] == 1


def test_results_that_are_no_tensors_are_joined_if_they_agree() -> None:
    assert same(join(0, [(X[:2], None, 3), (X[2:], None, 3)]), (X, None, 3))


def test_results_of_transformers_are_joined() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    parts = [outputs.BaseModelOutput(last_hidden_state=part) for part in X.split(3)]
    for hint in (0, {"last_hidden_state": 0}):
        joined = join(hint, parts)
        assert type(joined) is outputs.BaseModelOutput
        assert torch.equal(joined.last_hidden_state, X)


@pytest.mark.parametrize("args", [(0.5,), ("0",), (True,), ((0, 1.0),), ({"a": "b"},)])
def test_hint_refuses_what_is_no_dimension(args: tuple) -> None:
    with pytest.raises(TypeError, match="expected ints, None, and tuples, lists and dicts"):
        Hint(*args)


def test_hint_of_a_result() -> None:
    assert Hint(1).of_result() == 1
    assert Hint((0, 1)).of_result() == Hint(0, 1).of_result() == (0, 1)
    assert Hint(a=0).of_result() == {"a": 0}
    assert repr(Hint(0, (1, None), mask=2)) == "MultiStreamModuleHint(0, (1, None), mask=2)"
