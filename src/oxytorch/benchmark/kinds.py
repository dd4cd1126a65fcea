"""The kinds of results files: what tells their results apart, their tables and their plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from oxytorch.benchmark.core.results import Result, Run
from oxytorch.benchmark.gpu.plot import draw_cold_start
from oxytorch.benchmark.gpu.tables import cold_start_tables, gpu_optim_tables
from oxytorch.benchmark.llm.plot import draw_llm
from oxytorch.benchmark.llm.tables import llm_tables, perplexity_tables
from oxytorch.benchmark.machine.tables import costs_tables, limits_tables
from oxytorch.benchmark.models.plot import draw_models
from oxytorch.benchmark.models.tables import model_tables
from oxytorch.benchmark.ops.plot import draw_ops
from oxytorch.benchmark.ops.tables import op_tables
from oxytorch.benchmark.optim.plot import draw_optim
from oxytorch.benchmark.optim.tables import optim_tables
from oxytorch.benchmark.programs.tables import program_tables
from oxytorch.benchmark.report.tables import Table
from oxytorch.benchmark.streams.tables import stream_tables
from oxytorch.benchmark.training.plot import draw_training
from oxytorch.benchmark.training.tables import training_tables
from oxytorch.benchmark.zoo.tables import zoo_tables


@dataclass(frozen=True)
class Kind:
    """One kind of results file.

    Attributes:
        fields: those that tell its results apart; a newer result replaces an older one.
        tables: its tables.
        draw: (matplotlib.pyplot, run) -> figure; None where it has no plot.
    """

    fields: tuple[str, ...]
    tables: Callable[[Sequence[Result]], list[Table]]
    draw: Callable[[Any, Run], Any] | None = None

    def key(self, result: Result) -> tuple[object, ...]:
        """The same for two measurements of the same thing."""
        return tuple(result.get(field) for field in self.fields)


_LLM = ("model", "weights", "prompt", "tokens", "kv_cache", "group_size", "threads")
_PERPLEXITY = ("folder", "text", "tokens", "window", "stride", "group_size", "label")

KINDS = {
    "models": Kind(("model", "dtype", "batch"), model_tables, draw_models),
    "ops": Kind(("op", "dtype", "size", "sample"), op_tables, draw_ops),
    "optim": Kind(("optimizer", "case"), optim_tables, draw_optim),
    "gpu-optim": Kind(("optimizer", "case"), gpu_optim_tables, draw_optim),
    "cold-start": Kind(("way", "case"), cold_start_tables, draw_cold_start),
    "limits": Kind((), limits_tables),
    "costs": Kind(("cost", "model", "dtype", "inplace"), costs_tables),
    "zoo": Kind(("model", "dtype", "batch", "level", "threads"), zoo_tables),
    "programs": Kind(("model", "dtype", "batch", "threads"), program_tables),
    "streams": Kind(("model", "dtype", "batch", "threads"), stream_tables),
    "training": Kind(("measure", "way"), training_tables, draw_training),
    "llm": Kind(_LLM, llm_tables, draw_llm),
    "perplexity": Kind(_PERPLEXITY, perplexity_tables),
}
"""Kind of run -> what is known of it, in the order of reports."""
