"""The example that goes from a checkpoint to a server, with a small model and few tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

for _package in ("transformers", "fastapi", "uvicorn", "openai"):
    pytest.importorskip(_package)

import language_model_server  # noqa: E402
from small_checkpoint import make_tokenizer, write_checkpoint  # noqa: E402


def test_served_text_is_that_of_this_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_checkpoint(tmp_path / "small", width=128)
    file = tmp_path / "model.oxy"
    assert language_model_server.main([str(folder), "--tokens", "8", "--save", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "gives the same text: yes" in shown
    assert "completion of 'Once upon a time'" in shown and "chat: " in shown
    assert "four at once: 32 tokens" in shown and file.exists()


def test_tokenizer_reads_any_text() -> None:
    tokenizer = make_tokenizer()
    text = "Hello, Zürich! 山\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
