"""`oxytorch.graph.explain` tells what was fused, what was not and why, and draws it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import oxytorch
from oxytorch import _library
from oxytorch.graph import drawing
from oxytorch.program.passes import ALWAYS, CONVOLUTIONS, WITH_LASTING, name_of

pytestmark = [
    pytest.mark.skipif(not _library.loaded, reason=f"no library: {_library.why_missing}"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + torch.tanh(self.layer(x)))  # type: ignore[no-any-return]


class _Computed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return F.linear(x, self.layer.weight * scale)


class _Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[: int(x.sum())]


def _why(report: Any, by: str) -> list[str]:
    return [note.why for note in report.skipped if note.by == by]


def test_arguments_are_given_as_to_optimize() -> None:
    model, x, scale = _Computed().eval(), torch.randn(3, 256), torch.randn(256, 1)
    reports = [
        oxytorch.graph.explain(model, (x, scale)),
        oxytorch.graph.explain(model, {"x": x, "scale": scale}),
        oxytorch.graph.explain(model, x, {"scale": scale}),
    ]
    assert len({len(report.after.steps) for report in reports}) == 1
    with pytest.raises(TypeError, match=r"expected model to be a torch\.nn\.Module"):
        oxytorch.graph.explain("model", x)  # type: ignore[arg-type]


def test_report_has_changes_reasons_and_both_programs() -> None:
    model = _Residual().eval()
    x = torch.randn(3, 8)
    before = model(x)
    report = oxytorch.graph.explain(model, x)
    text = str(report)
    assert "norms.sums_before_norms: oxytorch::layer_norm became oxytorch::add_layer_norm" in text
    assert "norms.sums_before_norms: add became part of another step" in text
    assert any("fewer than 32768 elements" in why for why in _why(report, "linear.pack"))
    assert "%1 is layer.weight" in text
    assert "= aten::tanh" in text.partition("\nAfter\n")[0]
    assert "oxytorch::add_layer_norm %0" in text.partition("\nAfter\n")[2]
    assert torch.equal(model(x), before)


def test_folded_normalization_is_done_once() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)).eval()
    report = oxytorch.graph.explain(model, (torch.randn(1, 3, 16, 16),))
    assert "convolution.fold_norms" in {note.by for note in report.fused}
    assert "aten::rsqrt" in str(report).partition("\nDone once\n")[2]
    assert "aten::rsqrt" not in report.after.text()


def test_weight_that_changes_is_the_reason() -> None:
    inputs = torch.randn(4, 256), torch.randn(256)
    report = oxytorch.graph.explain(_Computed().eval(), inputs)
    assert _why(report, "linear.pack") == ["its weight is computed at each call"]


def test_reason_of_a_step_that_a_later_pass_took_is_not_shown() -> None:
    class Squares(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(F.silu(x) * x, (8,))

    report = oxytorch.graph.explain(Squares().eval(), torch.randn(2, 8))
    assert {step.target for step in report.after.steps} == {
        "oxytorch::silu_mul",
        "oxytorch::layer_norm",
    }
    assert report.skipped == []


def test_exported_program_and_keywords_are_taken() -> None:
    model = _Residual().eval()
    exported = torch.export.export(model, (), {"x": torch.randn(3, 8)})
    of_exported = oxytorch.graph.explain(exported)
    of_module = oxytorch.graph.explain(model, kwargs={"x": torch.randn(3, 8)})
    assert of_exported.after.text() == of_module.after.text()


def test_notes_name_passes() -> None:
    passes = {name_of(each) for each in (*ALWAYS, *CONVOLUTIONS, *WITH_LASTING)}
    report = oxytorch.graph.explain(_Residual().eval(), torch.randn(3, 8))
    assert {note.by for note in report.notes} <= passes


def test_model_in_training_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"_Residual in evaluation mode; call model\.eval\(\)"):
        oxytorch.graph.explain(_Residual(), torch.randn(3, 8))


def test_drawing_has_a_box_for_each_step(tmp_path: Path) -> None:
    report = oxytorch.graph.explain(_Residual().eval(), torch.randn(3, 8))
    report.svg(tmp_path / "model.svg")
    root = ElementTree.fromstring((tmp_path / "model.svg").read_text())
    titles = [each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}title")]
    steps = len(report.before.steps) + len(report.after.steps)
    assert len(titles) == steps + 5  # and the legend
    assert any("fewer than 32768" in title for title in titles)
    assert report._repr_svg_() == (tmp_path / "model.svg").read_text()


def test_boxes_stand_below_what_they_take_and_do_not_overlap() -> None:
    arrows = [(0, 2), (1, 2), (2, 3), (2, 4), (3, 5), (4, 5), (0, 5)]
    column = drawing.Column("<&>", [drawing.Box(str(i), "aten", "") for i in range(6)], arrows)
    places = drawing._places(column)
    assert all(places[start][1] < places[end][1] for start, end in arrows)
    by_row: dict[int, list[float]] = {}
    for across, down in places:
        by_row.setdefault(down, []).append(across)
    for row in by_row.values():
        assert all(b - a >= 1 for a, b in zip(sorted(row), sorted(row)[1:], strict=False))
    ElementTree.fromstring(drawing.draw([column, drawing.Column("empty", [], [])]))


class _ReadsNumbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y.relu() if y.mean().item() > 0 else y.tanh()


def test_a_mapping_in_a_tuple_is_told_apart() -> None:
    with pytest.raises(ValueError, match="pass the mapping itself"):
        oxytorch.graph.explain(_Residual().eval(), ({"x": torch.randn(2, 8)},))


def test_model_that_cannot_be_captured_is_a_short_error() -> None:
    with pytest.raises(ValueError, match=r"_ReadsNumbers cannot become a program") as found:
        oxytorch.graph.explain(_ReadsNumbers().eval(), torch.randn(4, 16))
    assert "\n" not in str(found.value)


def test_optimized_model_without_a_program_says_so() -> None:
    x = torch.randn(4, 16)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).eval()
    fast = oxytorch.optimize(model, sample_input=x)
    assert "no program runs for calls of this model" in str(oxytorch.graph.explain(fast, x))
    assert "no program runs" not in str(oxytorch.graph.explain(model, x))
