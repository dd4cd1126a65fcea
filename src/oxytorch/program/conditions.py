"""What sizes a program serves: conditions on the sizes of its inputs, as data.

A condition is a list of an operator and its operands, as it is written to a file:
`["==", ["%", ["size", 0, 1], 8], 0]` says that dimension 1 of input 0 is a multiple of 8. An input
that is a number itself is `["value", 3]`. Inputs are counted without their structure.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Condition = Any
"""An int, or a list as above."""


def _all(*parts: Any) -> bool:
    return all(parts)


def _any(*parts: Any) -> bool:
    return any(parts)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "min": min,
    "max": max,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "not": operator.not_,
    "and": _all,
    "or": _any,
}
_SIGNS: dict[type[ast.AST], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.And: "and",
    ast.Or: "or",
}
_DEEPEST = 50
_LARGEST = 1 << 62


def parse(text: str, names: Mapping[str, Condition]) -> Condition:
    """The condition that a line of Python says.

    names: what stands for the sizes: `{"s0": ["size", 0, 0]}`. Raises ValueError where the line
    holds anything else than arithmetic and comparisons of them and of integers.
    """
    return _parsed(ast.parse(text.replace("\n", " "), mode="eval").body, names)


def _parsed(node: ast.expr, names: Mapping[str, Condition]) -> Condition:
    text = ast.unparse(node)
    if text in names:
        return names[text]
    if isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        return int(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
        return [_SIGNS[type(node.op)], _parsed(node.left, names), _parsed(node.right, names)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _power(node, names)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return ["-", 0, _parsed(node.operand, names)]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ["not", _parsed(node.operand, names)]
    if isinstance(node, ast.BoolOp):
        return [_SIGNS[type(node.op)], *(_parsed(value, names) for value in node.values)]
    if isinstance(node, ast.Compare):
        values = [_parsed(value, names) for value in (node.left, *node.comparators)]
        if all(type(op) in _SIGNS for op in node.ops):
            pairs = zip(node.ops, values, values[1:], strict=False)
            parts = [[_SIGNS[type(op)], left, right] for op, left, right in pairs]
            return parts[0] if len(parts) == 1 else ["and", *parts]
    if isinstance(node, ast.Call) and not node.keywords:
        name = ast.unparse(node.func)
        if name in ("min", "max", "Min", "Max"):
            return [name.lower(), *(_parsed(value, names) for value in node.args)]
    raise ValueError(f"expected arithmetic on sizes of inputs, got {text}")


def _power(node: ast.BinOp, names: Mapping[str, Condition]) -> Condition:
    exponent = node.right
    if not isinstance(exponent, ast.Constant) or exponent.value not in (2, 3, 4):
        raise ValueError(f"expected arithmetic on sizes of inputs, got {ast.unparse(node)}")
    factors = [_parsed(node.left, names)] * exponent.value  # type: ignore[operator]
    product = factors[0]
    for factor in factors[1:]:
        product = ["*", product, factor]
    return product


def check(condition: Any, dims: Sequence[int | None], depth: int = 0) -> None:
    """Raise ValueError if data from a file is no condition.

    dims: of each input, the number of dimensions, None for a number.
    """
    if type(condition) is int:
        if abs(condition) > _LARGEST:
            raise ValueError(f"expected a smaller number, got {condition}")
        return
    if not isinstance(condition, list) or len(condition) < 2 or depth > _DEEPEST:
        raise ValueError(f"expected a condition, got {str(condition)[:100]}")
    name, *operands = condition
    if name in ("size", "value"):
        _check_place(name, operands, dims)
        return
    if not isinstance(name, str) or name not in _FUNCTIONS:
        raise ValueError(f"expected an operator of sizes, got {str(name)[:100]!r}")
    if name not in ("and", "or", "min", "max") and len(operands) != (1 if name == "not" else 2):
        raise ValueError(f"expected two operands of {name}, got {len(operands)}")
    for operand in operands:
        check(operand, dims, depth + 1)


def _check_place(name: str, operands: Sequence[Any], dims: Sequence[int | None]) -> None:
    is_whole = all(type(each) is int and each >= 0 for each in operands)
    if not is_whole or len(operands) != (2 if name == "size" else 1) or operands[0] >= len(dims):
        raise ValueError(f"expected the place of an input, got {operands}")
    found = dims[operands[0]]
    if (found is None) != (name == "value") or (found is not None and operands[1] >= found):
        raise ValueError(f"expected the place of a size, got {operands}")


def holds(condition: Condition, inputs: Sequence[Any]) -> bool:
    """Whether a condition holds. inputs: the shape of each tensor, and numbers as they are."""
    try:
        return bool(value(condition, inputs))
    except ZeroDivisionError:
        return False


def value(condition: Condition, inputs: Sequence[Any]) -> Any:
    """What a condition, or an operand of one, comes to. inputs: as in `holds`."""
    if not isinstance(condition, list):
        return condition
    name, *operands = condition
    if name == "size":
        return inputs[operands[0]][operands[1]]
    if name == "value":
        return inputs[operands[0]]
    return _FUNCTIONS[name](*(value(operand, inputs) for operand in operands))


def text(condition: Condition, names: Sequence[str]) -> str:
    """The condition as Python, for messages. names: those of the inputs."""
    if not isinstance(condition, list):
        return str(condition)
    name, *operands = condition
    if name == "size":
        return f"{names[operands[0]]}.shape[{operands[1]}]"
    if name == "value":
        return names[operands[0]]
    words = [text(operand, names) for operand in operands]
    if name in ("min", "max"):
        return f"{name}({', '.join(words)})"
    if name == "not":
        return f"not ({words[0]})"
    inner = [
        f"({w})" if isinstance(o, list) and o[0] in _FUNCTIONS and o[0] not in ("min", "max") else w
        for w, o in zip(words, operands, strict=True)
    ]
    return f" {name} ".join(inner)
