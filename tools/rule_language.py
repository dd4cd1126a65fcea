"""The restricted Python of src/oxytorch/optim/rules.py, expression by expression, as C++."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field

CALLS = {
    "sqrt": "square_root",
    "maximum": "larger",
    "fused_multiply_add": "fused_multiply_add",
}
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
    """Translates expressions: over vectors, or over float64 for the constants.

    used: names that occur. divisors: scalars that are divided by, for which C++ has
    `<name>_inverse` at hand, because dividing by them is then cheaper and as exact.
    """

    def __init__(
        self,
        helpers: dict[str, Helper],
        over_vectors: bool,
        scalars: Sequence[str] = (),
    ) -> None:
        self.helpers = helpers
        self.over_vectors = over_vectors
        self.scalars = scalars
        self.used: set[str] = set()
        self.divisors: list[str] = []

    def __call__(self, node: ast.expr) -> str:
        """The C++ text of an expression, in parentheses where it is compound."""
        if isinstance(node, ast.Name):
            self.used.add(node.id)
            return node.id
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            value = repr(float(node.value))
            return f"splat({value}f)" if self.over_vectors else value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return f"(-{self(node.operand)})"
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return f"(!{self(node.operand)})"
        if isinstance(node, ast.IfExp) and not self.over_vectors:
            return f"({self(node.test)} ? {self(node.body)} : {self(node.orelse)})"
        if isinstance(node, ast.BoolOp) and not self.over_vectors:
            sign = " && " if isinstance(node.op, ast.And) else " || "
            return f"({sign.join(self(value) for value in node.values)})"
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and not self.over_vectors:
            return f"std::pow({self(node.left)}, {self(node.right)})"
        if (
            isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.Div)
            and isinstance(node.right, ast.Name)
            and node.right.id in self.scalars
        ):
            divisor = self(node.right)
            self._divide_by(divisor)
            return f"divide({self(node.left)}, {divisor}, {divisor}_inverse)"
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return f"({self(node.left)} {OPERATORS[type(node.op)]} {self(node.right)})"
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OPERATORS:
            sign = OPERATORS[type(node.ops[0])]
            return f"({self(node.left)} {sign} {self(node.comparators[0])})"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            return self._call(node, node.func.id)
        raise Untranslatable(node, "cannot translate")

    def _divide_by(self, scalar: str) -> None:
        if scalar not in self.divisors:
            self.divisors.append(scalar)

    def _call(self, node: ast.Call, name: str) -> str:
        arguments = [self(argument) for argument in node.args]
        if name == "where" and self.over_vectors:
            condition, yes, no = arguments
            return f"({condition} ? {yes} : {no})"
        if name in ("min", "max") and not self.over_vectors:
            return f"std::{name}<double>({', '.join(arguments)})"
        if not self.over_vectors or (name not in CALLS and name not in self.helpers):
            raise Untranslatable(node, "cannot call")
        if name in self.helpers:
            helper = self.helpers[name]
            for divisor in helper.divisors:
                scalar = arguments[helper.arguments.index(divisor)]
                if scalar not in self.scalars:
                    raise Untranslatable(node, f"expected a scalar as {divisor}")
                self._divide_by(scalar)
                arguments.append(f"{scalar}_inverse")
        return f"{CALLS.get(name, name)}({', '.join(arguments)})"
