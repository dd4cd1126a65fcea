"""The driver of `optimize`, `llm.optimize` and `quantize_`: what a run of passes leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import oxytorch
from oxytorch.quantization import Int4Weight, Int8Weight, quantize_
from oxytorch.rewriting.changes import ATTRIBUTE, ChangeLog, ParameterSet, log_of
from oxytorch.rewriting.driver import run_passes
from oxytorch.rewriting.memory import nbytes
from oxytorch.rewriting.report import Report


class Stop(BaseException):
    """What nobody catches."""


@dataclass
class Context:
    model: nn.Module
    log: ChangeLog = field(default_factory=lambda: ChangeLog(Report("Linear", "", [])))
    seen: list[str] = field(default_factory=list)


def _halve(context: Context) -> None:
    """A pass that stores the weight in half of its bytes."""
    weight = context.model.get_parameter("weight")
    half = nn.Parameter(weight.detach().bfloat16())
    context.log.changes.append(ParameterSet(context.model, "weight", half, keeps_before=True))
    context.seen.append("halve")


def _look(context: Context) -> None:
    assert log_of(context.model) is context.log
    context.seen.append("look")


def _stop(context: Context) -> None:
    raise Stop


def test_passes_run_in_order_and_the_log_stays_with_time_and_bytes() -> None:
    context = Context(nn.Linear(16, 16))
    before = nbytes(context.model)
    run_passes(context, [_look, _halve, _look])
    assert context.seen == ["look", "halve", "look"]
    report = oxytorch.explain(context.model)
    assert report is context.log.report
    assert (report.bytes_before, report.bytes_after) == (before, before - 16 * 16 * 2)
    assert report.seconds > 0


def test_a_pass_that_raises_leaves_the_model_as_it_was() -> None:
    model = nn.Linear(16, 16)
    weight, keys = model.weight, {*model.__dict__}
    with pytest.raises(Stop):
        run_passes(Context(model), [_halve, _stop, _look])
    assert model.weight is weight and {*model.__dict__} == keys


def test_changes_that_are_kept_can_be_taken_back_later() -> None:
    context = Context(nn.Linear(16, 16))
    with pytest.raises(Stop):
        run_passes(context, [_halve, _stop], keeps_changes=True)
    assert context.model.weight.dtype == torch.bfloat16
    assert context.log.report.bytes_after == nbytes(context.model)
    oxytorch.undo(context.model)
    assert context.model.weight.dtype == torch.float32


def test_a_log_without_changes_does_not_stay() -> None:
    model = nn.Linear(16, 16)
    with pytest.raises(Stop):
        run_passes(Context(model), [_look, _stop], keeps_changes=True)
    assert ATTRIBUTE not in model.__dict__


def _stops_at(count: int) -> Any:
    def progress(done: int, layers: int, path: str) -> None:
        if done == count:
            raise Stop

    return progress


def test_explain_knows_the_layers_that_an_interrupted_quantize_did() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    with pytest.raises(Stop):
        quantize_(model, Int8Weight(), progress=_stops_at(0))
    with pytest.raises(ValueError, match="not optimized"):
        oxytorch.explain(model)
    with pytest.raises(Stop):
        quantize_(model, Int8Weight(), progress=_stops_at(1))
    assert [layer.module for layer in oxytorch.explain(model).layers] == ["0"]
    with pytest.raises(Stop):
        quantize_(model, Int4Weight(group_size=64), progress=_stops_at(2))
    report = oxytorch.explain(model)
    assert [layer.module for layer in report.layers] == ["0", "1", "2"]
    assert [entry.pass_name for entry in report.applied] == ["int8", "int4", "int4"]
    assert report.bytes_after == nbytes(model)
    oxytorch.undo(model)
    assert all(type(layer.weight) is nn.Parameter for layer in model)
