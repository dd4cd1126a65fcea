"""Results as tables: one content, shown as Markdown or in a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from oxytorch.benchmark.core.rounds import geometric_mean
from oxytorch.benchmark.models.contestants import PEERS

Result = dict[str, Any]


@dataclass
class Table:
    """A table with a title and notes below it; cells marked with ** are the best of their row."""

    title: str
    header: list[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def milliseconds(seconds: float) -> str:
    """About three significant digits in ms or us: `118 ms`, `7.9 ms`, `165 us`."""
    value, unit = (seconds * 1e3, "ms") if seconds >= 1e-3 else (seconds * 1e6, "us")
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def is_measured(record: Result | None) -> bool:
    """Whether there is a record and it has times."""
    return record is not None and record["status"] == "measured"


def peer_record(result: Result, peer: str) -> Result | None:
    """The record of a peer in a result, if it took part."""
    return next((record for record in result["peers"] if record["peer"] == peer), None)


def peer_names(results: Sequence[Result]) -> list[str]:
    """Peers with times in at least one result: the known ones in their order, then others."""
    found = {r["peer"] for result in results for r in result["peers"] if is_measured(r)}
    known = [name for name in PEERS if name in found]
    return known + sorted(found - set(known))


def label_of(results: Sequence[Result], peer: str) -> str:
    """What the peer is called in tables."""
    for result in results:
        record = peer_record(result, peer)
        if record is not None:
            return str(record["label"])
    return peer


def fastest_other(result: Result, peer: str = "oxytorch") -> Result | None:
    """The fastest measured contestant whose name does not begin with `peer`."""
    others = [r for r in result["peers"] if is_measured(r) and not r["peer"].startswith(peer)]
    return min(others, key=lambda record: float(record["seconds"]["median"]), default=None)


def over_fastest_other(result: Result) -> str:
    """How many times faster oxytorch is than the fastest peer, and which that is."""
    record, other = peer_record(result, "oxytorch"), fastest_other(result)
    if record is None or other is None or not is_measured(record):
        return "-"
    ratio = other["seconds"]["median"] / record["seconds"]["median"]
    return f"{ratio:.2f}x {other['label']}"


def _with_best_marked(cells: list[str], times: Sequence[float | None]) -> list[str]:
    known = [time for time in times if time is not None]
    if len(known) < 2:
        return cells
    best = times.index(min(known))
    return [f"**{cell}**" if index == best else cell for index, cell in enumerate(cells)]


def _median(record: Result | None) -> float | None:
    if record is None or not is_measured(record):
        return None
    return float(record["seconds"]["median"])


def _speed_cell(record: Result | None) -> str:
    if record is None:
        return "-"
    if not is_measured(record):
        return str(record["status"])
    text = milliseconds(record["seconds"]["median"])
    return text if record["peer"] == "eager" else f"{text} ({record['speedup']['median']:.2f}x)"


def _mean_cell(results: Sequence[Result], peer: str, value: Callable[[Result], float]) -> str:
    records = [peer_record(result, peer) for result in results]
    values = [value(record) for record in records if record is not None and is_measured(record)]
    if not values:
        return "-"
    text = f"{geometric_mean(values):.2f}x"
    return text if len(values) == len(results) else f"{text} ({len(values)} of {len(results)})"


def reasons(results: Sequence[Result], name: Callable[[Result], str]) -> list[str]:
    """One note per reason for which peers have no time, with the results it concerns."""
    concerned: dict[tuple[str, str, str], list[str]] = {}
    for result in results:
        for record in result["peers"]:
            if not is_measured(record):
                key = (record["label"], record["status"], record.get("reason", "no reason given"))
                concerned.setdefault(key, []).append(name(result))
    return [
        f"{label}: {status}"
        + ("" if len(names) == len(results) else f" on {', '.join(names)}")
        + f": {reason}."
        for (label, status, reason), names in concerned.items()
    ]


def models_table(results: Sequence[Result], dtype: str) -> Table:
    """Latency of every model in one dtype: a column per peer, speed-up over eager in brackets."""
    results = [result for result in results if result["dtype"] == dtype]
    peers = peer_names(results)
    header = ["model", *(label_of(results, peer) for peer in peers)]
    with_oxytorch = "oxytorch" in peers
    table = Table(
        f"Whole models, {dtype}", [*header, "over fastest peer"] if with_oxytorch else header
    )
    for result in results:
        records = [peer_record(result, peer) for peer in peers]
        cells = [_speed_cell(record) for record in records]
        cells = _with_best_marked(cells, [_median(record) for record in records])
        row = [f"{result['title']}, batch {result['batch']}", *cells]
        table.rows.append([*row, over_fastest_other(result)] if with_oxytorch else row)
    means = [_mean_cell(results, peer, lambda r: float(r["speedup"]["median"])) for peer in peers]
    row = ["geometric mean of the speed-up", *means]
    table.rows.append([*row, ""] if with_oxytorch else row)
    table.notes = reasons(results, lambda result: str(result["model"]))
    table.notes += _over_faster_stock(results, peers)
    changes = [result["eager_interleaved_over_alone"] for result in results]
    table.notes.append(
        f"Taking turns with the others changed torch eager's own time by a factor of "
        f"{min(changes):.2f} to {max(changes):.2f}."
    )
    return table


def _over_faster_stock(results: Sequence[Result], peers: Sequence[str]) -> list[str]:
    """Mean speed-ups over whichever of the two ways of running stock PyTorch is faster."""
    if "eager_cast" not in peers:
        return []
    means = []
    for peer in peers:
        ratios = []
        for result in results:
            stock = [_median(peer_record(result, name)) for name in ("eager", "eager_cast")]
            time = _median(peer_record(result, peer))
            if time is not None:
                ratios.append(min(value for value in stock if value is not None) / time)
        if peer not in ("eager", "eager_cast"):
            means.append(f"{label_of(results, peer)} {geometric_mean(ratios):.2f}x")
    if not means:
        return []
    return [
        "torch eager runs under autocast, the other row is the model cast to the dtype. "
        f"Geometric means over the faster of the two: {', '.join(means)}."
    ]


def preparation_table(results: Sequence[Result]) -> Table:
    """Seconds before each peer's first answer: optimizing, compiling, converting."""
    peers = [peer for peer in peer_names(results) if peer not in ("eager", "eager_cast")]
    table = Table(
        "Seconds to get ready: optimizing, converting, compiling",
        ["model", "dtype", *(label_of(results, peer) for peer in peers)],
    )
    for result in results:
        records = [peer_record(result, peer) for peer in peers]
        cells = [
            f"{record['prepare_seconds']:.2f}" if record and "prepare_seconds" in record else "-"
            for record in records
        ]
        table.rows.append([result["model"], result["dtype"], *cells])
    return table


def fraction_cell(record: Result | None) -> str:
    """The part of the limit that a record reached, with its quartiles."""
    if record is None:
        return "-"
    if not is_measured(record):
        return str(record["status"])
    fraction = record["fraction_of_limit"]
    return f"{fraction['median']:.0%} ({fraction['low']:.0%} to {fraction['high']:.0%})"


def ops_memory_table(results: Sequence[Result]) -> Table:
    """Fraction of the machine's limit at sizes beyond the caches, median and quartiles."""
    results = [result for result in results if result["size"] == "memory"]
    peers = peer_names(results)
    table = Table(
        "Ops beyond the caches: fraction of the machine's limit",
        ["op", "dtype", "sample", "traffic", "limit", *(label_of(results, p) for p in peers)],
    )
    for result in results:
        records = [peer_record(result, peer) for peer in peers]
        cells = _with_best_marked(
            [fraction_cell(record) for record in records], [_median(r) for r in records]
        )
        limit = {k: v / 1e9 for k, v in result["read_write_bandwidth"].items()}
        table.rows.append(
            [
                result["op"],
                result["dtype"],
                result["sample"],
                f"{result['bytes'] / 2**20:.0f} MiB",
                f"{limit['median']:.1f} GB/s ({limit['low']:.1f} to {limit['high']:.1f})",
                *cells,
            ]
        )
    table.notes = reasons(results, lambda result: f"{result['op']} {result['dtype']}")
    return table


def ops_cache_table(results: Sequence[Result]) -> Table:
    """Time per call at sizes that fit the caches, speed-up over eager in brackets."""
    results = [result for result in results if result["size"] == "cache"]
    peers = peer_names(results)
    with_oxytorch = "oxytorch" in peers
    header = ["op", "dtype", "sample", *(label_of(results, peer) for peer in peers)]
    table = Table(
        "Ops within the caches: time per call",
        [*header, "over fastest peer"] if with_oxytorch else header,
    )
    for result in results:
        records = [peer_record(result, peer) for peer in peers]
        cells = _with_best_marked(
            [_speed_cell(record) for record in records], [_median(r) for r in records]
        )
        row = [result["op"], result["dtype"], result["sample"], *cells]
        table.rows.append([*row, over_fastest_other(result)] if with_oxytorch else row)
    table.notes = reasons(results, lambda result: f"{result['op']} {result['dtype']}")
    return table


def optim_table(results: Sequence[Result]) -> Table:
    """Time of one step on one set of tensors: a row per optimizer and format of oxytorch."""
    first = results[0]
    peers = [peer for peer in ("foreach", "fused", "predecessor") if peer in peer_names(results)]
    table = Table(
        f"One step, {first['title']}: {first['parameters'] / 1e6:.0f} M parameters "
        f"in {first['tensors']} tensors",
        [
            "optimizer",
            "parameters + states",
            "bytes each",
            *(label_of(results, peer) for peer in peers),
            "oxytorch",
            "time over peer's",
            "least traffic",
            "of the limit",
        ],
    )
    for result in results:
        ours = [record for record in result["peers"] if record["peer"].startswith("oxytorch")]
        others = [peer_record(result, peer) for peer in peers]
        for index, record in enumerate(ours):
            row = [result["optimizer"], record["format"]]
            if not is_measured(record):
                status = str(record["status"])
                table.rows.append([*row, "-", *["-"] * len(peers), status, "-", "-", "-"])
                continue
            times = [_step_cell(other) if index == 0 else "" for other in others]
            table.rows.append(
                [
                    *row,
                    f"{record['bytes_per_parameter']:.2f}",
                    *times,
                    _step_cell(record),
                    _over_base_cell(result, record),
                    f"{record['bandwidth']['median'] / 1e9:.1f} GB/s",
                    fraction_cell(record),
                ]
            )
    limits = [result["read_write_bandwidth"]["median"] / 1e9 for result in results]
    table.notes = reasons(results, lambda result: str(result["optimizer"]))
    table.notes.append(
        f"The limit is the bandwidth of a copy or a change in place, whichever is faster, in the "
        f"same rounds: {min(limits):.1f} to {max(limits):.1f} GB/s. "
        "Every format is compared with the peer's float32 step."
    )
    return table


def _step_cell(record: Result | None) -> str:
    if record is None:
        return "-"
    if not is_measured(record):
        return str(record["status"])
    return milliseconds(record["seconds"]["median"])


def _over_base_cell(result: Result, record: Result) -> str:
    base = result["base"]
    if base is None or base == record["peer"]:
        return "-"
    ratio = record["time_over_base"]
    text = f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
    return f"{text} {label_of([result], base)}"


def limits_table(rates: dict[str, Any]) -> Table:
    """The machine's limits: median and quartiles."""
    table = Table("Limits of this machine", ["what", "median", "quartiles"])
    for name, value in rates.items():
        if not isinstance(value, dict):
            continue
        unit = "GFLOP/s" if name.startswith("matrix") else "GB/s"
        table.rows.append(
            [
                name.replace("_", " "),
                f"{value['median'] / 1e9:.1f} {unit}",
                f"{value['low'] / 1e9:.1f} to {value['high'] / 1e9:.1f}",
            ]
        )
    return table


def costs_table(results: Sequence[Result]) -> Table:
    """What oxytorch itself costs."""
    table = Table("What oxytorch itself costs", ["what", "time", "memory"])
    for result in results:
        if result["cost"] == "import":
            low, high = result["added_seconds_range"]
            table.rows.append(
                [
                    "import oxytorch, after import torch",
                    f"{result['added_seconds'] * 1e3:.0f} ms ({low * 1e3:.0f} to {high * 1e3:.0f})",
                    "-",
                ]
            )
        elif "reason" in result:
            table.rows.append([f"optimize, {result['title']}", "failed", result["reason"]])
        else:
            place = "in place" if result["inplace"] else "on a copy"
            table.rows.append(
                [
                    f"optimize {result['title']}, {result['dtype']}, {place}",
                    f"{result['seconds']:.2f} s",
                    f"at the peak {result['peak_growth_over_model']:.2f} x the model on top of it,"
                    f" {result['peak_over_model']:.2f} x in all",
                ]
            )
    return table


def training_step_table(results: Sequence[Result]) -> Table:
    """Time of a training step and bytes per parameter of every way of training."""
    table = Table(
        "Training steps and memory",
        ["way", "step", "over float32", "optimizer", "weights and states", "and gradients"],
        notes=[
            "Bytes are per parameter. A step is the model forward and backward and the optimizer's "
            "step, which also stands alone. Times are medians, ratios those of turns side by side."
        ],
    )
    for result in results:
        kinds = result["bytes_per_parameter"]
        total = sum(kinds.values())
        table.rows.append(
            [
                result["way"],
                milliseconds(result["step_seconds"]["median"]),
                f"{result['speedup']['median']:.2f}x",
                milliseconds(result["optimizer_seconds"]["median"]),
                f"{total - kinds['gradients']:.2f} bytes",
                f"{total:.2f} bytes",
            ]
        )
    return table


def training_loss_table(results: Sequence[Result]) -> Table:
    """Final held-out loss of every way of training, next to the spread of the first one's seeds."""
    base = results[0]["losses"]
    low, high = min(base), max(base)
    table = Table(
        "Final held-out loss",
        ["way", "mean", "least to largest", "difference", "within the spread", "checkpoint"],
        notes=[
            f"Nats per character, {len(base)} seeds. The difference is from the mean of "
            f"{results[0]['way']}; within its spread is a mean between its least and largest loss.",
            f"Checkpoint: mean of the stock {results[0]['way']} model after it has loaded the "
            "state_dict of the trained one.",
        ],
    )
    for result in results:
        mean = statistics.fmean(result["losses"])
        table.rows.append(
            [
                result["way"],
                f"{mean:.4f}",
                f"{min(result['losses']):.4f} to {max(result['losses']):.4f}",
                f"{mean - statistics.fmean(base):+.4f}",
                "yes" if low <= mean <= high else "no",
                f"{statistics.fmean(result['plain_losses']):.4f}",
            ]
        )
    return table
