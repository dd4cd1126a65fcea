"""A model over all rows of a dataset, into files: each row once, whatever ends meanwhile."""

from __future__ import annotations

import functools
import hashlib
import json
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute
import pyarrow.parquet
import ray
from ray.data import Dataset, TaskPoolStrategy

from ..core.whole_file import replacing
from .options import parsed
from .places import cpus_of_a_share, plan, take_place
from .rows import Rows


@dataclass(frozen=True)
class Written:
    """What `write_results` has done.

    rows: written by this call.
    skipped: that were there already.
    errors: of the rows written, those without a result.
    seconds: of the call.
    overhead: of the time of the processes, each from its first batch to its last one, the part that
        was not the model's: writing, and waiting for rows.
    repeated: batches that were computed again, because a machine was lost with them.
    """

    rows: int
    skipped: int
    errors: int
    seconds: float
    overhead: float
    repeated: int


def write_results(
    dataset: Dataset,
    model: str | Path,
    output: str | Path,
    *,
    key: str,
    columns: Sequence[str] | None = None,
    batch_size: int = 256,
    cores: int | None = None,
    workers: int | None = None,
    request: Mapping[str, Any] | None = None,
    progress: Callable[[int], object] | None = None,
    **options: Any,
) -> Written:
    """Runs a model over the rows of a dataset of Ray Data and writes Parquet files.

    model, columns, request, options: see `Rows`.
    output: a folder that all machines share; each file has the `key` and the results of one batch,
        and appears when it is complete. Rows whose keys are there already are skipped, so that the
        same call goes on where another one ended.
    key: a column with another value in each row.
    batch_size: rows of a batch, which is done again where its machine is lost.
    cores: of a process; None: a whole NUMA node.
    workers: processes at most; None: one for every share of the cluster's machines.
    progress: gets the number of rows written so far, after each batch.

    Raises ValueError where a key occurs twice, and what the model raises, but for mistakes of
    single rows, which stand in the column `error`.
    """
    parsed(model, options)
    if batch_size < 1:
        raise ValueError(f"write_results: expected batch_size of at least 1, got {batch_size}")
    folder = Path(output).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    nodes = plan(cores)
    cpus = cpus_of_a_share(nodes)
    _tell_if_taken(cpus)
    done = _keys(folder, key)
    _check_unique(done, key)
    written = _without(dataset, done, key).map_batches(
        _Batches(str(model), columns, request, options, cores, str(folder), key),
        batch_size=batch_size,
        batch_format="numpy",
        num_cpus=cpus,
        compute=TaskPoolStrategy(size=workers or sum(len(node.shares) for node in nodes)),
    )
    rows, errors, batches, processes = _counted(written, progress)
    _check_unique(_keys(folder, key), key)
    skipped, overhead = sum(map(len, done)), _overhead(processes.values())
    repeated = sum(each["batches"] for each in processes.values()) - batches
    return Written(rows, skipped, errors, time.monotonic() - begin, overhead, repeated)


def _tell_if_taken(cpus: float) -> None:
    """Warn where others hold all CPUs: Ray would wait for them without a word."""
    free = ray.available_resources().get("CPU", 0.0)
    if free < cpus:
        warnings.warn(
            f"write_results: the rows wait for {cpus:g} CPU of the cluster, of which {free:g} are "
            "free; served models hold theirs until ray.serve.delete, or add a machine",
            UserWarning,
            stacklevel=3,
        )


def _without(dataset: Dataset, done: Sequence[Any], key: str) -> Dataset:
    """The rows of a dataset whose keys are not among those of files."""
    if not done:
        return dataset
    known = ray.put(pyarrow.concat_arrays([chunk for part in done for chunk in part.chunks]))
    return dataset.map_batches(_Missing(known, key), batch_format="pyarrow", batch_size=None)


def _counted(
    written: Dataset, progress: Callable[[int], object] | None
) -> tuple[int, int, int, dict[str, dict[str, Any]]]:
    """Rows, mistakes and batches as they are written, and the last batch of each process."""
    processes: dict[str, dict[str, Any]] = {}
    rows = errors = batches = 0
    for batch in written.iter_rows():
        rows += batch["rows"]
        errors += batch["errors"]
        batches += 1
        last = processes.get(batch["process"])
        if last is None or last["batches"] < batch["batches"]:
            processes[batch["process"]] = batch
        if progress is not None:
            progress(rows)
    return rows, errors, batches, processes


def _overhead(processes: Iterable[Mapping[str, Any]]) -> float:
    """Of the processes' time, what was not the model's; from the last batch of each."""
    each = [*processes]
    total = sum(one["seconds"] for one in each)
    return 1 - sum(one["model_seconds"] for one in each) / total if total else 0.0


@dataclass(frozen=True)
class _Missing:
    """Leaves out the rows whose keys are known."""

    known: Any
    key: str

    def __call__(self, batch: pyarrow.Table) -> pyarrow.Table:
        known = ray.get(self.known)
        column = batch[self.key]
        return batch.filter(pyarrow.compute.invert(pyarrow.compute.is_in(column, known)))


@dataclass(frozen=True)
class _Batches:
    """Runs the model on batches, and writes each to a file of its own.

    A task and not an actor of Ray: one that lost its machine runs on any other, whereas an actor
    waits for a machine to start on again. A process keeps the model for its next task.
    """

    model: str
    columns: Sequence[str] | None
    request: Mapping[str, Any] | None
    options: Mapping[str, Any]
    cores: int | None
    folder: str
    key: str

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        words = json.dumps([self.model, self.columns, self.request, self.options, self.cores])
        model, work = _opened(words)
        begin = time.monotonic()
        if self.key not in batch:
            raise ValueError(f"key: there is no column {self.key!r}; there are {', '.join(batch)}")
        found = model(batch)
        work.batches += 1
        work.model_seconds += time.monotonic() - begin
        results = {name: found[name] for name in found if name == self.key or name not in batch}
        table = pyarrow.table({name: _array(values) for name, values in results.items()})
        _write(table, Path(self.folder), self.key)
        return {
            "rows": [len(table)],
            "errors": [len(table) - table["error"].null_count],
            "process": [work.name],
            "batches": [work.batches],
            "model_seconds": [work.model_seconds],
            "seconds": [time.monotonic() - work.begun],
        }


@dataclass
class _Work:
    """What a process has done so far, also what is done again and never told.

    begun: when its first batch did.
    """

    name: str
    begun: float
    batches: int = 0
    model_seconds: float = 0.0


@functools.lru_cache(maxsize=1)
def _opened(words: str) -> tuple[Rows, _Work]:
    """The model of this process, on cores of its own."""
    model, columns, request, options, cores = json.loads(words)
    take_place(cores)
    # The first file of a process takes a fifth of a second, which is not the first batch's.
    pyarrow.parquet.write_table(pyarrow.table({"": [0]}), pyarrow.BufferOutputStream())
    return Rows(model, columns, request, options), _Work(uuid.uuid4().hex, time.monotonic())


def _array(values: Any) -> pyarrow.Array:
    """A column; rows of arrays become lists."""
    if getattr(values, "ndim", 1) > 1:
        values = list(values.reshape(len(values), -1))
    if all(each is None for each in values):
        return pyarrow.array(values, pyarrow.string())
    return pyarrow.array(values)


def _write(table: pyarrow.Table, folder: Path, key: str) -> None:
    """A file whose name its keys decide, so that a batch that is done again replaces its own."""
    keys = json.dumps(table[key].to_pylist(), default=str)
    name = hashlib.sha256(keys.encode()).hexdigest()[:24]
    # Vectors have few numbers twice: a dictionary of them takes longer than all the rest.
    texts = [field.name for field in table.schema if pyarrow.types.is_string(field.type)]
    with replacing(folder / f"{name}.parquet") as file:
        pyarrow.parquet.write_table(table, file, use_dictionary=texts)


def _keys(folder: Path, key: str) -> list[pyarrow.ChunkedArray]:
    """The keys of all files."""
    return [
        pyarrow.parquet.read_table(path, columns=[key])[key]
        for path in sorted(folder.glob("*.parquet"))
    ]


def _check_unique(keys: Sequence[pyarrow.ChunkedArray], key: str) -> None:
    chunks = [chunk for part in keys for chunk in part.chunks]
    if not chunks:
        return
    counts = pyarrow.compute.value_counts(pyarrow.concat_arrays(chunks)).to_pylist()
    twice = next((each["values"] for each in counts if each["counts"] > 1), None)
    if twice is not None:
        raise ValueError(f"key: expected another {key} in each row, got {twice!r} twice")
