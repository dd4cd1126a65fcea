"""Host time of whole programs: what a call takes beyond its kernels, in models so narrow that these
take next to nothing.

    python benchmarks/host_time.py [bert|decode ...] [--calls N]

`bert`: BERT-base's layers and heads with one element a head, one token; the program of
`optimize(graph=True)` beside stock PyTorch, in turns. `decode`: a token of a Llama of 22 layers
with heads of 8 elements, by `llm.generate` of what `llm.optimize` made, and by stock. Prints
medians in milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import transformers

import oxytorch

LAYERS, TOKENS = 22, 64


def _milliseconds(runs: list[Callable[[], object]], calls: int) -> list[float]:
    """Medians of calls in turns."""
    taken: list[list[float]] = [[] for _ in runs]
    for turn in range(calls + 3):
        for run, found in zip(runs, taken, strict=True):
            began = time.perf_counter()
            run()
            if turn >= 3:
                found.append((time.perf_counter() - began) * 1e3)
    return [statistics.median(found) for found in taken]


def bert(calls: int) -> None:
    """Prints the line of BERT."""
    config = transformers.BertConfig(hidden_size=12, intermediate_size=48, vocab_size=100)
    model = transformers.BertModel(config).eval()
    given = {"input_ids": torch.tensor([[7]])}
    made = oxytorch.optimize(model, sample_input=given, graph=True, passes=["program"])
    steps = str(made.forward.programs()[0]).count(" = ")  # type: ignore[operator,union-attr]
    stock, ours = _milliseconds([lambda: model(**given), lambda: made(**given)], calls)
    print(f"BERT-base, {steps} steps: stock {stock:.3f}, program {ours:.3f}", flush=True)


def decode(calls: int) -> None:
    """Prints the line of a decoded token."""
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=8, num_key_value_heads=8,
        eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    prompt = torch.arange(1, 9)[None]
    fast, found = oxytorch.llm.optimize(model), []

    def stock(tokens: int) -> object:
        return model.generate(prompt, max_new_tokens=tokens, do_sample=False)

    def ours(tokens: int) -> object:
        return oxytorch.llm.generate(fast, prompt, max_new_tokens=tokens)

    for run in (stock, ours):
        few, many = _milliseconds([partial(run, 1), partial(run, 1 + TOKENS)], calls)
        found.append((many - few) / TOKENS)
    print(f"a token of {LAYERS} layers: stock {found[0]:.3f}, ours {found[1]:.3f}", flush=True)


def main() -> None:
    """Measures what is named."""
    kinds = {"bert": bert, "decode": decode}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("kinds", nargs="*", default=[*kinds], metavar="KIND", help=str([*kinds]))
    parser.add_argument("--calls", type=int, default=200, help="calls (default: 200)")
    arguments = parser.parse_args()
    with torch.inference_mode():
        for kind in arguments.kinds:
            kinds[kind](arguments.calls if kind == "bert" else max(3, arguments.calls // 40))


if __name__ == "__main__":
    main()
