"""Tables from results files: what `oxytorch bench report` prints or writes into a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from oxytorch.benchmark.core.results import Run
from oxytorch.benchmark.kinds import KINDS
from oxytorch.benchmark.machine.description import machine_name
from oxytorch.benchmark.models.tables import summary_table
from oxytorch.benchmark.report.tables import Table

PROVEN = (
    *("torch", "oxytorch", "onnxruntime", "openvino"),
    *("triton", "torch-optimi", "bitsandbytes", "flashoptim"),
    *("transformers", "llama_cpp_python", "torchao"),
)
"""Packages whose versions stand above the tables."""


def merge(runs: Sequence[Run]) -> dict[str, dict[str, Run]]:
    """Machine and torch -> kind -> one run with the newest result of everything measured there.

    The head of a merged run (date, versions, command) is that of its newest part.
    """
    machines: dict[str, dict[str, Run]] = {}
    for run in sorted(runs, key=lambda run: str(run["date"])):
        place = f"{machine_name(run['machine'])}, torch {run['versions']['torch']}"
        kinds, key = machines.setdefault(place, {}), KINDS[run["kind"]].key
        older = kinds.get(run["kind"], {"results": [], "parts": 0})
        # A result that is replaced keeps its place, as keys of dictionaries do.
        results = {key(result): result for result in [*older["results"], *run["results"]]}
        done = [*older.get("done", ()), *run.get("done", ())]
        left = dict.fromkeys([*older.get("left", ()), *run.get("left", ())])
        kinds[run["kind"]] = {
            **run,
            "results": list(results.values()),
            "parts": older["parts"] + 1,
            "done": done,
            "left": [job for job in left if job not in done],
        }
    return machines


def tables_of(run: Run) -> list[Table]:
    """Every table of one run."""
    return KINDS[run["kind"]].tables(run["results"]) if run["results"] else []


def provenance(run: Run) -> str:
    """Where, when, with what and by which command a run was measured."""
    machine, versions = run["machine"], run["versions"]
    caches = machine.get("caches", {})
    parts = [f"{name} {size}" for name, size in caches.items() if name in ("L2", "L3")]
    packages = [
        f"{name} {version}"
        for name, version in versions.items()
        if version != "absent" and name in PROVEN
    ]
    threads = {result["threads"] for result in run["results"] if "threads" in result}
    counted = f", {'/'.join(str(count) for count in sorted(threads))} threads" if threads else ""
    level = machine.get("oxytorch_isa")
    return (
        f"{machine['cpu']}, {machine['cores']} cores{counted} ({', '.join(parts)}; "
        f"torch's capability {machine['torch_capability']}"
        f"{f', oxytorch level {level}' if level else ''}); "
        f"{run['date'][:10]}; {', '.join(packages)}; `{run['command']}`"
        f"{'' if run.get('parts', 1) == 1 else ' (the newest of several runs)'}"
        f"{'; incomplete, not measured: ' + ', '.join(run['left']) if run.get('left') else ''}."
    )


def markdown(table: Table) -> str:
    """The table in Markdown, with its notes as a list."""
    lines = [
        "| " + " | ".join(table.header) + " |",
        "|" + "---|" * len(table.header),
        *("| " + " | ".join(row) + " |" for row in table.rows),
    ]
    notes = [f"- {note}" for note in table.notes]
    return "\n".join([f"**{table.title}**", "", *lines, *([""] if notes else []), *notes])


def section(run: Run) -> str:
    """All tables of a run in Markdown, headed by their provenance."""
    return "\n\n".join([provenance(run), *(markdown(table) for table in tables_of(run))])


def summary(run: Run) -> str:
    """One short table of a run of models, headed by its provenance."""
    return "\n\n".join([provenance(run), markdown(summary_table(run["results"]))])


BLOCKS = {**{kind: (kind, section) for kind in KINDS}, "summary": ("models", summary)}
"""Block of a page -> the kind of run that fills it, and with what."""


def report(runs: Sequence[Run]) -> str:
    """Everything in Markdown: a heading per machine, sections per kind of run."""
    parts = []
    for place, kinds in merge(runs).items():
        parts.append(f"## {place}")
        for kind in KINDS:
            if kind in kinds and kinds[kind]["results"]:
                parts += [f"### {kind}", section(kinds[kind])]
    return "\n\n".join(parts) + "\n"


def fill_page(page: Path, runs: Sequence[Run]) -> list[str]:
    """Replace the marked blocks of a Markdown page by tables; the names of those replaced.

    A block lies between `<!-- bench:models begin -->` and `<!-- bench:models end -->`, with a name
    of `BLOCKS`: a kind of run for all of its tables, or `summary` for the short one of models.

    Raises:
        ValueError: the page has no such block, or one that does not end, or the runs are of
            several machines or versions of torch.
    """
    text = page.read_text(encoding="utf-8")
    machines = merge(runs)
    filled = []
    for block, (kind, make) in BLOCKS.items():
        begin, end = f"<!-- bench:{block} begin -->", f"<!-- bench:{block} end -->"
        candidates = {place: kinds[kind] for place, kinds in machines.items() if kind in kinds}
        if begin not in text or not candidates:
            continue
        if len(candidates) > 1:
            raise ValueError(
                f"bench report: {page}: expected results of one machine and torch, got "
                f"{'; '.join(candidates)}; name the files to take"
            )
        before, _, rest = text.partition(begin)
        if end not in rest:
            raise ValueError(f"bench report: {page}: expected {end} after {begin}, found none")
        _, _, after = rest.partition(end)
        [run] = candidates.values()
        text = f"{before}{begin}\n{make(run)}\n{end}{after}"
        filled.append(block)
    if not filled:
        raise ValueError(
            f"bench report: {page}: expected a block such as <!-- bench:models begin --> for "
            f"which there are results, found none"
        )
    page.write_text(text, encoding="utf-8")
    return filled
