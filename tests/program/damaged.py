"""Saved programs that are altered at random: each is refused, or runs; no process ends by it.

    python -m tests.program.damaged [--files 10000] [--first 0] [--seconds 300]

File number N is the same in each run. Processes of their own open and run the files; the numbers of
those at which one ended or hung are printed, and at the end how many were refused, failed when they
ran, and ran.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import oxytorch  # noqa: E402
from forged_files import forge  # noqa: E402
from oxytorch import testing  # noqa: E402
from oxytorch.program import check  # noqa: E402
from oxytorch.quantization import CheckpointError  # noqa: E402

Case = tuple[nn.Module, tuple[Tensor, ...], Any]
"""A model, its inputs, and `dynamic_shapes`."""


class Block(nn.Module):
    """A layer of a transformer, with a mask, an embedding that is its head too, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(32, 32), nn.LayerNorm(32)
        self.parts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)
        self.head = nn.Linear(32, 32, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, ids: Tensor, kept: Tensor) -> dict[str, Any]:
        self.calls.add_(1)
        x = self.words(ids)
        q, k, v = (part(x).unflatten(-1, (2, 16)).transpose(1, 2) for part in self.parts[:3])
        mask = (1 - kept[:, None, None, :]) * -1e4
        seen = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
        x = self.norm(x + self.parts[3](seen))
        x = F.rms_norm(x + self.down(F.silu(self.gate(x)) * self.up(x)), (32,))
        chances = (self.head(F.leaky_relu(x)) * 0.5 + 1).softmax(-1)
        return {"x": chances, "rest": (x.mean(1), [x.shape[0] * 2, None])}


class Images(nn.Module):
    """Convolutions of both kinds with sums, a shuffle, pooling, and recurrent layers behind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.depth, self.point = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 16, 1)
        self.lstm = nn.LSTM(16, 8, batch_first=True)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.bag = nn.EmbeddingBag(9, 8, mode="sum")

    def forward(self, image: Tensor, ids: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(image)))
        x = x + F.hardswish(self.point(F.relu6(self.depth(x))))
        x = x.unflatten(1, (2, 8)).transpose(1, 2).flatten(1, 2)
        rows = F.max_pool2d(F.elu(x), 2).flatten(2).transpose(1, 2)
        return self.gru(self.lstm(rows)[0])[0].sum(1) + self.bag(ids)


def _block(dtype: torch.dtype) -> Case:
    sizes = {0: torch.export.Dim("batch", max=32), 1: torch.export.Dim("length", max=32)}
    return (
        Block().to(dtype),
        (torch.arange(10).reshape(2, 5), torch.ones(2, 5).to(dtype)),
        (sizes,) * 2,
    )


def _images(dtype: torch.dtype) -> Case:
    sizes = {0: torch.export.Dim("batch", max=32)}
    inputs = torch.ones(2, 3, 6, 6).to(dtype), torch.arange(6).reshape(2, 3)
    return Images().to(dtype), inputs, (sizes,) * 2


def _of_bytes() -> Case:
    from qdq_models import Net

    return Net(), (torch.randn(2, 3, 8, 8),), None


CASES: dict[str, Callable[[], Case]] = {
    "block": lambda: _block(torch.float32),
    "block in bfloat16": lambda: _block(torch.bfloat16),
    "images": lambda: _images(torch.float32),
    "images in bfloat16": lambda: _images(torch.bfloat16),
    "bytes": _of_bytes,
}


def save(name: str, folder: Path) -> None:
    """Writes a model's program and its inputs."""
    from packing import packing

    torch.manual_seed(0)
    model, inputs, sizes = CASES[name]()
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr("oxytorch.rewriting.measure.TIMED", False)
        patch.setattr("oxytorch.program.passes.linear.SMALLEST", 0)
        packing(patch)(True, own=True)
        exported = torch.export.export(model.eval(), inputs, dynamic_shapes=sizes)
        oxytorch.save(oxytorch.optimize(exported), folder / f"{name}.oxy")
    torch.save(inputs, folder / f"{name}.inputs")


NUMBERS = ("0", "1", "-1", "2", "3", "7", "64", "1000", "2147483648", "4611686018427387904",
           "9223372036854775807", "-9223372036854775808", "0.0", "1.0", "-0.5", "1e+300", "nan",
           "inf")  # fmt: skip
WORDS = (*NUMBERS, "%0", "%1", "$0", "%9999", "[", "]", "some", "none", "=", "true", "false", "cpu",
         "=float32", "=bfloat16", "=int64", "=bool", "=strided", '"none"', '"relu"', '"bfloat16"',
         "size", "add", "*", "/", "%", "_", "")  # fmt: skip


@functools.cache
def _operators() -> dict[tuple[Any, ...], list[str]]:
    """The operators that a file may call, by what they take and return."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        if name.startswith(("aten::", "oxytorch::")):
            try:
                made = check._operator(name)
            except ValueError:
                continue
            kinds = tuple(str(kind) for _, kind in made.arguments)
            found.setdefault((kinds, made.results, made.returns_list), []).append(name)
    return found


def _alike(target: str) -> list[str]:
    made = check._operator(target)
    kinds = tuple(str(kind) for _, kind in made.arguments)
    return _operators()[kinds, made.results, made.returns_list]


def _words(numbers: random.Random, text: str) -> str:
    words = text.replace("\n", " \n ").split(" ")
    for _ in range(numbers.randint(1, 3)):
        place = numbers.randrange(len(words))
        words[place] = numbers.choice([numbers.choice(words), numbers.choice(WORDS)])
    return " ".join(words).replace(" \n ", "\n")


def _numbers(numbers: random.Random, text: str) -> str:
    """Other numbers, values and modes in the places of such."""
    words = text.split(" ")
    for kind in numbers.choices(("number", "value", "text"), k=numbers.randint(1, 2)):
        is_of = {
            "number": lambda each: each.lstrip("-").replace(".", "", 1).isdigit(),
            "value": lambda each: each[:1] in ("%", "$") and each[1:].isdigit(),
            "text": lambda each: each[:1] == '"',
        }[kind]
        places = [place for place, word in enumerate(words) if is_of(word)]
        if places:
            other = words[numbers.choice(places)]
            words[numbers.choice(places)] = (
                numbers.choice([other, numbers.choice(NUMBERS)]) if kind == "number" else other
            )
    return " ".join(words)


def _operator(numbers: random.Random, text: str) -> str:
    """Another operator of the same arguments."""
    lines = text.split("\n")
    for _ in range(numbers.randint(1, 2)):
        places = [place for place, line in enumerate(lines) if "::" in line]
        place = numbers.choice(places)
        words = lines[place].split(" ")
        at = words.index("=") + 1
        words[at] = numbers.choice(_alike(words[at]))
        lines[place] = " ".join(words)
    return "\n".join(lines)


def _lines(numbers: random.Random, text: str) -> str:
    lines = text.split("\n")
    first, second = sorted(numbers.sample(range(1, len(lines)), 2))
    how = numbers.randrange(4)
    if how == 0:
        lines[first], lines[second] = lines[second], lines[first]
    elif how == 1:
        del lines[second]
    elif how == 2:
        lines.insert(second, lines[first])
    else:  # what one step makes, and what the other computes
        (a, _, b), (c, found, d) = lines[first].partition(" = "), lines[second].partition(" = ")
        if found:
            lines[first], lines[second] = f"{a} = {d}", f"{c} = {b}"
    return "\n".join(lines)


def _tree(numbers: random.Random, value: Any) -> Any:
    """JSON with one value changed somewhere."""
    if isinstance(value, (dict, list)) and value and numbers.random() < 0.9:
        keys = [*value] if isinstance(value, dict) else [*range(len(value))]
        key = numbers.choice([each for each in keys if each != "program"])
        if numbers.random() < 0.1:
            del value[key]
        elif isinstance(value, list) and numbers.random() < 0.1:
            value.insert(key, value[numbers.choice(keys)])
        else:
            value[key] = _tree(numbers, value[key])
        return value
    if isinstance(value, int) and numbers.random() < 0.7:
        return numbers.choice([value + 1, value - 1, -value, value * 2, 1 << 62, 1 << 63, 0])
    texts = ["leaf", "tuple", "dict", "float32", "bfloat16", "int64", "size", "tensor", "fixed"]
    return numbers.choice([None, True, 0, -1, 1.5, "", [], {}, [[]], numbers.choice(texts)])


def _constants(numbers: random.Random, description: Any, tensors: dict[str, Tensor]) -> None:
    """Tensors of another size, dtype or order, or in each other's places."""
    entries = description["constants"]
    if numbers.random() < 0.3:
        numbers.shuffle(entries)
        return
    name = numbers.choice([*tensors])
    made = tensors[name].reshape(-1)
    how = numbers.randrange(6)
    if how == 0:
        made = made[: numbers.randrange(made.numel() + 1)]
    elif how == 1:
        made = made.view(numbers.choice([torch.uint8, torch.int8]))
    elif how == 2 and made.numel() % 2 == 0:
        made = made.view(2, -1)
    elif how == 3:
        made = made[:1].expand(numbers.choice([1, 2, 64]), 1).clone()
    elif how == 4:
        made = made.to(numbers.choice([torch.float32, torch.bfloat16, torch.int64, torch.float64]))
    else:  # the same bytes in disorder: indices and weights of any value
        made = made.view(torch.uint8)[torch.randperm(made.nbytes)].view(made.dtype)
        made = made.view(tensors[name].shape)
    tensors[name] = made.contiguous()
    for entry in (*entries, *description["state"]):
        if entry["tensor"] == name:
            dtype = str(made.dtype).removeprefix("torch.")
            entry |= {"dtype": dtype, "shape": [*made.shape], "order": [*range(made.dim())]}


def alter(number: int, path: Path) -> None:
    """Alters a file, as its number says."""
    numbers = random.Random(number)
    torch.manual_seed(number)
    how = numbers.randrange(8)
    if how == 0:
        content = bytearray(path.read_bytes())
        header = 8 + int.from_bytes(content[:8], "little")
        for _ in range(numbers.choice((1, 1, 2, 8))):
            content[numbers.randrange(header)] ^= 1 << numbers.randrange(8)
        path.write_bytes(content[: numbers.choice((len(content), numbers.randrange(len(content))))])
        return

    def change(description: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        if how == 1:
            _tree(numbers, description)
        elif how == 2:
            _constants(numbers, description, tensors)
        else:
            altered = {3: _words, 4: _numbers, 5: _operator, 6: _lines, 7: _numbers}[how]
            description["program"] = altered(numbers, description["program"])

    forge(path, change)


REFUSED = (CheckpointError,)
FAILED = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, MemoryError)
"""What may be raised when a file is opened, and when what it holds is called."""
BAD = ("WRONG", "ENDED")
WITHOUT_VALUES = ("rand", "empty", "bernoulli", "multinomial", "normal", "poisson", "dropout",
                  "exponential", "new_", "like")  # fmt: skip
"""In names of operators whose results need not be the same twice."""


def outcome(path: Path, inputs: tuple[Tensor, ...]) -> str:
    """What became of a file. Raises what nobody may raise, and AssertionError where the results
    of its program depend on where they lie."""
    try:
        model = oxytorch.load(path)
    except REFUSED as error:
        return f"refused: {error}"
    state = [each.clone() for each in model.state]
    try:
        found = [_leaves(model(*inputs))]
    except FAILED as error:
        return f"failed: {error}"
    if any(name in str(model) for name in WITHOUT_VALUES):
        return "ran"
    for used in (True, False):
        for own, kept in zip(model.state, state, strict=True):
            own.copy_(kept)
        with testing.arenas(used=used, poisoned=used):
            found.append(_leaves(model(*inputs)))
    for other in found[1:]:
        for own, again in zip(found[0], other, strict=True):
            assert torch.equal(own, again), "results that depend on the arena"
    return "ran"


def _leaves(result: Any) -> list[Tensor]:
    tensors = (each for each in _pytree.tree_leaves(result) if isinstance(each, Tensor))
    return [torch.nan_to_num(each.detach().clone()) for each in tensors]


def _work(first: int, last: int, folder: Path, out: Connection) -> None:
    """Opens and runs the files of these numbers; sends what became of each."""
    limit = 12 << 30  # of addresses: a program may ask for more memory than there is
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    names = [*CASES]
    given = {name: torch.load(folder / f"{name}.inputs") for name in names}
    contents = {name: (folder / f"{name}.oxy").read_bytes() for name in names}
    path = folder / f"{first}.oxy"
    for number in range(first, last):
        name = names[number % len(names)]
        path.write_bytes(contents[name])
        alter(number, path)
        torch.set_num_threads(1 if number % 16 else 2)  # which wait long on a busy machine
        signal.alarm(20)
        try:
            out.send((number, outcome(path, given[name])))
        except Exception as error:
            shown = f"{type(error).__name__}: {str(error)[:300]}"
            where = traceback.extract_tb(error.__traceback__)[-1]
            out.send((number, f"WRONG: {shown} ({Path(where.filename).name}:{where.lineno})"))
        signal.alarm(0)
    path.unlink()


def _run(first: int, last: int, folder: Path) -> list[tuple[int, str]]:
    """What became of files, by processes of which each goes on where one ended."""
    import multiprocessing

    context = multiprocessing.get_context("fork")
    found: list[tuple[int, str]] = []
    while first < last:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(first, last, folder, sender))
        process.start()
        sender.close()
        while True:
            try:
                found.append(receiver.recv())
            except EOFError:
                break
        process.join()
        reached = found[-1][0] + 1 if found else first
        if reached < last:
            found.append((reached, f"ENDED with {process.exitcode}"))
            reached += 1
        first = reached
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first file")
    parser.add_argument("--seconds", type=float, default=300, help="no file is begun after them")
    arguments = parser.parse_args()
    end, number = time.monotonic() + arguments.seconds, arguments.first
    reasons: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pid = os.fork()  # so that no thread runs yet in those that are forked later
        if pid == 0:
            try:
                for case in CASES:
                    save(case, folder)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if os.waitpid(pid, 0)[1]:
            raise SystemExit("the files could not be made")
        while number < arguments.first + arguments.files and time.monotonic() < end:
            last = min(number + 200, arguments.first + arguments.files)
            for at, what in _run(number, last, folder):
                reasons[what.partition(":")[0].partition(" with ")[0]] += 1
                if what.startswith(BAD):
                    print(f"{at}: {what}", flush=True)
            number = last
    print(f"files {arguments.first} to {number}: " + json.dumps(reasons))
    raise SystemExit(any(bad in reasons for bad in BAD))


if __name__ == "__main__":
    main()
