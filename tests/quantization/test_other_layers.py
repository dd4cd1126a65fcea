"""Recurrent layers and embeddings whose weights are bytes."""

from __future__ import annotations

import copy
import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

import oxytorch
from marks import NEEDS_LIBRARY
from oxytorch.quantization import (
    CheckpointError,
    Int4Weight,
    Int8DynamicActivationInt8Weight,
    Int8Weight,
    other_layers,
)
from oxytorch.quantization.byte_weights import ByteWeight, GruWeight, LstmWeight, TableWeight
from oxytorch.rewriting import measure

pytestmark = NEEDS_LIBRARY

KINDS: dict[str, Any] = {"lstm": nn.LSTM, "gru": nn.GRU}
DYNAMIC = Int8DynamicActivationInt8Weight(only_faster=False)


@pytest.fixture(autouse=True)
def _all_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of tests are small: whatever was timed is as good."""
    monkeypatch.setattr(measure, "TIMED", False)


def sqnr(actual: Tensor, wanted: Tensor) -> float:
    """Decibels by which squares exceed those of the error."""
    error = (actual - wanted).double().square().sum()
    return float(10 * torch.log10(wanted.double().square().sum() / error))


def quantized(module: nn.Module, config: Any = DYNAMIC) -> Any:
    """A quantized copy."""
    other = copy.deepcopy(module).eval()
    oxytorch.quantize_(other, config)
    return other


def call(module: nn.Module, *args: Any) -> Any:
    with torch.no_grad():
        return module(*args)


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, PackedSequence):
        return [value.data]
    return [tensor for each in value for tensor in tensors(each)]


def ran_of_bytes(module: nn.Module, *args: Any) -> bool:
    """Whether a call runs the kernel."""
    with oxytorch.verbose(io.StringIO()) as log:
        call(module, *args)
    return any(row.op.startswith("quantized_") for row in log.rows)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_layers": 2, "batch_first": True},
    {"bidirectional": True, "num_layers": 2},
    {"bias": False},
    {"dropout": 0.5, "num_layers": 2},
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_recurrent_layers_are_near_floating_ones(kind: str, options: dict[str, Any]) -> None:
    module = KINDS[kind](40, 48, **options).eval()
    ours = quantized(module)
    x = torch.randn(6, 5, 40)
    batch = 6 if options.get("batch_first") else 5
    count = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    h, c = torch.randn(2, count, batch, 48)
    assert ran_of_bytes(ours, x)
    for states in ((), ((h, c) if kind == "lstm" else h,)):
        for actual, wanted in zip(
            tensors(call(ours, x, *states)), tensors(call(module, x, *states)), strict=True
        ):
            assert actual.shape == wanted.shape and actual.stride() == wanted.stride()
            assert sqnr(actual, wanted) > 35
    alone = x[:, 0] if not options.get("batch_first") else x[0]
    for actual, wanted in zip(
        tensors(call(ours, alone)), tensors(call(module, alone)), strict=True
    ):
        assert actual.shape == wanted.shape and sqnr(actual, wanted) > 35


@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_layers_are_as_exact_as_those_of_torch(kind: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = KINDS[kind](64, 96, 2, bidirectional=True)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.layer(x)[0]
            return result

    module = Model().eval()
    theirs = torch.ao.quantization.quantize_dynamic(module, {KINDS[kind]}, dtype=torch.qint8)
    x = torch.randn(20, 4, 64)
    wanted = call(module, x)
    ours, usual = sqnr(call(quantized(module), x), wanted), sqnr(call(theirs, x), wanted)
    assert ours > 38 and ours > usual + 3, (ours, usual)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sorted_", [True, False])
@pytest.mark.parametrize("both", [False, True])
def test_packed_sequences(kind: str, sorted_: bool, both: bool) -> None:
    module = KINDS[kind](16, 24, 2, bidirectional=both).eval()
    ours = quantized(module)
    lengths = [7, 4, 4, 1] if sorted_ else [4, 1, 7, 4]
    x = pack_sequence([torch.randn(length, 16) for length in lengths], enforce_sorted=sorted_)
    h, c = torch.randn(2, 4 if both else 2, 4, 24)
    assert ran_of_bytes(ours, x)
    for states in ((), ((h, c) if kind == "lstm" else h,)):
        (output, last), (wanted, wanted_last) = call(ours, x, *states), call(module, x, *states)
        assert isinstance(output, PackedSequence)
        assert torch.equal(output.batch_sizes, wanted.batch_sizes)
        found, plain = (pad_packed_sequence(each)[0] for each in (output, wanted))
        assert sqnr(found, plain) > 35
        for actual, exact in zip(tensors(last), tensors(wanted_last), strict=True):
            assert sqnr(actual, exact) > 35


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inputs_may_have_other_dtypes(kind: str, dtype: torch.dtype) -> None:
    module = KINDS[kind](16, 24).eval()
    ours, x = quantized(module), torch.randn(5, 2, 16)
    assert ran_of_bytes(ours, x.to(dtype))
    for actual, wanted in zip(
        tensors(call(ours, x.to(dtype))), tensors(call(module, x)), strict=True
    ):
        assert actual.dtype == dtype and sqnr(actual.float(), wanted) > 33
    with torch.enable_grad():  # the layer's own code, on plain values
        output = ours(x.to(dtype))[0]
    assert output.dtype == dtype and sqnr(output.float(), call(module, x)[0]) > 33
    half = quantized(module.to(dtype))
    assert half.weight_ih_l0.dtype == dtype
    assert sqnr(call(half, x)[0], call(module.float(), x)[0]) > 33


@pytest.mark.parametrize("kind", KINDS)
def test_with_gradients_the_own_code_runs_on_rounded_weights(kind: str) -> None:
    module = KINDS[kind](16, 24).eval()
    ours, x = quantized(module), torch.randn(5, 2, 16, requires_grad=True)
    module.load_state_dict(ours.state_dict())
    results = []
    for each in (ours, module):
        x.grad = None
        output = each(x)[0]
        output.square().sum().backward()
        results.append((output, x.grad, each.weight_hh_l0.grad))
    for actual, wanted in zip(*results, strict=True):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_the_kernel_does_not_know_fail_as_before(kind: str) -> None:
    module = KINDS[kind](16, 24).eval()
    ours = quantized(module)
    for args in ((torch.randn(5, 2, 17),), (torch.randn(5, 2, 16), torch.randn(3)), ("x",), ()):
        with pytest.raises(Exception) as wanted:
            call(module, *args)
        with pytest.raises(type(wanted.value)):
            call(ours, *args)


@pytest.mark.parametrize("kind", KINDS)
def test_writes_are_followed(kind: str) -> None:
    module = KINDS[kind](16, 24).eval()
    ours, x = quantized(module), torch.randn(5, 2, 16)
    with torch.no_grad():
        for each in (module, ours):
            each.weight_hh_l0.mul_(0.5)
            each.bias_ih_l0.add_(1.0)
            each.weight_ih_l0[3] = 0.25
    assert ran_of_bytes(ours, x)
    assert sqnr(call(ours, x)[0], call(module, x)[0]) > 35
    before = call(ours, x)[0]
    ours.load_state_dict(ours.state_dict())
    assert torch.equal(call(ours, x)[0], before)  # these values are exact


def test_rows_that_stay_keep_their_bytes() -> None:
    weight = LstmWeight.from_dense(torch.randn(4 * 24, 16).bfloat16())
    before, plain = {n: t.clone() for n, t in weight.tensors.items()}, weight.dense()
    weight.repack(plain)
    assert all(torch.equal(weight.tensors[name], tensor) for name, tensor in before.items())
    plain[5] *= 3
    weight.repack(plain)
    changed = weight.dense()
    assert torch.equal(changed[:5], plain[:5]) and torch.equal(changed[6:], plain[6:])
    torch.testing.assert_close(changed[5], plain[5], rtol=0, atol=float(plain[5].abs().max()) / 200)


WEIGHTS: dict[str, tuple[type[ByteWeight], Tensor]] = {
    "lstm": (LstmWeight, torch.linspace(-3, 3, 4 * 5 * 7).sin().view(20, 7)),
    "gru": (GruWeight, torch.linspace(-3, 3, 3 * 17 * 70).sin().view(51, 70)),
    "table": (TableWeight, torch.linspace(-3, 5, 9 * 12).sin().view(9, 12)),
    "constant": (TableWeight, torch.full((3, 4), 1.5)),
    "zero": (LstmWeight, torch.zeros(8, 3)),
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stored_weights_are_the_weight(name: str, dtype: torch.dtype) -> None:
    kind, plain = WEIGHTS[name]
    plain = plain.to(dtype)
    weight = kind.from_dense(plain)
    assert weight.shape == plain.shape and weight.dtype == dtype
    step = (plain.float().abs().amax(1) / 120).clamp_min(1e-6)
    assert ((weight.dense().float() - plain.float()).abs().amax(1) <= step).all()
    for other in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight)), weight.copy()):
        assert type(other) is kind and torch.equal(other.dense(), weight.dense())
        assert all(map(torch.equal, other.tensors.values(), weight.tensors.values()))
        assert all(t.data_ptr() != weight.tensors[n].data_ptr() for n, t in other.tensors.items())
    assert weight.nbytes_packed() == sum(t.nbytes for t in weight.tensors.values())
    with pytest.raises(ValueError, match="expected"):
        kind.from_tensors({}, plain.shape, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_state_dictionaries_are_plain_and_undo_gives_plain_weights(kind: str) -> None:
    module = KINDS[kind](64, 64, 2).eval()
    ours, x = quantized(module), torch.randn(5, 2, 64)
    report = oxytorch.explain(ours)
    names = ["weight_ih_l0", "weight_hh_l0", "weight_ih_l1", "weight_hh_l1"]
    assert [layer.module for layer in report.layers] == names  # type: ignore[attr-defined]
    assert report.bytes_after < 0.5 * report.bytes_before
    state = ours.state_dict()
    assert [*state] == [*module.state_dict()]
    assert all(type(value) is Tensor for value in state.values())
    del state
    rounded = {name: p.dense() for name, p in ours.named_parameters() if "weight" in name}
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert torch.equal(call(again, x)[0], call(ours, x)[0]) and ran_of_bytes(again, x)
    oxytorch.undo(ours)
    assert "forward" not in ours.__dict__ and type(ours.weight_hh_l0) is nn.Parameter
    assert all(torch.equal(getattr(ours, name), value) for name, value in rounded.items())
    module.load_state_dict(ours.state_dict())
    torch.testing.assert_close(call(ours, x)[0], call(module, x)[0])


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.LSTM(16, 24, proj_size=8), "LSTM with projections"),
        (nn.RNN(16, 24), "RNN is no linear layer"),
        (nn.EmbeddingBag(9, 8, mode="max"), "the kernel sums or averages"),
        (nn.EmbeddingBag(9, 8, padding_idx=0), "the kernel sums or averages"),
        (nn.EmbeddingBag(9, 8, max_norm=1.0), "max_norm"),
        (nn.EmbeddingBag(9, 8, mode="mean", include_last_offset=True), "the kernel sums"),
        (nn.GRU(16, 24).double(), "weight_ih_l0, it is float64"),
        (nn.Embedding(9, 8), "Embedding is no linear layer"),
        (nn.GRU(70000, 8), "it sums more than 65536 products"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_left_and_why(module: nn.Module, reason: str) -> None:
    report = oxytorch.quantize_(module.eval(), DYNAMIC)
    assert not report.layers and reason in str(report)


def test_shared_weights_are_left() -> None:
    first, second = nn.LSTM(8, 8), nn.LSTM(8, 8)
    second.weight_hh_l0 = first.weight_hh_l0
    model = nn.ModuleList([first, second]).eval()
    assert "another module holds it too" in str(oxytorch.quantize_(model, DYNAMIC))


def test_configurations_take_their_kinds() -> None:
    def model() -> nn.Module:
        return nn.ModuleDict(
            {"lstm": nn.LSTM(64, 16), "bag": nn.EmbeddingBag(9, 8), "table": nn.Embedding(9, 8)}
        ).eval()

    bags, all_ = {"bag"}, {"lstm.weight_ih_l0", "lstm.weight_hh_l0", "bag"}
    for config, taken in (
        (Int8Weight(), bags),
        (Int8DynamicActivationInt8Weight(), all_),
        (Int8Weight(embeddings=True), bags | {"table"}),
        (Int8DynamicActivationInt8Weight(embeddings=True), all_ | {"table"}),
        (Int8Weight(symmetric=False), set()),
        (Int8DynamicActivationInt8Weight(group_size=64), set()),
        (Int4Weight(group_size=64), set()),
    ):
        report = oxytorch.quantize_(model(), config)
        assert {layer.module for layer in report.layers} == taken, config
    report = oxytorch.quantize_(model(), DYNAMIC, filter="lstm")
    assert len(report.layers) == 2 and "left out by the filter" in str(report)
    report = oxytorch.quantize_(model(), DYNAMIC, filter=lambda path, module: path == "bag")
    assert [layer.module for layer in report.layers] == ["bag"]


@pytest.mark.parametrize("field", ["only_faster", "embeddings"])
def test_fields_are_checked(field: str) -> None:
    with pytest.raises(TypeError, match=f"expected {field} True or False, got 1"):
        Int8Weight(**{field: 1})  # type: ignore[arg-type]


def test_layers_that_are_not_faster_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_layers, "first_win", lambda *given: None)
    model = nn.ModuleList([nn.LSTM(16, 8), nn.GRU(16, 8), nn.EmbeddingBag(9, 8)]).eval()
    report = oxytorch.quantize_(model, Int8DynamicActivationInt8Weight())
    text = str(report)
    assert not report.layers and "only_faster=False takes it, for memory" in text
    assert all(type(p) is nn.Parameter for p in model.parameters())
    report = oxytorch.quantize_(model, DYNAMIC)
    assert len(report.layers) == 5


def test_layers_are_timed_beside_the_packed_floating_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared gives the same answers."""
    seen: list[str] = []

    def look(key: Any, sizes: Any, gain: float = 0.0) -> int:
        for floating, ours in sizes:
            with torch.inference_mode():
                assert sqnr(ours(), floating()) > 30
        seen.append(key[0])
        return 0

    monkeypatch.setattr(other_layers, "first_win", look)
    model = nn.ModuleList(
        [nn.LSTM(16, 8, batch_first=True), nn.GRU(16, 8), nn.LSTM(16, 8).bfloat16()]
    )
    model += [nn.EmbeddingBag(99, 8, mode="sum", include_last_offset=True)]
    oxytorch.quantize_(model.eval(), Int8DynamicActivationInt8Weight())
    assert seen == ["recurrent of bytes"] * 3 + ["bag of bytes"]


def test_weights_that_are_not_finite_are_named() -> None:
    for module in (nn.LSTM(16, 24), nn.EmbeddingBag(9, 8)):
        name = "weight_hh_l0" if isinstance(module, nn.LSTM) else "weight"
        with torch.no_grad():
            getattr(module, name)[2, 3] = float("nan")
        with pytest.raises(ValueError, match=f"{name}.*finite|finite.*{name}"):
            oxytorch.quantize_(module, DYNAMIC)
        assert all(type(p) is nn.Parameter for p in module.parameters())


def bag_calls(weighted: bool) -> list[tuple[Any, ...]]:
    indices, offsets = torch.randint(50, (12,)), torch.tensor([0, 0, 5, 9])
    factors = torch.randn(12)
    if weighted:
        return [(indices, offsets, factors), (indices.view(3, 4), None, factors.view(3, 4))]
    return [(indices, offsets), (indices.int(), offsets.int()), (indices.view(3, 4),)]


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_bags_are_near_floating_ones(mode: str, weighted: bool) -> None:
    if weighted and mode == "mean":
        pytest.skip("torch has no weighted mean")
    for last in (False, True):
        if last and mode == "mean":
            continue
        module = nn.EmbeddingBag(50, 24, mode=mode, include_last_offset=last).eval()
        ours = quantized(module)
        assert type(ours.weight) is TableWeight
        for args in bag_calls(weighted):
            given = args
            if last and len(args) > 1 and args[1] is not None:
                given = (args[0], torch.cat([args[1], args[1].new_tensor([12])]), *args[2:])
            assert ran_of_bytes(ours, *given)
            actual, wanted = call(ours, *given), call(module, *given)
            assert actual.dtype == wanted.dtype and sqnr(actual, wanted) > 38
        rounded = nn.EmbeddingBag(50, 24, mode=mode, include_last_offset=last).eval()
        rounded.load_state_dict(ours.state_dict())
        torch.testing.assert_close(call(quantized(rounded), *given), call(rounded, *given))


def test_embeddings_are_rows() -> None:
    module = nn.Embedding(50, 24, padding_idx=3).eval()
    ours = quantized(module, Int8Weight(embeddings=True))
    for ids in (torch.randint(50, (4, 5)), torch.tensor(7), torch.randint(50, (3,)).int()):
        assert ran_of_bytes(ours, ids)
        actual, wanted = call(ours, ids), call(module, ids)
        assert actual.shape == wanted.shape and sqnr(actual, wanted) > 38
        torch.testing.assert_close(actual, ours.weight.dense()[ids.long()])
    assert call(ours, torch.zeros(0, 3, dtype=torch.int64)).shape == (0, 3, 24)
    with pytest.raises((IndexError, RuntimeError)):
        call(ours, torch.tensor([50]))


def test_bags_of_16_bits_give_16_bits() -> None:
    module = nn.EmbeddingBag(50, 24, mode="sum").bfloat16().eval()
    ours = quantized(module)
    args = torch.randint(50, (12,)), torch.tensor([0, 5]), torch.randn(12).bfloat16()
    assert ran_of_bytes(ours, *args)
    actual = call(ours, *args)
    assert actual.dtype == torch.bfloat16
    assert sqnr(actual.float(), call(module.float(), *args[:2], args[2].float())) > 36


class Mixed(nn.Module):
    """All kinds of layers that become bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.bag = nn.EmbeddingBag(30, 16, mode="sum")
        self.lstm = nn.LSTM(16, 24, batch_first=True)
        self.gru = nn.GRU(24, 16, bidirectional=True)
        self.head = nn.Linear(32, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.bag(ids % 30)[:, None]
        result: Tensor = self.head(self.gru(self.lstm(x)[0])[0])
        return result


IDS = torch.randint(50, (3, 6), generator=torch.Generator().manual_seed(0))
ALL = Int8DynamicActivationInt8Weight(embeddings=True)


@pytest.mark.parametrize("shared", [True, False])
def test_files_bring_all_kinds_back(tmp_path: Path, shared: bool) -> None:
    model = quantized(Mixed(), ALL)
    oxytorch.save_quantized(model, tmp_path)
    again: Any = oxytorch.load_quantized(tmp_path, Mixed, shared=shared).eval()
    assert torch.equal(call(again, IDS), call(model, IDS))
    assert type(again.lstm.weight_ih_l0) is LstmWeight and type(again.bag.weight) is TableWeight
    found, wanted = ({str(a) for a in oxytorch.explain(m).layers} for m in (again, model))  # type: ignore[attr-defined]
    assert found == wanted
    assert json.loads((tmp_path / "oxytorch.json").read_text())["version"] == 2
    oxytorch.undo(again)
    assert all(type(p) is nn.Parameter for p in again.parameters())
    assert torch.equal(again.gru.weight_hh_l0, model.gru.weight_hh_l0.dense())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kind": "rnn"}, "KeyError: 'rnn'"),
        ({"shape": [96, 17]}, "expected panels|shape"),
        ({"shape": [95, 16]}, "expected rows for 4 gates, got 95"),
        ({"shape": [0, 16]}, "two sizes above 0"),
        ({"dtype": "int8"}, "expected a floating dtype, got 'int8'"),
        ({"kind": "embedding"}, "expected rows torch.uint8"),
    ],
)
def test_damaged_descriptions_are_refused(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    oxytorch.save_quantized(quantized(Mixed(), ALL), tmp_path)
    file = tmp_path / "oxytorch.json"
    description = json.loads(file.read_text())
    description["weights"]["lstm.weight_ih_l0"].update(changed)
    file.write_text(json.dumps(description))
    with pytest.raises(CheckpointError, match=message):
        oxytorch.load_quantized(tmp_path, Mixed)


@pytest.mark.parametrize("options", [{}, {"graph": True}, {"dtype": torch.bfloat16}], ids=str)
def test_quantized_layers_stay_in_optimized_models(options: dict[str, Any]) -> None:
    model = quantized(Mixed(), ALL)
    wanted = call(model, IDS)
    faster = oxytorch.optimize(model, sample_input=IDS, **options)
    found = call(faster, IDS)
    assert sqnr(found.float(), wanted) > (25 if "dtype" in options else 60)
    with torch.no_grad():
        model.lstm.weight_hh_l0.mul_(0.5)
        faster.lstm.weight_hh_l0.mul_(0.5)
    assert sqnr(call(faster, IDS).float(), call(model, IDS)) > (25 if "dtype" in options else 60)
