"""`oxytorch llm bench`: contestants of one weight format take turns, format after format."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from oxytorch.benchmark.core.contest import Absent, Progress, new_record, refuse
from oxytorch.benchmark.core.jobs import OnResult
from oxytorch.benchmark.core.processes import JobError
from oxytorch.benchmark.core.results import Record, Result, is_measured
from oxytorch.benchmark.core.rounds import paired_ratio, spread
from oxytorch.benchmark.llm.contestants import PEERS
from oxytorch.benchmark.llm.processes import ContestantProcess
from oxytorch.benchmark.llm.task import LlmTask
from oxytorch.llm_command.options import Precision

OURS = "oxytorch"
_Turn = dict[str, Any]
"""What a process reports of a turn: `first`, `tokens`; ours `limit` and `matrix_rate` too."""

LEAST_COSINE = {"bf16": 0.98, "int8": 0.97, "int4": 0.6, "nf4": 0.6, "fp8": 0.95}
"""Cosine of a contestant's logits to those of torch in bf16 below which its outputs are wrong.

With bf16 and int8 this tells a wrong formula: another rotary embedding leaves 0.84. Four bits of
random weights lose as much (0.80 to 0.85 over 22 layers, for all who take part), so that with them
only gross faults show; a peer's conversion is the same in all of its formats.
"""


@dataclass(frozen=True)
class LlmSettings:
    """What the options say.

    shape, folder: the model, by one of them.
    precisions: of oxytorch.
    peers: names.
    rounds: turns of each.
    silence: seconds without a sign of life after which a contestant is given up.
    work: folder for converted files, kept; None: a temporary one.
    """

    shape: str
    folder: str
    precisions: tuple[Precision, ...]
    peers: tuple[str, ...]
    kv_cache: str
    group_size: int
    prompt: int
    tokens: int
    rounds: int
    threads: int
    silence: float
    work: str | None = None


@dataclass
class _Seat:
    """A contestant of a group: its record, and its process once it is ready."""

    record: Record
    task: LlmTask
    peer: str
    process: ContestantProcess | None = None


def run_llm(
    settings: LlmSettings,
    on_result: OnResult,
    progress: Progress,
) -> list[Result]:
    """A result for each weight format: records of all contestants that have it."""
    with tempfile.TemporaryDirectory(prefix="oxytorch-llm-") as temporary:
        work = Path(settings.work or temporary)
        work.mkdir(parents=True, exist_ok=True)
        reference = Path(temporary) / "reference.pt"
        _write_reference(_task(settings, Precision("bf16"), work), reference, settings, progress)
        results = []
        for weights in dict.fromkeys(p.weights or "bf16" for p in settings.precisions):
            seats = _seats(settings, weights, work)
            result = _run_group(seats, weights, settings, reference, progress)
            results.append(result)
            on_result(result)
    return results


def _task(settings: LlmSettings, precision: Precision, work: Path) -> LlmTask:
    same = ("shape", "folder", "kv_cache", "group_size", "prompt", "tokens", "threads")
    return LlmTask(
        **{name: getattr(settings, name) for name in same},
        weights=precision.weights or "bf16",
        activation_dtype=precision.activation_dtype,
        work=work,
    )


def _seats(settings: LlmSettings, weights: str, work: Path) -> list[_Seat]:
    """oxytorch in each precision of this format, and every peer that has it."""
    seats = []
    for precision in settings.precisions:
        if (precision.weights or "bf16") == weights:
            name = OURS if precision.activation_dtype is None else f"{OURS}-{precision.name}"
            label = f"oxytorch {precision.name}"
            seats.append(_Seat(new_record(name, label), _task(settings, precision, work), OURS))
    for name in settings.peers:
        if weights in PEERS[name].weights:
            record = new_record(name, f"{PEERS[name].label} {weights}")
            seats.append(_Seat(record, replace(seats[0].task, activation_dtype=None), name))
    return seats


def _write_reference(task: LlmTask, path: Path, settings: LlmSettings, progress: Progress) -> None:
    """The logits of torch itself in bf16, which everybody's are compared with."""
    process = ContestantProcess("torch", settings.silence)
    try:
        progress("torch", "correct outputs")
        process.prepare(task, lambda stage: progress("torch", stage))
        process.ask("logits", path=str(path))
    finally:
        process.close()


def _run_group(
    seats: Sequence[_Seat],
    weights: str,
    settings: LlmSettings,
    reference: Path,
    progress: Progress,
) -> Result:
    """Prepares all contestants of a format, checks them, and lets them take turns."""
    try:
        for seat in seats:
            _guarded(seat, partial(_prepare, seat, settings, reference, progress))
        turns: dict[str, list[_Turn]] = {seat.record["peer"]: [] for seat in seats}
        for index in range(settings.rounds):
            for seat in seats if index % 2 == 0 else reversed(seats):
                progress(seat.record["label"], f"round {index + 1}/{settings.rounds}")
                _guarded(seat, partial(_take_turn, seat, turns))
        for seat in seats:
            _guarded(seat, partial(_summarize, seat, turns[seat.record["peer"]]))
    finally:
        for seat in seats:
            if seat.process is not None:
                seat.process.close()
    records = [seat.record for seat in seats]
    _add_ratios(records)
    return {
        "model": settings.shape or Path(settings.folder).name,
        "weights": weights,
        "prompt": settings.prompt,
        "tokens": settings.tokens,
        "kv_cache": settings.kv_cache,
        "group_size": settings.group_size,
        "threads": settings.threads,
        "peers": records,
    }


def _guarded(seat: _Seat, do: Callable[[], None]) -> None:
    """Does something with a contestant that is still in; what goes wrong stands in its record."""
    if "reason" in seat.record:
        return
    try:
        do()
        return
    except Absent as absent:
        refuse(seat.record, "absent", str(absent))
    except JobError as error:
        refuse(seat.record, "failed", str(error))
    if seat.process is not None:
        seat.process.close()
        seat.process = None


def _prepare(seat: _Seat, settings: LlmSettings, reference: Path, progress: Progress) -> None:
    record = seat.record
    progress(record["label"], "start")
    seat.process = ContestantProcess(seat.peer, settings.silence)
    record |= seat.process.prepare(seat.task, lambda stage: progress(record["label"], stage))
    path = reference.with_name("logits.pt")
    seat.process.ask("logits", path=str(path))
    cosine = _cosine(torch.load(path, weights_only=True), torch.load(reference, weights_only=True))
    record["cosine"] = cosine
    record["memory_bytes"] = seat.process.ask("memory")
    if not cosine >= LEAST_COSINE[seat.task.weights]:
        refuse(record, "wrong", f"cosine of its logits to torch's is {cosine:.3f}")
        seat.process.close()
        seat.process = None


def _cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape:
        return float("nan")
    return float(torch.cosine_similarity(one, other, dim=0))


def _take_turn(seat: _Seat, turns: dict[str, list[_Turn]]) -> None:
    assert seat.process is not None
    taken = seat.process.ask("turn")
    # The limit moves as the neighbours on the machine do: it is read beside each of our turns.
    if seat.peer == OURS:
        taken["limit"] = seat.process.ask("limit")
        taken["matrix_rate"] = seat.process.ask("matrix_rate")
    turns[seat.record["peer"]].append(taken)


def _summarize(seat: _Seat, turns: Sequence[_Turn]) -> None:
    record = seat.record
    record["rounds"] = turns
    first, tokens = _firsts(turns), _tokens(turns)
    record["first"] = spread(first)
    record["token"] = spread(tokens)
    record["status"] = "measured"
    if seat.peer == OURS:
        limits = [turn["limit"] for turn in turns]
        rates = [record["token_bytes"] / seconds for seconds in tokens]
        operations = [record["prompt_operations"] / seconds for seconds in first]
        record["limit"] = spread(limits)
        record["bandwidth"] = spread(rates)
        record["fraction_of_limit"] = paired_ratio(rates, limits)
        record["fraction_of_matrix_rate"] = paired_ratio(
            operations, [turn["matrix_rate"] for turn in turns]
        )


def _firsts(turns: Sequence[_Turn]) -> list[float]:
    return [turn["first"] for turn in turns]


def _tokens(turns: Sequence[_Turn]) -> list[float]:
    return [statistics.median(turn["tokens"]) for turn in turns]


def _add_ratios(records: Sequence[Record]) -> None:
    """How many times faster the first of oxytorch's records is, round by round, than each peer."""
    measured = [record for record in records if is_measured(record)]
    ours = next((record["rounds"] for record in measured if record["peer"] == OURS), None)
    if ours is None:
        return
    for record in measured:
        theirs = record["rounds"]
        record["oxytorch_first_ratio"] = paired_ratio(_firsts(theirs), _firsts(ours))
        record["oxytorch_token_ratio"] = paired_ratio(_tokens(theirs), _tokens(ours))
