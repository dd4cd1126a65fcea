"""Programs that were quantized elsewhere run on the same integers, to a step of their rounding.

A sum of integers is exact here, and rounded in float32 in the reference: where it lies in the
middle between two steps of what rounds it, the two may differ by that step.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from qdq_models import OPERATORS, PAIRS, STEP, WAYS, Depthwise, Net, Pair, Weight, decomposed, fake
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.nn import functional as F

import oxytorch
from oxytorch import isa
from oxytorch.ops.panels import layout
from oxytorch.program import ProgramModel

IMAGES = torch.randn(2, 3, 40, 40, generator=torch.Generator().manual_seed(0))
OF_FLOATS = ("aten::linear", "aten::convolution", "quantized_decomposed", "aten::matmul")


def exported(model: nn.Module, *args: Tensor, **kwargs: Any) -> ExportedProgram:
    torch.manual_seed(0)
    with torch.no_grad():
        return export(model.eval(), args, **kwargs)


def ran(model: Callable[..., Any], *args: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(*args)
    return found


def check(program: ProgramModel, source: ExportedProgram, *inputs: Tensor) -> None:
    """Compare with the reference, of which at most 3 % may differ, by a step."""
    differences = []
    for x in inputs:
        found, wanted = ran(program, x), ran(source.module(), x)
        assert found.shape == wanted.shape and found.dtype == wanted.dtype
        differences.append((found - wanted).abs().flatten())
    difference = torch.cat(differences)
    assert difference.max() <= 1.001 * STEP
    assert (difference > 1e-4 * STEP).float().mean() <= 0.03


def layers(program: ProgramModel) -> int:
    text = str(program)
    return text.count("oxytorch::quantized_linear") + text.count("oxytorch::quantized_convolution")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pair", PAIRS)
def test_all_layers_multiply_the_integers_of_every_spelling(pair: Pair, way: str) -> None:
    source = exported(Net(pair, way), IMAGES)
    program = oxytorch.optimize(source)
    assert layers(program) == 5
    assert not any(name in str(program) for name in OF_FLOATS)
    random = torch.Generator().manual_seed(1)
    check(program, source, *(torch.randn(IMAGES.shape, generator=random) for _ in range(8)))


def test_depthwise_convolutions_multiply_integers() -> None:
    x = torch.randn(2, 32, 12, 12, generator=torch.Generator().manual_seed(0))
    source = exported(Depthwise(), x)
    program = oxytorch.optimize(source)
    assert layers(program) == 2
    check(program, source, x)


def test_layers_give_each_other_bytes() -> None:
    program = oxytorch.optimize(exported(Net(), IMAGES))
    lines = [line for line in str(program).splitlines() if "quantized_" in line]
    assert sum('"add_relu" "uint8"' in line for line in lines) == 1
    assert sum("dequantize_per_tensor" in line for line in lines) == 0
    # The input and the means; what is pooled are bytes.
    assert str(program).count("oxytorch::quantize_per_tensor") == 2


@pytest.mark.parametrize("level", [each.name for each in isa.levels() if each.supported])
def test_every_level_gives_the_same_numbers(level: str) -> None:
    source = exported(Net(), IMAGES)
    program = oxytorch.optimize(source)
    with isa.use("generic"):
        wanted = ran(program, IMAGES)
    with isa.use(level):
        assert torch.equal(ran(program, IMAGES), wanted)


class Linear(nn.Module):
    """A linear layer between pairs, however its weight lies.

    product: makes its result of an input and the weight.
    """

    def __init__(
        self,
        weight: Weight,
        product: Callable[[Tensor, Tensor], Tensor] = F.linear,
        pair: Pair = decomposed,
    ) -> None:
        super().__init__()
        self.weight, self.product, self.pair = weight, product, pair
        self.bias = nn.Parameter(torch.randn(12))

    def forward(self, x: Tensor) -> Tensor:
        x = self.pair(x, 0.03, 100, torch.uint8)
        return self.pair(self.product(x, self.weight()) + self.bias, STEP, 3, torch.int8)


@pytest.mark.parametrize(
    ("weight", "product"),
    [
        (lambda: Weight(12, 32), F.linear),
        (lambda: Weight(32, 12, axis=1), torch.matmul),
        (lambda: Weight(32, 12, way="tensor"), torch.matmul),
        (lambda: Weight(32, 12, axis=1), lambda x, w: F.linear(x, w.t())),
        (lambda: Weight(32, 12, axis=1, way="formula"), lambda x, w: x @ w),
        (lambda: Weight(12, 32, zero_point=128, dtype=torch.uint8), F.linear),
        (lambda: Weight(12, 32, zero_point=128, dtype=torch.uint8, way="tensor"), F.linear),
        (lambda: Weight(32, 12, axis=1), lambda x, w: (x.flatten(0, 1) @ w).view(3, 7, 12)),
    ],
)
def test_weights_may_lie_in_any_way(
    weight: Callable[[], Weight], product: Callable[[Tensor, Tensor], Tensor]
) -> None:
    x = torch.randn(3, 7, 32)
    source = exported(Linear(weight(), product), x)
    program = oxytorch.optimize(source)
    assert layers(program) == 1 and not any(name in str(program) for name in OF_FLOATS)
    check(program, source, x)


def test_the_integers_are_the_very_ones() -> None:
    model = Linear(Weight(12, 32))
    program = oxytorch.optimize(exported(model, torch.randn(3, 32)))
    packed = [c for c in program.program.constants if c.dtype == torch.uint8]
    assert len(packed) == 1
    stored = layout.unpack("int8", packed[0], 12, 32).view(torch.int8)
    assert torch.equal(stored, model.weight.integers)
    scales = [c for c in program.program.constants if c.dtype == torch.float32 and len(c) == 16]
    assert any(torch.equal(each[:12], model.weight.scales) for each in scales)


class Layer(nn.Module):
    """A linear layer with some input and weight."""

    def __init__(self, weight: Weight, given: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.given = weight, given

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.given(x), self.weight())


def _wide(x: Tensor) -> Tensor:
    ends = -32768, 32767, torch.int16
    found: Tensor = OPERATORS.dequantize_per_tensor(
        OPERATORS.quantize_per_tensor(x, 0.001, 0, *ends), 0.001, 0, *ends
    )
    return found


def _by_channel(x: Tensor) -> Tensor:
    scales, zeros = torch.linspace(0.01, 0.03, 32), torch.arange(32)
    words = scales, zeros, 1, 0, 255, torch.uint8
    found: Tensor = OPERATORS.dequantize_per_channel(
        OPERATORS.quantize_per_channel(x, *words), *words
    )
    return found


def _dynamic(x: Tensor) -> Tensor:
    numbers = OPERATORS.choose_qparams.tensor(x, -128, 127, 1e-6, torch.int8)
    words = *numbers, -128, 127, torch.int8
    found: Tensor = OPERATORS.dequantize_per_tensor.tensor(
        OPERATORS.quantize_per_tensor.tensor(x, *words), *words
    )
    return found


def _pair(x: Tensor) -> Tensor:
    return decomposed(x, 0.03, 100, torch.uint8)


@pytest.mark.parametrize(
    ("weight", "given", "why"),
    [
        (lambda: Weight(12, 32), _wide, "its input is not rounded to 8 bits"),
        (lambda: Weight(12, 32), _by_channel, "its input is not rounded to 8 bits"),
        (lambda: Weight(12, 32), _dynamic, "its input is not rounded to 8 bits"),
        (lambda: Weight(12, 32), torch.tanh, "its input is not rounded to 8 bits"),
        (lambda: Weight(12, 32, zero_point=3), _pair, "its weight has zero points other than 0"),
        (lambda: Weight(12, 32, axis=1), _pair, "are not those of its outputs"),
        (lambda: Weight(12, 32).register_forward_hook, _pair, "its weight is not rounded"),
    ],
)
def test_what_is_not_taken_is_right_and_says_why(
    weight: Callable[[], Any], given: Callable[[Tensor], Tensor], why: str, tmp_path: Path
) -> None:
    made = weight()
    if not isinstance(made, nn.Module):
        made = Weight(12, 32)
        made.forward = lambda: made.numbers  # type: ignore[method-assign]
    x = torch.randn(3, 32)
    source = exported(Layer(made, given), x)
    program = oxytorch.optimize(source)
    assert layers(program) == 0
    assert torch.allclose(ran(program, x), ran(source.module(), x), atol=1e-5)
    report = oxytorch.graph.explain(source)
    assert any(why in note.why for note in report.skipped), report.skipped
    oxytorch.save(
        program, tmp_path / "model.oxy"
    )  # which holds no operator of quantized_decomposed
    loaded = oxytorch.load(tmp_path / "model.oxy")
    assert torch.allclose(ran(loaded, x), ran(source.module(), x), atol=1e-5)


def test_the_report_names_what_was_taken() -> None:
    report = str(oxytorch.graph.explain(exported(Net(), IMAGES)))
    assert "qdq_layers.layers: aten::convolution became oxytorch::quantized_convolution" in report
    assert "qdq_layers.layers: aten::linear became oxytorch::quantized_linear" in report


def test_files_are_small_and_give_the_same(tmp_path: Path) -> None:
    model = Linear(Weight(12, 32))
    model.weight, model.bias = Weight(512, 512), nn.Parameter(torch.randn(512))
    x = torch.randn(3, 512)
    source = exported(model, x)
    program, path = oxytorch.optimize(source), tmp_path / "model.oxy"
    oxytorch.save(program, path)
    assert path.stat().st_size < 1.1 * 512 * 512
    assert torch.equal(ran(oxytorch.load(path), x), ran(program, x))


def test_the_command_converts_and_compares(tmp_path: Path) -> None:
    """In a process that does not know the operators of the graph."""
    source, path = exported(Net(), IMAGES), tmp_path / "model.pt2"
    torch.export.save(source, path)
    command = [sys.executable, "-m", "oxytorch", "convert", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "compared on the example" in done.stdout
    loaded = oxytorch.load(tmp_path / "model.oxy")
    assert layers(loaded) == 5
    assert torch.equal(ran(loaded, IMAGES), ran(oxytorch.optimize(source), IMAGES))


def test_sizes_may_vary() -> None:
    source = exported(Net(), IMAGES, dynamic_shapes=({0: Dim("batch", max=8)},))
    program = oxytorch.optimize(source)
    assert layers(program) == 5
    check(program, source, IMAGES[:1])
    check(program, source, torch.cat([IMAGES, IMAGES, IMAGES]))


def test_torch_compile_and_whole_graphs_take_them_too() -> None:
    model = Net().eval()
    wanted = ran(model, IMAGES)
    compiled = torch.compile(model, backend="oxytorch")
    whole = oxytorch.optimize(model, sample_input=IMAGES, graph=True)
    for each in (compiled, whole):
        assert (ran(each, IMAGES) - wanted).abs().max() <= 1.001 * STEP


def test_images_keep_their_pixels() -> None:
    """What looks like rounding to bytes is torch's own, where nobody takes numbers of the bytes."""

    class Pixels(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.clamp(torch.round(x / 0.1), 0, 255).to(torch.uint8)

    x = torch.arange(-100, 2700) * 0.01
    program = oxytorch.optimize(exported(Pixels(), x))
    assert "oxytorch::quantize" not in str(program)
    assert torch.equal(ran(program, x), ran(Pixels(), x))


def test_training_keeps_fake_quantization() -> None:
    model = Linear(Weight(12, 32, way="fake"), pair=fake)
    x = torch.randn(3, 32)
    model(x).square().sum().backward()
    wanted = model.weight.numbers.grad
    assert wanted is not None
    model.zero_grad()
    torch.compile(model, backend="oxytorch")(x).square().sum().backward()
    assert torch.allclose(model.weight.numbers.grad, wanted, atol=1e-5)


def _torchao(quantizer: str, model: nn.Module, x: Tensor) -> ExportedProgram:
    """What torchao's PT2E makes of a model."""
    pt2e = pytest.importorskip(
        "torchao.quantization.pt2e.quantize_pt2e", reason="torchao is not installed"
    )
    if quantizer == "x86":
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as found

        own = found.X86InductorQuantizer()
        own.set_global(found.get_default_x86_inductor_quantization_config())
    else:
        name = "torchao.testing.pt2e._xnnpack_quantizer"
        found = pytest.importorskip(name, reason="this torchao has no XNNPACKQuantizer")
        own = found.XNNPACKQuantizer()
        own.set_global(found.get_symmetric_quantization_config(is_per_channel=True))
    prepared = pt2e.prepare_pt2e(export(model.eval(), (x,)).module(), own)
    prepared(x)
    return export(pt2e.convert_pt2e(prepared), (x,))


@pytest.mark.parametrize("quantizer", ["x86", "xnnpack"])
@pytest.mark.parametrize("kind", ["Residual", "Block"])
def test_models_of_torchao_run_on_bytes(quantizer: str, kind: str) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "quantization"))
    import int8_models

    torch.manual_seed(0)
    x = IMAGES if kind == "Residual" else torch.randn(2, 9, 64)
    model = getattr(int8_models, kind)()
    source = _torchao(quantizer, model, x)
    program = oxytorch.optimize(source)
    assert layers(program) == sum(isinstance(m, nn.Linear | nn.Conv2d) for m in model.modules())
    assert not any(name in str(program) for name in OF_FLOATS)
    wanted = ran(source.module(), x)
    assert (ran(program, x) - wanted).abs().max() <= 0.02 * wanted.abs().max()
