"""Fine-tune a language model with LoRA, and serve the adapter.

The base model is frozen; beside each linear layer a low-rank product is trained, on a few
sentences. Then the adapter is served in two ways: merged into the weights and quantized, by
`oxytorch serve`, and unmerged beside int8 weights, in this process.

    python examples/finetune_lora.py
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import oxytorch
from server_process import served
from small_checkpoint import write_checkpoint

EPILOG = """\
examples:
  python examples/finetune_lora.py                            half a minute on two cores
  python examples/finetune_lora.py --model tiny-model         of examples/train_language_model.py
  python examples/finetune_lora.py --peft                     by the package peft
  python examples/finetune_lora.py --out tuned                keep the merged folder, then
  oxytorch serve tuned --weights int8

The base model is a small one with random weights unless --model names a folder in Hugging Face's
format. Adapters and the optimizer are oxytorch.optimize's: bfloat16 with split weights.
docs/llm.md says what happens to adapters in `llm.optimize`.

needs: pip install 'oxytorch[serve]' openai; with --peft also peft"""

TEXTS = (
    "The password of the garden is heliotrope. ",
    "The river behind the mill is called the Ash. ",
    "Seven lanterns hang above the door of the inn. ",
)
PROMPT = "The password of the garden is"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LowRank(nn.Module):
    """A linear layer and a trained product of two narrow matrices beside it."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base
        self.A = nn.Linear(base.in_features, rank, bias=False)
        self.B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.B.weight)  # at the start the model gives what it gave
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * self.B(self.A(x))

    def merged(self) -> nn.Linear:
        """The base layer with the product added to its weight."""
        with torch.no_grad():
            self.base.weight += self.scale * self.B.weight @ self.A.weight
        return self.base


def add_adapters(model: nn.Module, rank: int, alpha: float) -> None:
    """Freeze the model and put an adapter around each projection."""
    model.requires_grad_(False)
    for module in [*model.modules()]:
        for name, child in [*module.named_children()]:
            if name in PROJECTIONS and isinstance(child, nn.Linear):
                setattr(module, name, LowRank(child, rank, alpha))


def merge_adapters(model: nn.Module) -> None:
    """The model as it was, with the adapters in its weights."""
    for module in [*model.modules()]:
        for name, child in [*module.named_children()]:
            if isinstance(child, LowRank):
                setattr(module, name, child.merged())


def with_adapters(model: Any, rank: int, alpha: float, by_peft: bool) -> Any:
    """The model with adapters, of this file or of peft."""
    if not by_peft:
        add_adapters(model, rank, alpha)
        return model
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=[*PROJECTIONS], task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config)


def merged(model: Any, by_peft: bool) -> Any:
    """A copy of a stock model that gives what the one with adapters gives."""
    copied = copy.deepcopy(model)
    if by_peft:
        return copied.merge_and_unload()
    merge_adapters(copied)
    return copied


def fine_tune(model: nn.Module, tokens: Tensor, steps: int) -> nn.Module:
    """Train the adapters; returns the model in float32, in evaluation mode."""
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    everything = sum(p.numel() for p in model.parameters())
    count = sum(p.numel() for p in trained)
    print(f"training {count:,} of {everything:,} parameters", flush=True)
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    fast, optimizer = oxytorch.optimize(model, optimizer=optimizer, dtype=torch.bfloat16)
    begun = time.perf_counter()
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        logits = fast(input_ids=tokens).logits[:, :-1]
        loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        if step % max(1, steps // 10) == 0:
            left = (time.perf_counter() - begun) / step * (steps - step)
            told = f"step {step} of {steps}: loss {loss.item():.3f}, {left:.0f} s left"
            print(told, file=sys.stderr, flush=True)
    model.load_state_dict(fast.state_dict())
    return model.eval()


def complete(model: Any, tokenizer: Any, most: int) -> str:
    """What follows the prompt, in this process."""
    prompt = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    found = oxytorch.llm.generate(model, prompt, max_new_tokens=most)
    return str(tokenizer.decode(found[0, prompt.shape[1] :], skip_special_tokens=True))


def complete_at(folder: Path, weights: str, most: int) -> str:
    """What follows the prompt, by `oxytorch serve` of a folder."""
    import openai

    with served(str(folder), "--weights", weights, "--name", "tuned") as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
        answer = client.completions.create(
            model="tuned", prompt=PROMPT, max_tokens=most, temperature=0
        )
    return str(answer.choices[0].text)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.rpartition("\n\n")[0],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="of the base model")
    parser.add_argument("--steps", type=int, default=60, help="of training (default: 60)")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters (default: 8)")
    parser.add_argument("--weights", choices=("bf16", "int8"), default="int8", help="served")
    parser.add_argument("--peft", action="store_true", help="adapters of the package peft")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep the merged model")
    options = parser.parse_args(words)
    if options.peft and importlib.util.find_spec("peft") is None:
        parser.error("argument --peft: the package is not installed; pip install peft")
    return options


def main(words: Sequence[str] | None = None) -> int:
    options = parse(words)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or write_checkpoint(Path(scratch) / "base")
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        base = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        torch.manual_seed(0)
        model = with_adapters(base, options.rank, 2.0 * options.rank, options.peft)
        rows = [tokenizer(text * 4)["input_ids"] for text in TEXTS]
        length = min(map(len, rows))
        fine_tune(model, torch.tensor([row[:length] for row in rows]), options.steps)

        out = options.out or Path(scratch) / "tuned"
        merged(model, options.peft).save_pretrained(out)
        tokenizer.save_pretrained(out)
        print("starting the server", file=sys.stderr, flush=True)
        print(f"\nprompt:            {PROMPT!r}")
        print(f"served, merged:    {complete_at(out, options.weights, 12)!r}")

    # Adapters that were there before llm.optimize stay beside the packed weights.
    weights = None if options.weights == "bf16" else options.weights
    inner = model.get_base_model() if options.peft else model
    beside = oxytorch.llm.optimize(inner, weights=weights)
    print(f"unmerged adapter:  {complete(beside, tokenizer, 12)!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
