"""Run the whole zoo and print what fails, grouped by cause: `python -m tests.zoo.report`.

Each model runs in a worker process that writes a line of JSON for every combination: a crash or a
hang costs one model's results, and is one of them. Lines are kept as they come; `--resume` goes on
where a run was stopped, `--show` prints the tables of a finished one. Each `--part` has a file
of its own; `--show` without `--part` or `--output` reads those of all parts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

Line = dict[str, Any]
FOLDER = Path("build")
"""Where the lines are, unless `--output` says so."""
SHOWN = 12
"""Combinations that are named for each cause."""


def work(names: Iterable[str], ways: Sequence[str]) -> None:
    """Check the models that are named, one line of JSON for each combination."""
    import warnings

    import settings
    import transformers
    from checks import COMBINATIONS, check

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    for module, attribute, value in settings.for_small_models():
        setattr(module, attribute, value)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what models print does not get between the lines
    for name in names:
        for way, dtype in COMBINATIONS:
            if way not in ways:
                continue
            head = {"model": name.strip(), "way": way, "dtype": dtype}
            print(json.dumps({**head, "status": "began"}), file=out, flush=True)
            began = time.perf_counter()
            line: Line
            try:
                outcome = check(name.strip(), way, dtype)
            except Exception as error:  # stock itself, or the checks
                line = {"status": "broken check", "findings": [("zoo", f"{error!r}"[:300])]}
            else:
                found = [(one.claim, one.message) for one in outcome.findings]
                status = "skipped" if outcome.skipped else "wrong" if found else "right"
                line = {"status": status, "findings": found, "changed": outcome.changed}
                line["reason"] = outcome.skipped
            line["seconds"] = round(time.perf_counter() - began, 2)
            print(json.dumps({**head, **line}), file=out, flush=True)
        print(json.dumps({"model": name.strip(), "status": "done"}), file=out, flush=True)


class Worker:
    """A process that checks one model after the other."""

    def __init__(self, ways: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "report.py"), "--worker", "--ways", ",".join(ways)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def check(self, name: str, timeout: float) -> list[Line]:
        """The lines of one model; where the process ends, the last combination has died."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(name + "\n")
        self.process.stdin.flush()
        guard = threading.Timer(timeout, self.process.kill)
        guard.start()
        lines: list[Line] = []
        current: Line = {"model": name, "way": "-", "dtype": "-"}
        try:
            for text in self.process.stdout:
                line = json.loads(text)
                if line["status"] == "done":
                    return lines
                if line["status"] == "began":
                    current = line
                else:
                    lines.append(line)
        finally:
            guard.cancel()
        code = self.process.wait()
        why = f"no answer in {timeout:.0f} seconds" if code == -9 else f"exit status {code}"
        died = {"status": "died", "findings": [("process", f"the process died: {why}")]}
        return [*lines, {**current, **died}]

    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def run(names: Sequence[str], ways: Sequence[str], target: Path, timeout: float) -> list[Line]:
    """Check models in worker processes and write their lines as they come."""
    worker = Worker(ways)
    everything: list[Line] = []
    with target.open("a") as file:
        for index, name in enumerate(names):
            if not worker.alive():
                worker = Worker(ways)
            lines = worker.check(name, timeout)
            for line in lines:
                print(json.dumps(line), file=file, flush=True)
            everything += lines
            counts = ", ".join(f"{n} {status}" for status, n in _counts(lines).items())
            print(f"{index + 1}/{len(names)} {name}: {counts}", flush=True)
    worker.close()
    return everything


def _counts(lines: Sequence[Line]) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for line in lines:
        counts[line["status"]] += 1
    return dict(counts)


def cause(message: str) -> str:
    """What a finding has in common with others: numbers, classes and places are left out."""
    text = re.sub(r"output(\.\w+)*", "output", message)
    text = re.sub(r"values: \S+ differs", "values: an output differs", text)
    text = re.sub(r"does not name a changed \w+", "does not name a changed module", text)
    text = re.sub(r", such as \S+", "", text)
    text = re.sub(r"is an? (\w+), stock gives an? \w+", r"is a \1, stock gives another class", text)
    text = re.sub(r"'dict' object has no attribute '\w+'", "'dict' object has no attribute", text)
    return re.sub(r"\d[\d.e+-]*", "N", text)[:160]


def tables(lines: Sequence[Line]) -> str:
    """Counts by way and dtype, then every cause with the combinations that it breaks."""
    out = [
        "",
        f"{'way':<14}{'dtype':<10}{'right':>7}{'wrong':>7}{'died':>7}{'skipped':>9}{'alone':>7}",
    ]
    groups: dict[tuple[str, str], list[Line]] = defaultdict(list)
    for line in lines:
        groups[line["way"], line["dtype"]].append(line)
    for (way, dtype), group in groups.items():
        counts = defaultdict(int, _counts(group))
        alone = sum(1 for line in group if line["status"] == "right" and not line["changed"])
        wrong = counts["wrong"] + counts["broken check"]
        out.append(
            f"{way:<14}{dtype:<10}{counts['right']:>7}{wrong:>7}{counts['died']:>7}"
            f"{counts['skipped']:>9}{alone:>7}"
        )
    causes: dict[str, list[tuple[Line, str]]] = defaultdict(list)
    for line in lines:
        for claim, message in first_findings(line):
            causes[cause(message)].append((line, f"{claim}: {message}"))
    for name, hits in sorted(causes.items(), key=lambda item: -len(item[1])):
        models = sorted({line["model"] for line, _ in hits})
        out += [
            "",
            f"{len(hits)} x {name}",
            f"  e.g. {hits[0][1]}",
            f"  models ({len(models)}): {', '.join(models)}",
        ]
        shown = [f"{line['model']}-{line['way']}-{line['dtype']}" for line, _ in hits[:SHOWN]]
        out.append(f"  {', '.join(shown)}" + (" ..." if len(hits) > SHOWN else ""))
    return "\n".join(out)


def first_findings(line: Line) -> list[tuple[str, str]]:
    """The findings of a line that say something of their own: each message once, first claim."""
    seen: dict[str, str] = {}
    for claim, message in line["findings"]:
        seen.setdefault(cause(message), claim + "\0" + message)
    return [(text.split("\0")[0], text.split("\0")[1]) for text in seen.values()]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo.report", description=__doc__)
    parser.add_argument("--models", default="", help="names, by commas (default: all)")
    parser.add_argument("--ways", default="default,sample_input,all_passes,tune", help="by commas")
    parser.add_argument("--output", type=Path, help="lines (default: one of build/zoo*.jsonl)")
    parser.add_argument("--resume", action="store_true", help="go on with what --output lacks")
    parser.add_argument("--show", action="store_true", help="only print the tables of --output")
    parser.add_argument("--part", type=part, help="I/N: only every Nth model, from the Ith")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one model")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.worker:
        work(iter(sys.stdin.readline, ""), arguments.ways.split(","))
        return 0
    target = arguments.output or _default(arguments.part)
    lines: list[Line] = []
    if arguments.show:
        is_all = arguments.output is None and arguments.part is None
        targets = sorted(FOLDER.glob("zoo*.jsonl")) if is_all else [target]
        lines = [line for one in targets for line in _read(one)]
    else:
        from checks import CASES

        names = [name for name in arguments.models.split(",") if name] or list(CASES)
        unknown = [name for name in names if name not in CASES]
        if unknown:
            parser.error(f"--models: expected names of the zoo, got {', '.join(unknown)}")
        first, step = arguments.part or (1, 1)
        names = names[first - 1 :: step]
        target.parent.mkdir(parents=True, exist_ok=True)
        if arguments.resume:
            lines = _read(target)
        else:
            for other in _earlier(target) if arguments.output is None else [target]:
                other.unlink(missing_ok=True)
        had = {line["model"] for line in lines}
        left = [name for name in names if name not in had]
        lines += run(left, arguments.ways.split(","), target, arguments.timeout)
    print(tables(lines))
    return 1 if any(line["status"] in ("wrong", "died", "broken check") for line in lines) else 0


def part(text: str) -> tuple[int, int]:
    """What `--part` says: (I, N)."""
    first, _, count = text.partition("/")
    if not (first.isdigit() and count.isdigit() and 1 <= int(first) <= int(count)):
        raise argparse.ArgumentTypeError(f"expected I/N with I from 1 to N, got {text!r}")
    return int(first), int(count)


def _default(part: tuple[int, int] | None) -> Path:
    """The file of a part of the models, or of all."""
    return FOLDER / ("zoo.jsonl" if part is None else f"zoo-{part[0]}-of-{part[1]}.jsonl")


def _earlier(target: Path) -> list[Path]:
    """The file of an earlier run, with those of runs that shared the models in another way: parts
    of one run write at the same time and leave each other's alone."""
    files = [(path, path.stem.partition("-of-")[2]) for path in FOLDER.glob("zoo*.jsonl")]
    parts = target.stem.partition("-of-")[2]
    return [path for path, count in files if path == target or count != parts]


def _read(path: Path) -> list[Line]:
    with path.open() as file:
        return [json.loads(text) for text in file if text.strip()]


if __name__ == "__main__":
    sys.exit(main())
