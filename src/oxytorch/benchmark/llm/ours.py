"""oxytorch's own contestant in `oxytorch llm bench`."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from oxytorch import llm
from oxytorch.benchmark.llm.task import Contestant, LlmTask, Turn, vocabulary_of
from oxytorch.llm_command.model import PreparedModel
from oxytorch.llm_command.options import PRECISIONS


class _Ours:
    """A model that `llm.optimize` made, in the loop of `llm.generate`."""

    def __init__(self, prepared: PreparedModel, prompt: int) -> None:
        self.model: Any = prepared.model
        self.vocabulary = vocabulary_of(prepared.model)
        self.reads = prepared.token_reads()
        self.operations = prepared.prompt_operations(prompt)
        self.notes: dict[str, object] = {"optimize_seconds": prepared.optimize_seconds}

    def turn(self, ids: Tensor, tokens: int) -> Turn:
        times = [time.perf_counter()]
        llm.generate(
            self.model,
            ids,
            max_new_tokens=tokens,
            eos_token_id=[],
            streamer=lambda column: times.append(time.perf_counter()),
        )
        gaps = [after - before for before, after in pairwise(times)]
        return Turn(gaps[0], gaps[1:])

    @torch.inference_mode()
    def logits(self, ids: Tensor) -> Tensor:
        found: Tensor = self.model(input_ids=ids).logits
        return found[0, -1].float().clone()


def prepare_ours(task: LlmTask) -> Contestant:
    """`llm.optimize` of the model in place."""
    name = "-".join(word for word in (task.weights, task.activation_dtype) if word)
    task.progress("", "build")
    model = task.build()
    task.progress("", "optimize")
    prepared = PreparedModel.from_model(model, PRECISIONS[name], task.kv_cache, task.group_size)
    return _Ours(prepared, task.prompt)
