"""The checks of the zoo find what they are there to find: each is shown a model that breaks it."""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import checks
import pytest
import report
import torch
from checks import Finding, check
from forms import difference_in_form, relative_error
from torch import nn

import oxytorch
from oxytorch.graph.errors import DtypeError
from oxytorch.rewriting.report import Entry

NAME = "vae"
"""It returns a dataclass."""


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Finding]]:
    """Check a model that `optimize` gave and a function has spoilt; returns the findings."""
    optimize = oxytorch.optimize

    def run(spoiling: Callable[[nn.Module, nn.Module], Any], dtype: str = "float32") -> Any:
        def spoilt(model: nn.Module, **given: Any) -> nn.Module:
            result = optimize(model, **given)
            spoiling(model, result)
            return result

        monkeypatch.setattr(oxytorch, "optimize", spoilt)
        checks.stock.cache_clear()
        found = check(NAME, "default", dtype).findings
        checks.stock.cache_clear()
        return found

    return run


def claims(findings: list[Finding]) -> set[str]:
    return {found.claim for found in findings}


def test_nothing_is_found_in_an_optimized_model(spoil: Any) -> None:
    assert spoil(lambda original, optimized: None) == []
    assert spoil(lambda original, optimized: None, "bfloat16") == []


@pytest.mark.parametrize(("dtype", "change"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_other_values_are_found(spoil: Any, dtype: str, change: float) -> None:
    def shift(original: nn.Module, optimized: Any) -> None:
        inner = optimized.mean.forward
        optimized.mean.forward = lambda x: inner(x) + change * inner(x).abs().max()

    found = spoil(shift, dtype)
    assert {"answers", "second shape", "second thread"} <= claims(found)
    assert any(one.message.startswith("values: mean differs by") for one in found)


def test_another_class_is_found(spoil: Any) -> None:
    def to_dict(original: nn.Module, optimized: Any) -> None:
        inner = optimized.forward
        optimized.forward = lambda x: vars(inner(x))

    assert "form: output is a dict, stock gives a Reconstruction" in spoil(to_dict)[0].message


def test_one_wrong_shape_or_thread_is_found(spoil: Any) -> None:
    def fail_for_three(original: nn.Module, optimized: Any) -> None:
        inner = optimized.forward

        def forward(x: torch.Tensor) -> Any:
            if x.shape[0] == 3:
                raise RuntimeError("three rows")
            return inner(x)

        optimized.forward = forward

    found = spoil(fail_for_three)
    assert Finding("second shape", "RuntimeError: three rows") in found
    assert "answers" not in claims(found)


def test_a_changed_original_is_found(spoil: Any) -> None:
    def write(original: Any, optimized: nn.Module) -> None:
        with torch.no_grad():
            original.mean.bias.add_(1)

    assert claims(spoil(write)) == {"original"}


def test_a_change_that_is_not_told_is_found(spoil: Any) -> None:
    def keep_quiet(original: nn.Module, optimized: Any) -> None:
        optimized.mean.register_forward_hook(lambda *given: None)
        records = oxytorch.explain(optimized)
        records.entries[:] = [entry for entry in records.entries if entry.module != "mean"]

    found = spoil(keep_quiet)
    assert "explain" in claims(found)
    assert "such as mean" in next(one.message for one in found if one.claim == "explain")


def test_a_program_that_cannot_be_made_is_found() -> None:
    model = oxytorch.optimize(nn.Linear(4, 4).eval())
    assert [*checks._explained(model, {})] == []
    entry = Entry("program", "", applied=False, detail="it fails, KeyError: 3")
    oxytorch.explain(model).entries.append(entry)
    (found,) = checks._explained(model, {})
    assert "KeyError: 3" in found


def _raise(x: torch.Tensor) -> Any:
    raise DtypeError("mixes dtypes") from RuntimeError("not the same dtype")


def _mixing(original: nn.Module, optimized: Any) -> None:
    optimized.forward = _raise


def test_mixed_dtypes_are_refused_where_stock_fails_too(
    spoil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {found.message for found in spoil(_mixing, "bfloat16")} == {"DtypeError: mixes dtypes"}
    assert spoil(_mixing, "float32") != []
    monkeypatch.setattr(checks.Stock, "cast_fails", "RuntimeError: no")
    assert spoil(_mixing, "bfloat16") == []
    outcome = check(NAME, "default", "bfloat16")  # `optimize` is still the one that spoils
    checks.stock.cache_clear()
    assert outcome.skipped.startswith("refused: RuntimeError: not the same dtype; stock's")

    def mixing_and_wrong(original: Any, optimized: Any) -> None:
        _mixing(original, optimized)
        with torch.no_grad():
            original.mean.bias.add_(1)

    assert "original" in claims(spoil(mixing_and_wrong, "bfloat16"))


def test_an_error_of_optimize_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: nn.Module, **given: Any) -> nn.Module:
        raise KeyError(0)

    monkeypatch.setattr(oxytorch, "optimize", refuse)
    assert check(NAME, "tune", "float32").findings == [Finding("optimize", "KeyError: 0")]


def test_a_call_that_waits_is_found(spoil: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "WAIT", 0.0)
    assert "waiting: the call took 0 s" in spoil(lambda original, optimized: None)[0].message


def test_forms_are_compared_to_the_last_part() -> None:
    Pair = namedtuple("Pair", "a b")
    one = {"x": Pair(torch.ones(2), [torch.ones(3), None])}
    assert difference_in_form(one, copy.deepcopy(one), dtypes=True) is None
    other = {"x": Pair(torch.ones(2), [torch.ones(3).half(), None])}
    assert difference_in_form(one, other, dtypes=False) is None
    assert "float16" in str(difference_in_form(one, other, dtypes=True))
    assert "keys" in str(difference_in_form(one, {"y": one["x"]}, dtypes=True))
    assert "is a tuple" in str(difference_in_form(one, {"x": tuple(one["x"])}, dtypes=True))


def test_errors_are_relative_and_see_what_is_no_number() -> None:
    expected = torch.tensor([1.0, -10.0, float("-inf")])
    assert relative_error(torch.tensor([2.0, -10.0, float("-inf")]), expected) == pytest.approx(0.1)
    assert relative_error(torch.tensor([1.0, -10.0, 0.0]), expected) == float("inf")
    assert relative_error(torch.tensor([float("nan"), -10.0, float("-inf")]), expected) > 1e9
    assert relative_error(torch.tensor([1, 2]), torch.tensor([1, 3])) == float("inf")


def test_causes_leave_out_what_differs_between_models() -> None:
    assert report.cause("values: logits differs by 2e-3, allowed 1e-05") == report.cause(
        "values: past_key_values.0.keys differs by 0.4, allowed 3.0e-02"
    )
    assert report.cause("KeyError: 0") != report.cause("KeyError: 'a'")


def test_the_report_keeps_broken_models_as_results(tmp_path: Any) -> None:
    lines = report.run(["no such model", NAME], ["default"], tmp_path / "zoo.jsonl", timeout=120)
    status = {(line["model"], line["dtype"]): line["status"] for line in lines}
    assert status["no such model", "float32"] == "broken check"
    assert status[NAME, "float32"] == status[NAME, "bfloat16"] == "right"
    assert len((tmp_path / "zoo.jsonl").read_text().splitlines()) == len(lines)
    text = report.tables(lines)
    assert "KeyError" in text and "no such model" in text


def test_the_report_goes_on_after_a_process_that_died(tmp_path: Any) -> None:
    lines = report.run([NAME, NAME], ["default"], tmp_path / "zoo.jsonl", timeout=0.01)
    assert [line["status"] for line in lines] == ["died", "died"]
    assert "the process died: no answer in" in lines[0]["findings"][0][1]


def test_parts_of_a_run_have_files_of_their_own(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "FOLDER", tmp_path)
    monkeypatch.setattr(checks, "CASES", {"no such model": None, "nor this": None})
    (tmp_path / "zoo.jsonl").write_text("")
    (tmp_path / "zoo-1-of-3.jsonl").write_text("")
    for part in ("1/2", "2/2"):
        assert report.main(["--ways", "default", "--part", part]) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"zoo-1-of-2.jsonl", "zoo-2-of-2.jsonl"}
    capsys.readouterr()
    report.main(["--show"])
    shown = capsys.readouterr().out
    assert "models (1): no such model" in shown and "models (1): nor this" in shown
    report.main(["--show", "--part", "2/2"])
    shown = capsys.readouterr().out
    assert "models (1): no such model" not in shown and "models (1): nor this" in shown
    with pytest.raises(SystemExit):
        report.main(["--part", "3/2"])
