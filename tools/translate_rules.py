"""Translates src/oxytorch/optim/rules.py into C++; CMake runs it when the library is built.

Writes two headers. `oxytorch_rules.h`, for the entry: for each rule the schema of its
hyper-parameters, the function that turns them into scalars, and which operands each variant reads
and writes. `oxytorch_rule_loops.h`, for the kernel of each level: a loop over float32 operands for
each variant. A variant is one setting of a rule's flags; settings with the same code share one.
"""

from __future__ import annotations

import argparse
import ast
import itertools
from dataclasses import dataclass, field
from pathlib import Path

from rule_language import Expression, Helper, Untranslatable

CONSTANTS, MEASURE, TRUST = "_constants", "_measure", "_trust"
OWN = {"sqrt", "where", "maximum", "fused_multiply_add"}
"""Functions of rules.py that C++ has in arithmetic.h."""


@dataclass
class Variant:
    """A rule's code under one setting of its flags."""

    lines: list[str] = field(default_factory=list)
    reads: set[str] = field(default_factory=set)
    writes: list[str] = field(default_factory=list)
    sums: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    divisors: list[str] = field(default_factory=list)


class Rule:
    """A function of rules.py over operands, scalars and flags."""

    def __init__(self, function: ast.FunctionDef, helpers: dict[str, Helper]) -> None:
        self.name = function.name
        self.function = function
        self.helpers = helpers
        kinds = [(a.arg, ast.unparse(a.annotation or a)) for a in function.args.args]
        self.operands = [name for name, kind in kinds if kind in ("Value", "Magnitude")]
        self.magnitudes = {name for name, kind in kinds if kind == "Magnitude"}
        self.scalars = [name for name, kind in kinds if kind == "Scalar"]
        self.flags = [name for name, kind in kinds if kind == "Flag"]
        self.variants: list[Variant] = []
        self.by_flags: list[int] = []
        for setting in itertools.product((False, True), repeat=len(self.flags)):
            # The first flag is the lowest bit of the index into by_flags.
            variant = self._variant(dict(zip(reversed(self.flags), setting, strict=True)))
            same = [i for i, other in enumerate(self.variants) if other == variant]
            if not same:
                self.variants.append(variant)
            self.by_flags.append(same[0] if same else len(self.variants) - 1)

    def _variant(self, flags: dict[str, bool]) -> Variant:
        variant = Variant()
        assigned: set[str] = set()

        def expression(node: ast.expr) -> str:
            translate = Expression(self.helpers, over_vectors=True, scalars=self.scalars)
            text = translate(node)
            variant.divisors += [d for d in translate.divisors if d not in variant.divisors]
            variant.used |= translate.used
            variant.reads |= {n for n in translate.used if n in self.operands} - assigned
            return text

        def walk(statements: list[ast.stmt]) -> None:
            for statement in statements:
                if isinstance(statement, ast.If) and isinstance(statement.test, ast.Name):
                    walk(statement.body if flags[statement.test.id] else statement.orelse)
                elif isinstance(statement, ast.Assign) and isinstance(
                    statement.targets[0], ast.Name
                ):
                    name = statement.targets[0].id
                    text = expression(statement.value)
                    declared = name in assigned or name in variant.reads
                    variant.lines.append(f"{'' if declared else 'f32v '}{name} = {text};")
                    assigned.add(name)
                elif isinstance(statement, ast.Return) and isinstance(statement.value, ast.Tuple):
                    for value in statement.value.elts:
                        if isinstance(value, ast.Name) and value.id in self.operands:
                            if value.id in assigned:
                                variant.writes.append(value.id)
                        else:
                            variant.sums.append(expression(value))
                elif not isinstance(statement, ast.Expr):
                    raise Untranslatable(statement, "cannot translate")

        walk(self.function.body)
        return variant

    def loop(self, index: int) -> str:
        """The C++ loop of a variant, for any formats of parameter, gradient and states."""
        variant = self.variants[index]
        lines = [
            "template <class Parameter, class Gradient, class State>",
            f"static void {self.name}_{index}(const Update& update, std::int64_t offset,",
            "    std::int64_t count, double* sums) {",
        ]
        if "gradient" in variant.reads:
            lines.append("  const float factor = update.factor;")
        present = variant.reads | set(variant.writes)
        for position, name in enumerate(self.operands):
            if name in present:
                sign = "Unsigned" if name in self.magnitudes else "Signed"
                kind = ("Parameter", "Gradient", f"State::{sign}")[min(position, 2)]
                if position > 1:
                    lines.append(f"  using {name}_format = typename {kind};")
                    kind = f"{name}_format"
                lines.append(f"  alignas(64) float {name}_scratch[{kind}::kScratch];")
                own = f"update.operands[{position}], offset, {name}_scratch"
                lines.append(f"  {kind} {name}_at({own});")
        for position, name in enumerate(self.scalars):
            if name in variant.used:
                lines.append(f"  const f32v {name} = splat(update.scalars[{position}]);")
        lines += [f"  const f32v {name}_inverse = 1.0f / {name};" for name in variant.divisors]
        lines += [f"  f32v sum_{i}{{}};" for i in range(len(variant.sums))]
        lines.append("  sweep(0, count, [&](std::int64_t i, auto rest) {")
        for name in self.operands:
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

    def mask(self, names: object) -> int:
        """The operands among `names` as bits."""
        assert isinstance(names, (set, list))
        return sum(1 << i for i, name in enumerate(self.operands) if name in names)


def helper(function: ast.FunctionDef, known: dict[str, Helper]) -> str:
    """A helper of assignments and one `return`, as an inline C++ function over vectors."""
    kinds = {a.arg: ast.unparse(a.annotation or a) for a in function.args.args}
    scalars = [name for name, kind in kinds.items() if kind == "Scalar"]
    translate = Expression(known, over_vectors=True, scalars=scalars)
    lines = []
    for statement in function.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            lines.append(f"  const f32v {statement.targets[0].id} = {translate(statement.value)};")
        elif isinstance(statement, ast.Return) and statement.value is not None:
            lines.append(f"  return {translate(statement.value)};")
    known[function.name] = Helper(list(kinds), translate.divisors)
    names = [*kinds, *(f"{name}_inverse" for name in translate.divisors)]
    arguments = ", ".join(f"f32v {name}" for name in names)
    return "\n".join([f"OXY_INLINE f32v {function.name}({arguments}) {{", *lines, "}", ""])


def trust(function: ast.FunctionDef) -> str:
    """The C++ function of a `_trust` function: of two sums and the hyper-parameters.

    An argument `count` after the sums is the number of elements.
    """
    arguments = [a.arg for a in function.args.args if a.arg != "count"]
    result = next(s.value for s in function.body if isinstance(s, ast.Return))
    assert result is not None
    lines = [
        f"static double {function.name}(const double* sums,",
        "    [[maybe_unused]] double count, const double* hyper) {",
    ]
    for position, name in enumerate(arguments):
        source = f"sums[{position}]" if position < 2 else f"hyper[{position - 2}]"
        lines.append(f"  [[maybe_unused]] const double {name} = {source};")
    text = Expression({}, over_vectors=False)(result)
    return "\n".join([*lines, f"  return {text};", "}", ""])


def constants(function: ast.FunctionDef, rules: list[Rule]) -> tuple[str, str, str]:
    """The C++ function of a `_constants` function, its schema, and its kinds ('f' or 'b')."""
    name = function.name.removesuffix(CONSTANTS)
    arguments = [(a.arg, ast.unparse(a.annotation or a)) for a in function.args.args]
    hyper = [pair for pair in arguments if pair[0] != "step"]
    result = next(s.value for s in function.body if isinstance(s, ast.Return))
    assert isinstance(result, ast.Dict)
    translate = Expression({}, over_vectors=False)
    texts = {
        ast.literal_eval(key): translate(value)
        for key, value in zip(result.keys, result.values, strict=True)
        if key is not None
    }
    signature = "double, " if len(hyper) == len(arguments) else "double step, "
    lines = [
        f"static void {name}_constants({signature}const double* hyper, float* scalars, "
        "unsigned* flags) {"
    ]
    for position, (argument, kind) in enumerate(hyper):
        test = " != 0" if kind == "bool" else ""
        lines.append(f"  [[maybe_unused]] const auto {argument} = hyper[{position}]{test};")
    scalars, flags = rules[0].scalars, rules[0].flags
    for rule in rules:
        if (rule.scalars, rule.flags) != (scalars, flags) or {*scalars, *flags} != {*texts}:
            raise Untranslatable(function, f"scalars and flags differ from those of {rule.name}")
    for i, scalar in enumerate(scalars):
        lines.append(f"  scalars[{i}] = static_cast<float>({texts[scalar]});")
    bits = " | ".join(f"static_cast<unsigned>({texts[f]}) << {i}" for i, f in enumerate(flags))
    lines.append(f"  *flags = {bits or '0'};")
    schema = ", ".join(f"{kind} {argument}" for argument, kind in hyper)
    kinds = "".join("b" if kind == "bool" else "f" for _, kind in hyper)
    return "\n".join([*lines, "}", ""]), schema, kinds


def translate(source: str) -> tuple[str, str]:
    """The texts of the two headers."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    by_name = {function.name: function for function in functions}
    names = [n.removesuffix(CONSTANTS) for n in by_name if n.endswith(CONSTANTS)]
    main = {name + suffix for name in names for suffix in ("", CONSTANTS, MEASURE, TRUST)}
    helpers: dict[str, Helper] = {}
    loops = [helper(node, helpers) for name, node in by_name.items() if name not in main | OWN]
    entries, variants, used, table, ops, pointers = [], [], [], [], [], []
    for name in names:
        rules = [Rule(by_name[n], helpers) for n in (name + MEASURE, name) if n in by_name]
        text, schema, kinds = constants(by_name[name + CONSTANTS], rules)
        entries.append(text)
        firsts = []
        for rule in rules:
            firsts.append(len(pointers))
            pointers += [f"{rule.name}_{i}" for i in range(len(rule.variants))]
            loops += [rule.loop(i) for i in range(len(rule.variants))]
            for variant in rule.variants:
                reads, writes = rule.mask(variant.reads), rule.mask(variant.writes)
                variants.append(f"    {{{reads}, {writes}}},")
                used.append(str(reads | writes))
            numbers = ", ".join(str(firsts[-1] + i) for i in rule.by_flags)
            entries.append(f"inline constexpr int {rule.name}_variants[] = {{{numbers}}};\n")
        update = rules[-1]
        measure, factor, step_size = "nullptr", "nullptr", 0
        if len(rules) == 2:
            entries.append(trust(by_name[name + TRUST]))
            measure, factor = f"{name}{MEASURE}_variants", name + TRUST
            step_size = update.scalars.index("step_size")
        has_step = "step" in [a.arg for a in by_name[name + CONSTANTS].args.args]
        table.append(
            f'    {{"{name}_step", "{kinds}", {len(update.operands) - 2}, '
            f"{str(has_step).lower()}, {name}_constants, {name}_variants, {measure}, {factor}, "
            f"{step_size}}},"
        )
        ops.append(f'  OP({name}_step, {len(ops)}, "{schema}")')
    head = (
        "// Written by tools/translate_rules.py from src/oxytorch/optim/rules.py.\n#pragma once\n\n"
    )
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
    return rules_header, loops_header


def main() -> None:
    """Writes the headers into the folder that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rules", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    texts = translate(arguments.rules.read_text())
    for name, text in zip(("oxytorch_rules.h", "oxytorch_rule_loops.h"), texts, strict=True):
        (arguments.folder / name).write_text(text)


if __name__ == "__main__":
    main()
