"""Results of `oxytorch llm bench` as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oxytorch.benchmark.report.tables import Result, Table, fraction_cell, is_measured, reasons


def llm_table(results: Sequence[Result]) -> Table:
    """Time of the prompt and of a token: a row for every contestant, format by format."""
    first = results[0]
    table = Table(
        f"{first['model']}, batch 1, {first['prompt']} tokens of prompt, {first['tokens']} new",
        [
            "contestant",
            "prompt",
            "of torch's products",
            "a token",
            "weights",
            "read at",
            "of the limit",
            "memory",
        ],
    )
    table.header += ["peers' prompt over ours", "peers' token over ours"]
    for result in results:
        for record in result["peers"]:
            table.rows.append(_row(record))
    table.notes = reasons(results, lambda result: str(result["weights"]))
    limits = [r["limit"]["median"] / 1e9 for result in results for r in _with_limit(result)]
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


def _with_limit(result: Result) -> list[Result]:
    return [record for record in result["peers"] if is_measured(record) and "limit" in record]


def _row(record: Result) -> list[str]:
    if not is_measured(record):
        return [str(record["label"]), str(record["status"]), *["-"] * 8]
    ours = "limit" in record
    size = record.get("token_bytes") or 0
    return [
        str(record["label"]),
        _spread_cell(record["first"], 1e3, "ms"),
        f"{record['fraction_of_matrix_rate']['median']:.0%}" if ours else "-",
        _spread_cell(record["token"], 1e3, "ms"),
        f"{size / 1e6:.0f} MB" if size else "-",
        f"{record['bandwidth']['median'] / 1e9:.1f} GB/s" if ours else "-",
        fraction_cell(record) if ours else "-",
        f"{record['memory_bytes'] / 1e9:.2f} GB",
        _ratio_cell(record.get("oxytorch_first_ratio"), ours),
        _ratio_cell(record.get("oxytorch_token_ratio"), ours),
    ]


def _spread_cell(values: dict[str, Any], factor: float, unit: str) -> str:
    median, low, high = (values[name] * factor for name in ("median", "low", "high"))
    digits = 0 if median >= 100 else 1
    return f"{median:.{digits}f} {unit} ({low:.{digits}f} to {high:.{digits}f})"


def _ratio_cell(ratio: dict[str, Any] | None, ours: bool) -> str:
    if ratio is None or ours:
        return "-"
    return f"{ratio['median']:.2f}x"
