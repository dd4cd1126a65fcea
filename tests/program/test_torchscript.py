"""Modules of TorchScript: what is fused from script and trace, and that nothing changes by it."""

from __future__ import annotations

import io
import logging
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import oxytorch
from threads import errors_in_threads

pytestmark = [
    pytest.mark.usefixtures("everything_is_packed"),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning", "ignore::UserWarning"
    ),
]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class Layers(nn.Module):
    """Layers that the functions below call by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(16, 32)
        self.back = nn.Linear(32, 16)
        self.norm = nn.LayerNorm(16)
        self.rms = nn.RMSNorm(16, eps=1e-6)
        self.scale = nn.Parameter(torch.rand(16))
        self.conv = nn.Conv2d(3, 8, 3)
        self.batch = nn.BatchNorm2d(8)
        self.batch.running_mean.copy_(torch.randn(8))  # type: ignore[union-attr]
        self.batch.running_var.copy_(torch.rand(8) + 0.5)  # type: ignore[union-attr]
        self.pool = nn.AdaptiveAvgPool2d(1)


class Norm(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class SumNorm(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.back(self.first(x)))


class RMSNorm(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.rms(x)


class WrittenRMSNorm(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Gate(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.first(x)) * self.second(x)


class GeluGate(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.first(x)) * self.second(x)


class WrittenGelu(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


class WrittenSilu(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


class LinearRelu(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.back(F.relu(self.first(x)))


class LinearReluInPlace(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu_(self.first(x))
        y += 1
        return self.back(y)


class LinearGelu(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.back(F.gelu(self.first(x)))


class LinearTanhGelu(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.back(F.gelu(self.first(x), approximate="tanh"))


class LinearSilu(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.back(F.silu(self.first(x)))


class LinearSum(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.first(x)) + x


class ConvNormRelu(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.batch(self.conv(x)), inplace=True)
        return torch.flatten(self.pool(y), 1)


class ConvImage(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


ROWS, IMAGE = (3, 5, 16), (2, 3, 8, 8)
PATTERNS: list[tuple[type[Layers], tuple[int, ...], torch.dtype, str]] = [
    (Norm, ROWS, torch.float32, "layer_norm"),
    (SumNorm, ROWS, torch.float32, "add + layer_norm"),
    (RMSNorm, ROWS, torch.float32, "rms_norm"),
    (WrittenRMSNorm, ROWS, torch.float32, "rms_norm"),
    (Gate, ROWS, torch.float32, "silu * mul"),
    (GeluGate, ROWS, torch.float32, "gelu * mul"),
    (WrittenGelu, ROWS, torch.float32, "gelu"),
    (WrittenSilu, ROWS, torch.float32, "silu"),
    (LinearRelu, ROWS, torch.float32, "linear + relu, weight in panels"),
    (LinearGelu, ROWS, torch.bfloat16, "linear + gelu, weight in panels"),
    (LinearTanhGelu, ROWS, torch.bfloat16, "linear + gelu_tanh, weight in panels"),
    (LinearSilu, ROWS, torch.bfloat16, "linear + silu, weight in panels"),
    (LinearSum, ROWS, torch.bfloat16, "linear + add, weight in panels"),
    (LinearReluInPlace, ROWS, torch.bfloat16, "linear + relu, weight in panels"),
    (ConvNormRelu, IMAGE, torch.float32, "convolution, channels last"),
    (ConvNormRelu, IMAGE, torch.float32, "relu in place"),
    (ConvImage, IMAGE, torch.float32, "convolution, channels last"),
]


def made(model: nn.Module, x: Any, traced: bool) -> torch.jit.ScriptModule:
    model = model.eval()
    found = torch.jit.trace(model, x) if traced else torch.jit.script(model)
    assert isinstance(found, torch.jit.ScriptModule)
    return found


def done(model: Any) -> list[str]:
    return [entry.detail for entry in oxytorch.explain(model).applied]


def why_left(model: Any) -> str:
    return " ".join(f"{each.module} {each.detail}" for each in oxytorch.explain(model).skipped)


def same(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    assert all(a.stride() == b.stride() for a, b in pairs)


def called(run: Callable[[], Any]) -> set[str]:
    """The operators that a call runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return {event.key for event in profile.key_averages()}


def runs_ours(model: Any, *args: Any) -> bool:
    names = called(lambda: model(*args)) - {"oxytorch::fits"}
    return any(name.startswith("oxytorch::") for name in names)


@pytest.mark.parametrize("traced", [False, True], ids=["script", "trace"])
@pytest.mark.parametrize(
    ("kind", "shape", "dtype", "what"),
    PATTERNS,
    ids=[f"{p[0].__name__}-{p[3].replace(' ', '_')}" for p in PATTERNS],
)
def test_pattern_is_found(
    kind: type[Layers], shape: tuple[int, ...], dtype: torch.dtype, what: str, traced: bool
) -> None:
    model = kind().to(dtype)
    x = torch.randn(shape, dtype=dtype)
    script = made(model, x, traced)
    ours = oxytorch.optimize(script, sample_input=x)
    assert what in done(ours)
    for batch in (shape[0], 1, 7):
        other = torch.randn(batch, *shape[1:], dtype=dtype)
        for _ in range(3):
            same(ours(other.clone()), model(other.clone()), TOLERANCE[dtype])


def test_one_module_serves_all_sizes() -> None:
    x = torch.randn(1, 5, 16)
    ours = oxytorch.optimize(made(SumNorm(), x, traced=False), sample_input=x)
    for shape in ((1, 5, 16), (4, 5, 16), (1, 1, 16), (2, 300, 16)):
        assert runs_ours(ours, torch.randn(shape))


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(16),
        torch.randn(2, 3, 4, 16),
        torch.randn(0, 5, 16),
        torch.randn(3, 16, 5).transpose(1, 2),
        torch.randn(3, 5, 16, requires_grad=True),
    ],
    ids=["one-dimension", "four-dimensions", "empty", "not-contiguous", "gradient"],
)
def test_call_of_another_form_runs_the_original(x: Tensor) -> None:
    sample = torch.randn(3, 5, 16)
    script = made(SumNorm(), sample, traced=False)
    ours = oxytorch.optimize(script, sample_input=sample)
    for _ in range(3):
        assert not runs_ours(ours, x)
        same(ours(x), script(x))


def test_gradients_are_those_of_the_original() -> None:
    sample = torch.randn(3, 5, 16)
    script = made(SumNorm(), sample, traced=False)
    ours = oxytorch.optimize(script, sample_input=sample)
    found, expected = (sample.clone().requires_grad_() for _ in range(2))
    with torch.enable_grad():
        for _ in range(3):
            ours(found).sum().backward()
            script(expected).sum().backward()
    same(found.grad, expected.grad, 1e-4)


def test_autocast_gives_what_it_gave() -> None:
    sample = torch.randn(3, 5, 16)
    script = torch.jit.freeze(made(LinearRelu(), sample, traced=False))
    ours = oxytorch.optimize(script, sample_input=sample)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = ours(sample), script(sample)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_wrong_input_raises_as_before() -> None:
    sample = torch.randn(3, 5, 16)
    ours = oxytorch.optimize(made(SumNorm(), sample, traced=False), sample_input=sample)
    with pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes|size|shape"):
        ours(torch.randn(3, 5, 17))


class Loop(Layers):
    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(x.size(0), 16, dtype=x.dtype)
        for step in range(x.size(1)):
            state = self.norm(self.back(F.relu(self.first(x[:, step]))) + state)
            if step > 1:
                state = F.silu(self.second(state))[:, :16] * state
        return state


class Growing(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        seen = x[:, :1]
        while seen.size(1) < x.size(1):
            step = x[:, seen.size(1) :][:, :1]
            seen = torch.cat([seen, self.norm(step + seen[:, -1:])], 1)
        return seen


class Branch(Layers):
    def forward(self, x: Tensor, twice: bool) -> Tensor:
        y = self.back(F.relu(self.first(x)))
        if twice:
            y = self.norm(y + x)
        elif bool(y.sum() > 1e9):
            y = y[:, :1]
        return self.norm(y + 1)


@pytest.mark.parametrize("kind", [Loop, Growing])
def test_loop_stays_and_its_body_is_fused(kind: type[Layers]) -> None:
    x = torch.randn(3, 5, 16)
    script = made(kind(), x, traced=False)
    ours = oxytorch.optimize(script, sample_input=x)
    assert "prim::Loop" in why_left(ours)
    assert any("layer_norm" in what for what in done(ours))
    for shape in ((3, 5, 16), (1, 9, 16), (2, 1, 16)):
        other = torch.randn(shape)
        same(ours(other), script(other))
    assert runs_ours(ours, x)


class Collects(Layers):
    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        for step in range(x.size(0)):
            seen.append(self.norm(x[step] + 1))
        return torch.stack(seen)


class CollectsMore(Layers):
    def forward(self, x: Tensor) -> Tensor:
        seen = [x]
        while len(seen) < 4:
            seen.append(F.relu(seen[-1]))
        return self.norm(torch.stack(seen, 1) + x.unsqueeze(1))


@pytest.mark.parametrize("kind", [Collects, CollectsMore])
def test_a_list_that_grows_is_not_taken_for_what_it_was(
    kind: type[Layers], caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(3, 16)
    script = made(kind(), x, traced=False)
    ours = oxytorch.optimize(script, sample_input=x)
    for rows in (3, 5, 1):
        other = torch.randn(rows, 16)
        same(ours(other), script(other))
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_operators_that_fail_without_values_are_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Reads(Layers):
        def forward(self, x: Tensor) -> Tensor:
            # The sample has one row, in place of which others are looked at first.
            return self.norm(torch.bmm(x[None], torch.ones(x.size(0), 16, 16)) + 1)

    x = torch.randn(1, 16)
    script = made(Reads(), x, traced=False)
    ours = oxytorch.optimize(script, sample_input=x)
    same(ours(x), script(x))
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_both_branches_stay() -> None:
    x = torch.randn(3, 16)
    script = made(Branch(), x, traced=False)
    ours = oxytorch.optimize(script, sample_input=(x, True))
    assert "prim::If" in why_left(ours)
    assert "add + layer_norm" in done(ours)
    for twice in (True, False):
        same(ours(x, twice), script(x, twice))


class WritesToInput(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x += 1
        return self.back(F.relu(self.first(y))) + x


class WritesToView(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        part = y[:, :4]
        part.zero_()
        return self.back(F.relu(y))


class Counts(nn.Module):
    """Keeps what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(16))
        self.norm = nn.LayerNorm(16)
        self.line = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.line(x) + x)
        self.seen = self.seen + y.sum(0)
        self.seen += 1
        return self.norm(y + self.seen)


class Draws(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + torch.rand_like(x)) + torch.rand_like(x)


class InPlaceView(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x.unsqueeze_(0)
        return self.norm(x)


@pytest.mark.parametrize("kind", [WritesToInput, WritesToView, Counts, Draws])
def test_writes_and_random_numbers_stay(kind: type[nn.Module]) -> None:
    x = torch.randn(5, 16)
    script = made(kind(), x, traced=False)
    frozen = torch.jit.freeze(script)
    ours = oxytorch.optimize(script, sample_input=x)
    for _ in range(4):
        given = [x.clone(), x.clone()]
        torch.manual_seed(1)
        found = ours(given[0])
        torch.manual_seed(1)
        expected = frozen(given[1])
        same((found, given[0]), (expected, given[1]))


def test_change_of_form_in_place_is_refused_with_a_reason() -> None:
    x = torch.randn(5, 16)
    script = made(InPlaceView(), x, traced=False)
    ours = oxytorch.optimize(script, sample_input=x)
    assert not done(ours)
    assert "aten::unsqueeze_ changes the form" in why_left(ours)
    same(ours(x.clone()), script(x.clone()))


class TwoResults(Layers):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x)
        return y, self.back(F.relu(y))


def test_results_may_be_written_to() -> None:
    x = torch.randn(5, 16)
    script = made(TwoResults(), x, traced=False)
    ours = oxytorch.optimize(script, sample_input=x)
    for _ in range(4):
        found, expected = ours(x), script(x)
        same(found, expected)
        for each in (*found, *expected):
            each.fill_(7)


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cumsum(x, 0)


def test_nothing_to_do_gives_the_frozen_module() -> None:
    x = torch.randn(5, 16)
    ours = oxytorch.optimize(made(Nothing(), x, traced=False), sample_input=x)
    assert not done(ours)
    assert "prim::If" not in str(ours.graph)
    same(ours(x), torch.cumsum(x, 0))


def test_without_a_sample_nothing_is_fused_and_explain_says_why() -> None:
    x = torch.randn(5, 16)
    script = made(SumNorm(), x, traced=True)
    ours = oxytorch.optimize(script)
    assert not done(ours)
    assert "give a sample_input" in why_left(ours)
    same(ours(x), script(x))


def test_original_stays_as_it_was() -> None:
    x = torch.randn(5, 16)
    script = made(SumNorm(), x, traced=False)
    code, keys = script.code, [*script.state_dict()]
    ours = oxytorch.optimize(script, sample_input=x)
    assert script.code == code and [*script.state_dict()] == keys
    assert [*ours.parameters()] == []
    frozen = torch.jit.freeze(script)
    text = str(frozen.graph)
    oxytorch.optimize(frozen, sample_input=x)
    assert str(frozen.graph) == text


class Methods(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.encode(x))

    @torch.jit.export
    def encode(self, x: Tensor) -> Tensor:
        return self.back(F.relu(self.first(x)))


def test_methods_and_preserved_attributes_are_kept() -> None:
    x = torch.randn(5, 16)
    script = made(Methods(), x, traced=False)
    frozen = torch.jit.freeze(script, preserved_attrs=["encode", "scale"])
    for given in (script, frozen):
        ours = oxytorch.optimize(given, sample_input=x)
        same(ours(x), script(x))
        same(ours.encode(x), script.encode(x))
        assert "encode only forward is looked at" in why_left(ours)
    same(ours.scale, script.scale)


class Nested(Layers):
    def forward(
        self, x: Tensor, scale: float = 2.0, mask: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        y = self.norm(x + 1) * scale
        if mask is not None:
            y = y * mask
        return y, list(y.chunk(2, -1))


def test_optional_and_default_arguments() -> None:
    x, mask = torch.randn(5, 16), torch.rand(16)
    script = made(Nested(), x, traced=False)
    samples: list[Any] = [x, {"x": x}, (x, 3.0), {"x": x, "mask": mask}]
    for sample in samples:
        ours = oxytorch.optimize(script, sample_input=sample)
        assert done(ours)
        for given in ({}, {"scale": 3.0}, {"mask": mask}):
            found, expected = ours(x, **given), script(x, **given)
            same(found[0], expected[0])
            same((*found[1],), (*expected[1],))


def test_saved_module_runs_in_a_fresh_process(tmp_path: Path) -> None:
    x = torch.randn(3, 5, 16).bfloat16()
    script = made(LinearGelu().bfloat16(), x, traced=True)
    ours = oxytorch.optimize(script, sample_input=x)
    torch.jit.save(ours, tmp_path / "model.pt")
    torch.save((x, ours(x)), tmp_path / "data.pt")
    code = (
        "import sys, torch, oxytorch\n"
        "model = torch.jit.load(sys.argv[1])\n"
        "x, expected = torch.load(sys.argv[2])\n"
        "for _ in range(3): found = model(x)\n"
        "assert torch.equal(found, expected)\n"
        "print(oxytorch.explain(model))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "model.pt"), str(tmp_path / "data.pt")]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "linear + gelu, weight in panels" in ran.stdout


def test_loaded_module_can_be_optimized() -> None:
    x = torch.randn(5, 16)
    file = io.BytesIO()
    script = made(SumNorm(), x, traced=True)
    torch.jit.save(torch.jit.freeze(script), file)
    file.seek(0)
    ours = oxytorch.optimize(torch.jit.load(file), sample_input=x)
    assert "add + layer_norm" in done(ours)
    same(ours(x), script(x))


def test_second_optimize_is_refused() -> None:
    x = torch.randn(5, 16)
    ours = oxytorch.optimize(made(SumNorm(), x, traced=False), sample_input=x)
    for again in (ours, torch.jit.freeze(ours.eval()) if hasattr(ours, "training") else ours):
        with pytest.raises(ValueError, match="is not optimized yet"):
            oxytorch.optimize(again, sample_input=x)
    refrozen = torch.jit.optimize_for_inference(ours)
    with pytest.raises(ValueError, match="is not optimized yet"):
        oxytorch.optimize(refrozen, sample_input=x)


def test_optimize_for_inference_before_and_after() -> None:
    x = torch.randn(2, 3, 8, 8)
    script = made(ConvNormRelu(), x, traced=False)
    expected = script(x)
    after = torch.jit.optimize_for_inference(oxytorch.optimize(script, sample_input=x))
    same(after(x), expected)
    same(after(x), expected)
    before = oxytorch.optimize(torch.jit.optimize_for_inference(script), sample_input=x)
    same(before(x), expected)
    same(before(x), expected)


def test_optimized_module_is_part_of_another() -> None:
    x = torch.randn(5, 16)
    ours = oxytorch.optimize(made(SumNorm(), x, traced=False), sample_input=x)
    outer = nn.Sequential(ours, nn.ReLU()).eval()
    expected = outer(x)
    same(torch.jit.script(outer)(x), expected)
    same(torch.jit.freeze(torch.jit.trace(outer, x))(x), expected)


def test_threads_share_a_module() -> None:
    x = torch.randn(3, 5, 16)
    ours = oxytorch.optimize(made(SumNorm(), x, traced=False), sample_input=x)
    expected = ours(x)

    def run(_: int) -> None:
        for _ in range(20):
            with torch.no_grad():
                same(ours(x), expected)

    assert errors_in_threads(run, range(4)) == []


def test_switches_of_torch_stay() -> None:
    def switches() -> list[Any]:
        return [
            torch._C._jit_texpr_fuser_enabled(),
            torch._C._get_graph_executor_optimize(),
            torch._C._jit_llga_enabled(),
            torch._C._jit_can_fuse_on_cpu(),
            torch.is_autocast_enabled("cpu"),
        ]

    before = switches()
    x = torch.randn(5, 16)
    oxytorch.optimize(made(SumNorm(), x, traced=False), sample_input=x)
    assert switches() == before


def test_training_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="in training mode"):
        oxytorch.optimize(torch.jit.script(SumNorm().train()), sample_input=torch.randn(5, 16))


@pytest.mark.parametrize("sample", [(torch.randn(2, 16), 1), {"y": torch.randn(2, 16)}, ()])
def test_sample_that_does_not_fit_is_refused(sample: Any) -> None:
    with pytest.raises(ValueError, match="expected a sample_input for forward"):
        oxytorch.optimize(torch.jit.script(SumNorm().eval()), sample_input=sample)


@pytest.mark.parametrize(
    "option",
    [{"dtype": torch.bfloat16}, {"inplace": True}, {"verify": True}, {"passes": ["pack"]}],
    ids=str,
)
def test_other_arguments_are_refused(option: dict[str, Any]) -> None:
    script: Any = torch.jit.script(SumNorm().eval())
    with pytest.raises(ValueError, match=r"no other argument than sample_input .*, got "):
        oxytorch.optimize(script, sample_input=torch.randn(5, 16), **option)


def test_undo_and_explain_say_what_to_do() -> None:
    x = torch.randn(5, 16)
    script: Any = torch.jit.script(SumNorm().eval())
    ours: Any = oxytorch.optimize(script, sample_input=x)
    with pytest.raises(ValueError, match="use the module that it was given"):
        oxytorch.undo(ours)
    with pytest.raises(ValueError, match="was not optimized"):
        oxytorch.explain(script)
    assert "add + layer_norm" in str(oxytorch.explain(ours))
