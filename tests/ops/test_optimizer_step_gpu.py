"""The GPU kernels of a step: in Triton's interpreter here, on a GPU where there is one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

import gpu_steps
import gpu_sweeps
import pytest
import torch

from oxytorch.gpu.kernel import Kernel, Signature
from oxytorch.ops import gpu_kernels
from oxytorch.ops.optimizer_step import gpu, layout, parsed_rules
from oxytorch.ops.optimizer_step.layout import Format
from oxytorch.optim.batch import Scaling

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")

RULES = list(gpu_steps.HYPER)
CASES = [case for rule in RULES for case in gpu_steps.cases(rule, is_quick=False)]
SCALINGS = [
    Scaling(factor=-0.5),
    Scaling(gradient_scale=torch.tensor(3.0)),
    Scaling(found_inf=torch.tensor(1.0)),
]
DEVICES = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
LARGEST = 3_000_000
"""Bytes that the compressed images of a device may have."""


def _on_gpu(
    kernel: Kernel, signature: Signature, arguments: Sequence[float], programs: int
) -> None:
    from oxytorch.gpu import launch

    device = torch.device("cuda", torch.cuda.current_device())
    ready = launch.function(kernel, signature, device).bind(*arguments)
    if programs:
        ready(programs, launch.current_stream(device))


QUICK = ("adam", "lion", "sgd", *gpu_steps.SWEEPS)
"""What the default run interprets: the kernels of other rules are made of the same parts."""


@needs_triton
@pytest.mark.parametrize(
    "subject",
    [*QUICK, *(pytest.param(r, marks=pytest.mark.slow) for r in RULES if r not in QUICK)],
)
def test_interpreted_kernels_compute_what_the_reference_does(subject: str) -> None:
    program = Path(gpu_steps.__file__)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), subject],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report
    assert [line for lines in report.values() for line in lines] == []


@needs_gpu
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_gpu_kernels_compute_the_bits_of_the_reference(case: gpu_steps.Case) -> None:
    before = gpu_steps.batch(case)
    for scaling in SCALINGS:
        actual = gpu_steps.moved(before, "cuda")
        tensors = [scaling.found_inf, scaling.gradient_scale]
        found_inf, scale = (None if t is None else t.cuda() for t in tensors)
        gpu_steps.step(
            _on_gpu,
            case,
            actual,
            seed=5,
            factor=scaling.factor,
            found_inf=found_inf,
            gradient_scale=scale,
        )
        wanted = gpu_steps.reference(case, before, scaling, 5)
        assert gpu_steps.differences(case, actual, wanted) == []


@needs_gpu
@pytest.mark.parametrize("subject", gpu_steps.SWEEPS)
def test_gpu_sweeps_compute_what_torch_does(subject: str) -> None:
    assert getattr(gpu_sweeps, subject)(_on_gpu, "cuda") == []


@pytest.mark.parametrize("rule", RULES)
def test_every_setting_of_the_flags_has_a_signature_for_every_formats(rule: str) -> None:
    family = parsed_rules.families()[rule]
    for case in gpu_steps.cases(rule, is_quick=False):
        for kernel in [gpu.REDUCE_NORMS, gpu.UPDATE] if family.reduce_norms else [gpu.UPDATE]:
            found = gpu.step_signature(kernel.name, rule, case.flags(), case.formats)
            assert found in kernel.signatures()
            is_mixed = case.formats[:2] in (
                (Format.SPLIT, Format.FLOAT32),
                (Format.FLOAT16, Format.BFLOAT16),
            )
            assert ("formats" not in found.options) == is_mixed


def test_signatures_have_names_of_their_own() -> None:
    names = [kernel.name for kernel in gpu_kernels.KERNELS]
    assert len({*names}) == len(names)
    for kernel in gpu_kernels.KERNELS:
        own = [signature.name for signature in kernel.signatures()]
        assert own
        assert len({*own}) == len(own)


def test_a_rule_without_norms_has_nothing_to_reduce_norms() -> None:
    with pytest.raises(ValueError, match="reduce_norms: expected a rule with norms, got adam"):
        gpu.step_rule("reduce_norms", "adam")


def test_the_table_of_blocks_numbers_those_of_each_tensor() -> None:
    counts = torch.tensor([1, 0, 2 * layout.BLOCK + 1, layout.BLOCK])
    assert layout.block_table(counts).tolist() == [[0, 0], [2, 0], [2, 1], [2, 2], [3, 0]]
    assert layout.block_table(counts[:0]).shape == (0, layout.BLOCK_FIELDS)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_every_signature_compiles_to_a_small_image(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oxytorch.gpu import compilers
    from oxytorch.gpu.devices import BY_NAME

    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")
    size = 0
    for kernel in gpu_kernels.KERNELS:
        for signature in kernel.signatures():
            size += len(
                zlib.compress(compilers.compile_for(kernel, signature, BY_NAME[device]).code)
            )
    assert size <= LARGEST
