"""Weights in panels in files: which tensors a file holds, at every level, and what is refused."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

import oxytorch
from forged_files import forge
from oxytorch import isa
from oxytorch.core.tensor_file import Source, TensorFile, write
from oxytorch.ops import pack_panels
from oxytorch.program.files import VERSIONS
from oxytorch.rewriting import measure

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
LINEAR, CONVOLUTION = "oxytorch::linear_panels", "oxytorch::convolution_panels"
LEVELS = [each.name for each in isa.levels() if each.supported]
DEPTHWISE = "oxytorch::depthwise_convolution"


class Packed(nn.Module):
    """Convolutions of our own of both kinds, linear layers that are joined, alone, and tied."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.depth = nn.Conv2d(32, 32, 3, groups=32)
        self.query, self.key = nn.Linear(32, 1024), nn.Linear(32, 1024)
        self.out = nn.Linear(1024, 48)
        self.words = nn.Embedding(1024, 48)

    def forward(self, image: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        rows = F.relu(self.depth(F.relu(self.norm(self.first(image))))).flatten(2).transpose(1, 2)
        mixed = self.out(F.gelu(self.query(rows)) * self.key(rows))
        return F.linear(mixed + self.words(ids), self.words.weight), mixed


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3, 6, 6).to(dtype), torch.arange(32).reshape(2, 16)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.fixture
def model(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, packing_pays: Callable[..., None]
) -> nn.Module:
    monkeypatch.setattr(measure, "TIMED", False)
    packing_pays(True, own=True)
    torch.manual_seed(0)
    found = Packed().eval()
    found.norm.running_mean.copy_(torch.randn(32))  # type: ignore[operator, union-attr]
    return found.to(dtype)


_saved: dict[torch.dtype, bytes] = {}


@pytest.fixture
def path(model: nn.Module, dtype: torch.dtype, tmp_path: Path) -> Path:
    found = tmp_path / "model.oxy"
    if dtype in _saved:
        found.write_bytes(_saved[dtype])
    else:
        oxytorch.save(model, found, sample_input=_inputs(dtype))
        _saved[dtype] = found.read_bytes()
    return found


def test_a_file_holds_panels_in_place_of_weights(path: Path, model: nn.Module) -> None:
    file, text = TensorFile(path), str(oxytorch.load(path, verify=True))
    assert file.metadata["version"] == VERSIONS[0]
    assert all(name in text for name in (LINEAR, CONVOLUTION, DEPTHWISE))
    assert "pack_panels" not in text and "mkldnn" not in text and "batch_norm" not in text
    # Of the plain weights that which is looked up is needed; biases are taken as they are.
    plain = {name for name in file.places if name.endswith("weight")}
    assert plain == {"words.weight"}
    derived = {name for name in file.places if ".derived" in name}
    packed = [file.places[name] for name in derived if file.places[name].dtype == torch.uint8]
    assert len(packed) == 4  # the joined layer is one
    assert {"first.weight.derived", "depth.weight.derived", "out.weight.derived"} <= derived


@pytest.mark.parametrize("level", LEVELS)
def test_panels_serve_all_levels(
    level: str, path: Path, model: nn.Module, dtype: torch.dtype
) -> None:
    inputs = _inputs(dtype)
    with torch.no_grad():
        wanted = model.float()(*(x.float() if x.is_floating_point() else x for x in inputs))
    with isa.use(level):
        found = oxytorch.load(path)(*inputs)
    for own, other in zip(found, wanted, strict=True):
        assert own.dtype == dtype
        scale = float(other.abs().max())
        torch.testing.assert_close(
            own.float(), other, atol=TOLERANCE[dtype] * scale, rtol=TOLERANCE[dtype]
        )


OTHER_LEVEL = """
import sys, torch, oxytorch
assert oxytorch.isa.active() == sys.argv[2]
x, ids, *wanted = torch.load(sys.argv[3])
for own, other in zip(oxytorch.load(sys.argv[1])(x, ids), wanted, strict=True):
    limit = float(sys.argv[4])
    torch.testing.assert_close(own, other, atol=limit * float(other.abs().max()), rtol=limit)
"""


@pytest.mark.parametrize("level", ["generic", "avx2"])
def test_a_process_of_another_level_opens_the_file(
    level: str, path: Path, dtype: torch.dtype, tmp_path: Path
) -> None:
    if level not in LEVELS:
        pytest.skip(f"the library or this processor has no kernels of level {level}")
    inputs = _inputs(dtype)
    torch.save((*inputs, *oxytorch.load(path)(*inputs)), tmp_path / "wanted")
    limit = str(TOLERANCE[dtype])
    command = [sys.executable, "-c", OTHER_LEVEL, str(path), level, str(tmp_path / "wanted"), limit]
    environment = {**os.environ, "OXYTORCH_ISA": level}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr


def test_panels_of_float32_serve_both_modes(path: Path, dtype: torch.dtype) -> None:
    loaded, inputs = oxytorch.load(path), _inputs(dtype)
    exact = loaded(*inputs)
    with oxytorch.fp32_math_mode("bf16"):
        rounded = loaded(*inputs)
    for own, other in zip(rounded, exact, strict=True):
        scale = float(other.abs().max())
        torch.testing.assert_close(own, other, atol=4e-2 * scale, rtol=4e-2)


def test_what_runs_in_memory_runs_from_the_file(
    model: nn.Module, dtype: torch.dtype, tmp_path: Path, packing_pays: Callable[..., None]
) -> None:
    """Where panels were the fastest, program and file are the same, bit for bit."""
    inputs = _inputs(dtype)
    with torch.no_grad():
        exported = torch.export.export(model, inputs)
    for in_panels in (True, False):
        packing_pays(True, in_panels=in_panels, own=True)
        program = oxytorch.optimize(exported)
        oxytorch.save(program, tmp_path / "model.oxy")
        loaded = oxytorch.load(tmp_path / "model.oxy")
        pickled = pickle.loads(pickle.dumps(program))
        assert str(pickled) == str(loaded) and pickled.names == loaded.names
        found, again = loaded(*inputs), pickled(*inputs)
        torch.testing.assert_close(found, again, atol=0, rtol=0)
        if in_panels:
            assert program.storable() is program and str(program) == str(loaded)
            torch.testing.assert_close(found, program(*inputs), atol=0, rtol=0)


class Views(nn.Module):
    """What is made of weights without memory of its own, or in a dtype that no file holds."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(1, 8))
        self.table = nn.Parameter(torch.randn(64, 8))
        self.phase = nn.Parameter(torch.rand(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.polar(torch.ones_like(self.phase), self.phase)
        wide = self.shift.exp().expand(4096, 8)  # repeats its own memory
        moved = (x + self.table[:4]) * wide[: x.shape[0]]
        return moved.reshape(-1, 4) * turned.real.float() + self.table.exp().sum()


def test_a_file_repeats_no_memory(tmp_path: Path) -> None:
    model, path = Views().eval(), tmp_path / "model.oxy"
    x = torch.randn(4, 8)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: Dim.STATIC, 1: Dim.STATIC},))
    program = oxytorch.optimize(exported)
    oxytorch.save(program, path)
    assert path.stat().st_size < 16 << 10  # the expanded tensor alone would take 128 KiB
    with torch.no_grad():
        for each in (program, oxytorch.load(path, verify=True)):
            torch.testing.assert_close(each(x), model(x))


def test_writes_to_loaded_weights_stay_in_the_process(path: Path, dtype: torch.dtype) -> None:
    inputs = _inputs(dtype)
    loaded, again = oxytorch.load(path), oxytorch.load(path)
    wanted = again(*inputs)
    for tensor in loaded.program.constants:
        tensor.zero_()
    assert not loaded(*inputs)[0].any()
    torch.testing.assert_close(again(*inputs), wanted, atol=0, rtol=0)
    oxytorch.load(path, verify=True)


def test_the_order_of_panels_belongs_to_the_version() -> None:
    """Files hold weights in this order. Who changes it writes another version, and reads both."""
    values = torch.arange(40 * 70, dtype=torch.float32).reshape(40, 70) % 251
    found = {
        name: hashlib.sha256(pack_panels(values.to(dtype), name).numpy().tobytes()).hexdigest()[:16]
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    }
    assert VERSIONS[0] == "3" and found == {
        "fp32": "bdbd9b5c33d6952b",
        "bf16": "90b75f00b14b5ab9",
    }


def test_files_of_the_first_version_are_read(path: Path, dtype: torch.dtype) -> None:
    file = TensorFile(path)
    _write(
        path, {name: file.tensor(name) for name in file.places}, file.metadata | {"version": "1"}
    )
    oxytorch.load(path)(*_inputs(dtype))


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    write(path, {name: Source.of(tensor) for name, tensor in tensors.items()}, metadata)


def _resized(name: str, numbers: random.Random) -> Callable[..., None]:
    """Another size or dtype for a packed constant, which its entry tells as well."""

    def change(description: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        own = tensors[name]
        how = numbers.randrange(4)
        if how == 0:
            own = own[: numbers.randrange(own.shape[0])]
        elif how == 1:
            own = own[..., : numbers.randrange(own.shape[-1])]
        elif how == 2:
            own = own.flatten()[: numbers.randrange(own.numel())]
        else:
            own = own.flatten()[:64].to(numbers.choice([torch.int64, torch.float16, torch.bool]))
        tensors[name] = own.contiguous()
        for entry in description["constants"]:
            if entry["tensor"] == name:
                entry["shape"], entry["order"] = [*own.shape], [*range(own.dim())]
                entry["dtype"] = str(own.dtype).removeprefix("torch.")

    return change


@pytest.mark.parametrize("seed", range(40))
def test_packed_constants_of_another_size_are_never_read(
    seed: int, path: Path, dtype: torch.dtype
) -> None:
    numbers = random.Random(seed)
    names = sorted(name for name in TensorFile(path).places if name.endswith("weight.derived"))
    forge(path, _resized(names[seed % len(names)], numbers))
    with pytest.raises((oxytorch.quantization.CheckpointError, RuntimeError)):
        oxytorch.load(path)(*_inputs(dtype))


HUGE = [*(1 << n for n in (16, 28, 29, 30, 31, 32, 40, 58, 61, 62)), (1 << 63) - 1, (1 << 63) - 15]


@pytest.mark.parametrize("seed", range(60))
def test_numbers_of_packed_layers_never_lead_astray(
    seed: int, path: Path, dtype: torch.dtype, little_memory: None
) -> None:
    """Sizes, strides, paddings and groups as a forger might want them: whatever is asked for, what
    runs gives a result or an error, and reads and writes what is its own."""
    numbers = random.Random(seed)
    step = (LINEAR, CONVOLUTION, DEPTHWISE)[seed % 3]

    def change(description: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        lines = description["program"].split("\n")
        place = next(i for i, line in enumerate(lines) if f"= {step} " in line)
        words = lines[place].split(" ")
        places = [i for i, word in enumerate(words) if re.fullmatch(r"\d+", word)]
        for chosen in numbers.sample(places, min(len(places), numbers.randint(1, 4))):
            words[chosen] = str(numbers.choice([0, -1, 1, 2, 3, 17, *HUGE]))
        lines[place] = " ".join(words)
        description["program"] = "\n".join(lines)

    forge(path, change)
    try:
        oxytorch.load(path)(*_inputs(dtype))
    except (oxytorch.quantization.CheckpointError, RuntimeError):
        return


def _convolution(kernel: list[int], pads: list[int], dilation: list[int], **given: Any) -> Tensor:
    x, panels = torch.ones(1, 2, 4, 4), torch.zeros(given.get("elements", 0), dtype=torch.uint8)
    return torch.ops.oxytorch.convolution_panels(
        x, "fp32", panels, kernel, given.get("channels", 16), None, None, [1, 1], pads, dilation, 1
    )


def test_sizes_that_would_overflow_are_refused() -> None:
    side = 1 << 31
    with pytest.raises(RuntimeError, match="kernel_size of 2 numbers from 1 to 2"):
        _convolution([side, side], [side] * 4, [1, 1])  # in_features are 0 modulo 2^64
    with pytest.raises(RuntimeError, match=r"kernel_size with fewer than \d+ in_features"):
        _convolution([1 << 30, 1 << 30], [1 << 30] * 4, [1, 1])
    with pytest.raises(RuntimeError, match="out_channels below"):
        _convolution([1, 1], [0] * 4, [1, 1], channels=1 << 60)
    with pytest.raises(RuntimeError, match="dilation and stride of kernels whose lines take below"):
        wide = 1 << 29  # lines of 2^30 pixels, for 2 results
        _convolution([1, 2], [0, 0, wide, wide], [1, 2 * wide + 2], elements=16 * 64 * 4)
    for features in (1 << 60, (1 << 63) - 15):
        with pytest.raises(RuntimeError, match="panels of fewer than"):
            nothing = torch.zeros(0, dtype=torch.uint8)
            torch.ops.oxytorch.linear_panels(
                torch.ones(0, 64), "fp32", nothing, None, None, None, features
            )
        with pytest.raises(RuntimeError, match="panels of fewer than"):
            torch.ops.oxytorch.unpack_panels(nothing, "fp32", features, 64)
