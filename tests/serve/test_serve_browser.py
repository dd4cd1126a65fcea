"""The status page in a real browser."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
from small_servers import running, write_language_model

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_status_page_shows_what_the_server_did(tmp_path: Path) -> None:
    folder = write_language_model(tmp_path / "tiny")
    with running(str(folder), "--slots", "3") as server:
        body = {"model": "tiny", "prompt": "once", "max_tokens": 5}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=20).raise_for_status()
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/own"]
        shown = subprocess.run(
            [str(BROWSER), *options, "--dump-dom", server.url + "/"],
            capture_output=True,
            text=True,
            timeout=90,
        )
    assert shown.returncode == 0, shown.stderr[-2000:]
    page = shown.stdout
    assert "<h1>oxytorch serve</h1>" in page
    for name, value in (("model", "tiny (language)"), ("slots", "3"), ("running", "0")):
        assert f"<td>{name}</td><td>{value}</td>" in page
    assert "<td>responses</td><td>1, " in page
    assert "mean time to the first token" in page
