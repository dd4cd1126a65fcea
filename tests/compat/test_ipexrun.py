"""Command lines of ipexrun become those of `oxytorch run`, and run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from oxytorch.__main__ import main
from oxytorch.compat.ipexrun import IpexrunError, meanings, translate

AUTO = ["--omp-runtime", "auto"]
COMPAT = ["-m", "oxytorch.compat"]


@pytest.mark.parametrize(
    ("line", "becomes"),
    [
        ("script.py --a 1", [*AUTO, *COMPAT, "script.py", "--a", "1"]),
        ("cpu script.py", [*AUTO, *COMPAT, "script.py"]),
        ("--log-dir ./logs script.py", [*AUTO, "--log-dir", "./logs", *COMPAT, "script.py"]),
        ("--use-logical-cores script.py", [*AUTO, "--use-logical-cores", *COMPAT, "script.py"]),
        ("--nodes-list 1 script.py", [*AUTO, "--nodes-list", "1", *COMPAT, "script.py"]),
        (
            "--ninstances 1 --ncores-per-instance 10 script.py",
            [*AUTO, "--ninstances", "1", "--ncores-per-instance", "10", *COMPAT, "script.py"],
        ),
        ("--throughput-mode script.py", [*AUTO, "--throughput-mode", *COMPAT, "script.py"]),
        ("--latency-mode --ninstances 4 s.py", [*AUTO, "--latency-mode", *COMPAT, "s.py"]),
        (
            "--ninstances 4 --instance-idx 0 s.py",
            [*AUTO, "--ninstances", "4", "--instance-idx", "0", *COMPAT, "s.py"],
        ),
        ("--instance-idx -1 --ninstances=0 --nnodes 0 s.py", [*AUTO, *COMPAT, "s.py"]),
        (
            "--memory-allocator jemalloc --omp-runtime default s.py",
            ["--memory-allocator", "jemalloc", "--omp-runtime", "default", *COMPAT, "s.py"],
        ),
        ("--multi-task-manager taskset --ccl-worker-count 4 s.py", [*AUTO, *COMPAT, "s.py"]),
        (
            "--auto-ipex --dtype bfloat16 --disable-ipex-graph-mode s.py",
            [*AUTO, "--optimize", "--sample-first-call", "--dtype", "bfloat16", *COMPAT, "s.py"],
        ),
        ("--dtype float32 s.py", [*AUTO, *COMPAT, "s.py"]),
        (
            "--nnodes 1 --nprocs-per-node 2 --master-port 29501 s.py",
            [*AUTO, "--nproc-per-node", "2", "--master-port", "29501", *COMPAT, "s.py"],
        ),
        ("-m package.module --b", [*AUTO, *COMPAT, "-m", "package.module", "--b"]),
        ("--no-python command", [*AUTO, "--no-python", "command"]),
        (
            "--use_logical_core --disable_numactl --node_id 0 --enable_tcmalloc s.py",
            [*AUTO, "--use-logical-cores", "--nodes-list", "0", "--memory-allocator", "tcmalloc",
             *COMPAT, "s.py"],
        ),
        ("--disable_iomp s.py", ["--omp-runtime", "default", *COMPAT, "s.py"]),
    ],
)  # fmt: skip
def test_line_becomes_one_of_oxytorch_run(line: str, becomes: list[str]) -> None:
    found = translate(line.split())
    assert (
        sorted(found.options) + found.program
        == sorted(becomes[: len(found.options)]) + (becomes[len(found.options) :])
    )


def test_left_out_options_are_named() -> None:
    line = "--latency-mode --ninstances 4 --multi-task-manager none script.py"
    notes = translate(line.split()).notes
    assert len(notes) == 2 and "numactl" in notes[0] and "--latency-mode decides" in notes[1]


@pytest.mark.parametrize("line", ["--hostfile hosts s.py", "--foo s.py", "--ninstances 2", ""])
def test_mistakes_end_with_status_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(IpexrunError):
        translate(line.split())
    assert main(["ipexrun", *line.split()]) == 2
    assert "oxytorch ipexrun: " in capsys.readouterr().err


def test_script_runs_with_the_predecessors_import(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch, intel_extension_for_pytorch as ipex\n"
        "model = ipex.optimize(torch.nn.Linear(4, 4).eval())\n"
        "with torch.no_grad(): print(tuple(model(torch.ones(1, 4)).shape), sys.argv[1:])\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "oxytorch", "ipexrun", "--ninstances", "1", str(script), "--x"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(1, 4) ['--x']"
    assert "oxytorch run --omp-runtime auto --ninstances 1 -m oxytorch.compat" in done.stderr


def test_every_option_has_a_meaning() -> None:
    assert len(meanings()) > 30 and all(meanings().values())


def test_the_launchers_older_name_and_what_is_no_script(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("print('ran')")
    base = [sys.executable, "-m", "oxytorch.compat"]
    launch = ["-m", "intel_extension_for_pytorch.cpu.launch", "--ninstances", "1", str(script)]
    done = subprocess.run([*base, *launch], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "ran" in done.stdout, done.stderr
    done = subprocess.run([*base, "-c", "pass"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "takes a script or -m, got -c" in done.stderr
