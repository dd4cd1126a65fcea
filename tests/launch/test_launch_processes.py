"""Processes of `oxytorch run`: their cores, labels, logs and variables, and that none is left."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
import traceback
from types import SimpleNamespace

import pytest
from instances import CORES, TWO, running

from oxytorch.__main__ import main
from oxytorch.launch.command import _opened
from oxytorch.launch.processes import Job, run_jobs

SHOW = """
import os, sys
print("out", sorted(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"], *sys.argv[1:])
print("err", file=sys.stderr)
"""
# Starts a process in another session and one that ignores polite requests.
LEAVE = """
import subprocess, sys, time
subprocess.Popen(["setsid", "sleep", MARK])
subprocess.Popen(["sh", "-c", "trap '' TERM INT HUP; sleep " + MARK + "; sleep " + MARK])
time.sleep(0.3)
try:
    print("ready", flush=True)
    time.sleep(SECONDS)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


class Launcher:
    """`oxytorch run` in a fork of this process, which has imported torch already."""

    def __init__(self, words: tuple[str, ...], variables: dict[str, str]) -> None:
        pipes = [os.pipe(), os.pipe()]
        self.pid = os.fork()
        if self.pid == 0:
            status = 99
            try:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                for number, (_, end) in enumerate(pipes, start=1):
                    os.dup2(end, number)
                for end in (end for pipe in pipes for end in pipe):
                    os.close(end)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
                for name in ("OMP_NUM_THREADS", "LD_PRELOAD"):
                    os.environ.pop(name, None)
                os.environ.update(variables)
                status = main(["run", *words])
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        for _, end in pipes:
            os.close(end)
        self.stdout, self.stderr = (os.fdopen(end) for end, _ in pipes)

    def finish(self) -> tuple[int, str, str]:
        """The exit status and what it printed; all that has its output has ended then."""
        with self.stdout, self.stderr:
            out, err = self.stdout.read(), self.stderr.read()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), out, err


def start(*words: str, **variables: str) -> Launcher:
    return Launcher(words, variables)


def run(*words: str, **variables: str) -> tuple[int, str, str]:
    return start(*words, **variables).finish()


@pytest.fixture
def mark() -> str:
    """Seconds to sleep, by which a process of this test is known."""
    return f"9{os.getpid()}.{time.monotonic_ns() % 10**6}"


@TWO
def test_instances_have_cores_labels_logs_and_a_summary(tmp_path):
    (tmp_path / "show.py").write_text(SHOW)
    logs = tmp_path / "logs"
    options = ("--ninstances", "2", "--log-dir", str(logs), "--log-file-prefix", "my")
    status, out, err = run(*options, str(tmp_path / "show.py"), "a", "--ninstances")
    assert status == 0, err
    first, second = CORES[0], CORES[len(CORES) // 2]
    assert re.search(rf"^\[0\] out \[{first}\b.*\] \d+ a --ninstances$", out, re.MULTILINE)
    assert re.search(rf"^\[1\] out \[{second}\b.*\] \d+ a --ninstances$", out, re.MULTILINE)
    assert {"[0] err", "[1] err"} < set(err.splitlines())
    assert "oxytorch run: summary" in err
    names = sorted(path.name for path in logs.iterdir())
    assert [re.sub(r"_\d{14}_", "_TIME_", name) for name in names][2] == "my_TIME_instances.log"
    text = (logs / names[0]).read_text()
    assert re.match(r"my_\d+_instance_0_cores_[\d,-]+\.log", names[0])
    assert sorted(text.splitlines())[0] == "err" and text.startswith(("out [", "err"))


def test_runs_of_one_second_have_files_of_their_own(tmp_path):
    arguments = SimpleNamespace(log_dir=str(tmp_path), log_file_prefix="run", parser=None)
    with _opened(arguments, "20261126") as (_, first), _opened(arguments, "20261126") as (_, other):
        assert (first, other) == ("20261126", "20261126-2")
    assert len([*tmp_path.iterdir()]) == 2


def test_one_instance_is_as_if_started_by_itself_and_variables_win(tmp_path):
    (tmp_path / "show.py").write_text(SHOW)
    words = ("--cores-list", str(CORES[-1]), str(tmp_path / "show.py"))
    status, out, err = run(*words, OMP_NUM_THREADS="7")
    assert (status, out) == (0, f"out [{CORES[-1]}] 7\n"), err
    assert "OMP_NUM_THREADS=7" in err


@TWO
def test_failing_instance_ends_the_others_and_its_status_is_passed_on(mark):
    script = f"if taskset -pc $$ | grep -q ' {CORES[0]}$'; then exit 7; fi; sleep {mark}"
    cores = ",".join(map(str, CORES[:2]))
    status, _, err = run("--cores-list", cores, "--ninstances", "2", "sh", "-c", script)
    assert status == 7
    assert "instance 0 failed with exit status 7; ending the others" in err
    assert running(mark) == []


@TWO
def test_instance_that_is_killed_gives_the_status_of_a_shell(mark):
    script = f"kill -SEGV $$; sleep {mark}"
    status, _, err = run("--ninstances", "2", "sh", "-c", script)
    assert status == 128 + signal.SIGSEGV
    assert "was killed by SIGSEGV" in err
    assert running(mark) == []


@pytest.mark.parametrize(
    ("count", "number"),
    [
        (1, signal.SIGINT),
        (1, signal.SIGTERM),
        pytest.param(2, signal.SIGINT, marks=TWO),
        pytest.param(2, signal.SIGTERM, marks=TWO),
    ],
)
def test_signals_end_all_and_leave_nothing(count, number, mark, tmp_path):
    script = tmp_path / "leave.py"
    script.write_text(LEAVE.replace("MARK", repr(mark)).replace("SECONDS", "60"))
    process = start("--ninstances", str(count), str(script))
    for _ in range(count):
        assert process.stdout.readline().endswith("ready\n")
    assert len(running(mark)) >= 2 * count
    os.kill(process.pid, number)
    status, out, err = process.finish()
    assert status == 128 + number, err
    assert out.count("interrupted") == (count if number == signal.SIGINT else 0)
    assert "oxytorch run: summary" in err
    assert running(mark) == []


def test_interrupt_while_the_hook_imports_torch_shows_no_traceback(mark, tmp_path):
    script = tmp_path / f"never{mark}.py"
    script.write_text("print('started', flush=True)")
    process = start("--optimize", str(script))
    while not any("launch.script" in line and "binding" not in line for line in running(mark)):
        time.sleep(0.01)
    time.sleep(0.2)  # Python has started, torch is being imported
    os.kill(process.pid, signal.SIGINT)
    status, out, err = process.finish()
    assert (status, out) == (128 + signal.SIGINT, ""), err
    assert "Traceback" not in err


def test_run_that_takes_too_long_is_ended(mark, capfd):
    job = Job("it", ["sh", "-c", f"echo here; sleep {mark}"], is_piped=True, is_shown=False)
    said = []
    result = run_jobs([job], said.append, seconds=0.3)
    assert (result.status, result.cause) == (124, "time")
    assert said == ["still running after 0.3 seconds; ending all"]
    assert capfd.readouterr().out == "" and running(mark) == []


def test_what_a_script_leaves_behind_is_ended_with_it(mark, tmp_path):
    script = tmp_path / "leave.py"
    script.write_text(LEAVE.replace("MARK", repr(mark)).replace("SECONDS", "0"))
    status, out, err = run(str(script))
    assert (status, out) == (0, "ready\n"), err
    assert running(mark) == []


def test_instances_end_with_the_launcher_even_if_it_is_killed(mark):
    process = start("sh", "-c", f"echo ready; exec sleep {mark}")
    assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGKILL)
    process.finish()
    for _ in range(50):
        if not running(mark):
            break
        time.sleep(0.1)
    assert running(mark) == []


@TWO
def test_ranks_of_a_training_have_cores_of_their_own(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(1)\n"
        "dist.all_reduce(x)\n"
        "print(dist.get_rank(), x.item(), sorted(os.sched_getaffinity(0))[0])\n"
        "dist.destroy_process_group()\n"
    )
    status, out, err = run("--nproc-per-node", "2", str(script))
    assert status == 0, err
    first, second = CORES[0], CORES[len(CORES) // 2]
    assert sorted(out.splitlines()) == [f"[0] 0 2.0 {first}", f"[1] 1 2.0 {second}"]


@TWO
def test_launchers_of_two_machines_are_one_training(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.full((1,), 1.0 + dist.get_rank())\n"
        "dist.all_reduce(x)\n"
        "print(dist.get_world_size(), x.item())\n"
        "dist.destroy_process_group()\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meet = ("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "two", "--local-addr", "127.0.0.1")
    shared = ("--nnodes", "2", "--nproc-per-node", "1", *meet)
    machines = [start(*shared, "--cores-list", str(core), str(script)) for core in CORES[:2]]
    ends = [machine.finish() for machine in machines]
    assert [status for status, _, _ in ends] == [0, 0], ends
    assert sorted(out for _, out, _ in ends) == ["[0] 2 3.0\n", "[1] 2 3.0\n"]
