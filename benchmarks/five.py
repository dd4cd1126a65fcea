"""Five speeds of a tree, for a look at it before and after a change: medians in milliseconds.

    PYTHONPATH=TREE/src python benchmarks/five.py

Prints a line of JSON. Run it of both trees in turns, on an idle machine.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

import oxytorch
from oxytorch.quantization import Int8DynamicActivationInt8Weight


def timed(call: Callable[[], Any], rounds: int) -> float:
    """The median time of a call, in milliseconds."""
    for _ in range(5):
        call()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


def bert() -> Callable[[], Any]:
    model = transformers.BertModel(transformers.BertConfig(num_hidden_layers=6)).eval()
    ids = torch.randint(0, 30000, (1, 128))
    fast = oxytorch.optimize(model, dtype=torch.bfloat16, sample_input=ids, graph=True)
    return lambda: fast(ids)


def llama() -> Callable[[], Any]:
    config = transformers.LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=4000,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    fast = oxytorch.llm.optimize(model, weights="int4")
    prompt = torch.randint(0, 4000, (1, 16))
    return lambda: oxytorch.llm.generate(fast, prompt, max_new_tokens=32)


def int8_layers() -> Callable[[], Any]:
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]).eval()
    oxytorch.quantize_(model, Int8DynamicActivationInt8Weight())
    fast, x = oxytorch.optimize(model), torch.randn(128, 1024)
    return lambda: fast(x)


def norm() -> Callable[[], Any]:
    x, weight = torch.randn(4096, 1024), torch.ones(1024)
    return lambda: oxytorch.ops.layer_norm(x, weight, weight, 1e-5)


def adamw() -> Callable[[], Any]:
    parameters = [nn.Parameter(torch.randn(1024, 1024)) for _ in range(24)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return oxytorch.optim.AdamW(parameters, lr=1e-4).step


def main() -> None:
    """Measures and prints a line."""
    torch.manual_seed(0)
    found = {}
    with torch.no_grad():
        found["BERT, 6 layers, bfloat16 program"] = timed(bert(), 80)
        found["Llama, 4 layers, int4, 32 tokens"] = timed(llama(), 12)
        found["8 linear layers in int8, 128 x 1024 x 1024"] = timed(int8_layers(), 200)
        found["layer_norm 4096 x 1024"] = timed(norm(), 200)
    found["AdamW, 24 x 1024 x 1024"] = timed(adamw(), 60)
    print(json.dumps({name: round(value, 3) for name, value in found.items()}))


if __name__ == "__main__":
    main()
