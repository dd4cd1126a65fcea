"""The plan of a program's memory: which results lie where in its arena, as formulas of sizes.

A result of an operator of ours that stays in the program has a place: a buffer, and its bytes as a
formula of the sizes of inputs. A buffer is taken again once nobody needs what lies there; it is as
large as the largest of its results, and buffers lie one after the other. So the arena's size is a
formula too, which the library computes at each call (program/plan.cpp).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .program import Steps, Value

_OURS = "oxytorch::"
_LINE = re.compile(r"place %(\d+) (\d+) (\S+)")
_SIZE = re.compile(r"%(\d+)\.(\d+)|\$(\d+)")
_LEAST, _UNIT = 4096, 64
"""Bytes below which a result lies elsewhere, and those that each other is rounded up to."""


@dataclass(frozen=True)
class Place:
    """Where a result lies.

    value: its number.
    bytes: a sum of products of numbers and of sizes: `%0.1` is dimension 1 of input 0, `$0` an
        input that is a size.
    """

    value: int
    buffer: int
    bytes: str

    def __str__(self) -> str:
        return f"place %{self.value} {self.buffer} {self.bytes}"

    def of(self, shapes: Sequence[Sequence[int]], sizes: Sequence[int] = ()) -> int:
        """The bytes for inputs of these shapes and sizes."""

        def factor(word: str) -> int:
            found = _SIZE.fullmatch(word)
            if found is None:
                return int(word)
            tensor, dim, size = found.groups()
            return shapes[int(tensor)][int(dim)] if size is None else sizes[int(size)]

        return sum(math.prod(map(factor, term.split("*"))) for term in self.bytes.split("+"))


@dataclass(frozen=True)
class ArenaPlan:
    """The places of a program's results, in the order in which they are made."""

    places: tuple[Place, ...] = ()

    @staticmethod
    def of_text(text: str) -> ArenaPlan:
        """The plan in the text of a program."""
        found = (_LINE.fullmatch(line) for line in text.split("\n"))
        return ArenaPlan(tuple(Place(int(m[1]), int(m[2]), m[3]) for m in found if m is not None))

    @property
    def formula(self) -> str:
        """The bytes of the arena: the largest of each buffer's results."""
        return " + ".join(
            words[0] if len(words) == 1 else f"max({', '.join(words)})"
            for words in (list(dict.fromkeys(p.bytes for p in own)) for own in self._buffers())
        )

    def _buffers(self) -> list[list[Place]]:
        count = max((place.buffer for place in self.places), default=-1) + 1
        return [[p for p in self.places if p.buffer == buffer] for buffer in range(count)]

    def arena(self, shapes: Sequence[Sequence[int]], sizes: Sequence[int] = ()) -> int:
        """The bytes of the arena for inputs of these shapes and sizes."""
        return sum(max(_taken(p.of(shapes, sizes)) for p in own) for own in self._buffers())

    def results(self, shapes: Sequence[Sequence[int]], sizes: Sequence[int] = ()) -> int:
        """The bytes of all results that have a place, which they would take one beside another."""
        return sum(_taken(place.of(shapes, sizes)) for place in self.places)

    def __str__(self) -> str:
        return "\n".join(map(str, self.places))


def _taken(size: int) -> int:
    return 0 if size < _LEAST else -(-size // _UNIT) * _UNIT + _UNIT


def planned(steps: Steps, numbers: dict[Value, int]) -> ArenaPlan:
    """A plan for steps. numbers: those of the values, as they are written."""
    symbols = _symbols(steps)
    last = _last_uses(steps)
    buffers: list[tuple[int, int]] = []  # the step that needs each last, and its bytes in a run
    places: list[Place] = []
    for at, step in enumerate(steps.steps):
        if not step.target.startswith(_OURS) or step.has_effect or step.returns_list:
            continue
        # What is held together leaves together: see `leaves` in read_program.cpp.
        if any(last[v] >= len(steps.steps) for v in step.results if v is not None):
            continue
        for value in step.results:
            found = None if value is None else _bytes(value, symbols)
            if value is None or found is None:
                continue
            word, size = found
            buffer = _free_buffer(buffers, at, size)
            if buffer == len(buffers):
                buffers.append((0, 0))
            buffers[buffer] = last[value], max(size, buffers[buffer][1])
            places.append(Place(numbers[value], buffer, word))
    return ArenaPlan(tuple(places))


def _free_buffer(buffers: Sequence[tuple[int, int]], at: int, size: int) -> int:
    """The buffer that fits best among those that nobody needs at a step, or a new one."""
    free = [number for number, (until, _) in enumerate(buffers) if until < at]
    large = [number for number in free if buffers[number][1] >= size]
    if large:
        return min(large, key=lambda number: buffers[number][1])
    return max(free, key=lambda number: buffers[number][1], default=len(buffers))


def _last_uses(steps: Steps) -> dict[Value, int]:
    """The last step that takes each value, or a view of it; outputs are taken behind all."""
    last = dict.fromkeys(steps.outputs, len(steps.steps))
    for at, step in reversed([*enumerate(steps.steps)]):
        until = at
        for value in step.results:
            if value is not None:
                last.setdefault(value, at)
                until = max(until, last[value]) if _may_show(step.target, step.is_view) else until
        for value in step.taken:
            last[value] = max(last.get(value, 0), until)
    return last


def _may_show(target: str, is_view: bool) -> bool:
    """Whether results may lie in the memory of arguments."""
    name = target.partition(".")[0]
    is_torchs = name.startswith("aten::") and name not in _NEW
    return is_view or is_torchs or name.endswith("_")


_NEW = frozenset(
    f"aten::{name}"
    for name in (
        "_softmax", "add", "addmm", "bmm", "cat", "clone", "convolution", "div", "embedding",
        "gelu", "linear", "matmul", "max_pool2d", "mean", "mm", "mul", "relu", "sigmoid",
        "softmax", "sub", "sum", "tanh", "where", "_scaled_dot_product_flash_attention_for_cpu",
    )
)  # fmt: skip
"""Operators of torch whose results are never their arguments."""


def _symbols(steps: Steps) -> dict[Any, str]:
    """The word of each symbol that is a size of an input."""
    found: dict[Any, str] = {}
    tensors = [value for value in steps.inputs if not value.is_size]
    for place, value in enumerate(tensors):
        for dim, size in enumerate(() if value.meta is None else value.meta.shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                found.setdefault(size.node.expr, f"%{place}.{dim}")
    return found


def _bytes(value: Value, symbols: dict[Any, str]) -> tuple[str, int] | None:
    """The bytes of a value as a formula, and in the run that the steps were captured with; None
    where they are not known."""
    meta = value.meta
    if meta is None or meta.layout != torch.strided:
        return None
    if all(type(size) is int for size in meta.shape):
        size = math.prod(meta.shape) * meta.itemsize
        return str(size), size
    sizes = tuple(s.node.expr if isinstance(s, torch.SymInt) else s for s in meta.shape)
    word = _formula((*sizes, meta.itemsize), tuple(symbols.items()))
    return None if word is None else (word, math.prod(map(hint, meta.shape)) * meta.itemsize)


@lru_cache(maxsize=1024)
def _formula(factors: tuple[Any, ...], symbols: tuple[tuple[Any, str], ...]) -> str | None:
    """A product as a sum of products of sizes of inputs; None where it is none."""
    import sympy  # type: ignore[import-untyped]

    product, words = sympy.expand(math.prod(factors)), dict(symbols)
    used = sorted(product.free_symbols, key=str)
    if not all(symbol in words for symbol in used) or not product.is_polynomial(*used):
        return None
    if not used:
        return str(int(product))
    terms = []
    for powers, factor in sympy.Poly(product, *used).terms():
        if not factor.is_Integer:
            return None
        names = [words[s] for s, power in zip(used, powers, strict=True) for _ in range(power)]
        terms.append("*".join([str(int(factor)), *names]))
    return "+".join(terms)


def hint(size: Any) -> int:
    """A size, or that which a symbol has in the run that it was captured with."""
    found: int = size.node.hint if isinstance(size, torch.SymInt) else size
    return found
