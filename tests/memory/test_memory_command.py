"""`oxytorch memory`: tables, pictures, and mistakes that say what to do."""

from __future__ import annotations

import contextlib
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import made_traces
import pytest

from oxytorch.__main__ import main
from oxytorch.memory import command, sizes
from oxytorch.memory import trace as traces
from oxytorch.memory.record import MemoryRecording


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.trace"
    traces.save(made_traces.training(), path)
    return path


def test_show_tells_what_a_trace_holds(path: Path, capsys) -> None:
    assert main(["memory", "show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "2832 events, 1440 allocations, 1.48 GiB at the peak" in shown
    assert "6, the last 'step 5'" in shown
    assert "held at the peak by" in shown


@pytest.mark.parametrize("verb", ["show", "advise", "replay"])
def test_a_reader_that_has_gone_ends_it_quietly(verb: str, path: Path, gone_reader, capfd) -> None:
    assert gone_reader(["memory", verb, str(path)]) == 141
    assert capfd.readouterr().err == ""


def test_replay_prints_a_line_for_each_allocator(path: Path, capsys) -> None:
    chosen = "native-policy,expandable,oxytorch,offline-bound,offline-contiguous"
    chosen += ",max_split_size_mb:64"
    written = path.with_suffix(".json")
    command = ["memory", "replay", str(path), "--allocators", chosen, "--json", str(written)]
    assert main(command) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[2:]] == chosen.split(",")
    assert shown[1].replace(" ", "") == "allocatorreservednotuseddrivercallsnsacall"
    assert len(json.loads(written.read_text())["results"]) == 6


def test_snapshot_of_torchs_is_taken_in_place_of_a_trace(tmp_path: Path, capsys) -> None:
    found, most = made_traces.history(made_traces.training())
    path = tmp_path / "torch.pickle"
    path.write_bytes(pickle.dumps(found))
    assert main(["memory", "replay", str(path), "--allocators", "expandable_segments:False"]) == 0
    assert sizes.size(most) in capsys.readouterr().out


def test_replay_with_a_limit_says_who_runs_out(path: Path, capsys) -> None:
    command = ["memory", "replay", str(path), "--limit", "1.5GiB"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "out of memory at event" in next(
        line for line in shown.splitlines() if line.startswith("native-policy")
    )


def test_advise_ends_with_what_to_do(path: Path, capsys) -> None:
    assert main(["memory", "advise", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("advice: ") for line in lines)


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_plot_is_drawn_the_same_again(path: Path, suffix: str, capsys) -> None:
    pytest.importorskip("matplotlib")
    drawn = []
    for name in ("a", "b"):
        path = path.rename(path.with_name("$run_{$\x1b.trace"))
        target = path.with_name(name + suffix)
        assert main(["memory", "replay", str(path), "--limit", "1.6G", "--plot", str(target)]) == 0
        drawn.append(target.read_bytes())
    assert drawn[0] == drawn[1]
    if suffix == ".svg":
        ElementTree.fromstring(drawn[0])
        for name in (b"native-policy", b"oxytorch", b"offline-bound"):
            assert name in drawn[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "absent.trace"], "absent.trace"),
        (["replay", "{path}", "--allocators", "jemalloc"], "expected allocators out of"),
        (["replay", "{path}", "--allocators", "max_split_size_mb:x"], "cannot be 'x'"),
        (["replay", "{path}", "--plot", "x.jpeg"], "ends with .svg or .png"),
        (["replay", "{path}", "--plot", "absent/x.svg"], "there is no folder absent"),
        (["record", "out.trace", "absent.py"], "there is no script absent.py"),
        (["show", "{other}"], "expected a trace that oxytorch.memory.record wrote"),
        (["show", "{path}", "--device", "1"], "a trace is of one device"),
        (["replay", "{path}", "--allocators", ","], "--allocators: expected some of native-policy"),
        (["replay", "{path}", "--allocators", "roundup_power2_divisions:3"], "a power of 2"),
        (
            ["replay", "{path}", "--json", "absent/x.json"],
            "--json: absent/x.json: expected an existing folder",
        ),
        (["replay", "{path}", "--json", "{path}"], "is the file that is read; name another"),
        (["replay", "{path}", "--json", "{folder}"], "found a folder"),
    ],
)
def test_mistakes_are_named(path: Path, words: list[str], message: str, capsys) -> None:
    other = path.with_name("other.txt")
    other.write_text("something else")
    given = [word.format(path=path, other=other, folder=path.parent) for word in words]
    assert main(["memory", *given]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("oxytorch memory: ")
    assert message in shown.err
    assert shown.out == "", "a mistake that is found after the work"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "x", "--top", "-3"], "expected an integer above 0, got '-3'"),
        (["record", "x", "y", "--max-events", "0"], "unrecognized"),
        (["record", "--max-events", "0", "x", "y"], "expected an integer above 0, got '0'"),
        (["replay", "x", "--limit", "500KiB"], "expected at least 1MiB, got 500KiB (500.00 KiB)"),
        (["replay", "x", "--limit", "999999T"], "expected at most 16.00 TiB, got 999999T"),
        (["record", "out.trace"], "arguments are required: SCRIPT\n"),
        (["record"], "example: oxytorch memory record run.trace train.py --epochs 1"),
    ],
)
def test_options_are_checked_before_the_work(words: list[str], message: str, capsys) -> None:
    if message == "unrecognized":  # what is behind the script is the script's own
        assert main(["memory", *words]) == 2
        assert "there is no script y" in capsys.readouterr().err
        return
    with pytest.raises(SystemExit) as stopped:
        main(["memory", *words])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_texts_of_a_trace_cannot_command_a_terminal(tmp_path: Path, capsys) -> None:
    trace = made_traces.training(steps=2)
    trace.sites = ["\x1b[2J\x07train.py\r\n\u202e"]
    for number in range(len(trace.places)):
        trace.places[number] = 0
    trace.about.program = "a\x1b]0;title\x07"
    trace.mark("\x1b[31m")
    path = tmp_path / "run.trace"
    traces.save(trace, path)
    for verb in ("show", "advise", "replay"):
        assert main(["memory", verb, str(path)]) == 0
    shown = capsys.readouterr().out
    assert "\\x1b[2J\\x07" in shown
    assert all(each.isprintable() or each == "\n" for each in shown)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """`record` without a GPU, which writes a trace where the block ends."""

    @contextlib.contextmanager
    def record(path: Path, **settings: object) -> Iterator[MemoryRecording]:
        recording = MemoryRecording()
        try:
            yield recording
        finally:
            recording.trace = made_traces.training(steps=1)
            traces.save(recording.trace, path)

    monkeypatch.setattr(command, "record", record)
    monkeypatch.setattr(sys, "argv", ["oxytorch"])
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize(
    ("code", "result"), [("print(sys.argv[1:])", 0), ("raise ValueError('of the script')", 1)]
)
def test_script_is_recorded_and_its_errors_are_its_own(
    recorded: None, tmp_path: Path, capsys, code: str, result: int
) -> None:
    script, path = tmp_path / "train.py", tmp_path / "run.trace"
    script.write_text(f"import sys\n{code}\n")
    assert main(["memory", "record", str(path), str(script), "--epochs", "1"]) == result
    shown = capsys.readouterr()
    assert f"{path}: " in shown.out
    if result:
        assert "Traceback" in shown.err
        assert f'File "{script}", line 2' in shown.err
        assert "ValueError: of the script" in shown.err
    else:
        assert "['--epochs', '1']" in shown.out
    assert len(traces.load(path)) > 0


def test_script_that_exits_keeps_its_code(recorded: None, tmp_path: Path, capsys) -> None:
    script, path = tmp_path / "train.py", tmp_path / "run.trace"
    script.write_text("raise SystemExit(3)\n")
    with pytest.raises(SystemExit) as ended:
        main(["memory", "record", str(path), str(script)])
    assert ended.value.code == 3
    assert f"{path}: " in capsys.readouterr().out


def test_limit_that_is_no_size_is_named(path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["memory", "replay", str(path), "--limit", "much"])
    assert stopped.value.code == 2
    assert "expected a size such as 80GiB, got 'much'" in capsys.readouterr().err


def test_limit_without_a_unit_is_named(path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["memory", "replay", str(path), "--limit", "24"])
    assert stopped.value.code == 2
    assert "got 24 (24 bytes); give a unit, such as 24GiB" in capsys.readouterr().err


def test_sizes_are_read_and_written() -> None:
    read = {"80GiB": 80 << 30, "1.5g": 3 << 29, "512M": 512 << 20, "2 MB": 2 << 20, "7": 7}
    for text, count in read.items():
        assert sizes.parse(text) == count
    for text in ("", "0", "-1G", "G", "1PB", "1e9", "nan"):
        with pytest.raises(ValueError, match="expected a size"):
            sizes.parse(text)
    assert [sizes.size(count) for count in (3, 1536, 3 << 29)] == [
        "3 bytes",
        "1.50 KiB",
        "1.50 GiB",
    ]
