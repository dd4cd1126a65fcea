"""The restricted Python of rules.py, expression by expression, in the words of a target."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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

    value: the type of a local variable. literal: a number, in place of {}. calls: names of
    functions. Operators are written by the functions of `operators`; those that it lacks are
    written as they are. divides_by_inverse: scalars that are divided by have `<name>_inverse` at
    hand, because dividing by them is then cheaper and as exact.
    """

    over_elements: bool
    value: str
    literal: str
    calls: Mapping[str, str]
    operators: Mapping[str, str] = field(default_factory=dict)
    divides_by_inverse: bool = False


class Untranslatable(Exception):
    """The rule uses Python beyond the restricted language."""

    def __init__(self, node: ast.AST, why: str) -> None:
        super().__init__(f"rules.py:{getattr(node, 'lineno', '?')}: {why}: {ast.unparse(node)}")


@dataclass
class Helper:
    """A function that rules call: its arguments, and those by which it divides."""

    arguments: list[str]
    divisors: list[str] = field(default_factory=list)


class Expression:
    """Translates expressions.

    used: names that occur. divisors: scalars that are divided by and need an inverse.
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
        over_elements = self.dialect.over_elements
        if isinstance(node, ast.Name):
            self.used.add(node.id)
            return node.id
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return self.dialect.literal.format(repr(float(node.value)))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            negate = self.dialect.operators.get("negate")
            operand = self(node.operand)
            return f"{negate}({operand})" if negate else f"(-{operand})"
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return f"(!{self(node.operand)})"
        if isinstance(node, ast.IfExp) and not over_elements:
            return f"({self(node.test)} ? {self(node.body)} : {self(node.orelse)})"
        if isinstance(node, ast.BoolOp) and not over_elements:
            sign = " && " if isinstance(node.op, ast.And) else " || "
            return f"({sign.join(self(value) for value in node.values)})"
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and not over_elements:
            return self._power(node.left, node.right)
        if (
            self.dialect.divides_by_inverse
            and isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.Div)
            and isinstance(node.right, ast.Name)
            and node.right.id in self.scalars
        ):
            divisor = self(node.right)
            self._divide_by(divisor)
            return f"divide({self(node.left)}, {divisor}, {divisor}_inverse)"
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return self._operation(OPERATORS[type(node.op)], node.left, node.right)
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OPERATORS:
            return self._operation(OPERATORS[type(node.ops[0])], node.left, node.comparators[0])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            return self._call(node, node.func.id)
        raise Untranslatable(node, "cannot translate")

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
        if scalar not in self.divisors:
            self.divisors.append(scalar)

    def _call(self, node: ast.Call, name: str) -> str:
        arguments = [self(argument) for argument in node.args]
        if name == "where" and self.dialect.over_elements:
            condition, yes, no = arguments
            return f"({condition} ? {yes} : {no})"
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
