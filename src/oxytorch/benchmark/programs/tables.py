"""Results of `benchmarks/programs.py` as tables: what does `graph=True` gain?"""

from __future__ import annotations

from collections.abc import Sequence

from oxytorch.benchmark.core.results import Result, is_measured
from oxytorch.benchmark.core.rounds import Spread, paired_ratio
from oxytorch.benchmark.programs.runs import PASSES, PROGRAM
from oxytorch.benchmark.report.tables import (
    Table,
    fastest_other,
    mean_cell,
    milliseconds,
    peer_record,
    reasons,
    tables_by,
    time_cell,
)
from oxytorch.benchmark.zoo.tables import speed_over_stock

COLUMNS = (
    *("model", "batch", "stock", "passes", "over stock"),
    *("graph", "over stock", "over passes", "optimize"),
)
"""Of every row; optimize: seconds of `optimize` with `graph=False`, and with `graph=True`."""


def speed_over_passes(result: Result) -> Spread | None:
    """How many times faster `graph=True` is than the other passes, round by round."""
    program, passes = peer_record(result, PROGRAM), peer_record(result, PASSES)
    if program is None or passes is None or not (is_measured(program) and is_measured(passes)):
        return None
    return paired_ratio(passes["rounds"], program["rounds"])


def speeds(result: Result) -> tuple[Spread | None, ...]:
    """Of the passes over stock, of the program over stock, of the program over the passes."""
    over_stock = (speed_over_stock(result, peer) for peer in (PASSES, PROGRAM))
    return *over_stock, speed_over_passes(result)


def no_program(result: Result) -> str | None:
    """Why there is no program of a model; None where there is one, or a failure says why not."""
    record = peer_record(result, PROGRAM)
    reason = None if record is None else record["notes"].get("no_program")
    return None if reason is None else str(reason)


def row(result: Result) -> list[str]:
    """The cells of a model, in the order of `COLUMNS`."""
    stock = fastest_other(result)
    passes, program = (peer_record(result, peer) for peer in (PASSES, PROGRAM))
    ratios = ["-" if each is None else f"{each['median']:.2f}x" for each in speeds(result)]
    costs = [
        f"{record['notes']['optimize_seconds']:.1f}"
        for record in (passes, program)
        if record is not None and "optimize_seconds" in record["notes"]
    ]
    return [
        result["title"],
        str(result["batch"]),
        "-" if stock is None else milliseconds(stock["seconds"]["median"]),
        *(time_cell(passes), ratios[0]),
        *(time_cell(program), *ratios[1:]),
        f"{' / '.join(costs)} s" if costs else "-",
    ]


def means(results: Sequence[Result]) -> list[str]:
    """The row of geometric means."""
    columns = zip(*map(speeds, results), strict=True)
    first, second, third = (
        mean_cell([each["median"] for each in column if each is not None], len(results))
        for column in columns
    )
    return ["geometric mean", "", "", "", first, "", second, third, ""]


def _table(results: Sequence[Result]) -> Table:
    table = Table(f"Programs, {results[0]['dtype']}", [*COLUMNS], [*map(row, results)])
    table.rows.append(means(results))
    table.notes = reasons(results, lambda result: f"{result['model']} batch {result['batch']}")
    table.notes += [
        f"No program of {result['model']} batch {result['batch']}: {reason}."
        for result in results
        if (reason := no_program(result)) is not None
    ]
    return table


program_tables = tables_by("dtype", _table)
