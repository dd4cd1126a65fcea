"""`oxytorch demo`: honest measurements, readable output, a useful exit status."""

from __future__ import annotations

import sys
import time

import pytest
import torch

from oxytorch.__main__ import main
from oxytorch.demo import command, embedding, measure, variants

rich = pytest.importorskip("rich", reason="the demo's tables need rich")
from oxytorch.demo import session, show  # noqa: E402

needs_model = pytest.mark.skipif(
    bool(command.missing_packages()),
    reason=f"not installed: {', '.join(command.missing_packages())} (extra: demo)",
)


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text(
        "The cat sleeps on the warm roof.\n\nStocks fell sharply on Monday.\n"
        "A dog barks at the postman.\nInterest rates rose again.\n",
        encoding="utf-8",
    )
    return path


@pytest.fixture
def no_memory_processes(monkeypatch):
    monkeypatch.setattr(session, "peak_memory", lambda name, text, most: 100 * 2**20)


def test_shipped_text_has_hundreds_of_described_names():
    texts = embedding.read_texts(embedding.TEXT, session.MOST_TEXTS)
    assert len(texts) > 400
    assert len(set(texts)) == len(texts)
    assert all(": " in text and text.isascii() for text in texts)
    assert (embedding.TEXT.parent / "LICENSE.python.txt").exists()


def test_batches_cover_every_text_once_with_similar_lengths_together():
    texts = ["x" * (row * 7 % 100) for row in range(75)]
    found = list(embedding.batches(texts))
    assert sorted(row for batch in found for row in batch) == list(range(75))
    longest = [max(len(texts[row]) for row in batch) for batch in found]
    assert longest == sorted(longest)


def test_interleaved_gives_every_call_the_same_number_of_turns():
    turns = []
    calls = {
        "fast": lambda: turns.append("fast"),
        "slow": lambda: (turns.append("slow"), time.sleep(0.002)),
    }
    times = measure.interleaved(calls, rounds=3)
    assert turns == ["fast", "slow", "slow", "fast", "fast", "slow"]
    assert times["slow"] > 0.002 > times["fast"]


def test_missing_package_is_one_line_with_the_command(monkeypatch, capsys):
    monkeypatch.setattr(command, "NEEDS", ("rich", "a_package_that_is_not_there"))
    assert main(["demo"]) == 2
    shown = capsys.readouterr().err
    assert shown == (
        "oxytorch demo: needs a_package_that_is_not_there; "
        "install with: pip install 'oxytorch[demo]'\n"
    )


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot read"),
        (b"", "expected at least one line of text"),
        (b"caf\xe9\n", "is not UTF-8 text (byte 3)"),
    ],
)
def test_text_file_that_does_not_fit_is_named(content, complaint, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "missing_packages", list)
    path = tmp_path / "notes.txt"
    if content is not None:
        path.write_bytes(content)
    assert main(["demo", "--text", str(path)]) == 2
    shown = capsys.readouterr().err
    assert complaint in shown
    assert str(path) in shown


def test_table_compares_with_stock_and_fits_80_columns(capsys):
    rows = [
        session.Row("stock fp32", 0.012, 100.0, 200 * 2**20, 0.0, 1.0),
        session.Row("optimized fp32", 0.006, 250.0, None, 3e-7, 0.9999999),
    ]
    show.output().print(show.table(rows, rows[0]))
    stock, optimized = [line for line in capsys.readouterr().out.splitlines() if "fp32" in line]
    assert stock.split() == ["stock", "fp32", "12.00", "1.00x", "100", "1.00x", "200", "-", "-"]
    assert optimized.split()[2:] == ["6.00", "2.00x", "250", "2.50x", "-", "3.0e-07", "1.000000"]


def test_progress_without_a_terminal_numbers_the_steps(capsys):
    with show.progress(2) as begin:
        begin("one")
        begin("two")
    assert capsys.readouterr().err == "[1/2] one\n[2/2] two\n"


@needs_model
def test_demo_on_own_text_finds_it_and_succeeds(texts, no_memory_processes, capsys):
    status = main(
        ["demo", "--text", str(texts), "--query", "how are share prices doing?", "--seconds", "0"]
    )
    shown = capsys.readouterr().out
    assert status == 0, shown
    for variant in variants.VARIANTS:
        assert variant.name in shown
    found = shown[shown.index("how are share prices doing?") :].splitlines()
    assert "Stocks fell sharply on Monday." in found[1]
    assert "Optimized fp32 gives the same outputs as stock" in shown


@needs_model
def test_demo_fails_when_the_optimized_model_answers_differently(
    texts, no_memory_processes, monkeypatch, capsys
):
    build = variants.Variant.build

    def wrong(variant, model, *rest):
        built = build(variant, model, *rest)
        if variant is not variants.OPTIMIZED:
            return built
        built.register_forward_hook(lambda module, args, output: scaled(output))
        return built

    def scaled(output):
        output.last_hidden_state = output.last_hidden_state + 0.01
        return output

    monkeypatch.setattr(variants.Variant, "build", wrong)
    assert main(["demo", "--text", str(texts), "--seconds", "0"]) == 1
    assert "NOT the same outputs" in capsys.readouterr().out


@needs_model
def test_embedder_gives_vectors_of_length_one_in_the_order_of_the_texts():
    embedder = embedding.Embedder(embedding.load_model(), embedding.load_tokenizer())
    texts = ["a much longer text about the weather in the north of the country", "short"]
    together = embedder.embed(texts)
    alone = torch.cat([embedder.embed([text]) for text in texts])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(together.norm(dim=-1), torch.ones(2))


@needs_model
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_counts_at_least_the_weights_that_run(texts):
    peak = measure.peak_memory(variants.STOCK.name, texts, 10)
    assert peak is not None
    assert 40 * 2**20 < peak < 600 * 2**20


def test_peak_memory_reports_why_the_process_failed(texts):
    with pytest.raises(RuntimeError, match="measuring the memory of no such variant failed"):
        measure.peak_memory("no such variant", texts, 10)
