"""Train a small character language model in float32 and in bfloat16, and compare what comes out.

The model and the training step are plain PyTorch. What oxytorch adds is in `prepared`.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

import oxytorch
from oxytorch.benchmark.core.results import new_run, write_run
from oxytorch.benchmark.report.drawing import draw_if_possible
from oxytorch.benchmark.report.terminal import show_run
from training_turns import loss_results, take_turns, time_results

DESCRIPTION = """\
Trains one small language model, which predicts the next character of Python's own documentation,
in several ways: float32 with stock AdamW, the same under stock autocast, bfloat16 with split
weights, and these with 8-bit optimizer states. Every way starts from the same weights and sees
the same text, once per seed; the seeds of float32 show how much the loss differs by chance.

The ways advance in turns, so that their step times are from the same minutes on this machine."""
EPILOG = """\
examples:
  python examples/train_character_model.py --short             a tiny model, under a minute
  python examples/train_character_model.py                     about ten minutes on two cores
  python examples/train_character_model.py --short --steps 3000     the tiny model for longer
  python examples/train_character_model.py --output result     also write result.json, result.svg
  python examples/train_character_model.py --text notes.txt    learn a text of your own
  python examples/train_character_model.py --only times        step times alone, half a minute

What the loss means: nats per character. On this text, guessing evenly among all characters costs
4.6, knowing how often each one occurs 3.3, how often it follows the one before 2.6, the two before
1.9. The default is short and ends at 2.6; --short --steps 3000 ends at 1.6."""

PIECE = 4096
"""Characters in a row that are either trained on or held out; every tenth piece is held out."""


@dataclass(frozen=True)
class Size:
    """How large the model is and how long it is trained; `turn`: steps until the next run's."""

    width: int = 192
    layers: int = 4
    heads: int = 3
    context: int = 128
    batch: int = 16
    steps: int = 300
    seeds: int = 3
    learning_rate: float = 2e-3
    turn: int = 25


SHORT = Size(
    width=64, layers=2, heads=2, context=64, batch=8, steps=60, seeds=2, learning_rate=3e-3, turn=10
)


@dataclass(frozen=True)
class Way:
    """One way of training.

    split: bfloat16 weights whose lower halves stand beside them, by `oxytorch.optimize`.
    state_dtype: of the optimizer's states. autocast: run the model under torch.autocast.
    """

    name: str
    split: bool = False
    state_dtype: torch.dtype | None = None
    autocast: bool = False


FLOAT32 = Way("float32")
WAYS: tuple[Way, ...] = (
    FLOAT32,
    Way("float32, autocast to bfloat16", autocast=True),
    Way("bfloat16, split weights", split=True),
    Way("bfloat16, split weights, 8-bit states", split=True, state_dtype=torch.int8),
)
ONLY_TIMED = Way("bfloat16, split weights, autocast", split=True, autocast=True)


def prepared(way: Way, model: nn.Module, learning_rate: float) -> tuple[nn.Module, Optimizer]:
    """The model and its optimizer, ready for this way of training."""
    if not way.split:
        return model, torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)
    optimizer = oxytorch.optim.AdamW(
        model.parameters(), lr=learning_rate, state_dtype=way.state_dtype
    )
    return oxytorch.optimize(model, optimizer=optimizer, dtype=torch.bfloat16)


# The text


@dataclass(frozen=True)
class Text:
    """Characters as numbers: `training` and `held_out` are int64 of one dimension."""

    training: Tensor
    held_out: Tensor
    characters: str
    source: str


def read_text(path: Path | None) -> Text:
    """The file's text, or without one the language reference that every Python carries.

    Raises:
        ValueError: the file is not UTF-8 or too short to hold something out.
        ModuleNotFoundError: this Python was installed without its documentation.
    """
    if path is None:
        from pydoc_data.topics import topics

        # Topics quote each other: a paragraph counts once, else what is held out would be known.
        paragraphs = [part for name in sorted(topics) for part in topics[name].split("\n\n")]
        text = "\n\n".join(dict.fromkeys(part for part in paragraphs if part.strip()))
        source = f"the help topics of Python {platform.python_version()}"
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text (byte {error.start})") from error
        source = str(path)
    if len(text) < 20 * PIECE:
        raise ValueError(f"expected a text of at least {20 * PIECE} characters, got {len(text)}")
    characters = "".join(sorted(set(text)))
    number = {character: index for index, character in enumerate(characters)}
    pieces = torch.tensor([number[character] for character in text]).split(PIECE)
    held_out = pieces[9::10]
    training = [piece for index, piece in enumerate(pieces) if index % 10 != 9]
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return Text(
        torch.cat(training),
        torch.cat(held_out),
        characters,
        f"{source} ({len(text):,} characters, {len(characters)} different, sha256 {digest})",
    )


# The model


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Each position attends to itself and those before it; [batch, heads, length, size]."""
    if query.dtype == torch.float32:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    # Spelled out, because torch's fused backward pass is slow on the CPU in bfloat16.
    length = query.shape[-2]
    future = torch.full((length, length), -math.inf, dtype=query.dtype).triu(1)
    weights = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5 + future
    return weights.softmax(-1) @ value


class Block(nn.Module):
    """Attention and two linear layers, each on the normalized input and added to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.hidden_norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        joined = self.query_key_value(self.attention_norm(x))
        heads = joined.view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = attention(query, key, value).transpose(1, 2).reshape(batch, length, width)
        x = x + self.output(mixed)
        return x + self.narrow(functional.gelu(self.widen(self.hidden_norm(x))))


class CharacterModel(nn.Module):
    """Characters [batch, length] to logits of each next one [batch, length, characters]."""

    def __init__(self, characters: int, size: Size) -> None:
        super().__init__()
        self.character = nn.Embedding(characters, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.logits = nn.Linear(size.width, characters)
        for module in self.modules():
            if isinstance(module, (nn.Embedding, nn.Linear)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, characters: Tensor) -> Tensor:
        positions = torch.arange(characters.shape[1])
        x = self.character(characters) + self.position(positions)
        logits: Tensor = self.logits(self.norm(self.blocks(x)))
        return logits


# Training


class Run:
    """A model that is trained in one way from one seed."""

    def __init__(self, way: Way, seed: int, size: Size, text: Text) -> None:
        self.way, self.seed, self.size, self.text = way.name, seed, size, text
        self.autocast = way.autocast
        torch.manual_seed(seed)
        model = CharacterModel(len(text.characters), size)
        self.model, self.optimizer = prepared(way, model, size.learning_rate)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)
        self.random = torch.Generator().manual_seed(seed)

    def rate(self, step: int) -> float:
        """Of the learning rate: rises over the first tenth of the steps, then falls to zero."""
        warm = min(1.0, (step + 1) / (0.1 * self.size.steps))
        return warm * 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.size.steps)))

    def loss(self, batch: Tensor) -> Tensor:
        """Cross entropy in nats per character of [batch, length + 1] characters."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            logits = self.model(batch[:, :-1])
        return functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    def step(self) -> None:
        """One training step on a random batch."""
        last = len(self.text.training) - self.size.context - 1
        starts = torch.randint(last, (self.size.batch, 1), generator=self.random)
        batch = self.text.training[starts + torch.arange(self.size.context + 1)]
        self.loss(batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Mean loss over the held-out text, computed as the model is trained."""
        context = self.size.context
        rows = self.text.held_out.unfold(0, context + 1, context)
        losses = [self.loss(part) * len(part) for part in rows.split(4 * self.size.batch)]
        return float(sum(losses)) / len(rows)

    def plain(self) -> Run:
        """The run as stock float32, loaded from the checkpoint of this one."""
        stock = Run(FLOAT32, self.seed, self.size, self.text)
        stock.model.load_state_dict(self.model.state_dict())
        stock.optimizer.load_state_dict(self.optimizer.state_dict())
        return stock

    def plain_loss(self) -> float:
        """The held-out loss of `plain`."""
        return self.plain().held_out_loss()


# The command


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments; nonsense ends the program with the choices."""
    parser = argparse.ArgumentParser(
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--short", action="store_true", help="a tiny model and few steps")
    parser.add_argument(
        "--only", choices=("times", "losses"), help="time a few steps, or compare losses untimed"
    )
    parser.add_argument("--steps", type=int, help=f"steps of each run (default: {Size.steps})")
    parser.add_argument("--seeds", type=int, help=f"runs of each way (default: {Size.seeds})")
    parser.add_argument("--text", type=Path, metavar="FILE", help="learn this text (UTF-8)")
    parser.add_argument(
        "--output", type=Path, metavar="BASE", help="write the files BASE.json and BASE.svg"
    )
    arguments = parser.parse_args(words)
    for name in ("steps", "seeds"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"argument --{name}: expected an integer >= 1, got {value}")
    return arguments


def main(words: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    arguments = parse(words)
    try:
        text = read_text(arguments.text)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        print(f"train_character_model: {error}; give another one with --text", file=sys.stderr)
        return 2
    size, ways = SHORT if arguments.short else Size(), WAYS
    if arguments.only == "times":
        size, ways = replace(size, steps=36, seeds=1, turn=6), (*WAYS, ONLY_TIMED)
    steps, seeds = arguments.steps or size.steps, arguments.seeds or size.seeds
    size = replace(size, steps=steps, seeds=seeds, turn=max(size.turn, steps // 20))

    runs = [Run(way, seed, size, text) for seed in range(size.seeds) for way in ways]
    parameters = sum(parameter.numel() for parameter in runs[0].model.parameters())
    print(
        f"text: {text.source}\n"
        f"model: {parameters:,} parameters; {size.steps} steps of {size.batch} x {size.context} "
        f"characters; {size.seeds} seed{'s' if size.seeds > 1 else ''} of {len(ways)} ways",
        flush=True,
    )
    command = shlex.join(["python", "examples/train_character_model.py", *words])
    settings = {**asdict(size), "parameters": parameters, "text": text.source}
    result = new_run("training", command, settings)
    logs = take_turns(runs, size.steps, size.turn, losses=arguments.only != "times")
    if arguments.only != "losses":
        result["results"] += time_results(logs)
    if arguments.only != "times":
        result["results"] += loss_results(logs)
    show_run(result)
    if arguments.output is not None:
        write(result, arguments.output, with_plot=arguments.only != "times")
    return 0


def write(result: dict[str, Any], base: Path, with_plot: bool) -> None:
    """Write BASE.json and, where matplotlib is installed, the plot of the losses."""
    path, plot = base.with_name(f"{base.name}.json"), base.with_name(f"{base.name}.svg")
    write_run(result, path)
    print(f"wrote {path}")
    if with_plot and draw_if_possible([result], plot):
        print(f"wrote {plot}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
