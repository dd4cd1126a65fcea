from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
from pathlib import Path
from typing import Any

import pytest
from commands import run_command

from oxytorch.benchmark import command
from oxytorch.benchmark.core.results import read_run, read_runs, write_run
from oxytorch.benchmark.machine.description import machine_name
from oxytorch.benchmark.models.contestants import PEERS
from oxytorch.benchmark.models.tables import summary_table
from oxytorch.benchmark.report.pages import fill_page, merge, report, tables_of
from oxytorch.benchmark.report.tables import ORDER


def test_models_table_has_speeds_means_and_reasons(models_run: dict[str, Any]) -> None:
    table = tables_of(models_run)[0]
    assert table.header[0] == "model" and table.header[-1] == "over fastest peer"
    bert, resnet, mean = table.rows
    assert bert[1:] == ["100 ms", "failed", "**50 ms (2.00x)**", "2.00x torch eager"]
    assert resnet[1:] == ["100 ms", "40 ms (2.50x)", "**25 ms (4.00x)**", "1.60x openvino"]
    assert mean[1:] == ["1.00x", "2.50x (1 of 2)", "2.83x", ""]
    assert "openvino: failed on bert: RuntimeError: no such operation." in table.notes


def test_ops_tables_have_fractions_and_times(ops_run: dict[str, Any]) -> None:
    memory, cache = tables_of(ops_run)
    assert memory.rows[0][-1] == "**50% (50% to 50%)**"
    assert memory.rows[0][4] == "30.0 GB/s (30.0 to 30.0)"
    assert cache.rows[0][-2:] == ["**10 us (2.00x)**", "2.00x torch eager"]


def test_optim_table_has_a_row_per_format(optim_run: dict[str, Any]) -> None:
    [table] = tables_of(optim_run)
    assert table.title == "One step, BERT-base: 109 M parameters in 199 tensors"
    plain, coded, lamb = table.rows
    over = "0.80 (0.80 to 0.80) torch fused"
    assert plain[:3] == ["AdamW", "float32", "12.00"]
    assert plain[3:] == ["50 ms", "40 ms", over, "25.0 GB/s", "50% (50% to 50%)"]
    assert coded[1] == "split+int8" and coded[3:5] == ["", "30 ms"]
    assert lamb[3:6] == ["absent", "60 ms", "-"]
    assert "torch fused: absent on Lamb: torch has no Lamb." in table.notes


def test_training_tables_have_times_memory_and_losses(training_run: dict[str, Any]) -> None:
    steps, losses = tables_of(training_run)
    assert steps.rows[1] == ["bfloat16", "50 ms", "2.00x", "5 ms", "4.00 bytes", "6.00 bytes"]
    assert losses.rows[0][1:5] == ["2.2500", "2.0000 to 2.5000", "+0.0000", "yes"]
    assert losses.rows[1][1:5] == ["2.5500", "2.3000 to 2.8000", "+0.3000", "no"]


def test_llm_table_has_times_limits_ratios_and_reasons(llm_run: dict[str, Any]) -> None:
    [table] = tables_of(llm_run)
    ours, peer, absent = table.rows
    assert ours[:3] == ["oxytorch int4", "800 ms (800 to 800)", "65%"]
    assert ours[4:8] == ["600 MB", "30.0 GB/s", "80% (80% to 80%)", "2.00 GB"]
    assert peer[0] == "llama.cpp int4" and peer[-2:] == ["2.00x", "2.00x"]
    assert absent[:2] == ["torchao int4", "absent"]
    assert any("pip install torchao" in note for note in table.notes)


def test_a_plot_of_trainings_needs_their_losses(
    training_run: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    from oxytorch.benchmark.report.drawing import draw

    steps = [result for result in training_run["results"] if result["measure"] == "step"]
    with pytest.raises(ValueError, match="their losses were not measured"):
        draw([{**training_run, "results": steps}], tmp_path / "plot.svg")


def test_the_newest_result_of_split_runs_counts(models_run: dict[str, Any]) -> None:
    newer = {**models_run, "date": "2026-01-03T00:00:00+00:00"}
    newer["results"] = [{**models_run["results"][0], "threads": 7}]
    [kinds] = merge([newer, models_run]).values()
    merged = kinds["models"]
    assert [result["model"] for result in merged["results"]] == ["bert", "resnet50"]
    assert [result["threads"] for result in merged["results"]] == [7, 2]
    assert merged["date"] == newer["date"]
    assert "the newest of several runs" in report([newer, models_run])


def test_blocks_of_a_page_are_filled(models_run: dict[str, Any], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    begin, end = "<!-- bench:models begin -->", "<!-- bench:models end -->"
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    assert fill_page(page, [models_run]) == ["models"]
    once = page.read_text()
    assert once.startswith(f"before\n{begin}\n") and once.endswith(f"{end}\nafter\n")
    assert "old" not in once and "| BERT, batch 1 |" in once
    fill_page(page, [models_run])
    assert page.read_text() == once


def test_the_summary_has_a_row_per_model(models_run: dict[str, Any], tmp_path: Path) -> None:
    half = [{**result, "dtype": "bfloat16"} for result in models_run["results"][:1]]
    table = summary_table([*models_run["results"], *half])
    assert table.header[:4] == ["model", "float32: PyTorch", "fastest peer", "oxytorch"]
    bert, resnet, mean = table.rows
    assert bert == ["BERT, batch 1", *["100 ms", "-", "**50 ms (2.00x)**"] * 2]
    assert resnet[1:] == ["100 ms", "40 ms openvino", "**25 ms (4.00x)**", "-", "-", "-"]
    assert mean[1:] == ["1.00x", "", "2.83x", "1.00x", "", "2.00x"]
    page = tmp_path / "page.md"
    page.write_text("<!-- bench:summary begin -->\n<!-- bench:summary end -->")
    assert fill_page(page, [models_run]) == ["summary"]
    assert "| RESNET50, batch 1 | 100 ms | 40 ms openvino |" in page.read_text()


def test_results_of_two_versions_of_torch_stay_apart(
    models_run: dict[str, Any], tmp_path: Path
) -> None:
    other = {**models_run, "versions": {**models_run["versions"], "torch": "2.8.0"}}
    assert len(merge([models_run, other])) == 2
    page = tmp_path / "page.md"
    page.write_text("<!-- bench:models begin --><!-- bench:models end -->")
    with pytest.raises(ValueError, match=r"expected results of one machine and torch, got .*; "):
        fill_page(page, [models_run, other])


@pytest.mark.parametrize("text", ["nothing here", "<!-- bench:models begin --> and no end"])
def test_a_page_without_a_block_is_left_alone(
    text: str, models_run: dict[str, Any], tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match="expected"):
        fill_page(page, [models_run])
    assert page.read_text() == text


def test_files_are_read_back(models_run: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "machine" / "run.json"
    write_run(models_run, path)
    assert read_runs([tmp_path]) == [models_run]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "is not a results file"),
        ("[]", "is not a results file of oxytorch bench"),
        ('{"format": 99, "kind": "models", "results": []}', "expected format <= 1, got 99"),
    ],
)
def test_other_files_are_refused(content: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=text):
        read_run(path)


def test_results_name_no_host_and_no_user(head: dict[str, Any]) -> None:
    text = json.dumps(head)
    assert socket.gethostname() not in text
    assert os.path.expanduser("~") not in text


def test_machine_name_is_a_folder_name() -> None:
    machine = {"cpu": "Intel(R) Xeon(R) Gold 6430 CPU @ 2.10GHz", "cores": 16}
    assert machine_name(machine) == "intel-xeon-gold-6430-16-cores"


def test_every_peer_of_models_has_its_column() -> None:
    assert tuple(PEERS) == ORDER


@pytest.mark.parametrize("suffix", [".svg", ".png"])
@pytest.mark.parametrize("kind", ["models_run", "ops_run", "optim_run", "training_run", "llm_run"])
def test_plots_are_drawn(
    kind: str, suffix: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    from oxytorch.benchmark.report.drawing import draw

    path = tmp_path / f"plot{suffix}"
    draw([request.getfixturevalue(kind)], path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")
    draw([request.getfixturevalue(kind)], path)
    assert path.read_bytes() == content, "the same results must give the same file"


def test_report_command_prints_tables(
    models_run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(models_run, tmp_path / "run.json")
    assert run_command("report", str(tmp_path)) == 0
    assert "| BERT, batch 1 | 100 ms |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("report", "no such folder"), "no such folder does not exist"),
        (("models", "--only", "bret"), "unknown name 'bret'; choices: bert,"),
        (("models", "--peers", "tensorflow"), "unknown name 'tensorflow'; choices: eager,"),
        (("models", "--dtype", "float64"), "unknown name 'float64'; choices: float32,"),
        (("ops", "--only", "relu6"), "unknown name 'relu6'; choices: activation, add_layer_norm,"),
        (("ops", "--isa", "sse2"), "unknown name 'sse2'"),
        (("optim", "--only", "Adan"), "unknown name 'Adan'; choices: SGD, Adam,"),
        (("optim", "--case", "gpt"), "unknown name 'gpt'; choices: bert, small"),
        (("optim", "--format", "int4"), "unknown name 'int4'; choices: float32,"),
        (("optim", "--peers", "eager"), "unknown name 'eager'; choices: foreach, fused,"),
        (("ops", "--size", "huge"), "unknown name 'huge'; choices: cache, memory"),
    ],
)
def test_nonsense_is_answered_with_the_choices(
    words: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(*words) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("words", [(), ("all",)], ids=["bare", "all"])
def test_everything_is_every_kind_of_run(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def measure(arguments: argparse.Namespace, words: Any) -> int:
        assert arguments.output == Path("benchmarks/results")
        asked.append(shlex.join(words))
        return int(arguments.what == "limits")

    monkeypatch.setattr(command, "_measure", measure)
    assert run_command(*words) == 1
    assert [text.split()[0] for text in asked] == [
        "limits",
        "import-time",
        "optimize-cost",
        "ops",
        "optim",
        "models",
    ]


def test_a_whole_run_writes_json_and_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["models", "--only", "lstm", "--dtype", "float32", "--peers", "eager"]
    words += ["--rounds", "1", "--threads", "1", "--output", str(tmp_path)]
    assert run_command(*words) == 0
    [path] = tmp_path.rglob("*.json")
    run = read_run(path)
    assert run["kind"] == "models" and len(run["results"]) == 1
    assert run["settings"]["threads"] == 1
    assert path.name.endswith("-models.json")
    assert f"wrote {path}" in capsys.readouterr().out
