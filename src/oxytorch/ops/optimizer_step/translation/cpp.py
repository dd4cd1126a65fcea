"""Rules as C++ for the kernels of the CPU.

Two headers. `oxytorch_rules.h`, for the entry: for each rule the schema of its hyper-parameters,
the function that turns them into scalars, and which operands each variant reads and writes.
`oxytorch_rule_loops.h`, for the kernel of each level: a loop over float32 operands for each
variant.
"""

from __future__ import annotations

import ast

from .language import Dialect, Expression, Helper
from .reading import (
    CONSTANTS,
    MEASURE,
    TRUST,
    Rule,
    arguments_of,
    constant_texts,
    helper_body,
    read,
    result_of,
)

ELEMENTS = Dialect(
    over_elements=True,
    value="f32v",
    literal="splat({}f)",
    calls={
        "sqrt": "square_root",
        "maximum": "larger",
        "fused_multiply_add": "fused_multiply_add",
    },
    divides_by_inverse=True,
)
NUMBERS = Dialect(
    over_elements=False,
    value="double",
    literal="{}",
    calls={"**": "std::pow", "min": "std::min<double>", "max": "std::max<double>"},
)


def loop(rule: Rule, index: int) -> str:
    """The C++ loop of a variant, for any formats of parameter, gradient and states."""
    variant = rule.variants[index]
    lines = [
        "template <class Parameter, class Gradient, class State>",
        f"static void {rule.name}_{index}(const Update& update, std::int64_t offset,",
        "    std::int64_t count, double* sums) {",
    ]
    if "gradient" in variant.reads:
        lines.append("  const float factor = update.factor;")
    present = variant.reads | set(variant.writes)
    for position, name in enumerate(rule.operands):
        if name in present:
            sign = "Unsigned" if name in rule.magnitudes else "Signed"
            kind = ("Parameter", "Gradient", f"State::{sign}")[min(position, 2)]
            if position > 1:
                lines.append(f"  using {name}_format = typename {kind};")
                kind = f"{name}_format"
            lines.append(f"  alignas(64) float {name}_scratch[{kind}::kScratch];")
            own = f"update.operands[{position}], offset, {name}_scratch"
            lines.append(f"  {kind} {name}_at({own});")
    for position, name in enumerate(rule.scalars):
        if name in variant.used:
            lines.append(f"  const f32v {name} = splat(update.scalars[{position}]);")
    lines += [f"  const f32v {name}_inverse = 1.0f / {name};" for name in variant.divisors]
    lines += [f"  f32v sum_{i}{{}};" for i in range(len(variant.sums))]
    lines.append("  sweep(0, count, [&](std::int64_t i, auto rest) {")
    for name in rule.operands:
        if name in variant.reads:
            scaled = " * factor" if name == "gradient" else ""
            lines.append(f"    f32v {name} = {name}_at.get(i, rest){scaled};")
    lines += [f"    {line}" for line in variant.lines]
    lines += [f"    {name}_at.put(i, {name}, rest);" for name in variant.writes]
    for i, text in enumerate(variant.sums):
        lines.append(f"    sum_{i} += fill_tail({text}, rest, 0.0f);")
    lines.append("  });")
    lines += [f"  {name}_at.finish(count);" for name in variant.writes]
    lines += [f"  sums[{i}] += sum(sum_{i});" for i in range(len(variant.sums))]
    return "\n".join([*lines, "}", ""])


def mask(rule: Rule, names: set[str]) -> int:
    """The operands among `names` as bits."""
    return sum(1 << i for i, name in enumerate(rule.operands) if name in names)


def helper(function: ast.FunctionDef, known: dict[str, Helper]) -> str:
    """A helper as an inline C++ function over vectors, which the following ones may call."""
    known[function.name], lines = helper_body(function, ELEMENTS, known)
    own = known[function.name]
    names = [*own.arguments, *(f"{name}_inverse" for name in own.divisors)]
    arguments = ", ".join(f"f32v {name}" for name in names)
    return "\n".join([f"OXY_INLINE f32v {function.name}({arguments}) {{", *lines, "}", ""])


def trust(function: ast.FunctionDef) -> str:
    """The C++ function of a `_trust` function: of two sums and the hyper-parameters.

    An argument `count` after the sums is the number of elements.
    """
    arguments = [name for name, _ in arguments_of(function) if name != "count"]
    lines = [
        f"static double {function.name}(const double* sums,",
        "    [[maybe_unused]] double count, const double* hyper) {",
    ]
    for position, name in enumerate(arguments):
        source = f"sums[{position}]" if position < 2 else f"hyper[{position - 2}]"
        lines.append(f"  [[maybe_unused]] const double {name} = {source};")
    text = Expression(NUMBERS, {})(result_of(function))
    return "\n".join([*lines, f"  return {text};", "}", ""])


def constants(function: ast.FunctionDef, rules: list[Rule]) -> tuple[str, str, str]:
    """The C++ function of a `_constants` function, its schema, and its kinds ('f' or 'b')."""
    name = function.name.removesuffix(CONSTANTS)
    arguments = arguments_of(function)
    hyper = [pair for pair in arguments if pair[0] != "step"]
    texts = constant_texts(function, NUMBERS, rules)
    signature = "double, " if len(hyper) == len(arguments) else "double step, "
    lines = [
        f"static void {name}_constants({signature}const double* hyper, float* scalars, "
        "unsigned* flags) {"
    ]
    for position, (argument, kind) in enumerate(hyper):
        test = " != 0" if kind == "bool" else ""
        lines.append(f"  [[maybe_unused]] const auto {argument} = hyper[{position}]{test};")
    for i, scalar in enumerate(rules[0].scalars):
        lines.append(f"  scalars[{i}] = static_cast<float>({texts[scalar]});")
    bits = " | ".join(
        f"static_cast<unsigned>({texts[flag]}) << {i}" for i, flag in enumerate(rules[0].flags)
    )
    lines.append(f"  *flags = {bits or '0'};")
    schema = ", ".join(f"{kind} {argument}" for argument, kind in hyper)
    kinds = "".join("b" if kind == "bool" else "f" for _, kind in hyper)
    return "\n".join([*lines, "}", ""]), schema, kinds


def headers(source: str) -> dict[str, str]:
    """The texts of the two headers, by name of the file, from the text of rules.py."""
    read_rules = read(source)
    functions = read_rules.functions
    helpers: dict[str, Helper] = {}
    loops = [helper(node, helpers) for node in read_rules.helpers]
    entries: list[str] = []
    variants: list[str] = []
    used: list[str] = []
    table: list[str] = []
    ops: list[str] = []
    pointers: list[str] = []
    for name in read_rules.names:
        rules = [
            Rule(functions[n], ELEMENTS, helpers) for n in (name + MEASURE, name) if n in functions
        ]
        text, schema, kinds = constants(functions[name + CONSTANTS], rules)
        entries.append(text)
        firsts = []
        for rule in rules:
            firsts.append(len(pointers))
            pointers += [f"{rule.name}_{i}" for i in range(len(rule.variants))]
            loops += [loop(rule, i) for i in range(len(rule.variants))]
            for variant in rule.variants:
                reads, writes = mask(rule, variant.reads), mask(rule, {*variant.writes})
                variants.append(f"    {{{reads}, {writes}}},")
                used.append(str(reads | writes))
            numbers = ", ".join(str(firsts[-1] + i) for i in rule.by_flags)
            entries.append(f"inline constexpr int {rule.name}_variants[] = {{{numbers}}};\n")
        update = rules[-1]
        measure, factor, step_size = "nullptr", "nullptr", 0
        if len(rules) == 2:
            entries.append(trust(functions[name + TRUST]))
            measure, factor = f"{name}{MEASURE}_variants", name + TRUST
            step_size = update.scalars.index("step_size")
        has_step = "step" in dict(arguments_of(functions[name + CONSTANTS]))
        table.append(
            f'    {{"{name}_step", "{kinds}", {len(update.operands) - 2}, '
            f"{str(has_step).lower()}, {name}_constants, {name}_variants, {measure}, {factor}, "
            f"{step_size}}},"
        )
        ops.append(f'  OP({name}_step, {len(ops)}, "{schema}")')
    head = "// Written by ops/optimizer_step/translation from rules.py.\n#pragma once\n\n"
    rules_header = head + "\n".join(
        [
            *entries,
            "// Operands of each variant, as bits.",
            f"inline constexpr unsigned kUsed[] = {{{', '.join(used)}}};\n",
            "inline constexpr Rule kRules[] = {",
            *table,
            "};\n",
            "#define OXY_FOR_EACH_RULE(OP) \\",
            " \\\n".join(ops),
            "",
        ]
    )
    loops_header = head + "\n".join(
        [
            *loops,
            "template <class P, class G, class S>",
            "struct Loops {",
            "  static constexpr Loop table[] = {",
            "      " + ", ".join(f"{name}<P, G, S>" for name in pointers),
            "  };",
            "};\n",
            "static constexpr Traffic kTraffic[] = {",
            *variants,
            "};",
            "",
        ]
    )
    return {"oxytorch_rules.h": rules_header, "oxytorch_rule_loops.h": loops_header}
