"""The GPU kernels of a step as OpenCL C, for Intel GPUs.

Each source is one kernel: settings, the files beside this one, and what the translator makes of
rules.py. Tables and arguments are those of triton.py. Work groups of 256 items do a block of
1024 elements, four to an item.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from pathlib import Path

from ....gpu.kernel import OpenClSource, Signature
from .. import gpu, layout, rule_text
from ..translation.language import Dialect, Expression, Helper, Untranslatable
from ..translation.reading import arguments_of, helper_body, result_of

ELEMENTS = Dialect(
    over_elements=True,
    value="value",
    literal="(value)({}f)",
    calls={"sqrt": "sqrt", "maximum": "larger", "fused_multiply_add": "fma"},
)
NUMBERS = Dialect(
    over_elements=False,
    value="number",
    literal="number_of({}f)",
    calls={"**": "power", "**0.5": "root", "min": "smaller_number", "max": "larger_number"},
    operators={
        "+": "add",
        "-": "subtract",
        "*": "multiply",
        "/": "quotient",
        "negate": "negated",
        "<": "is_less",
        ">": "is_greater",
    },
)

OPTIONS = ("-cl-std=CL1.2", "-cl-fp32-correctly-rounded-divide-sqrt")

STEP_GROUP = layout.BLOCK // 4
"""Items of a block: four elements each."""


def source(kernel: str, signature: Signature) -> OpenClSource:
    """The source of a signature of `prepare`, `measure`, `trust` or `update`.

    It has float64 arithmetic where the compiler says that the chip has it (cl_khr_fp64), and pairs
    of float32 elsewhere; WITHOUT_FLOAT64 asks for pairs.
    """
    family = rule_text.families()[str(signature.options["rule"])]
    if kernel == "prepare":
        settings = {"GROUP": gpu.PREPARE_LANES, "STATES": len(family.update.operands) - 2}
        text = assemble(settings, "tables.cl", _constants(family), "prepare.cl")
        return OpenClSource(text, "prepare", gpu.PREPARE_ARGUMENTS, gpu.PREPARE_LANES, OPTIONS)
    if kernel == "trust":
        step_size = family.update.scalars.index("step_size")
        settings = {"GROUP": STEP_GROUP, "STEP_SIZE": step_size}
        text = assemble(settings, "tables.cl", _trust(family), "trust.cl")
        return OpenClSource(text, "trust", gpu.TRUST_ARGUMENTS, STEP_GROUP, OPTIONS)
    rule = family.measure if kernel == "measure" else family.update
    if kernel not in ("measure", "update") or rule is None:
        raise ValueError(f"opencl: {family.name} has no kernel {kernel!r}")
    generated = (helpers()[1], _sweep(kernel, rule, signature))
    text = assemble({"GROUP": STEP_GROUP}, "arithmetic.cl", "tables.cl", "formats.cl", *generated)
    return OpenClSource(text, kernel, gpu.STEP_ARGUMENTS, STEP_GROUP, OPTIONS)


def assemble(settings: Mapping[str, int], *pieces: str) -> str:
    """The source of a kernel: settings, numbers, and `pieces`: names of files here, or texts."""
    shared = {
        "TENSOR_FIELDS": layout.TENSOR_FIELDS,
        "SCALAR_FIELDS": layout.SCALAR_FIELDS,
        "KEY_FIELDS": layout.KEY_FIELDS,
        "STEP": layout.STEP,
        "COUNT": layout.COUNT,
        "STREAM": layout.STREAM,
        "FIRST_BLOCK": layout.FIRST_BLOCK,
        "HEIGHT": layout.HEIGHT,
        "WIDTH_FIELD": layout.WIDTH,
        "FACTOR": layout.FACTOR,
        "SUMS": layout.SUMS,
        "BLOCK": layout.BLOCK,
        "CODE_BLOCK": layout.CODE_BLOCK,
        "HYPER": layout.HYPER,
        "FORMAT_BITS": layout.FORMAT_BITS,
        "STATES_LIMIT": layout.OPERANDS - 2,
    }
    defines = [f"#define {name} {value}" for name, value in {**shared, **settings}.items()]
    numbers = [
        "#pragma OPENCL FP_CONTRACT OFF",
        "#if defined(cl_khr_fp64) && !defined(WITHOUT_FLOAT64)",
        _file("float64.cl"),
        "#else",
        _file("pairs.cl"),
        "#endif",
        _file("numbers.cl"),
    ]
    own = [_file(piece) if piece.endswith(".cl") else piece for piece in pieces]
    return "\n".join([*defines, *numbers, *own])


@functools.cache
def _file(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


@functools.cache
def helpers() -> tuple[Mapping[str, Helper], str]:
    """The functions that rules call: how they are called, and their text."""
    known: dict[str, Helper] = {}
    texts = []
    rules = {
        name + suffix
        for name in rule_text.families()
        for suffix in ("", rule_text.CONSTANTS, rule_text.MEASURE, rule_text.TRUST)
    }
    for name, function in rule_text.functions().items():
        if name in rules | rule_text.OWN:
            continue
        known[name], lines = helper_body(function, ELEMENTS, known)
        arguments = ", ".join(f"value {argument}" for argument in known[name].arguments)
        texts.append("\n".join([f"static value {name}({arguments}) {{", *lines, "}", ""]))
    return known, "\n".join(texts)


def _constants(family: rule_text.Family) -> str:
    """The function that writes the scalars of a tensor."""
    function = rule_text.functions()[family.name + rule_text.CONSTANTS]
    result = result_of(function)
    assert isinstance(result, ast.Dict)
    lines = [
        "static void write_constants(number step, const number* hyper, global float* target) {"
    ]
    lines += [f"  const number {name} = hyper[{i}];" for i, name in enumerate(family.hyper)]
    entries = {
        ast.literal_eval(key): value
        for key, value in zip(result.keys, result.values, strict=True)
        if key is not None
    }
    for position, name in enumerate(family.update.scalars):
        text = Expression(NUMBERS, {})(entries[name])
        lines.append(f"  target[{position}] = float_of({text});")
    return "\n".join([*lines, "}", ""])


def _trust(family: rule_text.Family) -> str:
    """The function that turns sums into a factor of the step size."""
    function = rule_text.functions()[family.name + rule_text.TRUST]
    first, second, *_ = arguments_of(function)
    lines = [
        f"static number trust_factor(number {first[0]}, number {second[0]}, number count, "
        "const number* hyper) {"
    ]
    lines += [f"  const number {name} = hyper[{i}];" for i, name in enumerate(family.hyper)]
    return "\n".join([*lines, f"  return {Expression(NUMBERS, {})(result_of(function))};", "}", ""])


class _Body:
    """The statements of a rule, with the flags that are compiled settled."""

    def __init__(self, rule: rule_text.Rule, compiled: Mapping[str, bool]) -> None:
        self.rule = rule
        self.compiled = compiled
        self.locals: list[str] = []
        self.sums: list[str] = []
        self.lines: list[str] = []
        self._walk(rule.function.body, "    ")

    def _expression(self, node: ast.expr) -> str:
        return Expression(ELEMENTS, helpers()[0], self.rule.scalars)(node)

    def _walk(self, statements: list[ast.stmt], indent: str) -> None:
        for statement in statements:
            if isinstance(statement, ast.If) and isinstance(statement.test, ast.Name):
                self._choose(statement, statement.test.id, indent)
            elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                name = statement.targets[0].id
                if name not in self.rule.operands and name not in self.locals:
                    self.locals.append(name)
                self.lines.append(f"{indent}{name} = {self._expression(statement.value)};")
            elif isinstance(statement, ast.Return) and isinstance(statement.value, ast.Tuple):
                self.sums += [
                    self._expression(value)
                    for value in statement.value.elts
                    if not isinstance(value, ast.Name)
                ]
            elif not isinstance(statement, ast.Expr):
                raise Untranslatable(statement, "cannot translate")

    def _choose(self, statement: ast.If, flag: str, indent: str) -> None:
        if flag in self.compiled:
            self._walk(statement.body if self.compiled[flag] else statement.orelse, indent)
            return
        self.lines.append(f"{indent}if ({flag}) {{")
        self._walk(statement.body, indent + "  ")
        if statement.orelse:
            self.lines.append(f"{indent}}} else {{")
            self._walk(statement.orelse, indent + "  ")
        self.lines.append(f"{indent}}}")


def _sweep(kernel: str, rule: rule_text.Rule, signature: Signature) -> str:
    """The kernel `measure` or `update`, as `sweep` in triton.py."""
    compiled = {name: bool(signature.options[name]) for name in rule.compiled_flags}
    traffic = rule.traffic(compiled)
    body = _Body(rule, compiled)
    used = [
        (position, name)
        for position, name in enumerate(rule.operands)
        if name in traffic.reads | traffic.writes
    ]
    word = signature.options.get("formats")
    lines = [
        f"__attribute__((reqd_work_group_size(GROUP, 1, 1))) kernel void {kernel}(",
        "    ulong tensors, ulong blocks, int block_count, ulong scalars, ulong keys,",
        "    ulong partials, ulong found_inf, int flags, long formats) {",
        "  local uint largest[STATES_LIMIT * BOUNDS];",
        "  local number shared[GROUP];",
        "  if (optional(found_inf, 0.0f) != 0.0f) return;",
        "  const int item = (int)get_local_id(0);",
    ]
    if word is not None:
        lines.append(f"  formats = {int(word)}l;")
    lines += [
        f"  const int {name} = flags >> {i} & 1;"
        for i, name in enumerate(rule.flags)
        if name not in compiled
    ]
    lines += [
        "  for (int block = (int)get_group_id(0); block < block_count;",
        "       block += (int)get_num_groups(0)) {",
        "    const global int* own_block = (const global int*)blocks + 2 * (long)block;",
        "    const long tensor = own_block[0];",
        "    const long start = (long)own_block[1] * BLOCK;",
        "    const global long* row = row_of(tensors, tensor);",
        "    const long left = row[COUNT] - start - item * WIDTH;",
        "    const int have = (int)clamp(left, 0l, (long)WIDTH);",
        "    const long index = start + item * WIDTH;",
        "    const long height = row[HEIGHT];",
        "    const long width = row[WIDTH_FIELD];",
        "    const global float* own = (const global float*)scalars + tensor * SCALAR_FIELDS;",
        "    const global uint* own_keys = (const global uint*)keys + tensor * KEY_FIELDS;",
        "    barrier(CLK_LOCAL_MEM_FENCE);",
        "    if (item < STATES_LIMIT * BOUNDS) largest[item] = 0;",
        "    barrier(CLK_LOCAL_MEM_FENCE);",
    ]
    for position, name in used:
        kind = f"(int)(formats >> {position} * FORMAT_BITS & 255)"
        place = f"(ulong)row[{2 * position}], (ulong)row[{2 * position + 1}]"
        lines.append(f"    const operand {name}_at = {{{place}, {kind}}};")
        read = f"read({name}_at, index, have, height, width)"
        scaled = " * own[FACTOR]" if name == "gradient" else ""
        start = f"{read}{scaled}" if name in traffic.reads else "(value)(0.0f)"
        lines.append(f"    value {name} = {start};")
    lines += [
        f"    const value {name} = (value)(own[{position}]);"
        for position, name in enumerate(rule.scalars)
    ]
    lines += [f"    value {name} = (value)(0.0f);" for name in body.locals]
    lines += body.lines
    for position, name in used:
        if name in traffic.writes:
            key = f"own_keys[{position - 2}]" if position > 1 else "0"
            bounds = f"largest + {max(position - 2, 0)} * BOUNDS"
            lines.append(f"    write({name}_at, index, have, {name}, {key}, {bounds});")
    for position, text in enumerate(body.sums):
        total = f"sum_over_group(sum_of({text}, have), shared)"
        lines.append(f"    const number sum_{position} = {total};")
    if body.sums:
        lines.append("    if (item == 0) {")
        lines.append("      global argument* to = (global argument*)partials + (long)block * SUMS;")
        for position in range(len(body.sums)):
            lines.append(f"      to[{position}] = to_argument(sum_{position});")
        lines.append("    }")
    return "\n".join([*lines, "  }", "}", ""])
