"""Reads rules.py into the form from which C++, OpenCL C and Triton are written.

Expressions stay syntax trees of Python, which `expressions.py` writes for a target.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

CONSTANTS, REDUCE_NORMS, TRUST_RATIO = "_constants", "_reduce_norms", "_trust_ratio"

OWN = frozenset({"sqrt", "where", "maximum", "fused_multiply_add"})
"""Functions of rules.py that every target has of its own."""


class Untranslatable(Exception):
    """The rule uses Python beyond the restricted language."""

    def __init__(self, node: ast.AST, why: str) -> None:
        super().__init__(f"rules.py:{getattr(node, 'lineno', '?')}: {why}: {ast.unparse(node)}")


@dataclass(frozen=True)
class Assignment:
    """`target = value`."""

    target: str
    value: ast.expr


@dataclass(frozen=True)
class Choice:
    """`if` on a flag."""

    flag: str
    then: Body
    otherwise: Body


Body: TypeAlias = "tuple[Assignment | Choice, ...]"


@dataclass(frozen=True)
class Function:
    """A function of rules.py: its arguments with their types as written, and what it does."""

    name: str
    arguments: Mapping[str, str]
    body: Body
    result: ast.expr


@dataclass(frozen=True)
class Traffic:
    """The operands that a rule reads, and those that it writes."""

    reads: frozenset[str]
    writes: frozenset[str]


@dataclass(frozen=True)
class Rule:
    """An update, or the reduction before it, over operands, scalars and flags of its optimizer.

    Operands are in the order of the update's arguments, the others in that of the constants; flags
    are those that a rule of the optimizer asks for.

    magnitudes: the operands that are never negative.
    results: what the function returns.
    """

    name: str
    operands: tuple[str, ...]
    magnitudes: frozenset[str]
    scalars: tuple[str, ...]
    flags: tuple[str, ...]
    body: Body
    results: tuple[ast.expr, ...]

    @functools.cached_property
    def returned(self) -> frozenset[str]:
        """The operands among the results."""
        names = (value.id for value in self.results if isinstance(value, ast.Name))
        return frozenset(names).intersection(self.operands)

    @functools.cached_property
    def sums(self) -> tuple[ast.expr, ...]:
        """The other results, which are summed over the tensor."""
        return tuple(
            value
            for value in self.results
            if not (isinstance(value, ast.Name) and value.id in self.returned)
        )

    @functools.cached_property
    def tested_flags(self) -> frozenset[str]:
        """The flags that the rule asks for."""
        return frozenset(own.flag for own in walk(self.body) if isinstance(own, Choice))

    def traffic(self, flags: Mapping[str, bool]) -> Traffic:
        """What is read or written under any setting of the flags that `flags` leaves open."""
        open_flags = [flag for flag in self.flags if flag not in flags]
        reads: set[str] = set()
        writes: set[str] = set()
        for setting in itertools.product((False, True), repeat=len(open_flags)):
            chosen = {**flags, **dict(zip(open_flags, setting, strict=True))}
            assigned: set[str] = set()
            for statement in settled(self.body, chosen):
                assert isinstance(statement, Assignment)
                reads |= self._operands_in(statement.value) - assigned
                assigned.add(statement.target)
            # A state that is returned as it came is neither read nor written.
            writes |= assigned.intersection(self.returned)
            for value in self.sums:
                reads |= self._operands_in(value) - assigned
        return Traffic(frozenset(reads), frozenset(writes))

    def _operands_in(self, value: ast.expr) -> set[str]:
        return _names(value).intersection(self.operands)


@dataclass(frozen=True)
class Family:
    """An optimizer.

    hyper: the hyper-parameters and their types, in the order of `<rule>_constants`, without the
        step, which it takes if has_step.
    constants: the scalars and flags that it makes of them.
    rules: the update, and before it the reduction of an optimizer that needs norms.
    """

    name: str
    hyper: Mapping[str, str]
    has_step: bool
    constants: Mapping[str, ast.expr]
    rules: tuple[Rule, ...]
    trust_ratio: Function | None

    @property
    def update(self) -> Rule:
        """The last rule."""
        return self.rules[-1]

    @property
    def reduce_norms(self) -> Rule | None:
        """The rule before the update, or None."""
        return self.rules[0] if len(self.rules) > 1 else None


@dataclass(frozen=True)
class Rules:
    """All of rules.py: the optimizers by the name of their rule, and functions that rules call."""

    families: Mapping[str, Family]
    helpers: Sequence[Function]


def parse(source: str) -> Rules:
    """The text of rules.py; raises Untranslatable for what is not in the restricted language."""
    functions = {
        node.name: _function(node)
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name not in OWN
    }
    names = [name.removesuffix(CONSTANTS) for name in functions if name.endswith(CONSTANTS)]
    families = {name: _family(name, functions) for name in names}
    rules = {
        name + suffix for name in names for suffix in ("", CONSTANTS, REDUCE_NORMS, TRUST_RATIO)
    }
    return Rules(families, [own for name, own in functions.items() if name not in rules])


def settled(body: Body, flags: Mapping[str, bool]) -> Body:
    """What is left to do under these flags; choices by others stay."""
    result: list[Assignment | Choice] = []
    for statement in body:
        if isinstance(statement, Assignment):
            result.append(statement)
            continue
        then, otherwise = settled(statement.then, flags), settled(statement.otherwise, flags)
        if statement.flag in flags:
            result += then if flags[statement.flag] else otherwise
        else:
            result.append(Choice(statement.flag, then, otherwise))
    return tuple(result)


def walk(body: Body) -> Iterator[Assignment | Choice]:
    """All statements, those in choices too."""
    for statement in body:
        yield statement
        if isinstance(statement, Choice):
            yield from walk(statement.then)
            yield from walk(statement.otherwise)


class _Constants(ast.NodeTransformer):
    """Scalars and flags by their names alone, in place of `c.<name>`."""

    def __init__(self, argument: str) -> None:
        self._argument = argument

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if not isinstance(node.value, ast.Name) or node.value.id != self._argument:
            raise Untranslatable(node, "cannot translate")
        return ast.copy_location(ast.Name(node.attr), node)


def _function(node: ast.FunctionDef) -> Function:
    arguments = {
        a.arg: a.annotation.id if isinstance(a.annotation, ast.Name) else "" for a in node.args.args
    }
    for name in [name for name, kind in arguments.items() if kind == "Constants"]:
        del arguments[name]
        node = _Constants(name).visit(node)
    *statements, last = node.body
    if not isinstance(last, ast.Return) or last.value is None:
        raise Untranslatable(last, "expected `return` at the end")
    return Function(node.name, arguments, _body(statements), last.value)


def _body(statements: Sequence[ast.stmt]) -> Body:
    result: list[Assignment | Choice] = []
    for statement in statements:
        if isinstance(statement, ast.If) and isinstance(statement.test, ast.Name):
            then, otherwise = _body(statement.body), _body(statement.orelse)
            result.append(Choice(statement.test.id, then, otherwise))
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            result.append(Assignment(statement.targets[0].id, statement.value))
        elif not isinstance(statement, ast.Expr):
            raise Untranslatable(statement, "cannot translate")
    return tuple(result)


def _family(name: str, functions: Mapping[str, Function]) -> Family:
    constants, update = functions[name + CONSTANTS], functions[name]
    made = constants.result
    if not isinstance(made, ast.Dict):
        raise Untranslatable(made, "expected a dictionary of scalars and flags")
    entries = {
        ast.literal_eval(key): value
        for key, value in zip(made.keys, made.values, strict=True)
        if key is not None
    }
    functions_of = [own for own in (functions.get(name + REDUCE_NORMS), update) if own]
    statements = (statement for own in functions_of for statement in walk(own.body))
    tested = {statement.flag for statement in statements if isinstance(statement, Choice)}
    if not tested <= {*entries}:
        raise Untranslatable(made, f"expected the flags {', '.join(sorted(tested))}")
    shared = (
        tuple(key for key, kind in update.arguments.items() if kind in ("Value", "Magnitude")),
        frozenset(key for key, kind in update.arguments.items() if kind == "Magnitude"),
        tuple(key for key in entries if key not in tested),
        tuple(key for key in entries if key in tested),
    )
    rules = [Rule(own.name, *shared, own.body, _results(own, update)) for own in functions_of]
    return Family(
        name,
        {key: kind for key, kind in constants.arguments.items() if key != "step"},
        "step" in constants.arguments,
        entries,
        tuple(rules),
        functions.get(name + TRUST_RATIO),
    )


def _results(function: Function, update: Function) -> tuple[ast.expr, ...]:
    """What a function of an optimizer whose update is `update` returns."""
    if not function.arguments.items() <= update.arguments.items():
        raise Untranslatable(
            function.result, f"expected {function.name} to take operands of {update.name}"
        )
    if not isinstance(function.result, ast.Tuple):
        raise Untranslatable(function.result, "expected a tuple")
    return tuple(function.result.elts)


def _names(value: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
