"""The GPU kernels of a step, and which forms of them are built ahead of time.

`prepare_step` and `trust_ratio` have a signature for each rule. `reduce_norms` and `update` have
one for each setting of some flags (`compiled_flags`) in each of the formats that are common, and a
general one, which learns the formats when it runs, for all others.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...gpu.kernel import Kernel, Signature, TritonSource, kernel_of
from . import layout
from .layout import Format
from .parsed_rules import families
from .translation.parsing import CONSTANTS, Rule

CODES = "codes"
"""8-bit codes, signed or not as the state is."""

STATES: Mapping[str, Sequence[str]] = {
    "float32": ("float32", "stochastic", CODES),
    "bfloat16": ("bfloat16", "float32", "stochastic", CODES),
    "float16": ("float16", "float32", CODES),
    "split": ("float32", "stochastic", CODES),
}
"""For each format of the parameter the formats of states that are compiled."""

GENERAL = "general"

COMPILED_FLAGS = frozenset({"moves", "amsgrad", "centered", "is_whole"})
"""Flags that decide which states there are: each setting is a kernel. The others are settled when a
kernel runs, which costs nothing where the memory is the limit."""

DECAYS, PENALIZES = "decays", "penalizes"
"""Two ways to shrink weights, of which one is taken at most. Without either, a weight's factor, the
scalar `decay`, is 1: a kernel that penalizes does not decay, and any other always does."""


@dataclass(frozen=True)
class Shape:
    """How a program goes about a block; measured on an H200, see docs/gpu-kernels.md.

    chunk, piece: elements at a time where they lie at 16 bytes, and elsewhere.
    warps: of a program.
    registers: the most of a thread.
    vector: elements that a thread moves at a time.
    """

    chunk: int
    piece: int
    warps: int
    registers: int
    vector: int


WIDE = Shape(1024, 512, 4, 64, 4)
"""Where an operand has four bytes an element: all are spread alike over threads."""

NARROW = Shape(512, 512, 2, 64, 8)

CODED = Shape(256, 256, 1, 80, 8)
"""A warp does the elements that share a bound: it finds their largest without the others."""

PREPARE_STEP_LANES = 32
TRUST_RATIO_LANES = 1024

_TABLES = frozenset({"tensors", "blocks", "scalars", "keys", "partials", "sums"})


def arguments(names: str, **types: str) -> dict[str, str]:
    """Arguments of a kernel by name, with their types; those that no type is given for are i64."""
    return {name: types.get(name, "i64") for name in names.split()}


_HYPER = {f"hyper_{i}": "fp64" for i in range(layout.HYPER)}
STEP_ARGUMENTS = arguments(
    "tensors blocks block_count scalars keys partials found_inf flags formats",
    block_count="i32",
    flags="i32",
)
TRUST_RATIO_ARGUMENTS = {
    **arguments("tensors partials sums scalars found_inf phase", phase="i32"),
    **_HYPER,
}
PREPARE_STEP_ARGUMENTS = {
    **arguments(
        "tensors scalars keys count found_inf gradient_scale clip_factor learning_rate seed factor",
        count="i32",
        factor="fp64",
    ),
    **_HYPER,
}


def step_rule(kernel: str, rule: str) -> Rule:
    """The function of a rule that the kernel `reduce_norms` or `update` runs."""
    family = families()[rule]
    function = family.reduce_norms if kernel == "reduce_norms" else family.update
    if function is None:
        raise ValueError(f"{kernel}: expected a rule with norms, got {rule}")
    return function


def compiled_flags(rule: Rule) -> tuple[str, ...]:
    """The flags of which each setting is a kernel, as far as the rule asks for them."""
    chosen = COMPILED_FLAGS | ({PENALIZES} if DECAYS in rule.flags else set())
    return tuple(flag for flag in rule.flags if flag in chosen & rule.tested_flags)


def family_signature(rule: str) -> Signature:
    """The signature of `prepare_step` and `trust_ratio` for a rule."""
    return Signature(rule, {"rule": rule})


def step_signature(
    kernel: str, rule: str, flags: Mapping[str, object], formats: Sequence[Format]
) -> Signature:
    """The signature of `reduce_norms` or `update` for operands in these formats.

    flags: by name, as `<rule>_constants` returns them.
    formats: of the parameter, the gradient and the states in the rule's order; those of operands
        that the kernel does not touch do not count.
    """
    function = step_rule(kernel, rule)
    compiled = {name: bool(flags[name]) for name in compiled_flags(function)}
    traffic = function.traffic(compiled)
    used = traffic.reads | traffic.writes
    wanted = layout.formats_word(
        [
            own if name in used else Format.ABSENT
            for name, own in zip(function.operands, formats, strict=False)
        ]
    )
    known = _signatures_by_use(kernel, rule)
    setting = tuple(compiled.values())
    return known.get((setting, wanted)) or known[setting, None]


def run_time_flags(kernel: str, rule: str, flags: Mapping[str, object]) -> int:
    """The argument `flags` of `reduce_norms` and `update`."""
    names = step_rule(kernel, rule).flags
    return sum(1 << position for position, name in enumerate(names) if flags[name])


def _formats(function: Rule, used: frozenset[str], parameter: str, state: str) -> int:
    """The word of formats for a common combination."""
    kinds = [Format[parameter.upper()], Format.BFLOAT16 if parameter == "split" else None]
    for name in function.operands[2:]:
        if state == CODES:
            unsigned = name in function.magnitudes
            kinds.append(Format.UNSIGNED_CODES if unsigned else Format.SIGNED_CODES)
        else:
            kinds.append(Format[state.upper()])
    gradient = kinds[1] or kinds[0]
    own = [kinds[0], gradient, *kinds[2:]]
    return layout.formats_word(
        [
            kind if name in used and kind is not None else Format.ABSENT
            for name, kind in zip(function.operands, own, strict=True)
        ]
    )


def _step_signatures(kernel: str) -> tuple[Signature, ...]:
    """All signatures of `reduce_norms` or `update`."""
    return tuple(
        signature
        for rule, family in families().items()
        if kernel == "update" or family.reduce_norms is not None
        for signature in _rule_signatures(kernel, rule)
    )


# By rule, not all at once: a program uses one or two, and its first step waits for them.
@functools.cache
def _rule_signatures(kernel: str, rule: str) -> tuple[Signature, ...]:
    """The signatures of `reduce_norms` or `update` for a rule."""
    found: dict[str, Signature] = {}
    function = step_rule(kernel, rule)
    for setting in itertools.product((False, True), repeat=len(compiled_flags(function))):
        compiled = dict(zip(compiled_flags(function), setting, strict=True))
        names = [rule, *(name for name, value in compiled.items() if value)]
        traffic = function.traffic(compiled)
        used = traffic.reads | traffic.writes
        has_states = len(used - {"parameter", "gradient"}) > 0
        for parameter, states in STATES.items():
            kinds = list(states) if has_states else [""]
            # Adafactor keeps the variance of matrices as factors.
            if rule == "adafactor" and not compiled.get("is_whole", False):
                kinds = ["factored", *(kinds if kernel == "update" else [])]
            for state in kinds:
                name = "-".join([*names, parameter, *([state] if state else [])])
                word = _formats(function, used, parameter, state or "float32")
                options: dict[str, str | int | bool] = {"rule": rule, **compiled, "formats": word}
                found[name] = Signature(name, options)
        general = "-".join([*names, GENERAL])
        found[general] = Signature(general, {"rule": rule, **compiled})
    return tuple(found.values())


@functools.cache
def _signatures_by_use(
    kernel: str, rule: str
) -> Mapping[tuple[tuple[bool, ...], int | None], Signature]:
    """The signatures of `reduce_norms` or `update` by setting of flags and word of formats."""
    result = {}
    for signature in _rule_signatures(kernel, rule):
        options = signature.options
        setting = tuple(bool(options[name]) for name in compiled_flags(step_rule(kernel, rule)))
        word = options.get("formats")
        result[setting, None if word is None else int(word)] = signature
    return result


def _shape(word: int | str | None) -> Shape:
    """How to go about operands in the formats of a word, or in any if there is none."""
    if word is None:
        return WIDE
    formats = layout.formats_of(int(word))
    if Format.SIGNED_CODES in formats or Format.UNSIGNED_CODES in formats:
        return CODED
    return WIDE if {Format.FLOAT32, Format.FACTORED} & {*formats} else NARROW


def _mask(names: Sequence[str], chosen: frozenset[str]) -> int:
    return sum(1 << position for position, name in enumerate(names) if name in chosen)


def _step_triton(kernel: str, signature: Signature) -> TritonSource:
    from . import triton, triton_rules

    options = signature.options
    function = step_rule(kernel, str(options["rule"]))
    compiled = {name: bool(options[name]) for name in compiled_flags(function)}
    traffic = function.traffic(compiled)
    shape = _shape(options.get("formats"))
    settled = dict(compiled)
    if DECAYS in function.flags:
        settled[DECAYS] = not compiled.get(PENALIZES, False)
    constants: dict[str, Any] = {
        "RULE": triton_rules.functions()[function.name],
        "SCALARS": len(function.scalars),
        "FLAGS": len(function.flags),
        "COMPILED": _mask(function.flags, frozenset(settled)),
        "SETTING": _mask(function.flags, frozenset(n for n, value in settled.items() if value)),
        "INPUTS": len(function.operands),
        "READS": _mask(function.operands, traffic.reads),
        "WRITES": _mask(function.operands, traffic.writes),
        "SUMS_NORMS": kernel == "reduce_norms",
        "FORMATS": options.get("formats"),
        "CHUNK": shape.chunk,
        "PIECE": shape.piece,
        "VECTOR": shape.vector,
    }
    aligned = _TABLES & {*STEP_ARGUMENTS}
    return TritonSource(
        triton.sweep,
        STEP_ARGUMENTS,
        constants,
        aligned,
        num_warps=shape.warps,
        registers=shape.registers,
    )


def _prepare_step_triton(signature: Signature) -> TritonSource:
    from . import triton, triton_rules

    family = families()[str(signature.options["rule"])]
    constants = {
        "CONSTANTS": triton_rules.functions()[family.name + CONSTANTS],
        "HYPER": len(family.hyper),
        "HAS_STEP": family.has_step,
        "SCALARS": len(family.update.scalars),
        "STATES": len(family.update.operands) - 2,
        "LANES": PREPARE_STEP_LANES,
    }
    aligned = _TABLES & {*PREPARE_STEP_ARGUMENTS}
    return TritonSource(
        triton.prepare_step, PREPARE_STEP_ARGUMENTS, constants, aligned, num_warps=1
    )


def _trust_ratio_triton(signature: Signature) -> TritonSource:
    from . import triton, triton_rules

    family = families()[str(signature.options["rule"])]
    assert family.trust_ratio is not None
    constants = {
        "TRUST_RATIO": triton_rules.functions()[family.trust_ratio.name],
        "HYPER": len(family.hyper),
        "TAKES_COUNT": "count" in family.trust_ratio.arguments,
        "STEP_SIZE": family.update.scalars.index("step_size"),
        "LANES": TRUST_RATIO_LANES,
    }
    aligned = _TABLES & {*TRUST_RATIO_ARGUMENTS}
    return TritonSource(triton.trust_ratio, TRUST_RATIO_ARGUMENTS, constants, aligned, num_warps=8)


def _families(has_norms: bool) -> tuple[Signature, ...]:
    return tuple(
        family_signature(rule)
        for rule, family in families().items()
        if family.reduce_norms is not None or not has_norms
    )


_kernel = functools.partial(kernel_of, __package__)


def _sweep(name: str) -> Kernel:
    signatures = functools.partial(_step_signatures, name)
    return _kernel(name, signatures, functools.partial(_step_triton, name))


PREPARE_STEP = _kernel("prepare_step", lambda: _families(False), _prepare_step_triton)
"""Counts steps, makes scalars and keys; programs: `programs_of_prepare_step`."""

REDUCE_NORMS = _sweep("reduce_norms")
"""The first sweep of rules with norms; programs: `programs_of_step`."""

TRUST_RATIO = _kernel("trust_ratio", lambda: _families(True), _trust_ratio_triton)
"""From the sums of the first sweep to step sizes; as many programs as tensors."""

UPDATE = _sweep("update")
"""The sweep that updates parameters and states; programs: `programs_of_step`."""

KERNELS = (PREPARE_STEP, REDUCE_NORMS, TRUST_RATIO, UPDATE)


def float_signature(kernel: str, format: Format) -> Signature:
    """The signature of a kernel that differs by the format of the gradients alone."""
    if format not in layout.FLOATS.values():
        raise ValueError(f"{kernel}: expected float32, bfloat16 or float16, got {format.name}")
    return Signature(format.name.lower(), {"format": int(format)})


def float_signatures(kernel: str) -> tuple[Signature, ...]:
    """All signatures of such a kernel."""
    return tuple(float_signature(kernel, format) for format in layout.FLOATS.values())


def programs_of_prepare_step(tensor_count: int) -> int:
    """How many programs `prepare_step` needs."""
    return -(-tensor_count // PREPARE_STEP_LANES)


def programs_of_step(block_count: int) -> int:
    """How many programs `reduce_norms` and `update` need."""
    return block_count
