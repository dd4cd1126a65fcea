"""`oxytorch bench streams`: who takes part, and what its tables say."""

from __future__ import annotations

import pytest
import torch
from commands import parse
from torch import Tensor, nn

from oxytorch.benchmark.command import _settings
from oxytorch.benchmark.core.jobs import Settings
from oxytorch.benchmark.models.cases import CASES, ModelCase
from oxytorch.benchmark.streams import runs
from oxytorch.benchmark.streams.tables import COLUMNS, stream_tables
from oxytorch.benchmark.subjects import SUBJECTS


def _build(batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), (torch.randn(batch, 8),)


@pytest.mark.parametrize(
    "threads, counts", [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (16, [1, 2, 4, 8, 16])]
)
def test_streams_double_up_to_one_for_each_thread(threads: int, counts: list[int]) -> None:
    assert runs.counts(threads) == counts


def test_options_say_what_is_measured() -> None:
    words = ("streams", "--models", "resnet50,bert", "--dtype", "float32", "--batch", "8")
    settings = _settings(parse(*words, "--threads", "2"))
    jobs = [job.name for job in SUBJECTS["streams"].jobs(settings)]
    assert jobs == ["resnet50 float32 batch 8", "bert float32 batch 8"]


def test_a_run_compares_streams_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "small", ModelCase("small", "A small one", 4, _build))
    threads = torch.get_num_threads()
    names = tuple(map(runs.name_of, runs.counts(threads)))
    settings = Settings(rounds=2, threads=threads, peers=names)
    result = runs.run_job(lambda peer, stage: None, settings, "small", "float32", 5)
    assert [record["status"] for record in result["peers"]] == ["measured"] * (1 + len(names))
    (table,) = stream_tables([result])
    assert all(len(row) == len(COLUMNS) for row in table.rows)
    assert [row[0] for row in table.rows[1:]] == [*map(str, runs.counts(threads))]
    assert table.rows[1][-1] == "1.00x"
