"""Numbers, norms, rows and columns by GPU kernels, against torch and the reference."""

from __future__ import annotations

import gpu_steps
import torch
from gpu_steps import Run, moved
from torch import Tensor

from oxytorch.ops.global_norm import gpu as norm_kernels
from oxytorch.ops.mean_squares import gpu as factor_kernels
from oxytorch.ops.mean_squares import tiling
from oxytorch.ops.optimizer_step import gpu, layout, parsed_rules, rules
from oxytorch.ops.optimizer_step import op as step_op
from oxytorch.ops.optimizer_step.layout import Format
from oxytorch.optim import clipping, executor
from oxytorch.optim.batch import Batch, Scaling

DTYPES = (
    (Format.FLOAT32, torch.float32),
    (Format.BFLOAT16, torch.bfloat16),
    (Format.FLOAT16, torch.float16),
)


def norm(run: Run, device: str) -> list[str]:
    """What is wrong with the norm of gradients of all dtypes together."""
    generator = torch.Generator().manual_seed(3)
    # An interpreted program takes a millisecond.
    programs = norm_kernels.PROGRAMS if device == "cuda" else 50
    gradients: list[Tensor] = []
    partials = torch.full((len(DTYPES) * programs,), torch.nan, dtype=torch.float64)
    partials = partials.to(device)
    for position, (own, dtype) in enumerate(DTYPES):
        group = [
            (torch.randn(count + shift, generator=generator) * 1e3).to(dtype).to(device)[shift:]
            for count, shift in ((1, 0), (0, 0), (4096, 0), (1025, 1), (9001, 0))
        ]
        if dtype == torch.float32:
            group.append(torch.full((300,), 1e30, device=device))
        gradients += group
        rows = torch.zeros(len(group), layout.TENSOR_FIELDS, dtype=torch.int64)
        for row, gradient in zip(rows, group, strict=True):
            row[2] = gradient.data_ptr()
            row[layout.COUNT] = gradient.numel()
        rows = rows.to(device)
        blocks = layout.block_table(torch.tensor([g.numel() for g in group])).to(device)
        target = partials[position * programs :].data_ptr()
        run(
            norm_kernels.SQUARES,
            norm_kernels.squares_signature(own),
            [rows.data_ptr(), blocks.data_ptr(), len(blocks), target],
            programs,
        )
    scale = torch.tensor(8.0, device=device)
    results = torch.full((2,), torch.nan, device=device)
    at = [results[0:].data_ptr(), results[1:].data_ptr()]
    run(
        norm_kernels.NORM,
        norm_kernels.NORM_SIGNATURE,
        [partials.data_ptr(), len(partials), scale.data_ptr(), 2.5, *at],
        1,
    )
    squares = sum(g.double().square().sum() for g in gradients)
    assert isinstance(squares, Tensor)
    wanted = (squares.sqrt().float() / scale).cpu()
    factor = clipping.clip_factor(2.5, wanted)
    found = results.cpu()
    wrong = []
    if found[0] != wanted:
        wrong.append(f"norm: {found[0]} for {wanted}")
    if found[1] != factor:
        wrong.append(f"clip factor: {found[1]} for {factor}")
    return wrong


SHAPES = (
    (3, 5),
    (33, 70),
    (2, 40, 13),
    (1, 1030),
    (64, 64),
    (50, 3, 3),
    (7, 1),
    (300, 200),
    (0, 4),
)
LEAST = 1e-3


def factors(run: Run, device: str) -> list[str]:
    """What is wrong with rows, columns and factors of gradients of all dtypes."""
    return [line for own, dtype in DTYPES for line in _factors(run, device, own, dtype)]


def _factors(run: Run, device: str, own: Format, dtype: torch.dtype) -> list[str]:
    batch = _batch(dtype)
    there = moved(batch, device)
    row_factors = [torch.full_like(row, torch.nan).to(device) for row in batch.scales[0]]
    strips = [torch.full((tiling.strip_count(s), s[-1]), torch.nan, device=device) for s in SHAPES]
    table = _table(there, row_factors, strips).to(device)
    scalars = torch.zeros(len(SHAPES), layout.SCALAR_FIELDS, device=device)
    keys = torch.zeros(len(SHAPES), layout.KEY_FIELDS, dtype=torch.int32, device=device)
    tensors, numbers = table.data_ptr(), scalars.data_ptr()
    hyper = [0.01, -0.8, LEAST, 1e-3, 1.0, 0.0, 1.0, 0.0]
    run(
        gpu.PREPARE_STEP,
        gpu.family_signature("adafactor"),
        [tensors, numbers, keys.data_ptr(), len(SHAPES), 0, 0, 0, 0, 0, -0.5, *hyper],
        gpu.programs_of_prepare_step(len(SHAPES)),
    )
    for kernel, signature, tiles, least in (
        (
            factor_kernels.SUMS,
            factor_kernels.sums_signature(own),
            tiling.sum_tiles(SHAPES).to(device),
            [],
        ),
        (
            factor_kernels.FACTORS,
            factor_kernels.FACTORS_SIGNATURE,
            tiling.factor_tiles(SHAPES).to(device),
            [LEAST],
        ),
    ):
        run(kernel, signature, [tensors, tiles.data_ptr(), numbers, 0, *least], len(tiles))
    return [f"{own.name} {line}" for line in _far_off(batch, there, row_factors)]


def _batch(dtype: torch.dtype) -> Batch:
    """Gradients of SHAPES, and what Adafactor keeps of them: columns as states, rows as scales."""
    generator = torch.Generator().manual_seed(4)
    batch = Batch.of(("variance",))
    batch.gradients = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    batch.parameters = [torch.zeros(()) for _ in SHAPES]
    batch.low_bits = batch.parameters
    batch.states = [[torch.rand(*s[:-2], 1, s[-1], generator=generator) for s in SHAPES]]
    batch.scales = [[torch.rand(*s[:-1], 1, generator=generator) for s in SHAPES]]
    batch.steps = [torch.tensor(float(i)) for i in range(len(SHAPES))]
    return batch


def _table(batch: Batch, row_factors: list[Tensor], strips: list[Tensor]) -> Tensor:
    table = torch.zeros(len(SHAPES), layout.TENSOR_FIELDS, dtype=torch.int64)
    for i, row in enumerate(table):
        row[2] = batch.gradients[i].data_ptr()
        row[4] = batch.states[0][i].data_ptr()
        row[5] = row_factors[i].data_ptr()
        row[layout.ROWS] = batch.scales[0][i].data_ptr()
        row[layout.STRIPS] = strips[i].data_ptr()
        row[layout.STEP] = batch.steps[i].data_ptr()
        row[layout.COUNT] = batch.gradients[i].numel()
        row[layout.HEIGHT], row[layout.WIDTH] = SHAPES[i][-2:]
    return table


def _far_off(before: Batch, after: Batch, row_factors: list[Tensor]) -> list[str]:
    """What a step has made of a batch, where it is not what float64 gives."""
    found = []
    for i, gradient in enumerate(before.gradients):
        if not gradient.numel():
            continue
        squares = (gradient.double() * -0.5).square()
        weight = (i + 1.0) ** -0.8
        row = before.scales[0][i].double().lerp(squares.mean(-1, keepdim=True), weight)
        column = before.states[0][i].double().lerp(squares.mean(-2, keepdim=True), weight)
        factor = row / row.mean(-2, keepdim=True).clamp(min=LEAST)
        for name, actual, wanted in (
            ("row", after.scales[0][i], row),
            ("column", after.states[0][i], column),
            ("row factor", row_factors[i], factor),
        ):
            error = (actual.cpu().double() - wanted).abs()
            # Sums of at most some hundreds of float32 numbers.
            if not (error <= 2e-6 * wanted.abs()).all():
                found.append(f"{SHAPES[i]}: {name} is off by {error.max():.3g}")
    return found


STEPS = (0.0, 1.0, 2.0, 9.0, 99.0, 998.0, 12344.0, 99999.0, 1048575.0, 16777214.0)


def scalars(run: Run, device: str) -> list[str]:
    """What is wrong with the scalars of rules that count steps, after few steps and after many."""
    wrong = []
    for rule, family in parsed_rules.families().items():
        if not family.has_step:
            continue
        case = gpu_steps.Case(rule, 0, ())
        steps = [torch.tensor(step, device=device) for step in STEPS]
        table = torch.zeros(len(STEPS), layout.TENSOR_FIELDS, dtype=torch.int64)
        table[:, layout.STEP] = torch.tensor([step.data_ptr() for step in steps])
        table = table.to(device)
        found = torch.zeros(len(STEPS), layout.SCALAR_FIELDS, device=device)
        keys = torch.zeros(len(STEPS), layout.KEY_FIELDS, dtype=torch.int32, device=device)
        hyper = [*case.hyper, *[0.0] * (layout.HYPER - len(case.hyper))]
        pointers = [table.data_ptr(), found.data_ptr(), keys.data_ptr()]
        run(
            gpu.PREPARE_STEP,
            gpu.family_signature(rule),
            [*pointers, len(STEPS), 0, 0, 0, 0, 0, 1.0, *hyper],
            gpu.programs_of_prepare_step(len(STEPS)),
        )
        constants = getattr(rules, rule + "_constants")
        for i, step in enumerate(STEPS):
            values = constants(step + 1, *case.hyper)
            wanted = torch.tensor([values[name] for name in family.update.scalars])
            actual = found[i, : len(wanted)].cpu()
            if not torch.equal(actual, wanted) or steps[i] != step + 1:
                wrong.append(f"{rule} after {step} steps: {actual.tolist()} for {wanted.tolist()}")
    return wrong


def options(run: Run, device: str) -> list[str]:
    """What is wrong with steps that are left out, or that read their numbers on the device."""
    wrong = []
    for case in (next(gpu_steps.cases(rule, is_quick=True)) for rule in ("adam", "lamb")):
        before = gpu_steps.batch(case)
        actual = moved(before, device)

        def number(value: float) -> Tensor:
            return torch.tensor(value, device=device)

        gpu_steps.step(run, case, actual, found_inf=number(1.0))
        wrong += gpu_steps.differences(case, actual, before)
        gpu_steps.step(
            run,
            case,
            actual,
            factor=-1.0,
            found_inf=number(0.0),
            gradient_scale=number(3.0),
            clip_factor=number(0.7),
            learning_rate=number(0.02),
        )
        wanted = moved(before, "cpu")
        factor = -number(0.7).item()
        scaling = Scaling(gradient_scale=torch.tensor(3.0), factor=factor)
        hyper = (number(0.02).item(), *case.hyper[1:])
        executor.run_step(step_op.reference, case.rule, wanted, hyper, scaling, False, 0)
        wrong += gpu_steps.differences(case, actual, wanted)
    return wrong
