"""From a checkpoint of a language model to a server that OpenAI's client asks.

Quantizes a folder in Hugging Face's format to 4 bits, writes it to one file, starts
`oxytorch serve` with that file, and asks it: a completion, a chat that arrives token by token, four
requests at once.

    python examples/language_model_server.py [FOLDER]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import oxytorch
from server_process import served
from small_checkpoint import write_checkpoint

EPILOG = """\
examples:
  python examples/language_model_server.py                     a small model with random weights
  python examples/train_language_model.py tiny-model --short   makes one that has learned, then
  python examples/language_model_server.py tiny-model
  python examples/language_model_server.py my-model --weights int8 --save my-model.oxy

without this script
  oxytorch llm generate my-model --weights int4 --prompt "Once" --save my-model.oxy
  oxytorch serve my-model.oxy --tokenizer my-model
docs/serving.md lists what the server answers, docs/llm.md what the formats cost.

needs: pip install 'oxytorch[serve]' openai"""


def quantize(folder: Path, weights: str, file: Path) -> tuple[Any, Any]:
    """Write the model of a folder to a file, and return it with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    plain = sum(parameter.numel() for parameter in model.parameters()) * 2
    model = oxytorch.llm.optimize(model, weights=weights, inplace=True)
    oxytorch.save(model, file)
    print(
        f"{file.name}: {file.stat().st_size / 2**20:.2f} MiB with {weights} weights; "
        f"bfloat16 would take {plain / 2**20:.2f} MiB"
    )
    return model, tokenizer


def ask(address: str, name: str, prompt: str, most: int) -> str:
    """Ask the server in three ways; the text of the first one."""
    import openai

    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
    answer = client.completions.create(model=name, prompt=prompt, max_tokens=most, temperature=0)
    text = str(answer.choices[0].text)
    print(f"\ncompletion of {prompt!r}: {text!r}")

    begun, moments = time.perf_counter(), []
    messages: Any = [{"role": "user", "content": prompt}]
    if has_chat(client, name):
        stream = client.chat.completions.create(
            model=name, messages=messages, max_tokens=most, temperature=0, stream=True
        )
        moments = [time.perf_counter() - begun for part in stream if part.choices]
        print(f"chat: {len(moments)} parts, the first after {moments[0] * 1000:.0f} ms")

    def one(number: int) -> int:
        asked = client.completions.create(
            model=name, prompt=f"{prompt} {number}", max_tokens=most, temperature=0
        )
        return int(asked.usage.completion_tokens) if asked.usage else 0

    begun = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        tokens = sum(pool.map(one, range(4)))
    seconds = time.perf_counter() - begun
    print(f"four at once: {tokens} tokens in {seconds:.2f} s, {tokens / seconds:.0f} a second")
    return text


def has_chat(client: Any, name: str) -> bool:
    """Whether the tokenizer has a chat template; the server says so where it has none."""
    import openai

    messages: Any = [{"role": "user", "content": "?"}]
    try:
        client.chat.completions.create(model=name, messages=messages, max_tokens=1)
    except openai.BadRequestError as error:
        print(f"chat: {error.message}")
        return False
    return True


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.rpartition("\n\n")[0],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, metavar="FOLDER", help="of the model (default: a small one)"
    )
    parser.add_argument(
        "--weights", default="int4", choices=("int4", "int8", "nf4", "fp8"), help="(default: int4)"
    )
    parser.add_argument("--prompt", default="Once upon a time", help="to complete")
    parser.add_argument("--tokens", type=int, default=24, help="of an answer (default: 24)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep the quantized file")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    options = parse(words)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or write_checkpoint(Path(scratch) / "small")
        file = options.save or Path(scratch) / "model.oxy"
        model, tokenizer = quantize(folder, options.weights, file)

        print("starting the server", file=sys.stderr, flush=True)
        command = [str(file), "--tokenizer", str(folder), "--name", "model"]
        with served(*command) as address:
            text = ask(address, "model", options.prompt, options.tokens)

        prompt = torch.tensor([tokenizer(options.prompt)["input_ids"]])
        found = oxytorch.llm.generate(model, prompt, max_new_tokens=options.tokens)
        own = tokenizer.decode(found[0, prompt.shape[1] :], skip_special_tokens=True)
        print(f"llm.generate in this process gives the same text: {'yes' if own == text else 'no'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
