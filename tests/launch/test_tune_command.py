"""`oxytorch tune` as a user enters it, on scripts whose best placement is known."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import signal
from pathlib import Path

import pytest
import torch
from instances import CORES, TWO, running
from torch import nn

import oxytorch
from oxytorch.__main__ import main
from oxytorch.launch.tuning import session as sessions

# Two instances of one core are the best, by far.
SCRIPT = """
import os
cores, threads = len(os.sched_getaffinity(0)), int(os.environ["OMP_NUM_THREADS"])
if os.environ.get("FAIL_AT") == str(cores):
    raise SystemExit("too few for me")
print(f"throughput: {10 * cores ** 0.5 + (threads - cores)} a second")
print("latency:", 100 / cores)
"""


@pytest.fixture(autouse=True)
def script(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("OMP_NUM_THREADS", "LD_PRELOAD", "FAIL_AT"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "x.py"
    path.write_text(SCRIPT)
    return path


CORES_LIST = f"--cores-list={','.join(str(number) for number in CORES[:2])}"


def tune(*words: str) -> int:
    return main(["tune", CORES_LIST, *words])


def results(folder: Path) -> list[dict]:
    [path] = folder.glob("tune-*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


@TWO
def test_best_placement_is_found_and_its_command_starts_it(tmp_path, capfd):
    assert tune("x.py", "--size", "a b") == 0
    out, err = capfd.readouterr()
    assert "best: 2 x 1 core, throughput 20, 1.41 times that of 1 x 2 cores" in out
    assert "[1/15] 1 x 2 cores: throughput 14.14  | best 14.14: 1 x 2 cores" in err
    [command] = [line.strip() for line in out.splitlines() if line.startswith("  oxytorch run")]
    words = shlex.split(command)
    assert words[-3:] == ["x.py", "--size", "a b"]
    assert main(words[1:]) == 0
    out, err = capfd.readouterr()
    assert {f"[{i}] throughput: 10.0 a second" for i in (0, 1)} < set(out.splitlines())
    assert "2 instances" in err


@TWO
def test_search_goes_on_where_it_ended(tmp_path, capfd):
    assert tune("--search=grid", "--repeats=1", "x.py") == 0
    first = results(tmp_path)
    assert len(first) == 3
    path = next(tmp_path.glob("tune-*.jsonl"))
    with path.open("a") as file:
        file.write('{"placement": {"ninst')  # killed while it wrote
    capfd.readouterr()
    assert tune("--search=grid", "--repeats=2", "x.py") == 0
    assert "about 6 trials, 3 of them known" in capfd.readouterr().err
    assert len(results(tmp_path)) == 6 and results(tmp_path)[:3] == first
    assert tune("--search=grid", "--repeats=2", "x.py") == 0
    assert "[" not in capfd.readouterr().err
    assert tune("--restart", "--search=grid", "--repeats=1", "x.py") == 0
    assert len(results(tmp_path)) == 3
    path.write_text(path.read_text()[:40])  # killed while it wrote the first line
    assert tune("--search=grid", "--repeats=1", "x.py") == 0
    assert len(results(tmp_path)) == 3
    # another script is another search
    (tmp_path / "x.py").write_text(SCRIPT + "\n")
    assert tune("--search=grid", "--repeats=1", "x.py") == 0
    assert len([*tmp_path.glob("tune-*.jsonl")]) == 2


@TWO
def test_file_of_another_search_is_refused(tmp_path, mistake):
    assert tune("--repeats=1", "--results=my.jsonl", "x.py") == 0
    for words in (["--minimize=latency", "x.py"], ["x.py", "argument"]):
        told = mistake(["tune", CORES_LIST, "--results=my.jsonl", *words])
        assert "--results: my.jsonl is of another search:" in told
    (tmp_path / "notes.txt").write_text("my notes\n")
    told = mistake(["tune", CORES_LIST, "--results=notes.txt", "x.py"])
    assert "notes.txt holds no results to go on with" in told
    assert (tmp_path / "notes.txt").read_text() == "my notes\n"


@TWO
def test_failing_placements_are_told_and_others_go_on(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("FAIL_AT", "1")
    assert tune("x.py") == 0
    out, _ = capfd.readouterr()
    assert "best: 1 x 2 cores" in out
    assert "instance 0 failed with exit status 1: too few for me" in out
    failed = [each["trial"]["failure"] for each in results(tmp_path)]
    assert sum(bool(text) for text in failed) == 2


def test_search_without_any_figure_fails(tmp_path, capfd):
    (tmp_path / "x.py").write_text("raise ValueError('broken')")
    assert tune("--ninstances=1", "x.py") == 1
    out, _ = capfd.readouterr()
    assert "no placement gave a figure" in out and "ValueError: broken" in out
    assert "oxytorch run" not in out


def test_script_that_prints_no_figure_is_told_what_to_print(tmp_path, capfd):
    (tmp_path / "x.py").write_text("print('speed', 3)")
    assert tune("--ninstances=1", "x.py") == 2
    _, err = capfd.readouterr()
    assert "printed no throughput: expected a line like `throughput: 12.5`" in err
    assert err.splitlines()[-1] == "  speed 3"
    assert not [*tmp_path.glob("*.jsonl")]
    assert tune("--ninstances=1", "--repeats=1", "--maximize", r"speed (\d+)", "x.py") == 0
    assert (
        tune("--ninstances=1", "--at-most", "memory: 3", "--maximize", r"speed (\d+)", "x.py") == 2
    )
    assert "printed no memory" in capfd.readouterr().err


@TWO
def test_limit_excludes_a_faster_placement(capfd):
    assert tune("--at-most", "latency: 60", "x.py") == 0
    out, _ = capfd.readouterr()
    assert "best: 1 x 2 cores" in out and "over 60 latency" in out
    assert tune("--at-most", "latency: 10", "x.py") == 1
    out, _ = capfd.readouterr()
    assert "no placement has latency at most 10; the nearest is 1 x 2 cores" in out


@TWO
def test_threads_are_an_axis(capfd):
    words = ("--ninstances=1", "--nthreads-per-instance=cores,3", "--repeats=1", "x.py")
    assert tune(*words) == 0
    out, _ = capfd.readouterr()
    assert "best: 1 x 2 cores, 3 OpenMP threads, throughput 15.14" in out
    assert "--nthreads-per-instance=3" in out


def test_trial_that_takes_too_long_is_ended(tmp_path, capfd):
    mark = f"9{os.getpid()}.5"
    (tmp_path / "x.py").write_text(
        "import os, subprocess\nprint('throughput: 3')\nif not os.path.exists('at_once'):\n"
        f"    subprocess.run(['sleep', '{mark}'])"
    )
    assert tune("--ninstances=1", "--timeout=1", "x.py") == 1
    assert "still running after 1 seconds" in capfd.readouterr().out
    assert running(mark) == []
    # a longer limit tries it again, the same one does not
    assert tune("--ninstances=1", "--timeout=1", "x.py") == 1
    assert "1 of them known" in capfd.readouterr().err
    (tmp_path / "at_once").touch()
    assert tune("--ninstances=1", "--repeats=1", "--timeout=60", "x.py") == 0
    assert "throughput 3" in capfd.readouterr().out


@TWO
def test_interrupt_keeps_what_is_known_and_ends_what_runs(tmp_path, capfd):
    mark = f"9{os.getpid()}.6"
    (tmp_path / "x.py").write_text(
        SCRIPT + f"import signal, subprocess\nif cores == 1: os.kill({os.getpid()}, signal.SIGINT)"
        f"\nif cores == 1: subprocess.run(['sleep', '{mark}'])"
    )
    assert tune("x.py") == 130
    out, err = capfd.readouterr()
    assert "best: 1 x 2 cores" in out and "oxytorch run --ninstances=1" in out
    assert "interrupted; 1 trials are in tune-x-" in err
    assert running(mark) == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_placements_that_would_not_fit_into_memory_are_left_out(capfd, monkeypatch):
    monkeypatch.setattr(sessions, "available_memory", lambda: 1 << 20)
    words = (*("--search=grid", "--repeats=1", "--ninstances=1,2"), "x.py")
    if len(CORES) < 2:
        pytest.skip("needs two cores")
    assert tune(*words) == 0
    out, _ = capfd.readouterr()
    assert "best: 1 x 2 cores" in out and "not started: 2 instances of" in out
    assert tune("--ignore-memory", "--restart", *words) == 0
    assert "best: 2 x 1 core" in capfd.readouterr().out


@TWO
def test_dry_run_lists_what_would_be_tried(tmp_path, capfd):
    assert tune("--dry-run", "x.py") == 0
    out, _ = capfd.readouterr()
    listed = [" ".join(line.split()) for line in out.splitlines()]
    assert listed == ["1 1 x 2 cores", "2 1 x 1 core", "3 2 x 1 core"]
    assert tune("--dry-run", "--search=random", "--placements=2", "x.py") == 0
    assert len(capfd.readouterr().out.splitlines()) == 2
    assert not [*tmp_path.glob("*.jsonl")]


@TWO
@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_plot_is_drawn(suffix, tmp_path):
    pytest.importorskip("matplotlib")
    assert tune("--repeats=1", "--at-most=latency: 60", f"--plot=plot{suffix}", "x.py") == 0
    begin = (tmp_path / f"plot{suffix}").read_bytes()[:200]
    assert (b"<?xml" if suffix == ".svg" else b"\x89PNG") in begin


def save(path: str, is_open: bool = False) -> None:
    model, x = nn.Linear(8, 8).eval(), torch.ones(4, 8)
    sizes = ({0: torch.export.Dim("batch")},) if is_open else None
    exported = torch.export.export(model, (x,), dynamic_shapes=sizes)
    oxytorch.save(oxytorch.optimize(exported), path)


@TWO
def test_saved_program_is_measured(capfd):
    save("m.oxy")
    words = ("--repeats=1", "--seconds=0.1", "--at-most=latency: 1e4", "m.oxy")
    assert tune("--ninstances=2", *words) == 0
    out, _ = capfd.readouterr()
    assert "best: 2 x 1 core" in out and "-m oxytorch.launch.tuning.measure m.oxy" in out
    [trial] = results(Path.cwd())
    assert trial["trial"]["value"] > 0 and trial["trial"]["limits"][0] > 0


def test_saved_program_of_open_sizes_needs_them(mistake):
    save("open.oxy", is_open=True)
    for words, message in (
        ([], "--input 'input: N,8' with a number for each N"),
        (["--input=input: 4"], "expected input of shape [any, 8], got [4]"),
        (["--input=other: 4,8"], "expected an input of input, got 'other'"),
        (["--input=input 4"], "expected NAME: SIZES"),
    ):
        assert message in mistake(["tune", *words, "open.oxy"])
    words = ("--ninstances=1", "--repeats=1", "--seconds=0.1", "--minimize=latency")
    assert tune(*words, "--input=input: 4,8", "open.oxy") == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nope.py"], "there is no file nope.py"),
        (["nope.oxy"], "nope.oxy"),
        (["--maximise", "x.py"], "oxytorch tune: error: unrecognized arguments: --maximise"),
        (["--maximize=a", "--minimize=b", "x.py"], "not allowed with argument"),
        (["--at-most", "latency", "x.py"], "--at-most: expected NAME: NUMBER"),
        (["--ninstances", "0", "x.py"], "--ninstances: expected an integer above 0, got '0'"),
        (["--ninstances", "999999", "x.py"], "none of the combinations fit"),
        (["--cores-list", "99999", "x.py"], "--cores-list: expected cores of this machine"),
        (["--cores-list", "a", "x.py"], "expected numbers"),
        (["--memory-allocator", "malloc", "x.py"], "--memory-allocator: expected default"),
        (["--seed", "1", "x.py"], "--seed: needs --search random"),
        (["--plot", "plot.gif", "x.py"], "--plot: expected a name that ends with .svg or .png"),
        (["--plot", "no/plot.svg", "x.py"], "--plot: there is no folder no"),
        (["--results", "no/a.jsonl", "x.py"], "--results: cannot write to"),
        (["--forget", "x.py"], "--forget: expected no script"),
        (["--dtype", "bfloat16", "x.py"], "--dtype: needs --optimize"),
        (["--input", "x: 3", "x.py"], "--input: expected model.oxy"),
        (["--seconds", "0", "x.py"], "--seconds: expected a number above 0"),
    ],
)
def test_mistakes_are_named_before_anything_starts(words, message, mistake):
    assert message in mistake(["tune", *words])


def test_plot_without_matplotlib_names_the_package(monkeypatch, mistake):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'oxytorch[tune]'" in mistake(["tune", "--plot", "a.svg", "x.py"])


def test_help_teaches_by_two_examples(capfd):
    with pytest.raises(SystemExit):
        main(["tune", "--help"])
    shown = capfd.readouterr().out
    examples = [line for line in shown.splitlines() if line.startswith("  oxytorch tune")]
    assert len(examples) == 2
    save("model.oxy")
    Path("script.py").touch()
    for line in examples:
        words = shlex.split(line)[2:]
        assert main(["tune", "--dry-run", *words]) == 0
