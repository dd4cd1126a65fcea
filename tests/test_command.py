"""The `oxytorch` command: help that teaches, lazy subcommands, clear mistakes."""

from __future__ import annotations

import subprocess
import sys

import pytest

import oxytorch
from oxytorch.__main__ import COMMANDS, main


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


@pytest.mark.parametrize("words", [["info", "--json"], ["aot", "list"]])
def test_a_reader_that_has_gone_is_no_error(words: list[str]) -> None:
    """`oxytorch info --json | head -1`"""
    command = [sys.executable, "-m", "oxytorch", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=60) == 141
