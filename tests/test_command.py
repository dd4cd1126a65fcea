"""The `oxytorch` command: help that teaches, lazy subcommands, clear mistakes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import oxytorch
from oxytorch.__main__ import COMMANDS, main
from oxytorch.command_line import fail, report_errors

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "amd-epyc-2-cores"


def test_command_without_arguments_prints_the_help(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    for command in COMMANDS:
        assert command.name in shown
        assert command.summary in shown


def test_version_option_prints_the_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.strip() == f"oxytorch {oxytorch.__version__}"


def test_unknown_command_names_the_choices(mistake):
    shown = mistake(["optimise"])
    assert "optimise" in shown
    assert all(command.name in shown for command in COMMANDS)


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_help_of_each_command_prints_its_options(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: oxytorch {command}" in shown


def test_help_imports_no_subcommand():
    code = (
        "import sys; from oxytorch.__main__ import COMMANDS, main; main([]);"
        "print([c.name for c in COMMANDS if c.module in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_interrupt_ends_without_a_traceback(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("oxytorch.info.run", interrupted)
    assert main(["info"]) == 130
    assert capsys.readouterr().err == "oxytorch: interrupted\n"


def test_a_reader_that_has_gone_is_no_error() -> None:
    """`oxytorch info --json | head -1`"""
    command = [sys.executable, "-m", "oxytorch", "info", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=60) == 141


_PRINTING = [
    [],
    ["--version"],
    *([command.name, "--help"] for command in COMMANDS),
    ["info"],
    ["aot", "list"],
    ["aot", "size"],
    ["bench", "report", str(RESULTS / "2026-11-21-ops.json")],
    ["tune"],
]
"""Command lines that print to standard output. Others need files: see the tests of `memory`,
`convert` and `llm`."""


@pytest.mark.parametrize("words", _PRINTING, ids=" ".join)
def test_a_reader_that_has_gone_ends_each_command_quietly(words, gone_reader, own_cache, capfd):
    assert gone_reader(words) == 141
    assert capfd.readouterr().err == ""


_LOST = [
    ["bench", "report", "FILE"],
    ["convert", "FILE"],
    ["demo", "--text", "FILE"],
    ["llm", "generate", "FILE", "--prompt", "a"],
    ["memory", "show", "FILE"],
    ["serve", "FILE"],
]


@pytest.mark.parametrize("words", _LOST, ids=lambda words: words[0])
def test_a_file_that_is_not_there_is_told_by_its_name(words, tmp_path, capfd):
    """Errors of the file system are of the class that a closed pipe raises, and are told."""
    lost = tmp_path / "lost.json"
    status = main([str(lost) if word == "FILE" else word for word in words])
    told = capfd.readouterr().err
    assert status == 2, told
    assert told.startswith(f"oxytorch {words[0]}") and str(lost) in told, told


_ORDER = {UnicodeError: 3, ValueError: 2, OSError: 1}


@pytest.mark.parametrize(
    ("error", "status"),
    [(ValueError("no"), 2), (UnicodeError("no"), 3), (IsADirectoryError("no"), 1)],
)
def test_errors_are_told_with_the_status_of_their_class(error, status, capsys):
    def act() -> int:
        raise error

    assert report_errors("run", act, _ORDER) == status
    assert capsys.readouterr().err == "oxytorch run: no\n"


@pytest.mark.parametrize("error", [BrokenPipeError("no"), KeyError("no")])
def test_other_errors_and_closed_pipes_go_on(error, capsys):
    def act() -> int:
        raise error

    with pytest.raises(type(error)):
        report_errors("run", act, _ORDER)
    assert capsys.readouterr().err == ""


def test_what_a_terminal_would_obey_is_told_as_escapes(capsys):
    assert fail("run", "no \x1b[2J\nline two") == 2
    assert capsys.readouterr().err == "oxytorch run: no \\x1b[2J\nline two\n"
