"""Results of `oxytorch llm perplexity` as a table."""

from __future__ import annotations

from collections.abc import Sequence

from oxytorch.benchmark.report.tables import Result, Table


def perplexity_table(results: Sequence[Result]) -> Table:
    """A row for every format: perplexity, and its change from the first with the standard error."""
    first = results[0]
    table = Table(
        f"{first['folder']}: perplexity of {first['text']}, {first['tokens']:,} tokens, "
        f"window {first['window']}",
        ["weights and cache", "perplexity", f"change from {first['label']}"],
    )
    for result in results:
        change = f"{result['change']:+.2%} +- {result['change_error']:.2%}"
        table.rows.append(
            [
                str(result["label"]),
                f"{result['perplexity']:.3f}",
                "-" if result is first else change,
            ]
        )
    if any(result["weights"].startswith(("int4", "nf4")) for result in results):
        table.notes.append(f"Scales of 4-bit weights are for groups of {first['group_size']}.")
    return table
