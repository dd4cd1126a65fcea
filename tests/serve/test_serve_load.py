"""The load generator against a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_servers import running, write_language_model

from oxytorch.__main__ import main


def test_load_generator_counts_every_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_language_model(tmp_path / "tiny")
    path = tmp_path / "numbers.json"
    with running(str(folder), "--token", "secret") as server:
        words = ["--url", server.url, "--token", "secret", "--clients", "1,4", "--requests", "2"]
        sizes = ["--prompt", "5-20", "--tokens", "9", "--logprobs"]
        assert main(["bench", "serve", *words, *sizes, "--json", str(path)]) == 0
    results = json.loads(path.read_text())["results"]
    assert [each["clients"] for each in results] == [1, 4]
    assert [each["new_tokens"] for each in results] == [2 * 9, 8 * 9]
    assert "| clients | tokens/s |" in capsys.readouterr().out


def test_load_generator_names_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9"]) == 2
    assert "does not answer" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "serve", "--prompt", "9-5"])
    assert "expected at least and at most" in capsys.readouterr().err
    assert main(["bench", "serve", "--url", "nothing"]) == 2
    assert "expected a URL" in capsys.readouterr().err
