from __future__ import annotations

from typing import Any

import pytest
import torch

from oxytorch.benchmark.core.contest import Absent, judge, largest_difference, new_record
from oxytorch.benchmark.core.jobs import Settings
from oxytorch.benchmark.models.cases import CASES, ModelCase, call_model, output_tensors
from oxytorch.benchmark.models.contestants import PEERS, Peer
from oxytorch.benchmark.models.networks import DLRM, SequenceClassifier
from oxytorch.benchmark.models.runs import run_model
from oxytorch.benchmark.models.task import Runner, Task
from oxytorch.benchmark.peers.stock import prepare_eager


def run(case: ModelCase, *peers: str, dtype: str = "float32") -> dict[str, Any]:
    settings = Settings(peers=peers, rounds=1, threads=torch.get_num_threads())
    result = run_model(case, dtype, settings)
    return {record["peer"]: record for record in result["peers"]}


def add_peer(monkeypatch: pytest.MonkeyPatch, name: str, prepare: Any) -> None:
    monkeypatch.setitem(PEERS, name, Peer(name, name, prepare))


@pytest.mark.parametrize(
    "dtype", ["float32", *(pytest.param(d, marks=pytest.mark.slow) for d in ("bfloat16", "int8"))]
)
def test_peers_with_right_answers_are_timed(tiny_case: ModelCase, dtype: str) -> None:
    records = run(tiny_case, "eager", "eager_cast", "oxytorch", dtype=dtype)
    assert records["eager"]["status"] == "measured"
    assert records["eager"]["speedup"]["median"] == 1.0
    assert records["oxytorch"]["status"] == "measured", records["oxytorch"]
    assert records["oxytorch"]["seconds"]["median"] > 0
    assert records["oxytorch"]["notes"]["optimize_seconds"] > 0
    cast = records["eager_cast"]
    assert cast["status"] == ("measured" if dtype == "bfloat16" else "absent")


@pytest.mark.slow
def test_integers_are_timed_beside_the_way_without(tiny_case: ModelCase) -> None:
    records = run(tiny_case, "compile", "oxytorch_float", dtype="int8")
    assert records["oxytorch_float"]["status"] == "measured", records["oxytorch_float"]
    assert records["compile"]["status"] == "absent"
    again = run(tiny_case, "oxytorch_float", dtype="float32")["oxytorch_float"]
    assert (again["status"], again["reason"]) == ("absent", "the same as oxytorch")


def test_a_wrong_answer_gets_no_speed(
    tiny_case: ModelCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(task: Task) -> Runner:
        def call() -> object:
            tensors = output_tensors(call_model(task.model, task.inputs))
            return [tensors[0] + 0.01 * tensors[0].abs().max(), *tensors[1:]]

        return Runner(call)

    add_peer(monkeypatch, "cheat", prepare)
    record = run(tiny_case, "cheat")["cheat"]
    assert record["status"] == "wrong"
    assert f"0.01 > {record['allowed_difference']:.2g} allowed" in record["reason"]
    assert "seconds" not in record


@pytest.mark.slow
def test_twice_the_error_of_a_plain_cast_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cancelling(torch.nn.Module):
        """Loses digits in bfloat16, of which autocast knows nothing."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + 10.0) - 10.0

    def with_error(share: float) -> Any:
        def prepare(task: Task) -> Runner:
            return Runner(lambda: task.inputs[0] * (1 + share))

        return prepare

    case = ModelCase(
        "cancelling", "Cancelling", 1, lambda _: (Cancelling(), (torch.full((8,), 0.53),))
    )
    add_peer(monkeypatch, "near", with_error(0.1))
    add_peer(monkeypatch, "far", with_error(0.5))
    records = run(case, "near", "far", dtype="bfloat16")
    assert records["near"]["status"] == "measured", records["near"]
    assert records["far"]["status"] == "wrong"


@pytest.mark.slow
def test_failing_and_absent_peers_are_named_with_their_reason(
    tiny_case: ModelCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(task: Task) -> Runner:
        raise RuntimeError("\nno kernel for this\ndetails")

    def be_absent(task: Task) -> Runner:
        raise Absent("not installed")

    add_peer(monkeypatch, "broken", fail)
    add_peer(monkeypatch, "missing", be_absent)
    records = run(tiny_case, "broken", "missing")
    assert records["broken"]["status"] == "failed"
    assert records["broken"]["reason"] == "RuntimeError: no kernel for this"
    assert records["missing"]["status"] == "absent"
    assert records["missing"]["reason"] == "not installed"


def test_a_peer_that_changes_the_model_is_noticed(
    tiny_case: ModelCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vandal(task: Task) -> Runner:
        copied = prepare_eager(task)
        with torch.no_grad():
            for parameter in task.model.parameters():
                parameter.mul_(1.5)
        return copied

    add_peer(monkeypatch, "vandal", vandal)
    with pytest.raises(RuntimeError, match="eager is wrong: right at first"):
        run(tiny_case, "vandal")


def test_stock_error_is_the_yardstick() -> None:
    stock, other = new_record("eager", "eager"), new_record("other", "other")
    stock["difference"], other["difference"] = 0.1, 0.19
    judge([stock, other], torch.bfloat16)
    assert other["status"] == "measured"
    other["difference"] = 0.21
    judge([stock, other], torch.bfloat16)
    assert other["status"] == "wrong"


def test_twice_the_error_of_the_float32_answer_is_allowed() -> None:
    stock, other = new_record("eager", "eager"), new_record("other", "other")
    stock["difference"], other["difference"] = 0.0, 0.1
    judge([stock, other], torch.float32)
    assert other["status"] == "wrong" and "reason" in other
    judge([stock, other], torch.float32, own_error=0.06)
    assert other["status"] == "measured" and "reason" not in other
    judge([stock, other], torch.float32, own_error=0.04)
    assert other["status"] == "wrong"


def test_difference_is_relative_to_the_largest_value() -> None:
    expected = [torch.tensor([1.0, -10.0])]
    assert largest_difference([torch.tensor([2.0, -10.0])], expected) == pytest.approx(0.1)
    assert largest_difference([], expected) == float("inf")
    assert largest_difference([torch.ones(3)], expected) == float("inf")
    assert largest_difference([torch.tensor([1.0, float("nan")])], expected) == float("inf")


def test_dlrm_computes_the_published_formula() -> None:
    torch.manual_seed(0)
    model = DLRM(dense_features=3, tables=2, rows=5, dim=4, bottom=(6,), top=(7,)).eval()
    dense = torch.randn(2, 3)
    indices = torch.tensor([[0, 1, 2, 3], [4, 4, 0, 1]])
    offsets = torch.tensor([[0, 2], [0, 1]])
    with torch.no_grad():
        first = torch.relu(model.bottom(dense))
        tables = [bag.weight for bag in model.embeddings]
        bags = [
            torch.stack([tables[0][[0, 1]].sum(0), tables[0][[2, 3]].sum(0)]),
            torch.stack([tables[1][[4]].sum(0), tables[1][[4, 0, 1]].sum(0)]),
        ]
        pairs = [bags[0] * first, bags[1] * first, bags[1] * bags[0]]
        features = torch.cat([first, torch.stack([p.sum(1) for p in pairs], 1)], 1)
        expected = torch.sigmoid(model.top(features))
        torch.testing.assert_close(model(dense, indices, offsets), expected)


def test_sequence_classifier_uses_the_last_step() -> None:
    model = SequenceClassifier(features=3, hidden=5, layers=2, classes=4).eval()
    with torch.no_grad():
        states, _ = model.lstm(torch.ones(2, 6, 3))
        torch.testing.assert_close(model(torch.ones(2, 6, 3)), model.classifier(states[:, -1]))


def test_the_models_of_the_issue_are_there() -> None:
    assert list(CASES) == [
        "bert",
        "distilbert",
        "gpt2",
        "resnet50",
        "mobilenet_v2",
        "efficientnet",
        "regnet",
        "convnext",
        "vit",
        "lstm",
        "dlrm",
    ]


def test_builds_are_seeded() -> None:
    (first, inputs), (second, other) = CASES["lstm"].build(1), CASES["lstm"].build(1)
    assert not first.training
    torch.testing.assert_close(inputs, other, rtol=0, atol=0)
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)


def test_unknown_outputs_are_an_error() -> None:
    with pytest.raises(TypeError, match="got int"):
        output_tensors([torch.ones(1), 3])
