"""Runs that are recorded a second time: what the first one computed need not be computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from oxytorch.graph.errors import CaptureError
from oxytorch.program import tape
from oxytorch.program.calls import Recording
from oxytorch.program.tape import recorded_again, recorded_once

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def _both(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Recording, Recording]:
    """The first run's output, and the recordings of both."""

    def again() -> tuple[Any, list[Tensor]]:
        output = second()
        return output, [output]

    with torch.no_grad():
        output, before = recorded_once(first, lambda found: [found], [X], keeps=True)
        assert isinstance(before, Recording)
        return output, before, recorded_again(before, again, [X], was_watched=True)[0]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _several(x: Tensor) -> Tensor:
    first, second = (x * 2).chunk(2, -1)
    found, _ = torch.cat([first, second, first.exp()], -1).max(-1)
    return found.view(3, 1)


def test_results_of_the_first_run_are_taken() -> None:
    output, _, again = _both(lambda: _several(X), lambda: _several(X))
    assert again.output is not output
    assert _memory(again.output) == _memory(output)
    assert torch.equal(again.output, _several(X))


def test_nothing_is_kept_afterwards() -> None:
    _, before, again = _both(lambda: _several(X), lambda: _several(X))
    assert not before.made
    assert not again.made
    _, found = recorded_once(lambda: _several(X), lambda found: [found], [X])
    assert isinstance(found, Recording)
    assert not found.made


def test_few_bytes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "MOST_KEPT", 8)
    output, _, again = _both(lambda: _several(X), lambda: _several(X))
    assert _memory(again.output) != _memory(output)


def test_runs_that_write_to_what_they_made_are_computed_again() -> None:
    def run() -> Tensor:
        return (X * 2).add_(1)

    output, _, again = _both(run, run)
    assert _memory(again.output) != _memory(output)


@pytest.mark.parametrize("factor", [3, 2.5, True])
def test_other_arguments_are_another_run(factor: Any) -> None:
    with pytest.raises(CaptureError, match="two runs on one input differ"):
        _both(lambda: (X * 2).exp(), lambda: (X * factor).exp())


@pytest.mark.parametrize("pair", [(2, 2.0), (1, True), (0.0, -0.0)])
def test_equal_numbers_of_other_kinds_are_another_run(pair: tuple[Any, Any]) -> None:
    """Of which a result may have another dtype, or another sign."""
    first, second = pair
    whole = torch.arange(12).reshape(3, 4)
    for x in (whole, X):
        with pytest.raises(CaptureError, match="two runs on one input differ"):
            _both(lambda x=x: x * first, lambda x=x: x * second)


def test_numbers_that_are_none_are_equal() -> None:
    _, _, again = _both(lambda: X * float("nan"), lambda: X * float("nan"))
    assert again.steps


def test_another_run_writes_to_nothing_of_the_first() -> None:
    with torch.no_grad():
        output, before = recorded_once(lambda: X * 2, lambda found: [found], [X], keeps=True)
        assert isinstance(before, Recording)
        with pytest.raises(CaptureError, match="two runs on one input differ"):
            recorded_again(before, lambda: ((X * 2).zero_(), [X]), [X], was_watched=True)
    assert torch.equal(output, X * 2)


def test_values_that_code_reads_are_looked_at_again() -> None:
    def run() -> Tensor:
        return X * 2 if (X + 1).sum().item() > 0 else X * 3

    _, before, again = _both(run, run)
    (read,) = (step.read for step in again.steps if step.read is not None)
    assert read == (X + 1).sum().item()
    assert before.steps == again.steps
