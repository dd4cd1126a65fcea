"""`oxytorch llm bench`: contestants in their own processes, ratios, missing peers, mistakes."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

from oxytorch.__main__ import main
from oxytorch.benchmark.core.contest import Absent, require
from oxytorch.benchmark.core.processes import JobError
from oxytorch.benchmark.llm import processes as llm_jobs
from oxytorch.benchmark.llm import runs as llm_runs
from oxytorch.benchmark.llm.shapes import random_model
from oxytorch.benchmark.report.pages import tables_of

pytest.importorskip("transformers")

TINY = ["llm", "bench", "--shape", "tiny", "--threads", "1"]


@pytest.mark.slow
def test_bench_measures_checks_and_compares(tmp_path, capsys):
    path = tmp_path / "speed.json"
    words = ["--weights", "bf16,int8", "--peers", "torch,torchao", "--prompt", "16"]
    status = main([*TINY, *words, "--tokens", "4", "--rounds", "1", "--json", str(path)])
    run = json.loads(path.read_text())
    records = {record["label"]: record for result in run["results"] for record in result["peers"]}
    ours, torch_peer = records["oxytorch bf16"], records["torch eager bf16"]
    assert ours["status"] == torch_peer["status"] == records["oxytorch int8"]["status"]
    assert ours["status"] == "measured" and status == 0
    assert 0.99 < ours["cosine"] <= 1.0 + 1e-6 and records["oxytorch int8"]["cosine"] > 0.98
    assert len(ours["rounds"]) == 1 and len(ours["rounds"][0]["tokens"]) == 3
    ratio = torch_peer["oxytorch_token_ratio"]
    assert ratio["low"] <= ratio["median"] <= ratio["high"] and ratio["median"] > 0
    assert ours["token_bytes"] > 1.8 * records["oxytorch int8"]["token_bytes"]
    assert ours["fraction_of_limit"]["median"] == pytest.approx(
        ours["bandwidth"]["median"] / ours["limit"]["median"]
    )
    assert 0 < ours["fraction_of_matrix_rate"]["median"] < 2
    if importlib.util.find_spec("torchao") is None:
        assert records["torchao int8"]["status"] == "absent"
        assert "pip install torchao" in records["torchao int8"]["reason"]
    shown = capsys.readouterr().out
    assert "oxytorch int8" in shown and "of the limit" in shown
    assert tables_of(run)[0].rows[0][0] == "oxytorch bf16"


def test_a_contestant_that_dies_or_errs_is_named(tmp_path):
    process = llm_jobs.ContestantProcess("oxytorch", silence=60.0)
    try:
        with pytest.raises(JobError, match="no_such_request"):
            process.ask("no_such_request")
        process._process._process.kill()
        with pytest.raises(JobError, match="SIGKILL"):
            process.ask("memory")
    finally:
        process.close()


def test_a_wrong_answer_gets_no_speed(tmp_path, monkeypatch):
    class Wrong:
        def __init__(self, peer, silence):
            self.peer = peer

        def prepare(self, task, on_stage):
            return {"token_bytes": 10}

        def ask(self, what, **arguments):
            if what == "logits":
                good = self.peer == "torch"
                values = torch.arange(50.0) if good else torch.randn(50)
                torch.save(values, arguments["path"])
            if what == "turn":
                return {"first": 1.0, "tokens": [0.5, 0.5]}
            return 1.0

        def close(self):
            pass

    monkeypatch.setattr(llm_runs, "ContestantProcess", Wrong)
    settings = llm_runs.LlmSettings(
        "tiny", "", (llm_runs.Precision("int4", "int4"),), ("torch", "llama.cpp"), "bf16", 128,
        4, 3, 2, 1, 1.0,
    )  # fmt: skip
    [result] = llm_runs.run_llm(settings, lambda result: None, lambda peer, stage: None)
    assert [record["status"] for record in result["peers"]] == ["wrong", "wrong"]
    assert all("cosine of its logits" in record["reason"] for record in result["peers"])
    assert [record["peer"] for record in result["peers"]] == ["oxytorch", "llama.cpp"]


def test_missing_packages_are_named_with_their_command():
    with pytest.raises(Absent, match=r"not_a_package is not installed \(pip install some-name\)"):
        require("not_a_package", "pip install some-name")


MISTAKES = [
    (["llm", "bench"], "either a model's folder or --shape"),
    (["llm", "bench", "--shape", "huge"], "unknown 'huge'; choices: tiny, tinyllama-1.1b"),
    ([*TINY, "--peers", "vllm"], "unknown 'vllm'; choices: all, torch"),
    (["llm", "bench", "/no/such/folder"], "does not exist"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=[m for _, m in MISTAKES])
def test_mistakes_in_the_command_are_named(words, message, capsys):
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_quantized_folders_are_refused(tmp_path, capsys):
    config = {"architectures": ["LlamaForCausalLM"], "quantization_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    assert main(["llm", "bench", str(tmp_path)]) == 2
    assert "is quantized already" in capsys.readouterr().err


def test_random_models_are_the_same_and_have_no_equal_rows():
    one, two = random_model("tiny"), random_model("tiny")
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    head = one.lm_head.weight
    assert len(torch.unique(head, dim=0)) == len(head)
    assert head.float().std().item() == pytest.approx(256**-0.5, rel=0.02)
    with pytest.raises(ValueError, match="unknown shape 'vast'; choices: tiny"):
        random_model("vast")
