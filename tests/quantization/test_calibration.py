"""Calibration: codes that keep outputs, and what layers read, block after block."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from oxytorch.ops.panels.layout import values_of
from oxytorch.ops.quantize_weight import quantize_weight
from oxytorch.quantization import Int4Weight, calibration, quantize_
from oxytorch.quantization.calibrated import DAMPING, calibrated_codes
from oxytorch.quantization.calibration import input_moments
from oxytorch.rewriting import memory

CASES = [
    ("int4", 32, True),
    ("int4", 128, False),
    ("int4", None, True),
    ("int8", None, True),
    ("int8", 64, False),
    ("nf4", 64, True),
    ("fp8", None, True),
    ("fp8", 64, True),
]


def _inputs(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Inputs that lie near a space of fewer dimensions, as activations do."""
    random = torch.Generator().manual_seed(seed)
    basis = torch.randn(columns // 8, columns, generator=random)
    sizes = torch.rand(columns, generator=random) + 0.1
    noise = torch.randn(rows, columns, generator=random)
    return (torch.randn(rows, columns // 8, generator=random) @ basis + 0.3 * noise) * sizes


def _weight(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))


def _moments(x: Tensor) -> Tensor:
    return x.t() @ x / len(x)


@pytest.mark.parametrize(("format", "size", "symmetric"), CASES)
def test_calibrated_codes_lower_the_error_of_outputs_never_seen(format, size, symmetric):
    weight, columns = _weight(40, 256), 256
    x, unseen = _inputs(1200, columns).split([1000, 200])
    nearest = quantize_weight(weight, format, size, symmetric)
    found = calibrated_codes(weight, _moments(x), format, *nearest[1:])
    plain, kept = (
        (unseen @ (values_of(format, codes, *nearest[1:]) - weight).t()).norm()
        for codes in (nearest[0], found)
    )
    assert kept < 0.75 * plain


@pytest.mark.parametrize(("format", "size", "symmetric"), CASES)
def test_inputs_without_relations_leave_codes_to_nearest(format, size, symmetric):
    weight = _weight(20, 256)
    moments = torch.diag(torch.rand(256) + 0.5)
    codes, *scales = quantize_weight(weight, format, size, symmetric)
    assert torch.equal(calibrated_codes(weight, moments, format, *scales), codes)


def test_each_column_is_rounded_after_the_best_answer_to_those_before():
    """The same choices as solving, for every column, for the best values of all later ones."""
    weight = _weight(5, 32)
    moments = _moments(_inputs(100, 32))
    _, scales, _ = quantize_weight(weight, "int4")
    codes = calibrated_codes(weight, moments, "int4", scales, None)
    damped = moments.double()
    damped.diagonal().add_(DAMPING * moments.diagonal().double().mean())
    order = moments.diagonal().argsort(descending=True, stable=True).tolist()
    left = weight.double().clone()
    expected = torch.empty_like(codes)
    for done, column in enumerate(order):
        unit = scales[:, 0].double()
        code = (left[:, column] / unit).round().add(8).clamp(0, 15)
        expected[:, column] = code.to(torch.uint8)
        error = (code - 8) * unit - left[:, column]
        later = order[done + 1 :]
        if later:
            # Least squares: the changes d of later columns that minimize |x error + x d|.
            pull = damped[column, later][None] * error[:, None]
            left[:, later] -= torch.linalg.solve(damped[later][:, later], pull.t()).t()
    assert torch.equal(codes, expected)


def test_inputs_that_were_always_zero_are_rounded_to_nearest():
    weight = _weight(12, 64)
    x = _inputs(100, 64)
    x[:, 10:20] = 0
    nearest, scales, _ = quantize_weight(weight, "int4", 32)
    codes = calibrated_codes(weight, _moments(x), "int4", scales, None)
    assert torch.equal(codes[:, 10:20], nearest[:, 10:20])
    assert not torch.equal(codes, nearest)
    none = calibrated_codes(weight, torch.zeros(64, 64), "int4", scales, None)
    assert torch.equal(none, nearest)


def test_moments_that_do_not_fit_are_refused():
    weight = _weight(4, 64)
    given = "int4", torch.ones(4, 1), None
    with pytest.raises(ValueError, match=r"moments of shape \[64, 64\], got \[32, 32\]"):
        calibrated_codes(weight, torch.eye(32), *given)
    with pytest.raises(ValueError, match="finite moments"):
        calibrated_codes(weight, torch.full((64, 64), torch.nan), *given)


class Block(nn.Module):
    """Two layers that read the same, and one that reads what comes of them."""

    def __init__(self, width: int, answers: type) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)
        self.down = nn.Linear(width, width)
        self.answers = answers

    def forward(self, x: Tensor, *, shift: Tensor) -> object:
        x = x + self.down(torch.tanh(self.left(x)) * self.right(x)) + shift
        return (x, None) if self.answers is tuple else x


class Model(nn.Module):
    """Blocks that get an argument of their own, between two layers."""

    def __init__(self, answers: type = Tensor, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.blocks = nn.ModuleList(Block(width, answers) for _ in range(3))
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(width, 8)
        self.backwards = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index, block in enumerate(self.blocks[::-1] if self.backwards else self.blocks):
            found = block(self.drop(x), shift=torch.tensor(0.1 * index))
            x = found[0] if isinstance(found, tuple) else found
        return self.head(x)


def _linears(model: nn.Module) -> dict[str, nn.Module]:
    return {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}


def _watched(model: nn.Module, name: str, batches: list[Tensor]) -> Tensor:
    """The moments of one layer's inputs, from a plain run of the whole model."""
    seen: list[Tensor] = []
    layer = model.get_submodule(name)
    handle = layer.register_forward_pre_hook(lambda _, given: seen.append(given[0].flatten(0, -2)))
    with torch.no_grad():
        for batch in batches:
            model.eval()(batch)
    handle.remove()
    return _moments(torch.cat(seen))


@pytest.mark.parametrize("answers", [Tensor, tuple])
@pytest.mark.parametrize("backwards", [False, True])
def test_moments_are_those_of_what_layers_read(answers, backwards):
    torch.manual_seed(0)
    model = Model(answers)
    model.backwards = backwards
    batches = [torch.randn(4, 5, 16), torch.randn(2, 16)]
    found = dict(input_moments(model, _linears(model), batches))
    assert sorted(found) == sorted(_linears(model))
    assert model.training
    for name, moments in found.items():
        torch.testing.assert_close(moments, _watched(model, name, batches), rtol=1e-4, atol=1e-5)


def test_later_blocks_see_what_became_of_earlier_ones():
    torch.manual_seed(0)
    model = Model().eval()
    batches = [torch.randn(6, 16)]
    changed = copy.deepcopy(model)
    for name, moments in input_moments(model, _linears(model), batches):
        torch.testing.assert_close(moments, _watched(changed, name, batches), rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            model.get_submodule(name).weight.mul_(0.5)
            if name.endswith("down"):  # the last of a block: from now on others see the block
                changed = copy.deepcopy(model)


def test_the_model_is_left_as_it_was_when_somebody_stops():
    model = Model()
    before = {part: dict(part.__dict__) for part in model.modules()}
    turns = input_moments(model, _linears(model), [torch.randn(3, 16)])
    next(turns)
    turns.close()
    for part, attributes in before.items():
        assert {**part.__dict__} == attributes
        assert not part._forward_hooks and not part._forward_pre_hooks


def test_quantize_with_calibration_keeps_more_of_the_answers():
    torch.manual_seed(0)
    model = Model(width=128).eval()
    directions = torch.randn(3, 16)
    typical = [torch.randn(64, 3) @ directions for _ in range(4)]
    unseen = torch.randn(100, 3) @ directions
    filter = "blocks"
    gaps = []
    for batches in (None, typical):
        quantized = copy.deepcopy(model)
        report = quantize_(quantized, Int4Weight(32), filter=filter, calibration=batches)
        assert len(report.layers) == 9
        gaps.append((quantized(unseen) - model(unseen)).norm())
    assert gaps[1] < 0.7 * gaps[0]


@pytest.mark.parametrize(
    ("batches", "error", "complaint"),
    [
        ([], ValueError, "at least one batch, got none"),
        (torch.zeros(2, 16), TypeError, "got a Tensor; put it into a list"),
        ([torch.zeros(2, 7)], RuntimeError, "shapes cannot be multiplied"),
    ],
)
def test_batches_that_do_not_fit_leave_the_model_as_it_was(batches, error, complaint):
    model = Model()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=complaint):
        quantize_(model, Int4Weight(32), filter="blocks", calibration=batches)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert not any("forward" in part.__dict__ for part in model.modules())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert model.training


def test_memory_is_foreseen(monkeypatch):
    model = Model()
    batches = [torch.randn(10, 16)] * 7
    asked: list[tuple[int, str]] = []
    monkeypatch.setattr(
        calibration, "check_available", lambda _, needed, what: asked.append((needed, what))
    )
    input_moments(model, _linears(model), batches)
    # Answers of a block for every batch; three moments of a block, and three times the largest.
    assert asked[0][0] == 7 * 10 * 64 * 4 + 6 * 64 * 64 * 4
    model.backwards = True
    input_moments(model, _linears(model), batches)
    assert asked[1][0] == (10 * 64 * 64 + 16 * 16 + 3 * 64 * 64) * 4
    monkeypatch.undo()
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    with pytest.raises(MemoryError, match=r"calibration: .* of free memory for inputs of layers"):
        input_moments(model, _linears(model), batches)


def test_inputs_that_are_not_finite_are_told():
    model = Model()
    with pytest.raises(ValueError, match="finite inputs of layers"):
        [*input_moments(model, _linears(model), [torch.full((2, 16), torch.nan)])]
