"""`python -m tests.uses.table [arguments of pytest]` prints how many uses are right, by class.

A class is one test function. A use is right, refused with an error that names the remedy, or wrong;
each wrong one is printed in a line below the table. A use that kills the process, or that takes
longer than two minutes, is wrong, and the run goes on after it. `--keep FILE` first writes what
each test showed to a file, in lines of JSON; a run that was cut off goes on from there. `-m ""`
takes the slow ones too. Seconds are of processor time.
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

LONGEST = 120


class Recorder:
    """Writes what each test showed to a file as it happens, and leaves out what is there."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.began = 0.0
        self.done = {line["test"] for line in _lines(path)}

    def _write(self, **line: Any) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self.done]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(test=nodeid, verdict="started")
        self.began = time.process_time()
        faulthandler.dump_traceback_later(LONGEST, exit=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        faulthandler.cancel_dump_traceback_later()
        if report.outcome == "skipped":
            self._write(test=report.nodeid, verdict="skipped")
        elif report.when == "call" or report.failed:
            properties = dict(report.user_properties)
            crash = getattr(report.longrepr, "reprcrash", None)
            message = properties.get("detail") or getattr(crash, "message", report.longrepr) or ""
            verdict = "wrong" if report.failed else properties.get("verdict", "right")
            text = " ".join(str(message).split())
            seconds = round(time.process_time() - self.began, 3)
            self._write(test=report.nodeid, verdict=verdict, detail=text, seconds=seconds)


def _lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def _last(path: str) -> dict[str, dict[str, Any]]:
    """Return what is known last of every test."""
    return {line["test"]: line for line in _lines(path)}


def _run(path: str, arguments: list[str]) -> None:
    """Run the tests in processes of their own until none is left."""
    while True:
        before = len(_last(path))
        options = ["-q", "--no-header", "--tb=no", "--no-summary", "-p", "no:warnings"]
        command = [sys.executable, "-m", "tests.uses.table", "--record", path, *options, *arguments]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode in (0, 1, 5) or len(_last(path)) == before:
            if result.returncode not in (0, 1, 5):
                print(result.stdout, result.stderr)
            return


def _table(last: dict[str, dict[str, Any]]) -> str:
    counts: dict[str, Counter[str]] = {}
    seconds: Counter[str] = Counter()
    wrong = []
    for test, line in last.items():
        place, _, identifier = test.rpartition("/")[2].partition("[")
        verdict, detail = line["verdict"], line.get("detail", "")
        if verdict == "started":
            verdict, detail = "wrong", "the process died, or took too long"
        if verdict != "skipped":
            counts.setdefault(place, Counter())[verdict] += 1
            seconds[place] += line.get("seconds", 0)
        if verdict == "wrong":
            wrong.append(f"{place}[{identifier}: {detail[:220]}")
    width = max([len(name) for name in counts], default=5)
    lines = [
        f"{'class':<{width}} {'uses':>6} {'right':>6} {'refused':>8} {'wrong':>6} {'seconds':>8}"
    ]
    counts["all"], seconds["all"] = sum(counts.values(), Counter()), seconds.total()
    for name, count in counts.items():
        numbers = [count.total(), count["right"], count["refused"], count["wrong"]]
        row = "{:<{}} {:>6} {:>6} {:>8} {:>6} {:>8.1f}"
        lines.append(row.format(name, width, *numbers, seconds[name]))
    return "\n".join([*lines, "", *wrong])


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--record"]:
        return int(pytest.main(arguments[2:], plugins=[Recorder(arguments[1])]))
    if arguments[:1] == ["--keep"]:
        path, arguments = arguments[1], arguments[2:]
        Path(path).touch()
    else:
        handle, path = tempfile.mkstemp(suffix=".jsonl")
        os.close(handle)
    if not any(Path(a.partition("::")[0]).exists() for a in arguments if not a.startswith("-")):
        arguments = [str(Path(__file__).parent), *arguments]
    _run(path, arguments)
    last = _last(path)
    print(_table(last))
    return int(any(line["verdict"] in ("wrong", "started") for line in last.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
