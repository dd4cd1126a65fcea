"""Reads the functions of rules.py: what each variant of a rule reads, computes and stores.

A variant is one setting of a rule's flags; settings with the same code share one.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .language import Dialect, Expression, Helper, Untranslatable

CONSTANTS, MEASURE, TRUST = "_constants", "_measure", "_trust"
OWN = {"sqrt", "where", "maximum", "fused_multiply_add"}
"""Functions of rules.py that every target has its own of."""


@dataclass
class Variant:
    """A rule's code under one setting of its flags."""

    lines: list[str] = field(default_factory=list)
    reads: set[str] = field(default_factory=set)
    writes: list[str] = field(default_factory=list)
    sums: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    divisors: list[str] = field(default_factory=list)


class Rule:
    """A function of rules.py over operands, scalars and flags."""

    def __init__(
        self, function: ast.FunctionDef, dialect: Dialect, helpers: Mapping[str, Helper]
    ) -> None:
        self.name = function.name
        self.function = function
        self.dialect = dialect
        self.helpers = helpers
        kinds = [(a.arg, ast.unparse(a.annotation or a)) for a in function.args.args]
        self.operands = [name for name, kind in kinds if kind in ("Value", "Magnitude")]
        self.magnitudes = {name for name, kind in kinds if kind == "Magnitude"}
        self.scalars = [name for name, kind in kinds if kind == "Scalar"]
        self.flags = [name for name, kind in kinds if kind == "Flag"]
        self.variants: list[Variant] = []
        self.by_flags: list[int] = []
        for setting in itertools.product((False, True), repeat=len(self.flags)):
            # The first flag is the lowest bit of the index into by_flags.
            variant = self._variant(dict(zip(reversed(self.flags), setting, strict=True)))
            same = [i for i, other in enumerate(self.variants) if other == variant]
            if not same:
                self.variants.append(variant)
            self.by_flags.append(same[0] if same else len(self.variants) - 1)

    def _variant(self, flags: dict[str, bool]) -> Variant:
        variant = Variant()
        assigned: set[str] = set()

        def expression(node: ast.expr) -> str:
            translate = Expression(self.dialect, self.helpers, self.scalars)
            text = translate(node)
            variant.divisors += [d for d in translate.divisors if d not in variant.divisors]
            variant.used |= translate.used
            variant.reads |= {n for n in translate.used if n in self.operands} - assigned
            return text

        def walk(statements: list[ast.stmt]) -> None:
            for statement in statements:
                if isinstance(statement, ast.If) and isinstance(statement.test, ast.Name):
                    walk(statement.body if flags[statement.test.id] else statement.orelse)
                elif isinstance(statement, ast.Assign) and isinstance(
                    statement.targets[0], ast.Name
                ):
                    name = statement.targets[0].id
                    text = expression(statement.value)
                    declared = name in assigned or name in variant.reads
                    declaration = "" if declared else f"{self.dialect.value} "
                    variant.lines.append(f"{declaration}{name} = {text};")
                    assigned.add(name)
                elif isinstance(statement, ast.Return) and isinstance(statement.value, ast.Tuple):
                    for value in statement.value.elts:
                        if isinstance(value, ast.Name) and value.id in self.operands:
                            if value.id in assigned:
                                variant.writes.append(value.id)
                        else:
                            variant.sums.append(expression(value))
                elif not isinstance(statement, ast.Expr):
                    raise Untranslatable(statement, "cannot translate")

        walk(self.function.body)
        return variant


@dataclass
class Rules:
    """All functions of rules.py.

    names: of the rules, in order. functions: those of the rules, by name. helpers: functions that
    rules call, in order.
    """

    names: list[str]
    functions: dict[str, ast.FunctionDef]
    helpers: list[ast.FunctionDef]


def read(source: str) -> Rules:
    """The functions of the text of rules.py."""
    found = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    by_name = {function.name: function for function in found}
    names = [n.removesuffix(CONSTANTS) for n in by_name if n.endswith(CONSTANTS)]
    suffixes = ("", CONSTANTS, MEASURE, TRUST)
    main = {name + suffix for name in names for suffix in suffixes} & {*by_name}
    helpers = [node for name, node in by_name.items() if name not in main | OWN]
    return Rules(names, {name: by_name[name] for name in main}, helpers)


def helper_body(
    function: ast.FunctionDef, dialect: Dialect, known: Mapping[str, Helper]
) -> tuple[Helper, list[str]]:
    """A helper of assignments and one `return`: how it is called, and its statements."""
    kinds = {a.arg: ast.unparse(a.annotation or a) for a in function.args.args}
    scalars = [name for name, kind in kinds.items() if kind == "Scalar"]
    translate = Expression(dialect, known, scalars)
    lines = []
    for statement in function.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            lines.append(f"  const {dialect.value} {name} = {translate(statement.value)};")
        elif isinstance(statement, ast.Return) and statement.value is not None:
            lines.append(f"  return {translate(statement.value)};")
    return Helper(list(kinds), translate.divisors), lines


def arguments_of(function: ast.FunctionDef) -> list[tuple[str, str]]:
    """Names of arguments with their types as written."""
    return [(a.arg, ast.unparse(a.annotation or a)) for a in function.args.args]


def result_of(function: ast.FunctionDef) -> ast.expr:
    """What a function of one `return` returns."""
    value = next(s.value for s in function.body if isinstance(s, ast.Return))
    assert value is not None
    return value


def constant_texts(
    function: ast.FunctionDef, dialect: Dialect, rules: Sequence[Rule]
) -> dict[str, str]:
    """The entries of what a `_constants` function returns.

    Raises Untranslatable unless they are the scalars and flags of all `rules`.
    """
    result = result_of(function)
    assert isinstance(result, ast.Dict)
    translate = Expression(dialect, {})
    texts = {
        ast.literal_eval(key): translate(value)
        for key, value in zip(result.keys, result.values, strict=True)
        if key is not None
    }
    for rule in rules:
        if {*rule.scalars, *rule.flags} != {*texts} or (rule.scalars, rule.flags) != (
            rules[0].scalars,
            rules[0].flags,
        ):
            raise Untranslatable(function, f"scalars and flags differ from those of {rule.name}")
    return texts
