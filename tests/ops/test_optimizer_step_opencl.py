"""The OpenCL kernels of a step on SYCL's CPU device, which runs the code that Intel GPUs run."""

from __future__ import annotations

import ast
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gpu_steps
import gpu_sweeps
import pytest
import torch

from oxytorch.gpu import ocloc
from oxytorch.gpu.kernel import Function, Kernel, Signature
from oxytorch.ops import gpu_kernels
from oxytorch.ops.optimizer_step import gpu, layout, parsed_rules, rules
from oxytorch.optim.batch import Scaling

NUMBERS = {"float64": (), "pairs": ("-DWITHOUT_FLOAT64",)}
"""Options of the two ways in which constants and sums are computed."""

SCALINGS = [
    Scaling(factor=-0.5),
    Scaling(gradient_scale=torch.tensor(3.0)),
    Scaling(found_inf=torch.tensor(1.0)),
]


def _cases() -> Iterator[Any]:
    """All cases with each way of computing numbers.

    Slow but for float32 in every setting and a few formats in the first one; pairs matter to rules
    with norms, and to the others in `prepare_step` alone, which has tests of its own.
    """
    for rule, family in parsed_rules.families().items():
        for case in gpu_steps.cases(rule, is_quick=False):
            kinds = tuple(own.name.lower() for own in case.formats)
            is_common = kinds[:1] + kinds[2:3] in (("float32", "float32"), ("split", "factored"))
            has_codes = kinds[0] == "split" and any(kind.endswith("codes") for kind in kinds)
            is_random = kinds[0] == "bfloat16" and "stochastic" in kinds
            is_few = is_common or (case.setting == 0 and (has_codes or is_random))
            for numbers in NUMBERS:
                is_quick = is_few and (numbers == "float64" or family.reduce_norms is not None)
                marks = [] if is_quick else [pytest.mark.slow]
                yield pytest.param(case, numbers, id=f"{case.name}-{numbers}", marks=marks)


@pytest.fixture(scope="session")
def runs(sycl_driver: Any) -> Mapping[str, gpu_steps.Run]:
    """Runs kernels on SYCL's CPU device, by the way of computing numbers."""

    compiled: dict[tuple[str, str, Sequence[str]], Function] = {}

    def make(options: Sequence[str]) -> gpu_steps.Run:
        def run(
            kernel: Kernel, signature: Signature, arguments: Sequence[float], programs: int
        ) -> None:
            # An update computes no numbers.
            own = () if kernel is gpu.UPDATE else options
            name = kernel.name, signature.name, own
            if name not in compiled:
                source = kernel.opencl(signature)
                source = dataclasses.replace(source, options=(*source.options, *own))
                compiled[name] = sycl_driver.from_source(source)
            compiled[name].bind(*arguments)(programs, 0)
            sycl_driver.wait()

        return run

    return {name: make(options) for name, options in NUMBERS.items()}


@pytest.mark.parametrize(("case", "numbers"), [*_cases()])
def test_kernels_compute_the_bits_of_the_reference(
    case: gpu_steps.Case, numbers: str, runs: Mapping[str, gpu_steps.Run]
) -> None:
    before = gpu_steps.batch(case)
    actual = gpu_steps.moved(before, "cpu")
    gpu_steps.step(runs[numbers], case, actual, seed=5)
    wanted = gpu_steps.reference(case, before, Scaling(), 5)
    assert gpu_steps.differences(case, actual, wanted) == []


@pytest.mark.usefixtures("ocloc_on_path")
@pytest.mark.parametrize("rule", ["adam", "lamb", "adafactor"])
def test_spirv_computes_the_bits_of_the_reference(rule: str, sycl_driver: Any) -> None:
    """The way of an Intel GPU for which there is no image."""

    def run(
        kernel: Kernel, signature: Signature, arguments: Sequence[float], programs: int
    ) -> None:
        source = kernel.opencl(signature)
        program = sycl_driver._from_spirv(ocloc.compile_opencl(source, ocloc.SPIRV))
        sycl_driver._from(program, source).bind(*arguments)(programs, 0)
        sycl_driver.wait()

    cases = [*gpu_steps.cases(rule, is_quick=True)]
    case = next(case for case in cases if layout.Format.SPLIT in case.formats)
    before = gpu_steps.batch(case)
    actual = gpu_steps.moved(before, "cpu")
    gpu_steps.step(run, case, actual, seed=5)
    wanted = gpu_steps.reference(case, before, Scaling(), 5)
    assert gpu_steps.differences(case, actual, wanted) == []


@pytest.mark.parametrize("scaling", SCALINGS, ids=["factor", "gradient_scale", "found_inf"])
@pytest.mark.parametrize("rule", ["adam", "lamb"])
def test_gradients_are_scaled_and_steps_left_out(
    rule: str, scaling: Scaling, runs: Mapping[str, gpu_steps.Run]
) -> None:
    case = next(iter(gpu_steps.cases(rule, is_quick=True)))
    before = gpu_steps.batch(case)
    actual = gpu_steps.moved(before, "cpu")
    gpu_steps.step(
        runs["float64"],
        case,
        actual,
        seed=5,
        factor=scaling.factor,
        found_inf=scaling.found_inf,
        gradient_scale=scaling.gradient_scale,
    )
    wanted = gpu_steps.reference(case, before, scaling, 5)
    assert gpu_steps.differences(case, actual, wanted) == []
    untouched = [torch.equal(a, b) for a, b in zip(actual.steps, before.steps, strict=True)]
    assert all(untouched) == (scaling.found_inf is not None)


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("subject", gpu_steps.SWEEPS)
def test_sweeps_compute_what_torch_does(
    subject: str, numbers: str, runs: Mapping[str, gpu_steps.Run]
) -> None:
    assert getattr(gpu_sweeps, subject)(runs[numbers], "cpu") == []


@pytest.mark.parametrize("numbers", NUMBERS)
def test_the_norm_survives_the_smallest_and_the_largest_gradients(
    numbers: str, runs: Mapping[str, gpu_steps.Run]
) -> None:
    for size in (1e-30, 1e-20, 1.0, 1e20, 1e37, torch.inf, torch.nan):
        assert _norm_of(runs[numbers], torch.full((3000,), size)) == []


def _norm_of(run: gpu_steps.Run, gradient: torch.Tensor) -> list[str]:
    """What is wrong with the norm of one tensor."""
    from oxytorch.ops.global_norm import gpu as norm_kernels

    row = torch.zeros(1, layout.TENSOR_FIELDS, dtype=torch.int64)
    row[0, 2], row[0, layout.COUNT] = gradient.data_ptr(), gradient.numel()
    blocks = layout.block_table(torch.tensor([gradient.numel()]))
    partials = torch.zeros(norm_kernels.PROGRAMS, dtype=torch.float64)
    norm = torch.zeros(1)
    arguments = [row.data_ptr(), blocks.data_ptr(), len(blocks), partials.data_ptr()]
    signature = norm_kernels.squares_signature(layout.Format.FLOAT32)
    run(norm_kernels.SQUARES, signature, arguments, norm_kernels.PROGRAMS)
    arguments = [partials.data_ptr(), len(partials), 0, 1.0, norm.data_ptr(), 0]
    run(norm_kernels.NORM, norm_kernels.NORM_SIGNATURE, arguments, 1)
    wanted = gradient.double().norm().float()
    same = torch.equal(norm[0], wanted) or bool(norm.isnan() & wanted.isnan())
    return [] if same else [f"{norm.item()} for {wanted.item()}"]


STEPS = (0.0, 1.0, 2.0, 9.0, 99.0, 1000.0, 123456.0, 1e7)
SETTINGS = {
    "adam": [(1e-3, b1, b2, 1e-8, 0.01, 0, 1) for b1 in (0.0, 0.9, 0.95) for b2 in (0.95, 0.9999)],
    "adagrad": [(0.01, decay, 0.1, 1e-10) for decay in (0.0, 1e-7, 0.3)],
    "lamb": [(0.01, 0.9, b2, 1e-6, 0.01) for b2 in (0.9, 0.99, 0.999999)],
    "adafactor": [(0.01, decay, 1e-7, 1e-3, 1.0, 0.1, 0) for decay in (-0.8, -0.5, -1.3, -2.0)],
}


def _scalars(run: gpu_steps.Run, rule: str, hyper: Sequence[float]) -> torch.Tensor:
    """What `prepare_step` makes of hyper-parameters after each of STEPS."""
    family = parsed_rules.families()[rule]
    steps = [torch.tensor(step) for step in STEPS]
    rows = torch.zeros(len(steps), layout.TENSOR_FIELDS, dtype=torch.int64)
    rows[:, layout.STEP] = torch.tensor([step.data_ptr() for step in steps])
    scalars = torch.zeros(len(steps), layout.SCALAR_FIELDS)
    keys = torch.zeros(len(steps), layout.KEY_FIELDS, dtype=torch.int32)
    padded = [*hyper, *[0.0] * (layout.HYPER - len(hyper))]
    at = [rows.data_ptr(), scalars.data_ptr(), keys.data_ptr()]
    arguments = [*at, len(steps), 0, 0, 0, 0, 0, 1.0, *padded]
    run(
        gpu.PREPARE_STEP,
        gpu.family_signature(rule),
        arguments,
        gpu.programs_of_prepare_step(len(steps)),
    )
    return scalars[:, : len(family.update.scalars)]


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("rule", SETTINGS)
def test_scalars_are_those_of_float64(
    rule: str, numbers: str, runs: Mapping[str, gpu_steps.Run]
) -> None:
    """float64: the same bits. Pairs: a value between two float32 may go to the other one."""
    constants: Callable[..., Mapping[str, float]] = getattr(rules, f"{rule}_constants")
    names = parsed_rules.families()[rule].update.scalars
    for hyper in SETTINGS[rule]:
        found = _scalars(runs[numbers], rule, hyper)
        for step, actual in zip(STEPS, found, strict=True):
            values = constants(step + 1, *hyper)
            wanted = torch.tensor([values[name] for name in names])
            unit = torch.nextafter(wanted.abs(), torch.tensor(torch.inf)) - wanted.abs()
            allowed = unit if numbers == "pairs" else torch.zeros_like(unit)
            assert ((actual - wanted).abs() <= allowed).all(), (hyper, step, actual, wanted)


def _instructions(code: bytes) -> Iterator[tuple[int, Sequence[int]]]:
    """Number and operands of each instruction of SPIR-V."""
    words = memoryview(code).cast("I")
    place = 5
    while place < len(words):
        length = words[place] >> 16
        yield words[place] & 0xFFFF, words[place + 1 : place + length]
        place += length


CAPABILITY, EXECUTION_MODE = 17, 16
FLOAT64, CONTRACTION_OFF = 10, 31


@pytest.mark.usefixtures("ocloc_on_path")
@pytest.mark.parametrize("kernel", gpu_kernels.KERNELS, ids=lambda kernel: kernel.name)
def test_spirv_needs_no_float64_and_contracts_nothing(kernel: Kernel) -> None:
    # The translator says so only where there is a product and a sum that could be contracted.
    names = [signature.name for signature in kernel.signatures()]
    chosen = names.index("lars-moves-general") if kernel is gpu.UPDATE else -1
    code = ocloc.compile_opencl(kernel.opencl(kernel.signatures()[chosen]), ocloc.SPIRV)
    instructions = [*_instructions(code)]
    capabilities = {operands[0] for number, operands in instructions if number == CAPABILITY}
    assert capabilities
    assert FLOAT64 not in capabilities
    modes = {operands[1] for number, operands in instructions if number == EXECUTION_MODE}
    assert CONTRACTION_OFF in modes


@pytest.mark.usefixtures("ocloc_on_path")
@pytest.mark.parametrize("device", ["pvc", "ats-m150"])
@pytest.mark.parametrize("kernel", gpu_kernels.KERNELS, ids=lambda kernel: kernel.name)
def test_ocloc_compiles_each_kernel(kernel: Kernel, device: str) -> None:
    signature = kernel.signatures()[0]
    ocloc.check(ocloc.compile_opencl(kernel.opencl(signature), device), device)


@pytest.mark.slow
@pytest.mark.usefixtures("ocloc_on_path")
@pytest.mark.parametrize("kernel", gpu_kernels.KERNELS, ids=lambda kernel: kernel.name)
def test_ocloc_compiles_every_signature(kernel: Kernel) -> None:
    for signature in kernel.signatures():
        source = kernel.opencl(signature)
        for device in ("pvc", "ats-m150"):
            ocloc.check(ocloc.compile_opencl(source, device), device)


def test_numbers_in_constants_are_float32() -> None:
    """Pairs are made of them with a float32, which would not hold 0.1."""
    for name, family in parsed_rules.families().items():
        trust = [family.trust_ratio.result] if family.trust_ratio else []
        for node in itertools.chain(*map(ast.walk, [*family.constants.values(), *trust])):
            if isinstance(node, ast.Constant) and isinstance(node.value, float):
                assert torch.tensor(node.value).item() == node.value, (name, node.value)
