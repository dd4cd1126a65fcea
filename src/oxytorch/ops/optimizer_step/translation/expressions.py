"""Writes the expressions and statements of rules.py in the words of a target."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .parsing import Assignment, Body, Function, Untranslatable

OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}


@dataclass(frozen=True)
class Dialect:
    """How a target writes expressions, over elements or over the float64 of constants.

    over_elements: `where` chooses there, and Python's own choices, `and`, `or` and powers only in
        constants.
    literal: writes a number.
    calls: names of functions, of `**` and of `**0.5` too.
    value: the type of a local variable.
    operators: functions that stand for operators; others are written as they are.
    choice: the two values of which a condition chooses one.
    both, either: of conditions.
    division_by_scalar: because dividing by a scalar may be cheaper and as exact, with
        `<name>_inverse` at hand if keeps_inverses.
    statements: of an assignment, and what stands before the first branch of a choice by a flag,
        between the branches and at the end.
    """

    over_elements: bool
    literal: Callable[[float], str]
    calls: Mapping[str, str]
    value: str = ""
    operators: Mapping[str, str] = field(default_factory=dict)
    choice: str = "({} ? {} : {})"
    both: str = " && "
    either: str = " || "
    division_by_scalar: str = ""
    keeps_inverses: bool = False
    statements: tuple[str, str, str, str] = ("{} = {};", "if ({}) {{", "}} else {{", "}}")


@dataclass
class Helper:
    """A function that rules call: its arguments, and those by whose inverse it multiplies."""

    arguments: list[str]
    divisors: list[str] = field(default_factory=list)


class Expression:
    """Writes expressions.

    used: names that occur.
    divisors: scalars that are divided by and need an inverse.
    """

    def __init__(
        self, dialect: Dialect, helpers: Mapping[str, Helper], scalars: Sequence[str] = ()
    ) -> None:
        self.dialect = dialect
        self.helpers = helpers
        self.scalars = scalars
        self.used: set[str] = set()
        self.divisors: list[str] = []

    def __call__(self, node: ast.expr) -> str:
        """The text of an expression, in parentheses where it is compound."""
        if isinstance(node, ast.Name):
            self.used.add(node.id)
            return node.id
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return self.dialect.literal(node.value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            negate = self.dialect.operators.get("negate")
            operand = self(node.operand)
            return f"{negate}({operand})" if negate else f"(-{operand})"
        if isinstance(node, ast.BinOp) and self._is_division_by_scalar(node):
            divisor = self(node.right)
            self._divide_by(divisor)
            return self.dialect.division_by_scalar.format(self(node.left), divisor)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return self._operation(OPERATORS[type(node.op)], node.left, node.right)
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OPERATORS:
            return self._operation(OPERATORS[type(node.ops[0])], node.left, node.comparators[0])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            return self._call(node, node.func.id)
        if not self.dialect.over_elements:
            return self._of_constants(node)
        raise Untranslatable(node, "cannot translate")

    def _of_constants(self, node: ast.expr) -> str:
        """What only constants may have."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return f"(!{self(node.operand)})"
        if isinstance(node, ast.IfExp):
            return self.dialect.choice.format(self(node.test), self(node.body), self(node.orelse))
        if isinstance(node, ast.BoolOp):
            sign = self.dialect.both if isinstance(node.op, ast.And) else self.dialect.either
            return f"({sign.join(self(value) for value in node.values)})"
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            return self._power(node.left, node.right)
        raise Untranslatable(node, "cannot translate")

    def _is_division_by_scalar(self, node: ast.BinOp) -> bool:
        return (
            self.dialect.division_by_scalar != ""
            and isinstance(node.op, ast.Div)
            and isinstance(node.right, ast.Name)
            and node.right.id in self.scalars
        )

    def _operation(self, sign: str, left: ast.expr, right: ast.expr) -> str:
        function = self.dialect.operators.get(sign)
        if function:
            return f"{function}({self(left)}, {self(right)})"
        return f"({self(left)} {sign} {self(right)})"

    def _power(self, base: ast.expr, exponent: ast.expr) -> str:
        root = self.dialect.calls.get("**0.5")
        if root and isinstance(exponent, ast.Constant) and exponent.value == 0.5:
            return f"{root}({self(base)})"
        return f"{self.dialect.calls['**']}({self(base)}, {self(exponent)})"

    def _divide_by(self, scalar: str) -> None:
        if self.dialect.keeps_inverses and scalar not in self.divisors:
            self.divisors.append(scalar)

    def _call(self, node: ast.Call, name: str) -> str:
        arguments = [self(argument) for argument in node.args]
        if name == "where" and self.dialect.over_elements:
            return self.dialect.choice.format(*arguments)
        if name in self.helpers:
            helper = self.helpers[name]
            for divisor in helper.divisors:
                scalar = arguments[helper.arguments.index(divisor)]
                if scalar not in self.scalars:
                    raise Untranslatable(node, f"expected a scalar as {divisor}")
                self._divide_by(scalar)
                arguments.append(f"{scalar}_inverse")
            return f"{name}({', '.join(arguments)})"
        if name not in self.dialect.calls:
            raise Untranslatable(node, "cannot call")
        return f"{self.dialect.calls[name]}({', '.join(arguments)})"


def statements(body: Body, expression: Expression, indent: str) -> Iterator[str]:
    """The lines of statements whose variables are declared."""
    assign, begin, between, end = expression.dialect.statements
    for statement in body:
        if isinstance(statement, Assignment):
            value = expression(statement.value)
            yield indent + assign.format(statement.target, value)
            continue
        yield indent + begin.format(statement.flag)
        yield from statements(statement.then, expression, indent + "  ")
        if statement.otherwise:
            yield indent + between.format()
            yield from statements(statement.otherwise, expression, indent + "  ")
        if end:
            yield indent + end.format()


def inline_function(
    function: Function, dialect: Dialect, known: dict[str, Helper], prefix: str
) -> str:
    """A function that rules call, in C: known to those that follow, which may call it too."""
    scalars = [name for name, kind in function.arguments.items() if kind == "Scalar"]
    expression = Expression(dialect, known, scalars)
    lines = []
    for statement in function.body:
        if not isinstance(statement, Assignment):
            raise Untranslatable(function.result, f"expected no choices in {function.name}")
        value = expression(statement.value)
        lines.append(f"  const {dialect.value} {statement.target} = {value};")
    lines.append(f"  return {expression(function.result)};")
    known[function.name] = Helper([*function.arguments], expression.divisors)
    names = [*function.arguments, *(f"{name}_inverse" for name in expression.divisors)]
    arguments = ", ".join(f"{dialect.value} {name}" for name in names)
    head = f"{prefix} {dialect.value} {function.name}({arguments}) {{"
    return "\n".join([head, *lines, "}", ""])
