"""Results of `oxytorch llm bench` and `oxytorch llm perplexity` as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oxytorch.benchmark.core.results import Record, Result, is_measured
from oxytorch.benchmark.report.tables import Table, fraction_cell, reasons, spread_cell, tables_by


def _speed(results: Sequence[Result]) -> Table:
    """A row for every contestant, format by format."""
    first = results[0]
    table = Table(
        f"{first['model']}, batch 1, {first['prompt']} tokens of prompt, {first['tokens']} new",
        [
            *("contestant", "prompt", "of torch's products", "a token", "weights", "read at"),
            *("of the limit", "memory", "prefill: peer / oxytorch", "decode: peer / oxytorch"),
        ],
        [_row(record) for result in results for record in result["peers"]],
        reasons(results, lambda result: str(result["weights"])),
    )
    records = [record for result in results for record in result["peers"] if is_measured(record)]
    limits = [record["limit"]["median"] / 1e9 for record in records if "limit" in record]
    if limits:
        table.notes.append(
            f"Times are medians, quartiles in brackets. Weights are the packed bytes that a token "
            f"reads; the limit is what the same process reads by sums over buffers allocated as "
            f"they are, beside each turn: {min(limits):.1f} to {max(limits):.1f} GB/s. Of torch's "
            "products: the rate of the prompt's products over that of torch's bf16 product of two "
            "matrices of 2048 x 2048, in the same process. Memory is "
            "the process's own, with everything that it loaded. Ratios are of turns side by side."
        )
    return table


def _row(record: Record) -> list[str]:
    if not is_measured(record):
        return [str(record["label"]), str(record["status"]), *["-"] * 8]
    ours = "limit" in record
    size = record.get("token_bytes") or 0
    return [
        str(record["label"]),
        _time_cell(record["first"]),
        f"{record['fraction_of_matrix_rate']['median']:.0%}" if ours else "-",
        _time_cell(record["token"]),
        f"{size / 1e6:.0f} MB" if size else "-",
        f"{record['bandwidth']['median'] / 1e9:.1f} GB/s" if ours else "-",
        fraction_cell(record) if ours else "-",
        f"{record['memory_bytes'] / 1e9:.2f} GB",
        _ratio_cell(record.get("oxytorch_first_ratio"), ours),
        _ratio_cell(record.get("oxytorch_token_ratio"), ours),
    ]


def _time_cell(seconds: dict[str, Any]) -> str:
    return spread_cell(seconds, " ms", 1e3, digits=0 if seconds["median"] >= 0.1 else 1)


def _ratio_cell(ratio: dict[str, Any] | None, ours: bool) -> str:
    return "-" if ratio is None or ours else f"{ratio['median']:.2f}x"


def _perplexities(results: Sequence[Result]) -> Table:
    """A row for every format: perplexity, and its change from the first with the standard error."""
    first = results[0]
    table = Table(
        f"{first['folder']}: perplexity of {first['text']}, {first['tokens']:,} tokens, "
        f"window {first['window']}",
        ["weights and cache", "perplexity", f"change from {first['label']}"],
    )
    for result in results:
        change = f"{result['change']:+.2%} +- {result['change_error']:.2%}"
        change = "-" if result is first else change
        table.rows.append([str(result["label"]), f"{result['perplexity']:.3f}", change])
    if any(result["weights"].startswith(("int4", "nf4")) for result in results):
        table.notes.append(f"Scales of 4-bit weights are for groups of {first['group_size']}.")
    return table


llm_tables = tables_by("model", _speed)
"""Times of the prompt and of a token, for each model."""


perplexity_tables = tables_by("folder", _perplexities)
"""Perplexities of each model."""
