"""The script that trains at the edge of memory: its plan, its parts, and what it makes of them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import module_of

FOLDER = Path(__file__).parents[2] / "benchmarks" / "memory"
TRACE = Path(__file__).parent / "data" / "lora_finetuning.trace"
SMALL = "--layers 2 --width 128 --inner 64 --vocabulary 50 --longest 300 --batch 2 --steps 2"


@pytest.fixture
def edge(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return module_of(FOLDER / "edge.py")


def test_edge_limits_memory_to_what_ours_alone_fits(edge: Any) -> None:
    found = edge.expected(TRACE, 0.007, 4)
    assert found["bound"] < found["limit"] <= found["bound"] * 1.007 + (2 << 20)
    fits = {name: each["fits"] for name, each in found["replay"].items()}
    assert fits == {"native": False, "expandable": False, "ours": True}
    assert "tokens" in found["replay"]["native"]["fails_in"]


@pytest.mark.parametrize("allocator", ["native", "ours"])
def test_edge_trains_in_a_process_of_its_own(allocator: str) -> None:
    words = ["--part", "run", "--device", "cpu", "--allocator", allocator, *SMALL.split()]
    command = [sys.executable, str(FOLDER / "edge.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["done"] == found["steps"] == len(found["seconds"]) == 2
    assert found["steps_per_second"] > 0


def test_edge_runs_all_parts_and_tells_what_failed(
    edge: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[dict[str, str]] = []

    def answer(command: list[str], **given: Any) -> subprocess.CompletedProcess[str]:
        said = dict(zip(command[2::2], command[3::2], strict=True))
        commands.append(said)
        ends = said.get("--limit") and said["--allocator"] != "ours"
        assert ("PYTORCH_ALLOC_CONF" in given["env"]) == (said.get("--allocator") == "expandable")
        if said["--part"] == "record":
            shutil.copy(TRACE, said["--trace"])
            return subprocess.CompletedProcess(command, 0, '{"device": "made up"}\n', "")
        result = {
            "steps": 8,
            "done": 3 if ends else 8,
            "steps_per_second": 2.0,
            "reserved": 1 << 30,
        }
        if ends:
            result["out_of_memory"] = "no"
        return subprocess.CompletedProcess(command, 0, json.dumps(result) + "\n", "")

    monkeypatch.setattr(edge.subprocess, "run", answer)
    out = tmp_path / "edge.json"
    edge.main(["--device", "cuda", "--out", str(out)])
    said = capsys.readouterr().out
    assert "GiB  OUT OF MEMORY in step 3 of 8" in said
    assert "batch 5: the bound is 10.996 GiB, it fits too" in said
    found = json.loads(out.read_text())
    assert [each["part"] for each in found["parts"]] == ["record"] * 2 + ["run"] * 8
    assert found["expected"]["limit"] == int(commands[2]["--limit"])
    assert [each.get("--limit") is None for each in commands[5:]] == [True] * 5


def test_edge_ends_when_its_time_is_over(
    edge: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = edge.Parts(edge.options().parse_args(["--seconds", "0"]))
    parts.longest = 1.0
    assert parts.part("run", allocator="ours", batch=4) is None
    assert "0 s were left" in capsys.readouterr().out


def test_edge_needs_a_gpu_or_a_trace(edge: Any) -> None:
    with pytest.raises(SystemExit, match="no NVIDIA GPU"):
        edge.main(["--device", "cpu"])
