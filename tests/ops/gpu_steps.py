"""Runs the GPU kernels of a step on the tensors of a Batch: on a GPU, or in Triton's interpreter.

As a program it runs the cases that its arguments name in the interpreter, which has to be chosen
before Triton is imported, and writes what differs from the reference as JSON.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from oxytorch.gpu.kernel import Kernel, Signature
from oxytorch.ops.optimizer_step import formats, gpu, layout, parsed_rules, rules
from oxytorch.ops.optimizer_step import op as step_op
from oxytorch.ops.optimizer_step.layout import Format
from oxytorch.ops.optimizer_step.translation.parsing import Rule
from oxytorch.optim import executor
from oxytorch.optim.batch import Batch, Scaling

Run = Callable[[Kernel, Signature, Sequence[float], int], None]
"""Runs a kernel with arguments and a number of programs."""

DTYPES = {
    Format.FLOAT32: torch.float32,
    Format.BFLOAT16: torch.bfloat16,
    Format.FLOAT16: torch.float16,
    Format.SPLIT: torch.bfloat16,
    Format.STOCHASTIC: torch.bfloat16,
    Format.SIGNED_CODES: torch.int8,
    Format.UNSIGNED_CODES: torch.uint8,
}

HYPER: Mapping[str, Sequence[Mapping[str, float]]] = {
    "sgd": (
        {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.1},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.0},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.1, "nesterov": 1.0},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.1, "first": 1.0},
    ),
    "adam": tuple(
        {
            "lr": 0.01,
            "beta1": beta1,
            "beta2": 0.999,
            "eps": 1e-8,
            "weight_decay": decay,
            "amsgrad": amsgrad,
            "decoupled_weight_decay": decoupled,
        }
        for beta1, decay, amsgrad, decoupled in (
            (0.9, 0.1, 0.0, 1.0),
            (0.4, 0.1, 0.0, 0.0),
            (0.9, 0.0, 1.0, 0.0),
        )
    ),
    "adagrad": (
        {"lr": 0.01, "lr_decay": 0.01, "weight_decay": 0.1, "eps": 1e-10},
        {"lr": 0.01, "lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-10},
    ),
    "rmsprop": tuple(
        {
            "lr": 0.01,
            "alpha": 0.99,
            "eps": 1e-8,
            "weight_decay": decay,
            "momentum": momentum,
            "centered": centered,
        }
        for decay, momentum, centered in (
            (0.0, 0.0, 0.0),
            (0.1, 0.9, 0.0),
            (0.1, 0.0, 1.0),
            (0.0, 0.9, 1.0),
        )
    ),
    "lion": (
        {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1},
        {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0},
    ),
    "lamb": (
        {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.1},
        {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.0},
    ),
    "lars": (
        {"lr": 0.1, "momentum": 0.0, "eeta": 0.01, "weight_decay": 0.1, "epsilon": 1e-3},
        {"lr": 0.1, "momentum": 0.9, "eeta": 0.01, "weight_decay": 0.1, "epsilon": 1e-3},
        {
            "lr": 0.1,
            "momentum": 0.9,
            "eeta": 0.01,
            "weight_decay": 0.0,
            "epsilon": 1e-3,
            "first": 1.0,
        },
    ),
    "adafactor": (
        {
            "lr": 0.01,
            "beta2_decay": -0.8,
            "eps1": 1e-30,
            "eps2": 1e-3,
            "d": 1.0,
            "weight_decay": 0.1,
            "is_factored": 0.0,
        },
        {
            "lr": 0.01,
            "beta2_decay": -0.8,
            "eps1": 1e-30,
            "eps2": 1e-3,
            "d": 1.0,
            "weight_decay": 0.0,
            "is_factored": 1.0,
        },
    ),
}
"""Settings that reach every flag of every rule; what is left out is 0."""


@dataclass(frozen=True)
class Case:
    """A rule with hyper-parameters, and the formats of its operands."""

    rule: str
    setting: int
    formats: tuple[Format, ...]

    @property
    def name(self) -> str:
        """As a test's id."""
        kinds = "-".join(own.name.lower() for own in self.formats)
        return f"{self.rule}-{self.setting}-{kinds}"

    @property
    def hyper(self) -> tuple[float, ...]:
        """In the order of `<rule>_constants`."""
        given = HYPER[self.rule][self.setting]
        return tuple(given.get(name, 0.0) for name in parsed_rules.families()[self.rule].hyper)

    def flags(self) -> Mapping[str, object]:
        """As the rule's `_constants` function has them."""
        step = [1.0] if parsed_rules.families()[self.rule].has_step else []
        values: Mapping[str, object] = getattr(rules, f"{self.rule}_constants")(*step, *self.hyper)
        return values


FEW = (("float32", "float32"), ("bfloat16", "stochastic"), ("split", gpu.CODES))


def cases(rule: str, is_quick: bool) -> Iterator[Case]:
    """Every setting with every compiled combination of formats, and with some that are general.

    is_quick: only FEW of the combinations for all settings but one with every state.
    """
    family = parsed_rules.families()[rule]
    most = {"sgd": 1, "adam": 2, "rmsprop": 3, "lars": 1}.get(rule, 0)
    for setting, hyper in enumerate(HYPER[rule]):
        is_factored = bool(hyper.get("is_factored"))
        for parameter, states in gpu.STATES.items():
            for state in ["factored"] if is_factored else states:
                if is_quick and setting != most and (parameter, state) not in FEW:
                    continue
                yield Case(rule, setting, _formats(family.update, parameter, state))
        if not is_factored:
            mixed = (Format.SPLIT, Format.FLOAT32, Format.SIGNED_CODES, Format.FLOAT32)
            yield Case(rule, setting, _general(family.update, mixed))
            mixed = (Format.FLOAT16, Format.BFLOAT16, Format.STOCHASTIC, Format.UNSIGNED_CODES)
            yield Case(rule, setting, _general(family.update, mixed))


def _formats(function: Rule, parameter: str, state: str) -> tuple[Format, ...]:
    own = Format[parameter.upper()]
    found = [own, Format.BFLOAT16 if own is Format.SPLIT else own]
    for name in function.operands[2:]:
        if state == gpu.CODES:
            is_magnitude = name in function.magnitudes
            found.append(Format.UNSIGNED_CODES if is_magnitude else Format.SIGNED_CODES)
        else:
            found.append(Format[state.upper()])
    return tuple(found)


def _general(function: Rule, mixed: Sequence[Format]) -> tuple[Format, ...]:
    found = list(mixed[:2])
    for name, own in zip(function.operands[2:], itertools.cycle(mixed[2:]), strict=False):
        is_codes = own in (Format.SIGNED_CODES, Format.UNSIGNED_CODES)
        is_magnitude = name in function.magnitudes
        codes = Format.UNSIGNED_CODES if is_magnitude else Format.SIGNED_CODES
        found.append(codes if is_codes else own)
    return tuple(found)


COUNTS = (1, 255, 256, 257, 0, layout.BLOCK - 1, layout.BLOCK, layout.BLOCK + 1)
SHAPES = ((3, 5), (33, 70), (2, 40, 13), (1, layout.BLOCK + 1), (64, 64))
"""Of parameters with a factored state."""


def batch(case: Case, seed: int = 0) -> Batch:
    """Hostile tensors: sizes around blocks, one that is not aligned, zeros, infinities, NaN."""
    generator = torch.Generator().manual_seed(seed)
    made = Batch.of(case.formats[2:])
    is_factored = Format.FACTORED in case.formats
    shapes: list[tuple[int, ...]] = [*SHAPES] if is_factored else [(n,) for n in COUNTS]
    for position, shape in enumerate(shapes):

        def values(shape: tuple[int, ...] = shape) -> Tensor:
            return torch.randn(shape, generator=generator)

        # The last but one does not lie at 16 bytes.
        shift = 1 if position == len(shapes) - 2 else 0
        weight = values()
        low = torch.empty(0)
        if case.formats[0] is Format.SPLIT:
            weight, low = formats.split(weight)
            low = _placed(low, shift)
        made.parameters.append(_placed(weight.to(DTYPES[case.formats[0]]), shift))
        made.low_bits.append(low)
        gradient = values()
        if gradient.numel() > 40 and not is_factored:
            gradient.view(-1)[:4] = torch.tensor([0.0, -0.0, 1e-30, 3e4])
            gradient.view(-1)[7:9] = torch.tensor([torch.inf, torch.nan])
        made.gradients.append(_placed(gradient.to(DTYPES[case.formats[1]]), shift))
        for k, own in enumerate(case.formats[2:]):
            name = parsed_rules.families()[case.rule].update.operands[2 + k]
            value = values() * 0.1
            if name in parsed_rules.families()[case.rule].update.magnitudes:
                value = value.square()
            data, extra = value, torch.empty(0)
            if own is Format.FACTORED:
                data = torch.rand((*shape[:-2], 1, shape[-1]), generator=generator)
                extra = torch.rand((*shape[:-2], shape[-2], 1), generator=generator)
            elif own in (Format.SIGNED_CODES, Format.UNSIGNED_CODES):
                data, extra = formats.encode(value, own is Format.SIGNED_CODES)
                data = _placed(data, shift)
            else:
                data = _placed(value.to(DTYPES[own]), shift)
            made.states[k].append(data)
            made.scales[k].append(extra)
        if parsed_rules.families()[case.rule].has_step:
            made.steps.append(torch.tensor(float(position * 50)))
        made.rng_streams.append(7 * position + 3)
    return made


def _placed(tensor: Tensor, shift: int) -> Tensor:
    """A copy whose memory begins `shift` elements after a multiple of 64 bytes."""
    room = torch.empty(tensor.numel() + 128, dtype=tensor.dtype)
    first = -room.data_ptr() % 64 // tensor.element_size() + shift
    return room[first : first + tensor.numel()].view(tensor.shape).copy_(tensor)


def moved(batch: Batch, device: str) -> Batch:
    """A copy on a device; what is not aligned stays so."""

    def move(tensor: Tensor) -> Tensor:
        if device == "cpu":
            return _placed(tensor, tensor.data_ptr() % 64 // tensor.element_size())
        shift = tensor.data_ptr() % 16 // tensor.element_size()
        room = torch.empty(tensor.numel() + 64, dtype=tensor.dtype, device=device)
        return room[shift : shift + tensor.numel()].view(tensor.shape).copy_(tensor)

    return replace(
        batch,
        parameters=[move(t) for t in batch.parameters],
        low_bits=[move(t) for t in batch.low_bits],
        gradients=[move(t) for t in batch.gradients],
        states=[[move(t) for t in state] for state in batch.states],
        scales=[[move(t) for t in state] for state in batch.scales],
        steps=[move(t) for t in batch.steps],
    )


class Tables:
    """The tables of a batch, on its device."""

    def __init__(self, batch: Batch) -> None:
        device = batch.parameters[0].device
        counts = torch.tensor([p.numel() for p in batch.parameters])
        first = torch.cumsum(layout.block_counts(counts), 0) - layout.block_counts(counts)
        rows = torch.zeros(len(counts), layout.TENSOR_FIELDS, dtype=torch.int64)
        for i, row in enumerate(rows):
            pairs = [(batch.parameters[i], batch.low_bits[i]), (batch.gradients[i], None)]
            pairs += [(s[i], x[i]) for s, x in zip(batch.states, batch.scales, strict=True)]
            for k, (data, extra) in enumerate(pairs):
                row[2 * k] = data.data_ptr()
                row[2 * k + 1] = 0 if extra is None or not extra.numel() else extra.data_ptr()
            row[layout.STEP] = batch.steps[i].data_ptr() if batch.steps else 0
            row[layout.COUNT] = counts[i]
            row[layout.RNG_STREAM] = batch.rng_streams[i]
            row[layout.FIRST_BLOCK] = first[i]
            if batch.parameters[i].dim() > 1:
                row[layout.HEIGHT], row[layout.WIDTH] = batch.parameters[i].shape[-2:]
        blocks = layout.block_table(counts)

        def empty(count: int, fields: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(count, fields, dtype=dtype, device=device)

        self.tensors = rows.to(device)
        self.blocks = blocks.to(device)
        self.scalars = empty(len(rows), layout.SCALAR_FIELDS, torch.float32)
        self.keys = empty(len(rows), layout.KEY_FIELDS, torch.int32)
        self.partials = empty(len(blocks), layout.SUMS, torch.float64)
        self.sums = empty(len(rows), layout.SUMS, torch.float64)


def step(
    run: Run,
    case: Case,
    batch: Batch,
    seed: int = 0,
    factor: float = 1.0,
    found_inf: Tensor | None = None,
    gradient_scale: Tensor | None = None,
    clip_factor: Tensor | None = None,
    learning_rate: Tensor | None = None,
) -> Tables:
    """One step by the kernels."""
    family = parsed_rules.families()[case.rule]
    tables = Tables(batch)
    at = [
        0 if tensor is None else tensor.data_ptr()
        for tensor in (found_inf, gradient_scale, clip_factor, learning_rate)
    ]
    hyper = [*case.hyper, *[0.0] * (layout.HYPER - len(case.hyper))]
    tensors, scalars, keys = (
        table.data_ptr() for table in (tables.tensors, tables.scalars, tables.keys)
    )
    count, blocks = len(tables.tensors), len(tables.blocks)
    own = gpu.family_signature(case.rule)
    arguments = [tensors, scalars, keys, count, *at, seed, factor, *hyper]
    run(gpu.PREPARE_STEP, own, arguments, gpu.programs_of_prepare_step(count))
    partials, sums = tables.partials.data_ptr(), tables.sums.data_ptr()
    flags = case.flags()
    for kernel in [gpu.REDUCE_NORMS, gpu.UPDATE] if family.reduce_norms else [gpu.UPDATE]:
        run(
            kernel,
            gpu.step_signature(kernel.name, case.rule, flags, case.formats),
            [
                *(tensors, tables.blocks.data_ptr(), blocks, scalars, keys, partials, at[0]),
                gpu.run_time_flags(kernel.name, case.rule, flags),
                layout.formats_word(case.formats),
            ],
            gpu.programs_of_step(blocks),
        )
        if kernel is gpu.REDUCE_NORMS:
            run(gpu.TRUST_RATIO, own, [tensors, partials, sums, scalars, at[0], 0, *hyper], count)
    return tables


def reference(case: Case, batch: Batch, scaling: Scaling, seed: int) -> Batch:
    """What the rule makes of the batch on CPU tensors."""
    expected = moved(batch, "cpu")
    stochastic = Format.STOCHASTIC in case.formats
    executor.run_step(step_op.reference, case.rule, expected, case.hyper, scaling, stochastic, seed)
    return expected


def _whole(case: Case, batch: Batch) -> list[Tensor]:
    """The parameters, split ones joined."""
    if case.formats[0] is not Format.SPLIT:
        return batch.parameters
    halves = zip(batch.parameters, batch.low_bits, strict=True)
    return [formats.join(upper.cpu(), low.cpu()) for upper, low in halves]


def differences(case: Case, actual: Batch, wanted: Batch) -> list[str]:
    """What is not the same bits, in words; NaN equals NaN, whatever its sign is."""
    operands = parsed_rules.families()[case.rule].update.operands
    lists = [
        ("parameter", _whole(case, actual), _whole(case, wanted)),
        ("step", actual.steps, wanted.steps),
    ]
    for k, (own, other) in enumerate(zip(actual.states, wanted.states, strict=True)):
        if case.formats[2 + k] in (Format.SIGNED_CODES, Format.UNSIGNED_CODES):
            scales = zip(actual.scales[k], wanted.scales[k], strict=True)
            pairs = zip(own, other, scales, strict=True)
            own, other = [], []
            for ours, theirs, (a, b) in pairs:
                own.append(formats.decode(ours.cpu(), a.cpu()))
                other.append(formats.decode(theirs, b))
        lists.append((operands[2 + k], own, other))
        lists.append((f"{operands[2 + k]}_scales", actual.scales[k], wanted.scales[k]))
    found = []
    for name, ours, theirs in lists:
        for position, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            a = a.cpu()
            differs = (a != b) & ~((a != a) & (b != b))
            if differs.any():
                index = int(differs.view(-1).nonzero()[0])
                found.append(
                    f"{case.name}: {name} {position} {tuple(b.shape)}: {int(differs.sum())} "
                    f"differ, first at {index}: {a.view(-1)[index]} for {b.view(-1)[index]}"
                )
    return found


def _library_fma() -> Any:
    function = ctypes.CDLL("libm.so.6").fma
    function.restype, function.argtypes = ctypes.c_double, [ctypes.c_double] * 3
    return function


def _narrow_fma(x: Any, y: Any, z: Any) -> Any:
    """x y + z of float32 arrays, rounded once; as arithmetic.h has it for old processors."""
    import numpy

    with numpy.errstate(all="ignore"):
        product = x.astype(numpy.float64) * y
        total = product + z
        part = total - product
        error = (product - (total - part)) + (z - part)
        bits = numpy.array(total).view(numpy.int64)
        towards = numpy.where((error > 0) == (total > 0), 1, -1)
        changes = (error != 0) & ((bits & 1) == 0) & numpy.isfinite(total)
        return (bits + towards * changes).view(numpy.float64).astype(numpy.float32)


def interpreter() -> Run:
    """Runs kernels in Triton's interpreter, which is made to round as GPUs do."""
    import numpy
    import triton.language as tl
    from triton.runtime import interpreter as triton_interpreter

    wide = numpy.vectorize(_library_fma(), otypes=[numpy.float64])

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        function = _narrow_fma if x.data.dtype == numpy.float32 else wide
        data = function(x.data, y.data, z.data)
        return triton_interpreter.TensorHandle(data, z.dtype.scalar)

    def create_fp_trunc(self: Any, x: Any, dtype: Any) -> Any:
        if dtype.scalar != tl.bfloat16:
            return self.cast_impl(x, dtype)
        rounded = torch.from_numpy(x.data).to(torch.bfloat16).view(torch.int16)
        return triton_interpreter.TensorHandle(rounded.numpy().view(numpy.uint16), dtype.scalar)

    builder = triton_interpreter.InterpreterBuilder
    builder.create_fma, builder.create_fp_trunc = create_fma, create_fp_trunc
    patch_tensor = triton_interpreter._patch_lang_tensor

    def patch_tensor_for_numpy_2(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        # Numbers are arrays of one element, which NumPy does not take for an index since 2.4.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    triton_interpreter._patch_lang_tensor = patch_tensor_for_numpy_2
    types = {"i64": tl.int64, "i32": tl.int32, "fp64": tl.float64}

    def run(
        kernel: Kernel, signature: Signature, arguments: Sequence[float], programs: int
    ) -> None:
        source = kernel.triton(signature)
        given = {
            name: tl.tensor(
                triton_interpreter.TensorHandle(
                    numpy.array([value], triton_interpreter._get_np_dtype(types[kind])),
                    types[kind],
                ),
                types[kind],
            )
            for (name, kind), value in zip(source.arguments.items(), arguments, strict=True)
        }
        if programs:
            source.function[(programs,)](**given, **source.constants)

    return run


SWEEPS = ("norm", "factors", "scalars", "options")
"""What gpu_sweeps.py has beside the rules."""


def main() -> None:
    """Interprets all cases of the rules that are named; prints what differs, as JSON."""
    run = interpreter()
    report = {}
    for rule in sys.argv[1:]:
        if rule in SWEEPS:
            import gpu_sweeps

            report[rule] = getattr(gpu_sweeps, rule)(run, "cpu")
            continue
        for case in cases(rule, is_quick=True):
            before = batch(case)
            actual = moved(before, "cpu")
            step(run, case, actual, seed=5, factor=-0.5)
            wanted = reference(case, before, Scaling(factor=-0.5), 5)
            report[case.name] = differences(case, actual, wanted)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
