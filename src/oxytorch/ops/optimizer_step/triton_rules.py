"""The functions of rules.py as functions of Triton.

They are the same text with the operators that Triton lacks, or rounds in another way, written as
calls of triton_arithmetic.py.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import triton

from . import parsed_rules, triton_arithmetic
from .translation.expressions import Dialect, Expression, Helper, statements
from .translation.parsing import CONSTANTS, OWN, Body, Family

_FILE = "<rules.py for Triton>"

ELEMENTS = Dialect(
    over_elements=True,
    literal=repr,
    calls={name: name for name in OWN},
    # Triton's `/` is not correctly rounded, and by a scalar there is a cheaper division.
    operators={"/": "divide"},
    choice="where({}, {}, {})",
    division_by_scalar="divide_by_scalar({}, {})",
    statements=("{} = {}", "if {}:", "else:", ""),
)
NUMBERS = Dialect(
    over_elements=False,
    literal=repr,
    calls={"**": "power", "**0.5": "square_root", "min": "smaller", "max": "larger"},
    choice="where({}, {}, {})",
    both=" & ",
    either=" | ",
)


def _function(
    name: str, arguments: Iterable[str], body: Body, results: str, expression: Expression
) -> str:
    head = f"def {name}({', '.join(arguments)}):"
    lines = [head, *statements(body, expression, "  "), f"  return {results}"]
    # As Python writes it, without the parentheses that nothing needs.
    return ast.unparse(ast.parse("\n".join(lines))) + "\n"


def _tuple(results: Sequence[ast.expr], expression: Expression) -> str:
    return f"({''.join(f'{expression(value)}, ' for value in results)})"


def texts() -> Iterator[str]:
    """Every function of rules.py but those that triton_arithmetic.py has, as text for Triton."""
    rules = parsed_rules.rules()
    helpers: dict[str, Helper] = {}
    for own in rules.helpers:
        scalars = [name for name, kind in own.arguments.items() if kind == "Scalar"]
        expression = Expression(ELEMENTS, helpers, scalars)
        helpers[own.name] = Helper([*own.arguments])
        yield _function(own.name, own.arguments, own.body, expression(own.result), expression)
    for family in rules.families.values():
        yield _constants(family)
        for rule in family.rules:
            expression = Expression(ELEMENTS, helpers, rule.scalars)
            arguments = (*rule.operands, *rule.scalars, *rule.flags)
            results = _tuple(rule.results, expression)
            yield _function(rule.name, arguments, rule.body, results, expression)
        if family.trust_ratio:
            own, expression = family.trust_ratio, Expression(NUMBERS, {})
            sums = (name for name in own.arguments if name not in family.hyper)
            arguments = (*sums, *family.hyper)
            yield _function(own.name, arguments, own.body, expression(own.result), expression)


def _constants(family: Family) -> str:
    expression = Expression(NUMBERS, {})
    scalars = [family.constants[name] for name in family.update.scalars]
    arguments = [*(["step"] if family.has_step else []), *family.hyper]
    results = _tuple(scalars, expression)
    return _function(family.name + CONSTANTS, arguments, (), results, expression)


@functools.cache
def functions() -> Mapping[str, Any]:
    """Every function of rules.py by name, made by `triton.jit`.

    `<rule>_constants` return a tuple of the scalars in the order of the rule's arguments.
    """
    text = "\n".join(texts())
    # Triton reads the source of the functions that it compiles.
    linecache.cache[_FILE] = (len(text), None, text.splitlines(keepends=True), _FILE)
    namespace: dict[str, Any] = {**vars(triton_arithmetic), "__name__": __name__}
    before = set(namespace)
    exec(compile(text, _FILE, "exec"), namespace)
    made = {
        name: triton.jit(namespace[name]) for name in namespace.keys() - before - {"__builtins__"}
    }
    namespace.update(made)
    return made
