"""Train a small causal language model in Hugging Face's format on Python's standard library.

The result is a directory that `transformers` and `oxytorch llm` read like any other model, with
text that the model never saw beside it: enough to measure what a weight or cache format costs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import oxytorch

DESCRIPTION = """\
Trains a Llama of a few million parameters, and the tokenizer for it, on the sources of the Python
that runs this script, in bfloat16 with exact weights (oxytorch.optim). Whole files are held out.

OUT gets the model and the tokenizer (config.json, model.safetensors, tokenizer.json), held_out.txt,
calibration.txt (a part of the training text) and training.json (settings and losses)."""
EPILOG = """\
examples:
  python examples/train_language_model.py small-model             a quarter of an hour on two cores
  python examples/train_language_model.py tiny-model --short      under a minute
  python examples/train_language_model.py mine --text notes       text files of a directory
  oxytorch llm perplexity small-model --text small-model/held_out.txt"""

SKIPPED = {
    "site-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
    "encodings",  # tables
    "pydoc_data",  # text as string literals
}
SUFFIXES = (".py", ".txt", ".md", ".rst")
HELD_OUT_PART = 20
"""One file in so many is held out, chosen by a hash of its name."""


@dataclass(frozen=True)
class Size:
    """How large the model is and how long it is trained.

    mlp: width inside of the gated MLP. files: one in so many of the training files is read.
    """

    width: int = 256
    mlp: int = 768
    layers: int = 4
    heads: int = 4
    key_value_heads: int = 2
    vocabulary: int = 2048
    context: int = 256
    batch: int = 8
    steps: int = 800
    learning_rate: float = 4e-3
    files: int = 1


SHORT = Size(
    width=128,
    mlp=384,
    layers=2,
    heads=2,
    key_value_heads=1,
    vocabulary=512,
    context=128,
    steps=150,
    files=6,
)


# The text


@dataclass(frozen=True)
class Text:
    """Contents of files: what is trained on, what is held out, and where they come from."""

    training: list[str]
    held_out: list[str]
    source: str


def read_text(root: Path | None, files: int = 1) -> Text:
    """The text files under `root`, or without one the standard library's sources.

    files: one in so many of those that are not held out is read.

    Raises:
        ValueError: fewer than 20 files or 200,000 characters are found, too little to learn.
    """
    source = str(root) if root else f"the standard library of Python {platform.python_version()}"
    root = root or Path(sysconfig.get_path("stdlib"))
    training, held_out = [], []
    paths = [path for path in root.rglob("*") if path.suffix in SUFFIXES and path.is_file()]
    for path in sorted(paths):
        name = path.relative_to(root).as_posix()
        if SKIPPED & set(name.split("/")[:-1]):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        (held_out if number % HELD_OUT_PART == 0 else training).append(text)
    training = training[::files]
    characters = sum(map(len, training))
    if len(training) < 20 or characters < 200_000 or not held_out:
        raise ValueError(
            f"expected at least 20 text files of 200,000 characters together in {root}, "
            f"got {len(training)} of {characters:,}"
        )
    return Text(training, held_out, f"{source} ({characters:,} characters)")


def make_tokenizer(texts: Sequence[str], vocabulary: int) -> Any:
    """A byte-level BPE tokenizer learned from `texts`, with one special token: the end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def numbers(tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """The tokens of all texts in a row, with the end token after each; int64 of one dimension."""
    rows = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return torch.tensor([token for row in rows for token in (*row, tokenizer.eos_token_id)])


# The model


def make_model(size: Size, vocabulary: int, end: int) -> Any:
    """A Llama with random weights in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=size.width,
        intermediate_size=size.mlp,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_value_heads,
        max_position_embeddings=size.context,
        bos_token_id=None,
        eos_token_id=end,
        # torch's fused attention has a slow backward pass on the CPU in bfloat16.
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config)


def loss_of(model: Any, batch: Tensor) -> Tensor:
    """Cross entropy in nats per token of [batch, length + 1] tokens."""
    logits = model(batch[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def rate(step: int, steps: int) -> float:
    """Of the learning rate: rises over the first twentieth of the steps, then falls to zero."""
    return min(1.0, (step + 1) / (0.05 * steps)) * 0.5 * (1 + math.cos(math.pi * step / steps))


def train(model: Any, tokens: Tensor, size: Size) -> Iterator[tuple[int, float]]:
    """Train `model` (float32) in place; yields the number of steps done and the last loss.

    The steps run in bfloat16 with split weights: every weight is exact in float32.
    """
    trained = model.train()
    optimizer = oxytorch.optim.AdamW(
        trained.parameters(), lr=size.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
    )
    trained, optimizer = oxytorch.optimize(trained, optimizer=optimizer, dtype=torch.bfloat16)
    random = torch.Generator().manual_seed(0)
    offsets = torch.arange(size.context + 1)
    for step in range(size.steps):
        for group in optimizer.param_groups:
            group["lr"] = size.learning_rate * rate(step, size.steps)
        starts = torch.randint(len(tokens) - size.context, (size.batch, 1), generator=random)
        loss = loss_of(trained, tokens[starts + offsets])
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield step + 1, loss.item()
    model.load_state_dict(trained.state_dict())
    model.eval()


@torch.no_grad()
def held_out_loss(model: Any, tokens: Tensor, context: int) -> float:
    """Mean loss in float32 over at most 32,768 held-out tokens, `context` at a time."""
    rows = tokens[:32_769].unfold(0, context + 1, context)
    losses = [loss_of(model, part) * len(part) for part in rows.split(16)]
    return float(sum(losses)) / len(rows)


# The command


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments; nonsense ends the program with the choices."""
    parser = argparse.ArgumentParser(
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the directory to write")
    parser.add_argument("--short", action="store_true", help="a tiny model and few steps")
    parser.add_argument("--steps", type=int, help=f"steps of training (default: {Size.steps})")
    parser.add_argument(
        "--text", type=Path, metavar="DIR", help="learn the text files of this directory"
    )
    arguments = parser.parse_args(words)
    if arguments.steps is not None and arguments.steps < 1:
        parser.error(f"argument --steps: expected an integer >= 1, got {arguments.steps}")
    return arguments


def main(words: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    arguments = parse(words)
    size = SHORT if arguments.short else Size()
    size = replace(size, steps=arguments.steps or size.steps)
    try:
        text = read_text(arguments.text, size.files)
        arguments.out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        print(f"train_language_model: {error}", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    tokenizer = make_tokenizer(text.training, size.vocabulary)
    tokens = numbers(tokenizer, text.training)
    model = make_model(size, len(tokenizer), tokenizer.eos_token_id)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    seen = size.steps * size.batch * size.context
    print(
        f"text: {text.source}, {len(tokens):,} tokens\n"
        f"model: {parameters:,} parameters; {size.steps} steps, {seen:,} tokens",
        flush=True,
    )
    begun, losses = time.monotonic(), []
    for step, loss in train(model, tokens, size):
        losses.append(loss)
        if step % max(1, size.steps // 20) == 0:
            left = (time.monotonic() - begun) / step * (size.steps - step)
            print(f"step {step} of {size.steps}: loss {loss:.3f}, {left:.0f} s left", flush=True)
    loss = held_out_loss(model, numbers(tokenizer, text.held_out), size.context)
    print(f"held-out loss {loss:.4f}, perplexity {math.exp(loss):.3f} per token")
    save(model, tokenizer, text, arguments.out)
    settings = {**asdict(size), "parameters": parameters, "text": text.source}
    record = {"settings": settings, "losses": losses, "held_out_loss": loss}
    (arguments.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {arguments.out}")
    return 0


def save(model: Any, tokenizer: Any, text: Text, out: Path) -> None:
    """Write the model, the tokenizer and the two texts."""
    model.config._attn_implementation = "sdpa"
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "held_out.txt").write_text("\n".join(text.held_out), encoding="utf-8")
    (out / "calibration.txt").write_text(
        "\n".join(part[:4000] for part in text.training[::7]), encoding="utf-8"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
