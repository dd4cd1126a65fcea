"""Calls a second of BERT-base (128 tokens, batch 1), for `oxytorch run` and `tune` to start.

    python benchmarks/throughput.py
    oxytorch run --ninstances 8 benchmarks/throughput.py
    oxytorch tune benchmarks/throughput.py

Each instance prints a line; the sum of them is the throughput of the machine.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import BertConfig, BertModel

import oxytorch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=6.0, help="how long (default: 6)")
    parser.add_argument("--dtype", default="bfloat16", help="of weights (default: bfloat16)")
    arguments = parser.parse_args()
    seconds, dtype = arguments.seconds, getattr(torch, arguments.dtype)
    torch.manual_seed(0)
    ids = torch.randint(0, 30000, (1, 128))
    model = oxytorch.optimize(
        BertModel(BertConfig()).eval(), dtype=dtype, sample_input=ids, graph=True
    )
    with torch.inference_mode():
        for _ in range(20):
            model(ids)
        calls, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            model(ids)
            calls += 1
    rate = calls / (time.perf_counter() - begin)
    print(f"throughput: {rate:.2f} a second, {torch.get_num_threads()} threads", flush=True)


if __name__ == "__main__":
    main()
