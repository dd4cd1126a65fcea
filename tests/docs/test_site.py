"""The site builds without a warning: links and anchors lead somewhere, docstrings are found."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import module_of

ROOT = Path(__file__).parents[2]

pytest.importorskip("mkdocs", reason="needs tools/site/requirements.txt")
pytest.importorskip("mkdocstrings", reason="needs tools/site/requirements.txt")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. `strict` in mkdocs.yml makes a warning an error."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_every_page_of_docs_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    names = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert [name for name in names if f": {name}\n" not in navigation] == []


def test_first_page_is_the_readme(site: Path) -> None:
    assert "make demo" in (site / "index.html").read_text(encoding="utf-8")


def test_pages_ask_for_nothing_from_elsewhere(site: Path) -> None:
    asks = re.compile(r"<(?:script|img|link|iframe)\b[^>]*(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
    found = [
        (page.name, each)
        for page in site.rglob("*.html")
        for each in asks.findall(page.read_text(encoding="utf-8"))
        if 'rel="canonical"' not in each
    ]
    assert found == []


def test_reference_lists_parameters(site: Path) -> None:
    """Docstrings of this package list parameters as lines, which the site shows as a list."""
    text = (site / "api" / "oxytorch.html").read_text(encoding="utf-8")
    assert re.search(r"<li>\s*(<p>)?<code>sample_input</code>:", text)
    assert 'href="../numerics.html"' in text


@pytest.mark.slow
def test_pages_in_a_browser(site: Path) -> None:
    """No page scrolls sideways at 1280 and 390 px; the first one takes less than a second."""
    pytest.importorskip("playwright", reason="needs playwright and Chromium")
    assert module_of(ROOT / "tools" / "site" / "look.py").complaints(site) == []
