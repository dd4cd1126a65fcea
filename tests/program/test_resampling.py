"""`interpolate` in programs stays one operator, by factors and by sizes that give some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oxytorch
from oxytorch.program.allowed import RESAMPLED
from oxytorch.program.check import check
from oxytorch.program.other_operators import RESAMPLING, by_factors
from oxytorch.program.program import Program


class Resized(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.options = nn.Conv2d(3, 16, 3, padding=1), options
        self.last = nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        resized = F.interpolate(self.first(x), **self.options)
        return self.last(resized)  # type: ignore[no-any-return]


OPTIONS = [
    {"scale_factor": 2},
    {"scale_factor": (2, 1.5)},
    {"scale_factor": 1.3, "mode": "nearest-exact"},
    {"scale_factor": 2, "mode": "bilinear", "align_corners": True},
    {"scale_factor": 0.7, "mode": "bilinear", "align_corners": False},
    {"scale_factor": 0.5, "mode": "bilinear", "antialias": True},
    {"scale_factor": 2, "mode": "bicubic"},
]
SIZED: list[dict[str, Any]] = [
    {"size": (9, 11), "mode": "bilinear"},
    {"size": 13},
    {"scale_factor": 0.5, "mode": "bilinear", "recompute_scale_factor": True},
]


@pytest.mark.parametrize("options", [*OPTIONS, *SIZED], ids=str)
def test_answers_are_torchs_for_other_sizes_and_from_a_file(
    options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = Resized(**options).eval(), torch.randn(2, 3, 10, 14)
    optimized = oxytorch.optimize(model, sample_input=x, graph=True, tune=False)
    oxytorch.save(model, tmp_path / "m.oxy", sample_input=x)
    loaded = oxytorch.load(tmp_path / "m.oxy")
    with torch.inference_mode():
        torch.testing.assert_close(loaded(x), model(x), rtol=1e-4, atol=1e-5)
        for shape in ((2, 3, 10, 14), (1, 3, 10, 14), (3, 3, 12, 17), (2, 3, 10, 14)):
            other = torch.randn(shape)
            torch.testing.assert_close(optimized(other), model(other), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [*OPTIONS, *SIZED], ids=str)
def test_it_stays_one_operator(options: dict[str, Any]) -> None:
    model = Resized(**options).eval()
    text = str(oxytorch.graph.explain(model, torch.randn(2, 3, 10, 14)))
    steps = [line for line in text.splitlines() if "upsample_" in line and ".vec" in line]
    assert steps and "_unsafe_index" not in text and "gather" not in text


def test_it_stays_one_beside_what_is_taken_apart() -> None:
    class Both(Resized):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.vector_norm(super().forward(x), dim=1)

    model = Both(scale_factor=2, mode="bilinear").eval()
    text = str(oxytorch.graph.explain(model, torch.randn(2, 3, 10, 14)))
    assert "upsample_bilinear2d.vec" in text and "_unsafe_index" not in text


class Pyramid(nn.Module):
    """Resizes to the sizes of other tensors, as feature pyramids and segmentation networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2, 1)
        self.last = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.first(x)
        coarse = self.down(fine)
        upper = F.interpolate(coarse, size=fine.shape[-2:], mode="bilinear", align_corners=False)
        found = self.last(torch.cat([upper, fine], 1))
        return F.interpolate(found, size=(2 * x.shape[2], 2 * x.shape[3]))


SHAPES = [(2, 3, 32, 48), (3, 3, 32, 48), (2, 3, 64, 64), (1, 3, 40, 24), (1, 3, 33, 57)]


def test_sizes_of_other_tensors_are_followed() -> None:
    torch.manual_seed(0)
    model = Pyramid().eval()
    optimized = oxytorch.optimize(model, sample_input=torch.randn(SHAPES[0]), graph=True)
    compiled = torch.compile(model, backend="oxytorch")
    with torch.inference_mode():
        for shape in SHAPES:
            x = torch.randn(shape)
            for found in (optimized(x), compiled(x)):
                torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-5)


class Aligned(nn.Module):
    """Resizes one input to the size of another, or to twice its own."""

    def __init__(self, is_twice: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(16, 64, 3, padding=1), nn.Conv1d(64, 32, 3, padding=1)
        self.is_twice = is_twice

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = F.relu(self.first(x))
        size = 2 * hidden.shape[2] if self.is_twice else y.shape[2]
        return self.last(F.interpolate(hidden, size=size)) + y.mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_twice", [True, False])
def test_many_sizes_of_two_inputs(is_twice: bool) -> None:
    torch.manual_seed(0)
    model = Aligned(is_twice).eval()
    sample = torch.randn(2, 16, 10), torch.randn(2, 16, 15)
    optimized = oxytorch.optimize(model, sample_input=sample, graph=True, passes=["program"])
    sizes = [(2, 10, 15), (3, 10, 20), (4, 12, 17), (2, 9, 14), (5, 16, 31), (1, 7, 40), (2, 30, 5)]
    with torch.inference_mode():
        for batch, own, other in sizes * 2:
            given = torch.randn(batch, 16, own), torch.randn(batch, 16, other)
            torch.testing.assert_close(optimized(*given), model(*given), rtol=1e-4, atol=1e-5)


def test_ratios_of_sizes_are_factors_in_exported_programs() -> None:
    torch.manual_seed(0)
    model, x = Pyramid().eval(), torch.randn(2, 3, 32, 48)
    height, width = (torch.export.Dim(name, min=4, max=400) for name in ("h", "w"))
    sizes = {0: torch.export.Dim.AUTO, 2: 2 * height, 3: 2 * width}
    with torch.no_grad():
        exported = torch.export.export(model, (x,), dynamic_shapes=(sizes,))
        program = oxytorch.optimize(exported)
        for shape in [(2, 3, 32, 48), (3, 3, 64, 20)]:
            x = torch.randn(shape)
            torch.testing.assert_close(program(x), model(x), rtol=1e-4, atol=1e-5)
    text = str(program)
    assert "upsample_bilinear2d.vec" in text and "_unsafe_index" not in text


@pytest.mark.parametrize("operator", RESAMPLING, ids=str)
def test_by_factors_the_bits_are_those_by_sizes(operator: Any) -> None:
    dims, most = {"1d": (1, 3000), "2d": (2, 90), "3d": (3, 20)}[
        next(part for part in ("1d", "2d", "3d") if part in operator.name())
    ]
    aligned = "align_corners" in str(operator._schema)
    is_vec = operator._overloadname == "vec"
    draw = torch.Generator().manual_seed(0)
    dtypes = (torch.float32,) if "_aa" in operator.name() else (torch.float32, torch.bfloat16)
    for _ in range(40):
        size, wanted = torch.randint(1, most, (2, dims), generator=draw).tolist()
        corners = [bool(torch.randint(2, (), generator=draw))] if aligned else []
        rest = [None] if is_vec else [None] * dims
        for dtype in dtypes:
            x = torch.randn(1, 2, *size).to(dtype)
            given = x, wanted, *corners, *rest
            arguments = by_factors(operator, x, given)
            assert arguments is not None and arguments[1] is None
            assert torch.equal(operator.overloadpacket.vec(*arguments), operator(*given))


def test_factors_are_not_known_where_a_size_is_not() -> None:
    operator = torch.ops.aten.upsample_nearest1d
    x = torch.randn(1, 1, 8)
    assert by_factors(operator.vec, x.double(), (x, [16], None)) is None
    assert by_factors(operator.default, x, (x, [16], 1.5)) is None  # which makes 12
    assert by_factors(operator.vec, x.new_empty(1, 1, 1 << 20), (x, [16], None)) is None


def _step(name: str, sizes: str, align: str) -> str:
    return f'inputs 1 3 0\n%1 = resample %0 "{name}" [ {sizes} ] {align}\noutputs %1'


@pytest.mark.parametrize("name", RESAMPLED)
def test_to_sizes_of_the_call_the_bits_are_torchs(name: str) -> None:
    dims = int(name[-2])
    most = {1: 3000, 2: 90, 3: 20}[dims]
    operator = getattr(torch.ops.aten, name).vec
    words = " ".join(f"${place}" for place in range(dims))
    draw = torch.Generator().manual_seed(0)
    for align in ["none"] if "nearest" in name else ["true", "false"]:
        text = _step(name, words, align)
        check(text)
        program = Program(text, [])
        assert program.text == text
        corners = [] if align == "none" else [align == "true"]
        for _ in range(40):
            size, wanted = torch.randint(1, most, (2, dims), generator=draw).tolist()
            for dtype in (torch.float32, torch.bfloat16):
                x = torch.randn(1, 2, *size).to(dtype)
                (found,), _ = program([x], [*wanted, *[0] * (3 - dims)])
                expected = operator(x, wanted, *corners, None)
                assert torch.equal(found, expected) and found.stride() == expected.stride()


@pytest.mark.parametrize(
    ("name", "sizes", "align", "message"),
    [
        ("upsample_bilinear2d", "$0", "true", "sizes|size"),
        ("upsample_bilinear2d", "$0 $1 $2", "true", "2 sizes"),
        ("upsample_bilinear2d", "$0 $1", "none", "corners"),
        ("upsample_nearest2d", "$0 $1", "true", "corners"),
        ("_upsample_bilinear2d_aa", "$0 $1", "true", "resamples"),
        ("relu", "$0 $1", "none", "resamples"),
        ("upsample_nearest2d", "$0 $7", "none", "size"),
        ("upsample_nearest2d", "$0 %0", "none", "size"),
    ],
)
def test_texts_of_files_that_resample_otherwise_are_refused(
    name: str, sizes: str, align: str, message: str
) -> None:
    text = _step(name, sizes, align)
    with pytest.raises(ValueError, match=message):
        check(text)
    with pytest.raises(RuntimeError):
        Program(text, [])


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [((1, 2, 4, 4), (0, 3)), ((1, 2, 4, 4), (3, 1 << 20)), ((1, 2, 4), (3, 3)), ((4, 4), (3, 3)),
     ((1, 2, 0, 4), (3, 3)), ((1, 2, 4, 4), (-1, 3))],
)  # fmt: skip
def test_sizes_that_cannot_be_had_are_errors(
    shape: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    program = Program(_step("upsample_bilinear2d", "$0 $1", "false"), [])
    with pytest.raises(RuntimeError, match="resample"):
        program([torch.randn(shape)], [*sizes, 0])


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
def test_ratios_of_sizes_that_vary(mode: str, tmp_path: Path) -> None:
    """In files, compiled, and recorded: a program resizes one input to the size of another."""

    class Fits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = nn.Conv2d(3, 16, 3, padding=1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.interpolate(self.c(x).relu(), size=y.shape[-2:], mode=mode) + y

    torch.manual_seed(0)
    model = Fits().eval()
    given = torch.randn(2, 3, 12, 16), torch.randn(2, 16, 17, 23)
    names = [{2: torch.export.Dim(f"h{n}", max=99), 3: torch.export.Dim(f"w{n}", max=99)}
             for n in range(2)]  # fmt: skip
    with torch.no_grad():
        exported = torch.export.export(model, given, dynamic_shapes=tuple(names))
        oxytorch.save(oxytorch.optimize(exported), tmp_path / "m.oxy")
        loaded = oxytorch.load(tmp_path / "m.oxy")
        assert "resample" in str(loaded)
        compiled = torch.compile(model, backend="oxytorch", dynamic=True)
        recorded = oxytorch.optimize(model, sample_input=given, graph=True, passes=["program"])
        for h, w, m, n in [(12, 16, 17, 23), (9, 11, 5, 40), (20, 8, 31, 31), (7, 30, 14, 15)] * 2:
            x, y = torch.randn(2, 3, h, w), torch.randn(2, 16, m, n)
            for run in (loaded, compiled, recorded):
                torch.testing.assert_close(run(x, y), model(x, y), rtol=1e-4, atol=1e-5)
