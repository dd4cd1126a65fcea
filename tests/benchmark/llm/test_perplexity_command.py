"""`oxytorch llm perplexity`: its rows and files, and mistakes that it tells."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import oxytorch
from oxytorch.__main__ import main
from oxytorch.benchmark.core.results import read_run
from oxytorch.benchmark.report.pages import report
from tiny import tiny_llama

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model over bytes, with a text beside it."""
    from tokenizers import decoders, models, pre_tokenizers

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("perplexity") / "model"
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    model = tiny_llama(
        vocab_size=256, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
        initializer_range=0.1,
    )  # fmt: skip
    model.save_pretrained(folder)
    (folder / "text.txt").write_text("What stands in a file is text. " * 20)
    return folder


def _run(folder: Path, *words: str) -> int:
    return main(["llm", "perplexity", str(folder), "--text", str(folder / "text.txt"), *words])


def test_rows_are_told_and_written(folder, tmp_path, capsys):
    path = tmp_path / "result.json"
    words = ["--weights", "float32,int4,nf4", "--kv-cache", "bf16,int8", "--group-size", "64"]
    words += ["--calibration", str(folder / "text.txt"), "--tokens", "300", "--json", str(path)]
    assert _run(folder, *words) == 0
    printed = capsys.readouterr().out
    rows = {row["label"]: row for row in read_run(path)["results"]}
    assert [*rows] == [
        "float32",
        *("int4", "int4, calibrated", "int4, int8 cache", "int4, calibrated, int8 cache"),
        *("nf4", "nf4, calibrated", "nf4, int8 cache", "nf4, calibrated, int8 cache"),
    ]
    first = rows["float32"]
    assert (first["tokens"], first["window"], first["stride"]) == (300, 64, 64)
    assert first["change"] == 0
    for label, row in rows.items():
        assert f"| {label} | {row['perplexity']:.3f} |" in printed
        if label != "float32":
            assert 0 < row["change_error"] < 0.05
            ratio = row["perplexity"] / first["perplexity"] - 1
            assert row["change"] == pytest.approx(ratio, abs=1e-6)
    assert f"wrote {path}" in printed
    assert "### perplexity" in report([read_run(path)])


def test_a_folder_that_is_quantized_is_measured_as_it_is(folder, tmp_path, capsys):
    quantized, path = tmp_path / "quantized", tmp_path / "result.json"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    oxytorch.quantize_(model.eval(), oxytorch.quantization.Int4Weight(64), filter="*")
    oxytorch.save_quantized(model, quantized)
    for file in folder.glob("tokenizer*"):
        shutil.copy(file, quantized)
    words = ["--text", str(folder / "text.txt"), "--tokens", "300", "--json"]
    assert main(["llm", "perplexity", str(quantized), *words, str(path)]) == 0
    plain = ["--weights", "int4", "--group-size", "64", "--tokens", "300", "--json"]
    assert _run(folder, *plain, str(tmp_path / "plain.json")) == 0
    [stored], [made] = (read_run(p)["results"] for p in (path, tmp_path / "plain.json"))
    assert stored["label"] == "as stored"
    assert stored["perplexity"] == pytest.approx(made["perplexity"], rel=1e-3)
    capsys.readouterr()
    assert main(["llm", "perplexity", str(quantized), *words, str(path), "--weights", "int8"]) == 2
    assert "--weights: " in (told := capsys.readouterr().err) and "quantized already" in told


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--weights", ","], "at least one format"),
        (["--window", "65"], "window of at most 64"),
        (["--window", "32", "--stride", "33"], "stride 1 to 32"),
        (["--group-size", "48", "--weights", "int4"], "group_size"),
    ],
)
def test_options_that_do_not_fit_are_told(words, complaint, folder, capsys):
    assert _run(folder, *words) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--weights", "int3"], ["--kv-cache", "fp8"], ["--tokens", "0"]])
def test_unknown_words_are_refused_with_the_choices(words, folder, capsys):
    with pytest.raises(SystemExit) as ended:
        _run(folder, *words)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert words[0] in told
    if words[0] == "--weights":
        assert "choices: float32, bf16, int8" in told


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(None, "No such file"), (b"\xff\xff", "not UTF-8"), (b"", "at least 2 tokens")],
)
def test_files_without_text_are_told(content, complaint, folder, tmp_path, capsys):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    assert main(["llm", "perplexity", str(folder), "--text", str(path)]) == 2
    assert complaint in capsys.readouterr().err


def test_a_folder_that_is_no_model_is_told(tmp_path, folder, capsys):
    assert main(["llm", "perplexity", str(tmp_path), "--text", str(folder / "text.txt")]) == 2
    assert "is not a model" in capsys.readouterr().err
