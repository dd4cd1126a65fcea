"""`oxytorch run` as a user writes it: the plan, and mistakes that end before anything starts."""

from __future__ import annotations

import os

import pytest
from recorded_machines import TWO_SOCKETS

from oxytorch.__main__ import main
from oxytorch.launch import command
from oxytorch.launch.options import ELSEWHERE
from oxytorch.launch.topology import read_topology


@pytest.fixture(autouse=True)
def two_sockets(tmp_path, monkeypatch):
    """A script in the current folder, on a machine of two sockets."""
    found = read_topology(TWO_SOCKETS.write(tmp_path / "machine"))
    monkeypatch.setattr(command, "read_topology", lambda: found)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("raise SystemExit('started')")
    (tmp_path / "notes.txt").touch()
    for name in ("OMP_NUM_THREADS", "KMP_AFFINITY", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)


def test_dry_run_shows_cores_command_and_variables(capsys):
    assert main(["run", "--dry-run", "--throughput-mode", "x.py", "--size", "a b"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:4] == ["oxytorch", "run:", "2", "instances"]
    assert ["0", "0-27", "28", "0", "nearest", "node"] in lines
    assert ["1", "28-55", "28", "1", "nearest", "node"] in lines
    assert ["command", "python", "x.py", "--size", "'a", "b'"] in lines
    assert ["set", "OMP_NUM_THREADS=28"] in lines


def test_dry_run_names_what_is_the_users(capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "40")
    monkeypatch.setenv("KMP_AFFINITY", "compact")
    assert main(["run", "--dry-run", "--ninstances", "2", "x.py"]) == 0
    shown = capsys.readouterr().out
    assert "yours, kept  OMP_NUM_THREADS=40" in shown
    assert "OMP_NUM_THREADS=40 of yours is more than an instance has cores" in shown
    assert "KMP_AFFINITY of yours may put all instances on the same cores" in shown


def test_dry_run_of_a_training_shows_ranks_and_torchruns_options(capsys):
    words = ["--nnodes", "2", "--rdzv-endpoint", "host:29400", "--nproc-per-node", "4", "x.py"]
    assert main(["run", "--dry-run", *words]) == 0
    shown = capsys.readouterr().out
    assert "4 ranks on 2 sockets" in shown
    options = "--rdzv-backend=c10d --nproc-per-node=4 --nnodes=2 --rdzv-endpoint=host:29400"
    assert f"torchrun {options} python x.py" in shown
    assert main(["run", "--dry-run", "--nproc-per-node", "auto", "x.py"]) == 0
    assert "torchrun --standalone --nproc-per-node=2 python x.py" in capsys.readouterr().out


def test_help_teaches_by_examples(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    shown = capsys.readouterr().out
    assert shown.index("--ninstances") < shown.index("examples:")
    for line in shown[shown.index("examples:") :].splitlines():
        if line.startswith("  oxytorch run"):
            words = line.split()[2:]
            for name in ("script.py", "train.py"):
                words = ["x.py" if word == name else word for word in words]
            assert main(["run", "--dry-run", *words]) == 0, line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected a script, -m module or a command"),
        (["nope.py"], "there is no file nope.py"),
        (["no-such-command"], "there is no command no-such-command on PATH"),
        (["./notes.txt"], "./notes.txt is not executable"),
        (["machine"], "machine is a folder"),
        (["--ninstances", "0", "x.py"], "--ninstances: expected an integer above 0, got '0'"),
        (["--ninstances", "57", "x.py"], "--ninstances: expected at most 56"),
        (["--ninstances", "2", "--instance-idx", "2", "x.py"], "--instance-idx: expected"),
        (["--cores-list", "0,200", "x.py"], "--cores-list: expected cores of this machine (0-111)"),
        (["--cores-list", "3-1", "x.py"], "--cores-list: expected numbers and ranges"),
        (["--cores-list", "", "x.py"], "--cores-list: expected at least one number"),
        (["--nodes-list", "2", "x.py"], "--nodes-list: expected NUMA nodes of this machine (0-1)"),
        (["--strategy", "best", "x.py"], "--strategy: invalid choice: 'best'"),
        (["--latency-mode", "--throughput-mode", "x.py"], "exclude each other"),
        (["--latency-mode", "--ninstances", "2", "x.py"], "exclude each other"),
        (["--cores-list", "0", "--nodes-list", "0", "x.py"], "exclude each other"),
        (["--nproc-per-node", "2", "--ninstances", "2", "x.py"], "leave one out"),
        (["--nproc-per-node", "2", "--instance-idx", "0", "x.py"], "leave one out"),
        (["--nnodes", "2", "--ncores-per-instance", "2", "x.py"], "needs --nproc-per-node"),
        (["--nnodes", "2", "x.py"], "--nnodes: needs a place where machines meet"),
        (["--dtype", "bfloat16", "x.py"], "--dtype: needs --optimize"),
        (["--optimize", "ls"], "--optimize: expected a Python script"),
        (["--unknown", "x.py"], "oxytorch run: error: unrecognized arguments: --unknown"),
        (["--ninstance", "2", "x.py"], "oxytorch run: error: unrecognized arguments: --ninstance"),
    ],
)
def test_mistakes_are_named_before_anything_starts(words, message, mistake):
    assert message in mistake(["run", *words])


@pytest.mark.parametrize("option", ELSEWHERE)
def test_options_of_other_launchers_say_what_to_do(option, mistake):
    told = mistake(["run", option, "x.py"])
    assert f"{option} is no option of oxytorch run: {ELSEWHERE[option]}" in told


def test_log_dir_that_cannot_be_made_is_named(mistake):
    words = ["run", "--log-dir", os.path.join("notes.txt", "logs"), "x.py"]
    assert "--log-dir:" in mistake(words)
