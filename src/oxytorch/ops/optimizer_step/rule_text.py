"""What rules.py says, read as text: it is compiled for a GPU, never run.

`translation` reads the same functions when the library is built.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ... import _garbage

CONSTANTS, MEASURE, TRUST = "_constants", "_measure", "_trust"

OWN = frozenset({"sqrt", "where", "maximum", "fused_multiply_add"})
"""Functions of rules.py that every target has of its own."""

COMPILED_FLAGS = frozenset({"moves", "amsgrad", "centered", "is_whole"})
"""Flags that decide which states there are: each setting is a kernel. The others are settled when a
kernel runs, which costs nothing where the memory is the limit."""

DECAYS, PENALIZES = "decays", "penalizes"
"""Two ways to shrink weights, of which one is taken at most. Without either, a weight's factor, the
scalar `decay`, is 1: a kernel that penalizes does not decay, and any other always does."""


@dataclass(frozen=True)
class Traffic:
    """The operands that an update under some flags reads, and those that it writes."""

    reads: frozenset[str]
    writes: frozenset[str]


@dataclass(frozen=True)
class Rule:
    """A function of rules.py over operands, scalars and flags, in the order of its arguments.

    magnitudes: the operands that are never negative.
    """

    name: str
    function: ast.FunctionDef
    operands: tuple[str, ...]
    magnitudes: frozenset[str]
    scalars: tuple[str, ...]
    flags: tuple[str, ...]

    @functools.cached_property
    def compiled_flags(self) -> tuple[str, ...]:
        """The flags of which each setting is a kernel, as far as the rule asks for them."""
        tests = [node.test for node in ast.walk(self.function) if isinstance(node, ast.If)]
        used = {test.id for test in tests if isinstance(test, ast.Name)}
        chosen = COMPILED_FLAGS | ({PENALIZES} if DECAYS in self.flags else set())
        return tuple(flag for flag in self.flags if flag in chosen & used)

    def traffic(self, compiled: Mapping[str, bool]) -> Traffic:
        """What is read or written under any setting of the flags that `compiled` leaves open."""
        open_flags = [flag for flag in self.flags if flag not in compiled]
        reads: set[str] = set()
        writes: set[str] = set()
        for setting in itertools.product((False, True), repeat=len(open_flags)):
            flags = {**compiled, **dict(zip(open_flags, setting, strict=True))}
            self._add_traffic(flags, reads, writes)
        return Traffic(frozenset(reads), frozenset(writes))

    def _add_traffic(self, flags: Mapping[str, bool], reads: set[str], writes: set[str]) -> None:
        assigned: set[str] = set()
        for statement in _settled(self.function.body, flags):
            names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
            if isinstance(statement, ast.Assign):
                used = {n.id for n in ast.walk(statement.value) if isinstance(n, ast.Name)}
                reads |= used.intersection(self.operands) - assigned
                assigned |= names - used | {_target(statement)}
            elif isinstance(statement, ast.Return) and isinstance(statement.value, ast.Tuple):
                # A state that is returned as it came is neither read nor written.
                for value in statement.value.elts:
                    if isinstance(value, ast.Name):
                        writes |= {value.id} & assigned & {*self.operands}
                    else:
                        used = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}
                        reads |= used.intersection(self.operands) - assigned


def _target(statement: ast.Assign) -> str:
    target = statement.targets[0]
    assert isinstance(target, ast.Name)
    return target.id


def _settled(body: list[ast.stmt], flags: Mapping[str, bool]) -> Iterator[ast.stmt]:
    """The statements that run under these flags."""
    for statement in body:
        if isinstance(statement, ast.If) and isinstance(statement.test, ast.Name):
            yield from _settled(
                statement.body if flags[statement.test.id] else statement.orelse, flags
            )
        else:
            yield statement


@dataclass(frozen=True)
class Family:
    """An optimizer: its update, and what belongs to it.

    hyper: the hyper-parameters in the order of `<rule>_constants`, without the step, which it takes
    if has_step. trust_takes_count: whether `<rule>_trust` takes the number of elements.
    """

    name: str
    update: Rule
    measure: Rule | None
    hyper: tuple[str, ...]
    has_step: bool
    trust_takes_count: bool


def _rule(function: ast.FunctionDef) -> Rule:
    # A quick look: this is part of the first step of a program.
    kinds = [
        (a.arg, a.annotation.id) for a in function.args.args if isinstance(a.annotation, ast.Name)
    ]
    return Rule(
        function.name,
        function,
        tuple(name for name, kind in kinds if kind in ("Value", "Magnitude")),
        frozenset(name for name, kind in kinds if kind == "Magnitude"),
        tuple(name for name, kind in kinds if kind == "Scalar"),
        tuple(name for name, kind in kinds if kind == "Flag"),
    )


@functools.cache
def functions() -> Mapping[str, ast.FunctionDef]:
    """All functions of rules.py by name, in its order."""
    text = (Path(__file__).parent / "rules.py").read_text(encoding="utf-8")
    with _garbage.paused():
        tree = ast.parse(text)
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


@functools.cache
def families() -> Mapping[str, Family]:
    """All optimizers by the name of their rule."""
    known = functions()
    result = {}
    for name in known:
        if not name.endswith(CONSTANTS):
            continue
        rule = name.removesuffix(CONSTANTS)
        arguments = [a.arg for a in known[name].args.args]
        trust = known.get(rule + TRUST)
        result[rule] = Family(
            rule,
            _rule(known[rule]),
            _rule(known[rule + MEASURE]) if rule + MEASURE in known else None,
            tuple(a for a in arguments if a != "step"),
            "step" in arguments,
            trust is not None and "count" in [a.arg for a in trust.args.args],
        )
    return result
