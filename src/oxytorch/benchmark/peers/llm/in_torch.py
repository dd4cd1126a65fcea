"""Language models in torch itself: eager, compiled, and with torchao's weights."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from oxytorch.benchmark.core.contest import Absent, require
from oxytorch.benchmark.llm.task import Contestant, LlmTask, Stepwise, vocabulary_of


class _Loop:
    """Greedy steps of a model of transformers; `new_cache` makes the cache of each run."""

    def __init__(self, model: nn.Module, new_cache: Callable[[], Any]) -> None:
        self.model = model
        self.new_cache = new_cache
        self.cache: Any = None
        self.latest = torch.empty(0)

    @torch.inference_mode()
    def start(self, ids: Tensor) -> int:
        self.cache = self.new_cache()
        return self._step(ids)

    @torch.inference_mode()
    def step(self, token: int) -> int:
        return self._step(torch.tensor([[token]]))

    def _step(self, ids: Tensor) -> int:
        output = self.model(
            input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )
        self.latest = output.logits[0, -1]
        return int(self.latest.argmax())

    def last(self) -> Tensor:
        return self.latest.float().clone()


def _contestant(model: Any, new_cache: Callable[[], Any], notes: dict[str, object]) -> Stepwise:
    loop = _Loop(model, new_cache)
    return Stepwise(vocabulary_of(model), loop.start, loop.step, loop.last, notes=notes)


def prepare_torch(task: LlmTask) -> Contestant:
    """The model of transformers as it is, in bf16."""
    from transformers import DynamicCache

    return _contestant(task.build(), DynamicCache, {})


def _static(task: LlmTask, model: Any, notes: dict[str, object]) -> Stepwise:
    """The model compiled by Inductor with freezing and a static cache; warmed up."""
    import torch._inductor.config as inductor
    from transformers import StaticCache

    inductor.freezing = True
    cache: Any = StaticCache(config=model.config, max_cache_len=task.prompt + task.tokens)

    def reset() -> Any:
        cache.reset()
        return cache

    model.forward = torch.compile(model.forward)
    found = _contestant(model, reset, notes)
    task.progress("", "compile")
    begin = time.perf_counter()
    # The second prompt comes after steps of one token and is compiled once more.
    for _ in range(2):
        found.turn(task.prompt_ids(found.vocabulary), 4)
    notes["first_call_seconds"] = time.perf_counter() - begin
    return found


def prepare_compile(task: LlmTask) -> Contestant:
    """`torch.compile` in bf16 with a static cache."""
    return _static(task, task.build(), {})


def prepare_torchao(task: LlmTask) -> Contestant:
    """torchao's weight-only int8 (compiled) or int4 in its layout for CPUs (eager)."""
    torchao = require("torchao.quantization", "pip install torchao")
    from transformers import DynamicCache

    model = task.build()
    if task.weights == "int8":
        torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
        return _static(task, model, {"mode": "compiled"})
    if task.weights == "int4":
        # The layout for CPUs lies here; the public Int4WeightOnlyConfig knows only those of GPUs.
        layouts = importlib.import_module("torchao.prototype.quantization.int4")
        config = layouts.PrototypeInt4WeightOnlyConfig(task.group_size, set_inductor_config=False)
        torchao.quantize_(model, config)
        return _contestant(model, DynamicCache, {"mode": "eager"})
    raise Absent(f"torchao has no weights in {task.weights} here")
