"""The functions of rules.py as functions of Triton.

They are the same text with the operators that Triton lacks, or rounds in another way, written as
calls of triton_arithmetic.py.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Mapping, Sequence
from typing import Any

import triton

from . import rule_text, triton_arithmetic

_FILE = "<rules.py for Triton>"
_CALLS = {"max": "larger", "min": "smaller"}


class _Elementwise(ast.NodeTransformer):
    """Divisions: Triton's `/` is not correctly rounded, and by a scalar there is a cheaper one."""

    def __init__(self, scalars: Sequence[str]) -> None:
        self.scalars = scalars

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Div):
            return node
        is_scalar = isinstance(node.right, ast.Name) and node.right.id in self.scalars
        name = "divide_by_scalar" if is_scalar else "divide"
        return ast.Call(ast.Name(name), [node.left, node.right], [])


class _Wide(ast.NodeTransformer):
    """Expressions over float64: powers, choices and what a rule returns as a dictionary.

    scalars: the names of the results that are kept, in their order.
    """

    def __init__(self, scalars: Sequence[str]) -> None:
        self.scalars = scalars

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Pow):
            return node
        if isinstance(node.right, ast.Constant) and node.right.value == 0.5:
            return ast.Call(ast.Name("square_root"), [node.left], [])
        return ast.Call(ast.Name("power"), [node.left, node.right], [])

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        return ast.Call(ast.Name("where"), [node.test, node.body, node.orelse], [])

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        sign = ast.BitAnd() if isinstance(node.op, ast.And) else ast.BitOr()
        return functools.reduce(lambda x, y: ast.BinOp(x, sign, y), node.values)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name):
            node.func.id = _CALLS.get(node.func.id, node.func.id)
        return node

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        values = {ast.literal_eval(k): v for k, v in zip(node.keys, node.values, strict=True) if k}
        return ast.Tuple([self.visit(values[name]) for name in self.scalars])


def _translated(function: ast.FunctionDef) -> str:
    """The function's text for Triton, without types and documentation."""
    name = function.name
    kinds = [(a.arg, ast.unparse(a.annotation or a)) for a in function.args.args]
    families = rule_text.families()
    change: ast.NodeTransformer
    if name.endswith(rule_text.CONSTANTS):
        change = _Wide(families[name.removesuffix(rule_text.CONSTANTS)].update.scalars)
    elif name.endswith(rule_text.TRUST):
        change = _Wide(())
    else:
        change = _Elementwise([argument for argument, kind in kinds if kind == "Scalar"])
    body = [s for s in function.body if not isinstance(s, ast.Expr)]
    copy = ast.parse(f"def {name}({', '.join(argument for argument, _ in kinds)}): pass").body[0]
    assert isinstance(copy, ast.FunctionDef)
    copy.body = [change.visit(s) for s in ast.parse(ast.unparse(ast.Module(body, []))).body]
    return ast.unparse(ast.fix_missing_locations(copy)) + "\n"


@functools.cache
def functions() -> Mapping[str, Any]:
    """Every function of rules.py by name, made by `triton.jit`.

    `<rule>_constants` return a tuple of the scalars in the order of the rule's arguments.
    """
    text = "\n".join(
        _translated(function)
        for name, function in rule_text.functions().items()
        if name not in rule_text.OWN
    )
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
