"""Rules as C++ for the kernels of the CPU.

Two headers. `oxytorch_rules.h`, for the entry: for each rule the names of its hyper-parameters,
the function that turns them into scalars, and which operands each variant reads and writes.
`oxytorch_rule_loops.h`, for the kernel of each level: a loop over float32 operands for each
variant, which is one setting of a rule's flags; settings with the same code share one.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from .expressions import Dialect, Expression, Helper, inline_function
from .parsing import (
    REDUCE_NORMS,
    TRUST_RATIO,
    Assignment,
    Family,
    Function,
    Rule,
    Rules,
    Traffic,
    parse,
    settled,
)

ELEMENTS = Dialect(
    over_elements=True,
    literal=lambda number: f"splat({float(number)!r}f)",
    calls={
        "sqrt": "square_root",
        "maximum": "larger",
        "fused_multiply_add": "fused_multiply_add",
    },
    value="f32v",
    division_by_scalar="divide({0}, {1}, {1}_inverse)",
    keeps_inverses=True,
)
NUMBERS = Dialect(
    over_elements=False,
    literal=lambda number: repr(float(number)),
    calls={"**": "std::pow", "min": "std::min<double>", "max": "std::max<double>"},
    value="double",
)


@dataclass
class Variant:
    """A rule's code under one setting of its flags."""

    lines: list[str]
    traffic: Traffic
    sums: list[str]
    scalars: list[str]
    divisors: list[str]


def variants_of(rule: Rule, helpers: Mapping[str, Helper]) -> tuple[list[Variant], list[int]]:
    """The variants of a rule, and which one each setting is; the first flag is the lowest bit."""
    variants: list[Variant] = []
    by_flags = []
    for setting in itertools.product((False, True), repeat=len(rule.flags)):
        variant = _variant(rule, dict(zip(reversed(rule.flags), setting, strict=True)), helpers)
        if variant not in variants:
            variants.append(variant)
        by_flags.append(variants.index(variant))
    return variants, by_flags


def _variant(rule: Rule, flags: Mapping[str, bool], helpers: Mapping[str, Helper]) -> Variant:
    expression = Expression(ELEMENTS, helpers, rule.scalars)
    traffic = rule.traffic(flags)
    declared = set(traffic.reads)
    lines = []
    for statement in settled(rule.body, flags):
        assert isinstance(statement, Assignment)
        value = expression(statement.value)
        kind = "" if statement.target in declared else f"{ELEMENTS.value} "
        lines.append(f"{kind}{statement.target} = {value};")
        declared.add(statement.target)
    sums = [expression(value) for value in rule.sums]
    scalars = [name for name in rule.scalars if name in expression.used]
    return Variant(lines, traffic, sums, scalars, expression.divisors)


def loop(rule: Rule, variant: Variant, index: int) -> str:
    """The C++ loop of a variant, for any formats of parameter, gradient and states."""
    reads, writes = (
        [name for name in rule.operands if name in some]
        for some in (variant.traffic.reads, variant.traffic.writes)
    )
    lines = [
        "template <class Parameter, class Gradient, class State>",
        f"static void {rule.name}_{index}(const Update& update, std::int64_t offset,",
        "    std::int64_t count, double* sums) {",
    ]
    if "gradient" in reads:
        lines.append("  const float factor = update.factor;")
    for position, name in enumerate(rule.operands):
        if name in (*reads, *writes):
            lines += _operand(rule, position)
    for name in variant.scalars:
        position = rule.scalars.index(name)
        lines.append(f"  const f32v {name} = splat(update.scalars[{position}]);")
    lines += [f"  const f32v {name}_inverse = 1.0f / {name};" for name in variant.divisors]
    lines += [f"  f32v sum_{i}{{}};" for i in range(len(variant.sums))]
    lines.append("  sweep(0, count, [&](std::int64_t i, auto rest) {")
    for name in reads:
        scaled = " * factor" if name == "gradient" else ""
        lines.append(f"    f32v {name} = {name}_at.get(i, rest){scaled};")
    lines += [f"    {line}" for line in variant.lines]
    lines += [f"    {name}_at.put(i, {name}, rest);" for name in writes]
    for i, text in enumerate(variant.sums):
        lines.append(f"    sum_{i} += fill_tail({text}, rest, 0.0f);")
    lines.append("  });")
    lines += [f"  {name}_at.finish(count);" for name in writes]
    lines += [f"  sums[{i}] += sum(sum_{i});" for i in range(len(variant.sums))]
    return "\n".join([*lines, "}", ""])


def _operand(rule: Rule, position: int) -> list[str]:
    """The declaration of an operand, in the format that the loop is instantiated for."""
    name = rule.operands[position]
    sign = "Unsigned" if name in rule.magnitudes else "Signed"
    kind = ("Parameter", "Gradient", f"State::{sign}")[min(position, 2)]
    lines = []
    if position > 1:
        lines.append(f"  using {name}_format = typename {kind};")
        kind = f"{name}_format"
    lines.append(f"  alignas(64) float {name}_scratch[{kind}::kScratch];")
    own = f"update.operands[{position}], offset, {name}_scratch"
    return [*lines, f"  {kind} {name}_at({own});"]


def mask(rule: Rule, names: Collection[str]) -> int:
    """The operands among `names` as bits."""
    return sum(1 << i for i, name in enumerate(rule.operands) if name in names)


def trust_ratio(family: Family, function: Function) -> str:
    """The C++ function of a `_trust_ratio` function: of two sums and the hyper-parameters.

    An argument `count` is the number of elements.
    """
    lines = [
        f"static double {function.name}(const double* sums,",
        "    [[maybe_unused]] double count, const double* hyper) {",
    ]
    for source, names in (("sums", [*function.arguments][:2]), ("hyper", [*family.hyper])):
        lines += [
            f"  [[maybe_unused]] const double {name} = {source}[{position}];"
            for position, name in enumerate(names)
        ]
    text = Expression(NUMBERS, {})(function.result)
    return "\n".join([*lines, f"  return {text};", "}", ""])


def constants(family: Family) -> str:
    """The C++ function of a `_constants` function."""
    expression = Expression(NUMBERS, {})
    texts = {name: expression(value) for name, value in family.constants.items()}
    signature = "double step, " if family.has_step else "double, "
    lines = [
        f"static void {family.name}_constants({signature}const double* hyper, float* scalars, "
        "unsigned* flags) {"
    ]
    for position, (argument, kind) in enumerate(family.hyper.items()):
        test = " != 0" if kind == "bool" else ""
        lines.append(f"  [[maybe_unused]] const auto {argument} = hyper[{position}]{test};")
    for i, scalar in enumerate(family.update.scalars):
        lines.append(f"  scalars[{i}] = static_cast<float>({texts[scalar]});")
    bits = " | ".join(
        f"static_cast<unsigned>({texts[flag]}) << {i}" for i, flag in enumerate(family.update.flags)
    )
    return "\n".join([*lines, f"  *flags = {bits or '0'};", "}", ""])


def record(family: Family) -> str:
    """The entry of an optimizer in the table of rules."""
    name = family.name
    reduction, ratio, step_size = "nullptr", "nullptr", 0
    if family.reduce_norms:
        reduction, ratio = f"{name}{REDUCE_NORMS}_variants", name + TRUST_RATIO
        step_size = family.update.scalars.index("step_size")
    entries = (
        f'"{name}"',
        str(len(family.hyper)),
        f'"{", ".join(family.hyper)}"',
        str(len(family.update.operands) - 2),
        str(family.has_step).lower(),
        f"{name}_constants",
        f"{name}_variants",
        reduction,
        ratio,
        str(step_size),
    )
    return f"    {{{', '.join(entries)}}},"


def headers(source: str) -> dict[str, str]:
    """The texts of the two headers, by name of the file, from the text of rules.py."""
    rules = parse(source)
    helpers: dict[str, Helper] = {}
    loops = [inline_function(own, ELEMENTS, helpers, "OXY_INLINE") for own in rules.helpers]
    entries: list[str] = []
    traffic: list[str] = []
    used: list[str] = []
    pointers: list[str] = []
    for family in rules.families.values():
        entries.append(constants(family))
        for rule in family.rules:
            variants, by_flags = variants_of(rule, helpers)
            numbers = ", ".join(str(len(pointers) + i) for i in by_flags)
            entries.append(f"inline constexpr int {rule.name}_variants[] = {{{numbers}}};\n")
            for i, variant in enumerate(variants):
                pointers.append(f"{rule.name}_{i}")
                loops.append(loop(rule, variant, i))
                reads, writes = (
                    mask(rule, variant.traffic.reads),
                    mask(rule, variant.traffic.writes),
                )
                traffic.append(f"    {{{reads}, {writes}}},")
                used.append(str(reads | writes))
        if family.trust_ratio:
            entries.append(trust_ratio(family, family.trust_ratio))
    return {
        "oxytorch_rules.h": _entry_header(rules, entries, used),
        "oxytorch_rule_loops.h": _loops_header(loops, pointers, traffic),
    }


_HEAD = "// Written by ops/optimizer_step/translation from rules.py.\n#pragma once\n\n"


def _entry_header(rules: Rules, entries: Sequence[str], used: Sequence[str]) -> str:
    lines = [
        *entries,
        "// Operands of each variant, as bits.",
        f"inline constexpr unsigned kUsed[] = {{{', '.join(used)}}};\n",
        "inline constexpr Rule kRules[] = {",
        *map(record, rules.families.values()),
        "};",
        "",
    ]
    return _HEAD + "\n".join(lines)


def _loops_header(loops: Sequence[str], pointers: Sequence[str], traffic: Sequence[str]) -> str:
    lines = [
        *loops,
        "template <class P, class G, class S>",
        "struct Loops {",
        "  static constexpr Loop table[] = {",
        "      " + ", ".join(f"{name}<P, G, S>" for name in pointers),
        "  };",
        "};\n",
        "static constexpr Traffic kTraffic[] = {",
        *traffic,
        "};",
        "",
    ]
    return _HEAD + "\n".join(lines)
