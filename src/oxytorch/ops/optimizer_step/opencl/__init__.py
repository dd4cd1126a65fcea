"""The GPU kernels of a step as OpenCL C, for Intel GPUs.

Each source is one kernel: settings, the files beside this one, and what the translator makes of
rules.py. Tables and arguments are those of triton.py. Work groups of 256 items do a block of
1024 elements, four to an item.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ....gpu.kernel import OpenClSource, Signature
from .. import gpu, layout, parsed_rules
from ..translation.expressions import Dialect, Expression, Helper, inline_function, statements
from ..translation.parsing import Assignment, Family, Rule, Traffic, settled, walk

ELEMENTS = Dialect(
    over_elements=True,
    literal=lambda number: f"(value)({float(number)!r}f)",
    calls={"sqrt": "sqrt", "maximum": "larger", "fused_multiply_add": "fma"},
    value="value",
)
NUMBERS = Dialect(
    over_elements=False,
    literal=lambda number: f"number_of({float(number)!r}f)",
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

_LAYOUT = """
    TENSOR_FIELDS SCALAR_FIELDS KEY_FIELDS STEP COUNT RNG_STREAM FIRST_BLOCK HEIGHT FACTOR SUMS
    BLOCK CODE_BLOCK HYPER FORMAT_BITS GRADIENT COLUMNS ROW_FACTORS ROWS STRIPS
    """.split()  # noqa: SIM905
"""Numbers of layout.py that kernels know by the same names."""

STEP_GROUP = layout.BLOCK // 4
"""Items of a block: four elements each."""


def source(kernel: str, signature: Signature) -> OpenClSource:
    """The source of a signature of `prepare_step`, `reduce_norms`, `trust_ratio` or `update`.

    It has float64 arithmetic where the compiler says that the chip has it (cl_khr_fp64), and pairs
    of float32 elsewhere; WITHOUT_FLOAT64 asks for pairs.
    """
    family = parsed_rules.families()[str(signature.options["rule"])]
    if kernel == "prepare_step":
        settings = {"GROUP": gpu.PREPARE_STEP_LANES, "STATES": len(family.update.operands) - 2}
        text = assemble(settings, "tables.cl", _constants(family), "prepare_step.cl")
        return OpenClSource(
            text, "prepare_step", gpu.PREPARE_STEP_ARGUMENTS, gpu.PREPARE_STEP_LANES, OPTIONS
        )
    if kernel == "trust_ratio":
        step_size = family.update.scalars.index("step_size")
        settings = {"GROUP": STEP_GROUP, "STEP_SIZE": step_size}
        text = assemble(settings, "tables.cl", _trust_ratio(family), "trust_ratio.cl")
        return OpenClSource(text, "trust_ratio", gpu.TRUST_RATIO_ARGUMENTS, STEP_GROUP, OPTIONS)
    rule = family.reduce_norms if kernel == "reduce_norms" else family.update
    if kernel not in ("reduce_norms", "update") or rule is None:
        raise ValueError(f"opencl: {family.name} has no kernel {kernel!r}")
    generated = (helpers()[1], _sweep(kernel, rule, signature))
    text = assemble({"GROUP": STEP_GROUP}, "arithmetic.cl", "tables.cl", "formats.cl", *generated)
    return OpenClSource(text, kernel, gpu.STEP_ARGUMENTS, STEP_GROUP, OPTIONS)


def assemble(settings: Mapping[str, int], *pieces: str) -> str:
    """The source of a kernel: settings, numbers, and `pieces`: names of files here, or texts."""
    shared = {name: int(getattr(layout, name)) for name in _LAYOUT}
    shared.update(WIDTH_FIELD=layout.WIDTH, STATES_LIMIT=layout.OPERANDS - 2)
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
    texts = [
        inline_function(own, ELEMENTS, known, "static") for own in parsed_rules.rules().helpers
    ]
    return known, "\n".join(texts)


def _constants(family: Family) -> str:
    """The function that writes the scalars of a tensor."""
    lines = [
        "static void write_constants(number step, const number* hyper, global float* target) {"
    ]
    lines += [f"  const number {name} = hyper[{i}];" for i, name in enumerate(family.hyper)]
    for position, name in enumerate(family.update.scalars):
        text = Expression(NUMBERS, {})(family.constants[name])
        lines.append(f"  target[{position}] = float_of({text});")
    return "\n".join([*lines, "}", ""])


def _trust_ratio(family: Family) -> str:
    """The function that turns sums into a factor of the step size."""
    assert family.trust_ratio is not None
    first, second, *_ = family.trust_ratio.arguments
    lines = [
        f"static number trust_ratio_of(number {first}, number {second}, number count, "
        "const number* hyper) {"
    ]
    lines += [f"  const number {name} = hyper[{i}];" for i, name in enumerate(family.hyper)]
    return "\n".join(
        [*lines, f"  return {Expression(NUMBERS, {})(family.trust_ratio.result)};", "}", ""]
    )


def _sweep(kernel: str, rule: Rule, signature: Signature) -> str:
    """The kernel `reduce_norms` or `update`, as `sweep` in triton.py."""
    compiled = {name: bool(signature.options[name]) for name in gpu.compiled_flags(rule)}
    traffic = rule.traffic(compiled)
    body = settled(rule.body, compiled)
    expression = Expression(ELEMENTS, helpers()[0], rule.scalars)
    word = signature.options.get("formats")
    flags = [
        f"  const int {name} = flags >> {i} & 1;"
        for i, name in enumerate(rule.flags)
        if name not in compiled
    ]
    assigned = [own.target for own in walk(body) if isinstance(own, Assignment)]
    own = [name for name in dict.fromkeys(assigned) if name not in rule.operands]
    lines = [
        f"__attribute__((reqd_work_group_size(GROUP, 1, 1))) kernel void {kernel}(",
        *_SWEEP_BEGIN,
        *([] if word is None else [f"  formats = {int(word)}l;"]),
        *flags,
        *_BLOCK_BEGIN,
        *_reads(rule, traffic),
        *(
            f"    const value {name} = (value)(own[{position}]);"
            for position, name in enumerate(rule.scalars)
        ),
        *(f"    value {name} = (value)(0.0f);" for name in own),
        *statements(body, expression, "    "),
        *_writes(rule, traffic),
        *_partial_sums([expression(value) for value in rule.sums]),
    ]
    return "\n".join([*lines, "  }", "}", ""])


_SWEEP_BEGIN = (
    "    ulong tensors, ulong blocks, int block_count, ulong scalars, ulong keys,",
    "    ulong partials, ulong found_inf, int flags, long formats) {",
    "  local uint largest[STATES_LIMIT * BOUNDS];",
    "  local number shared[GROUP];",
    "  if (optional(found_inf, 0.0f) != 0.0f) return;",
    "  const int item = (int)get_local_id(0);",
)
_BLOCK_BEGIN = (
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
)


def _reads(rule: Rule, traffic: Traffic) -> Iterator[str]:
    """Where the operands lie that are used, and their values."""
    for position, name in enumerate(rule.operands):
        if name not in traffic.reads | traffic.writes:
            continue
        kind = f"(int)(formats >> {position} * FORMAT_BITS & 255)"
        place = f"(ulong)row[{2 * position}], (ulong)row[{2 * position + 1}]"
        yield f"    const operand {name}_at = {{{place}, {kind}}};"
        read = f"read({name}_at, index, have, height, width)"
        scaled = " * own[FACTOR]" if name == "gradient" else ""
        start = f"{read}{scaled}" if name in traffic.reads else "(value)(0.0f)"
        yield f"    value {name} = {start};"


def _writes(rule: Rule, traffic: Traffic) -> Iterator[str]:
    for position, name in enumerate(rule.operands):
        if name in traffic.writes:
            key = f"own_keys[{position - 2}]" if position > 1 else "0"
            bounds = f"largest + {max(position - 2, 0)} * BOUNDS"
            yield f"    write({name}_at, index, have, {name}, {key}, {bounds});"


def _partial_sums(values: Sequence[str]) -> Iterator[str]:
    """The sums over a block."""
    for position, text in enumerate(values):
        total = f"sum_over_group(sum_of({text}, have), shared)"
        yield f"    const number sum_{position} = {total};"
    if values:
        yield "    if (item == 0) {"
        yield "      global argument* to = (global argument*)partials + (long)block * SUMS;"
        for position in range(len(values)):
            yield f"      to[{position}] = to_argument(sum_{position});"
        yield "    }"
