"""What `optimize` promises about hooks, dtypes, memory, verification, tuning and bad arguments."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from zoo import CASES, Attention, Classifier, build, call

import oxytorch
from oxytorch import isa
from oxytorch.core.packed import PackedTensor
from oxytorch.ops.attention import is_fast, scaled_dot_product_attention
from oxytorch.optimize import PASSES
from oxytorch.optimize.verify import VerificationError
from oxytorch.quantization import Int8Weight
from threads import errors_in_threads

bfloat16_only = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 here"
)


def _details(model: nn.Module) -> str:
    return " | ".join(e.detail for e in oxytorch.explain(model).applied)


def _block() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4), nn.GELU()
    ).eval()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["forward", "pre"])
@pytest.mark.parametrize("name", ["resnet", "bert", "gated", "recommender", "gpt2"])
def test_hooks_survive(name: str, kind: str, when: str) -> None:
    model, sample = build(name)
    with torch.no_grad():
        expected = call(model, sample)
    called: list[str] = []

    def hook(module: nn.Module, *rest: Any) -> None:
        called.append(type(module).__name__)

    def add(to: nn.Module) -> None:
        for module in to.modules():
            if kind == "forward":
                module.register_forward_hook(hook)
            else:
                module.register_forward_pre_hook(hook)

    if when == "before":
        add(model)
    optimized = oxytorch.optimize(model, sample_input=sample)
    if when == "after":
        add(optimized)
        add(model)
    called.clear()
    with torch.no_grad():
        found = call(optimized, sample)
    ours = [*called]
    called.clear()
    with torch.no_grad():
        call(model, sample)
    assert ours == called
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_hook_that_changes_the_output_of_a_fused_layer_is_obeyed() -> None:
    model = _block()
    x = torch.randn(3, 8)
    optimized = oxytorch.optimize(model, sample_input=x)
    assert "linear + relu" in _details(optimized)
    handle = optimized[0].register_forward_hook(lambda m, a, out: out * 0)
    with torch.no_grad():
        zeros = optimized(x)
        handle.remove()
        assert not torch.equal(optimized(x), zeros)
        assert torch.allclose(zeros, model[1:](torch.zeros(3, 16)), atol=1e-6)


def test_output_hidden_states_of_transformers() -> None:
    model, sample = build("bert")
    optimized = oxytorch.optimize(model, sample_input=sample)
    with torch.no_grad():
        expected = model(**sample, output_hidden_states=True).hidden_states
        found = optimized(**sample, output_hidden_states=True).hidden_states
    assert len(found) == len(expected) == 3
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_training_mode_after_optimize_runs_the_original() -> None:
    model = _block()
    optimized = oxytorch.optimize(model).train()
    x = torch.ones(64, 8)
    torch.manual_seed(1)
    found = optimized(x)
    torch.manual_seed(1)
    assert torch.allclose(found, model.train()(x), atol=1e-6)
    assert not torch.allclose(found, optimized(x))  # dropout is at work


def test_batch_norm_in_training_mode_is_not_folded() -> None:
    model, sample = build("resnet")
    norm = next(m for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    norm.train()
    optimized = oxytorch.optimize(copy.deepcopy(model), sample_input=sample)
    with torch.no_grad():
        assert torch.allclose(call(optimized, sample), call(model, sample), atol=1e-4)


def test_folding_with_zero_factors_is_exact_in_the_state() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    model[1].weight.data[1] = 0
    model[1].weight.data[2] = 1e-30
    before = {k: v.clone() for k, v in model.state_dict().items()}
    x = torch.randn(1, 3, 6, 6)
    with torch.no_grad():
        expected = model(x)
        optimized = oxytorch.optimize(model, sample_input=x)
        assert "folded batch norm" in _details(optimized)
        assert torch.allclose(optimized(x), expected, atol=1e-5)
        assert torch.allclose(optimized[0](x), model[0](x), atol=1e-5)
    assert all(torch.equal(v, before[k]) for k, v in optimized.state_dict().items())


def test_a_folded_layer_called_on_its_own_gives_its_own_result() -> None:
    model, sample = build("resnet")
    optimized = oxytorch.optimize(model, sample_input=sample)
    layer, original = optimized.embedder.embedder.convolution, model.embedder.embedder.convolution
    x = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        assert torch.allclose(layer(x), original(x), atol=1e-5)


def test_shared_weights_stay_shared() -> None:
    model, sample = build("tied")
    optimized = oxytorch.optimize(model, sample_input=sample)
    assert optimized.first.weight is optimized.second.weight
    assert isinstance(optimized.first.weight, PackedTensor)
    assert optimized.head.weight is optimized.embedding.weight
    assert optimized.head.weight.cell.keeps_plain
    done = {e.module: e.detail for e in oxytorch.explain(optimized).applied}
    assert "second copy: the weight that an embedding shares" in done["head"]
    with torch.no_grad():
        assert torch.allclose(call(optimized, sample), call(model, sample), atol=1e-5)
        for changed in (model, optimized):
            changed.embedding.weight.mul_(2.0)
        assert torch.allclose(call(optimized, sample), call(model, sample), atol=1e-5)
    half = oxytorch.optimize(model, dtype=torch.bfloat16, sample_input=sample)
    assert half.head.weight is half.embedding.weight
    assert half.head.weight.dtype == torch.bfloat16


def test_layers_that_share_an_input_are_joined() -> None:
    torch.manual_seed(0)
    model, x = Attention().eval(), torch.randn(2, 5, 32)
    optimized = oxytorch.optimize(
        model, sample_input=x, passes=[p for p in PASSES if p != "program"]
    )
    assert sum(e.pass_name == "join" for e in oxytorch.explain(optimized).applied) == 3
    with torch.no_grad():
        expected = model(x)
        for _ in range(3):
            assert torch.allclose(optimized(x), expected, atol=1e-6)
        other = torch.randn(2, 5, 32)
        for name in ("key", "query", "value"):  # another order, other tensors in between
            ours, theirs = getattr(optimized, name), getattr(model, name)
            assert torch.allclose(ours(x), theirs(x), atol=1e-6)
            assert torch.allclose(ours(other), theirs(other), atol=1e-6)
        x.mul_(2)  # the same tensor object with other values
        assert torch.allclose(optimized(x), model(x), atol=1e-5)


def test_two_threads_share_a_joined_model() -> None:
    torch.manual_seed(0)
    model = Attention().eval()
    optimized = oxytorch.optimize(
        model, sample_input=torch.randn(2, 5, 32), passes=[p for p in PASSES if p != "program"]
    )

    def work(seed: int) -> None:
        x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            expected = model(x)
            for _ in range(50):
                assert float((optimized(x) - expected).abs().max()) <= 1e-5

    assert not errors_in_threads(work, range(4))


def test_dtype_may_differ_by_path_and_type() -> None:
    model, sample = build("bert")
    dtype = {"": torch.bfloat16, "encoder.layer.1": torch.float32, nn.Embedding: torch.float32}
    optimized = oxytorch.optimize(model, dtype=dtype, sample_input=sample)
    assert optimized.encoder.layer[0].output.dense.weight.dtype == torch.bfloat16
    assert optimized.encoder.layer[1].output.dense.weight.dtype == torch.float32
    assert optimized.embeddings.word_embeddings.weight.dtype == torch.float32
    assert optimized.embeddings.LayerNorm.weight.dtype == torch.float32
    with torch.no_grad():
        gap = (call(optimized, sample).float() - call(model, sample)).abs().max()
    assert gap < 0.05


@pytest.mark.parametrize("trains", [False, True])
def test_a_path_leaves_batch_norm_below_it_beside_its_statistics(trains: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 8, 3)), nn.Flatten()
    ).train(trains)
    x = torch.randn(2, 3, 6, 6)
    expected = model(x)
    if trains:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimized, _ = oxytorch.optimize(model, optimizer=optimizer, dtype={"0": torch.bfloat16})
    else:
        optimized = oxytorch.optimize(model, dtype={"0": torch.bfloat16})
    norm, _, convolution = optimized[0]
    assert norm.weight.dtype == norm.running_mean.dtype == torch.float32
    assert convolution.weight.dtype == torch.bfloat16
    assert (optimized(x).float() - expected).abs().max() < 0.05


@pytest.mark.parametrize("key", ["0", nn.BatchNorm2d])
def test_a_key_that_names_batch_norm_is_an_error(key: Any) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 8, 3)).eval()
    with pytest.raises(ValueError, match="BatchNorm2d '0', whose running statistics are float32"):
        oxytorch.optimize(model, dtype={key: torch.bfloat16})
    assert oxytorch.optimize(model, dtype={key: torch.float32})[0].weight.dtype == torch.float32


def test_modules_that_read_their_childrens_weights_are_left_alone() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.Sequential(nn.Linear(16, 16), layer).eval()
    x = torch.randn(2, 5, 16)
    for dtype in (None, torch.bfloat16):
        optimized = oxytorch.optimize(model, dtype=dtype)
        with torch.no_grad():
            gap = (optimized(x).float() - model(x)).abs().max()
        assert gap < (1e-5 if dtype is None else 0.1)
        entries = {e.module: e.detail for e in oxytorch.explain(optimized).entries}
        assert "TransformerEncoderLayer" in entries["1"]


def test_parametrized_weights_are_left_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4)
    ).eval()
    optimized = oxytorch.optimize(model, inplace=True)
    x = torch.randn(2, 4)
    with torch.no_grad():
        first = optimized(x)
        oxytorch.undo(optimized)
        assert torch.allclose(first, optimized(x), atol=1e-6)


def test_a_model_that_fx_cannot_trace_keeps_its_packed_layers() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if x.sum() > 0 else -self.layer(x)

    model = Branching().eval()
    optimized = oxytorch.optimize(model)
    assert isinstance(optimized.layer.weight, PackedTensor)
    with torch.no_grad():
        for x in (torch.ones(2, 8), -torch.ones(2, 8)):
            assert torch.allclose(optimized(x), model(x), atol=1e-6)


def test_the_plain_weight_is_dropped() -> None:
    code = """
import json, torch
import oxytorch
from oxytorch.rewriting import measure
measure.TIMED = False  # every layer is packed
torch.manual_seed(0)
widths = [1024, 2048] * 10
model = torch.nn.Sequential(*map(torch.nn.Linear, widths[:-1], widths[1:])).eval()
size = sum(p.nbytes for p in model.parameters())

def resident(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))

for layer in model[:2]:
    oxytorch.optimize(torch.nn.Sequential(layer).eval())
before = resident("VmRSS")
oxytorch.optimize(model, inplace=True)
print(json.dumps([(resident(name) - before) / size for name in ("VmRSS", "VmHWM")]))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown, peak = json.loads(run.stdout)
    assert grown < 0.15
    assert peak < 0.3


def test_verify_passes_and_reports() -> None:
    model, sample = build("resnet")
    for dtype in (None, torch.bfloat16):
        optimized = oxytorch.optimize(model, dtype=dtype, sample_input=sample, verify=True)
        verified = oxytorch.explain(optimized).verified
        assert verified is not None
        assert verified["difference"] <= verified["allowed"]
        assert verified["modules"] >= 10
        assert "verified" in str(oxytorch.explain(optimized))


@pytest.mark.parametrize("inplace", [False, True])
def test_verify_names_the_first_module_that_differs(
    inplace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oxytorch.optimize.passes.packed_layers import LinearForward

    model, sample = build("bert")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    real = LinearForward.__call__

    def wrong(self: Any, x: torch.Tensor) -> torch.Tensor:
        result = real(self, x)
        return result + 1 if self.module.out_features == 32 else result

    monkeypatch.setattr(LinearForward, "__call__", wrong)
    with pytest.raises(VerificationError, match=r"encoder\.layer\.0\.attention\.self\.query"):
        oxytorch.optimize(model, sample_input=sample, verify=True, inplace=inplace)
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert "_oxytorch" not in model.__dict__
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_tune_keeps_what_wins_and_says_so() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).eval()
    x = torch.randn(16, 256)
    optimized = oxytorch.optimize(model, sample_input=x, tune=True)
    report = oxytorch.explain(optimized)
    assert report.tuned is not None
    assert report.tuned["passes"] == report.passes
    assert any("original" in name for name, _ in report.tuned["lines"])
    with torch.no_grad():
        assert torch.allclose(optimized(x), model(x), atol=1e-5)


def test_tune_returns_the_original_where_nothing_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    from oxytorch.optimize import tune

    monkeypatch.setattr(tune, "paired", lambda first, second, sample: (1.5, 1.0, 1.5))
    model = _block()
    optimized = oxytorch.optimize(model, sample_input=torch.randn(2, 8), tune=True)
    assert oxytorch.explain(optimized).passes == []
    assert not any("forward" in m.__dict__ for m in optimized.modules())
    assert "kept the original" in str(oxytorch.explain(optimized))


def test_report_is_text_and_data() -> None:
    model, sample = build("bert")
    report = oxytorch.explain(oxytorch.optimize(model, sample_input=sample))
    data = json.loads(json.dumps(report.as_dict()))
    assert data["model"] == "BertModel"
    assert {"pass_name", "module", "applied", "detail"} == set(data["entries"][0])
    text = str(report)
    assert "linear + gelu" in text
    assert "encoder.layer.0.intermediate, encoder.layer.1.intermediate" in text
    assert "encoder.layer.*.output" in text  # of four modules
    assert "left alone" in text
    assert "Embedding" in text
    full = report.full().splitlines()
    assert {e.module or "(the model)" for e in report.entries} <= {line.strip() for line in full}
    assert "*" not in report.full() and full[0] == text.splitlines()[0]


@pytest.mark.parametrize(
    "build_report",
    [
        lambda model: oxytorch.explain(oxytorch.optimize(model, dtype=torch.bfloat16)),
        lambda model: oxytorch.quantize_(model, Int8Weight()),
    ],
    ids=["optimize", "quantize_"],
)
def test_full_report_names_every_module(build_report: Any) -> None:
    report = build_report(nn.Sequential(*(nn.Linear(64, 64) for _ in range(5))).eval())
    lines = [line.strip() for line in report.full().splitlines()]
    assert {"0", "1", "2", "3", "4"} <= {*lines}
    assert "4" not in [line.strip() for line in str(report).splitlines()]


def test_report_says_where_fused_layers_are_not_packed() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU()).eval(), torch.randn(4, 64)
    note = ", as separate kernels: the layer is not packed"
    for passes, is_noted in ((["fuse"], True), (["fuse", "pack"], False)):
        optimized = oxytorch.optimize(model, sample_input=x, passes=passes)
        details = _details(optimized).split(" | ")
        assert "linear + gelu" + (note if is_noted else "") in details


@pytest.mark.parametrize("inplace", [False, True])
def test_inplace_says_which_model_changes(inplace: bool) -> None:
    model = _block()
    optimized = oxytorch.optimize(model, inplace=inplace)
    assert (optimized is model) == inplace
    assert isinstance(model[0].weight, PackedTensor) == inplace


def test_a_model_that_is_one_layer() -> None:
    torch.manual_seed(0)
    for model, x in (
        (nn.Linear(4, 3), torch.randn(2, 4)),
        (nn.Conv2d(3, 4, 3), torch.randn(1, 3, 5, 5)),
        (nn.LayerNorm(6), torch.randn(2, 6)),
        (nn.LSTM(4, 5), torch.randn(3, 2, 4)),
    ):
        model = model.eval()
        optimized = oxytorch.optimize(model, sample_input=x)
        with torch.no_grad():
            expected, found = model(x), optimized(x)
        if isinstance(expected, tuple):
            expected, found = expected[0], found[0]
        assert torch.allclose(found, expected, atol=1e-5)
        assert len(oxytorch.explain(optimized).applied) == 1


@pytest.mark.parametrize("shape", [(0, 8), (8,), (1, 8), (2, 3, 4, 8)])
def test_linear_takes_every_shape_that_torch_takes(shape: tuple[int, ...]) -> None:
    model = _block()
    optimized = oxytorch.optimize(model)
    x = torch.randn(shape)
    with torch.no_grad():
        assert optimized(x).shape == model(x).shape
        assert torch.allclose(optimized(x), model(x), atol=1e-6)
        strided = torch.randn(*shape, 2)[..., 0]
        assert torch.allclose(optimized(strided), model(strided), atol=1e-6)


def test_packed_sequence_and_states_of_an_lstm() -> None:
    torch.manual_seed(0)
    model = nn.LSTM(4, 5, 2, bidirectional=True).eval()
    optimized = oxytorch.optimize(model)
    x = torch.randn(6, 3, 4)
    state = (torch.randn(4, 3, 5), torch.randn(4, 3, 5))
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 4, 2]))
    with torch.no_grad():
        for args in ((x,), (x, state), (x[:, 0],), (packed,), (packed, state)):
            expected, (h, c) = model(*args)
            found, (h_ours, c_ours) = optimized(*args)
            if isinstance(expected, nn.utils.rnn.PackedSequence):
                expected, found = expected.data, found.data
            for ours, theirs in ((found, expected), (h_ours, h), (c_ours, c)):
                assert ours.shape == theirs.shape
                assert torch.allclose(ours, theirs, atol=1e-5)


class _Bad(nn.Module):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("this model holds a socket")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"model": 3}, TypeError, ["model", "torch.nn.Module", "int"]),
        ({"model": _block().train()}, ValueError, ["training mode", "eval()"]),
        ({"model": _Bad().eval()}, ValueError, ["_Bad", "socket", "inplace=True"]),
        ({"dtype": torch.int8}, ValueError, ["dtype", "torch.bfloat16", "torch.int8"]),
        ({"dtype": {"nowhere": torch.bfloat16}}, ValueError, ["dtype", "nowhere"]),
        ({"dtype": {0: torch.bfloat16}}, TypeError, ["dtype keys", "paths or types", "0"]),
        ({"passes": ["pack", "magic"]}, ValueError, ["passes", "channels_last", "magic"]),
        ({"passes": "pack"}, TypeError, ["passes", "'pack'"]),
        ({"passes": 3}, TypeError, ["passes", "names", "3"]),
        ({"verify": True}, ValueError, ["verify", "sample_input", "None"]),
        ({"tune": True}, ValueError, ["tune", "sample_input", "None"]),
        ({"sample_input": torch.randn(2, 9)}, ValueError, ["sample_input", "2x9"]),
        ({"sample_input": {"z": torch.randn(2, 8)}}, ValueError, ["sample_input", "'z'"]),
        ({"sample_input": (1, 2, 3)}, ValueError, ["sample_input", "Sequential"]),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("inplace", [False, True])
def test_bad_arguments(
    arguments: dict[str, Any], error: type[Exception], words: list[str], inplace: bool
) -> None:
    if "socket" in words and inplace:
        pytest.skip("a model changed in place is not copied")
    model = arguments.get("model", _block())
    rest = {key: value for key, value in arguments.items() if key != "model"}
    with pytest.raises(error) as caught:
        oxytorch.optimize(model, inplace=inplace, **rest)
    for word in ["optimize", *words]:
        assert word in str(caught.value)
    if isinstance(model, nn.Module):
        assert not any("forward" in m.__dict__ for m in model.modules())
        assert "_oxytorch" not in model.__dict__


@pytest.mark.parametrize("function", [oxytorch.undo, oxytorch.explain])
def test_what_is_no_model_is_named(function: object) -> None:
    assert callable(function)
    with pytest.raises(
        TypeError, match=r"expected model to be a torch\.nn\.Module, got a NoneType"
    ):
        function(None)


def test_optimizing_twice_is_refused() -> None:
    optimized = oxytorch.optimize(_block())
    with pytest.raises(ValueError, match="undo"):
        oxytorch.optimize(optimized)
    with pytest.raises(ValueError, match="explain"):
        oxytorch.explain(_block())


def test_a_pass_that_fails_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from oxytorch.rewriting import changes

    model = _block()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    calls = 0

    def failing(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError("no memory left")

    monkeypatch.setattr(changes.ChangeLog, "prepare_for_packed", failing)
    with pytest.raises(MemoryError):
        oxytorch.optimize(model, inplace=True)
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not any(isinstance(p, PackedTensor) for p in model.parameters())


def test_sample_may_be_a_lone_tensor_or_a_list() -> None:
    model = Classifier().eval()
    x = CASES["classifier"].sample()[0]
    for sample in (x, [x], {"x": x}):
        assert "LSTM" in _details(oxytorch.optimize(model, sample_input=sample))


def test_dropout_switched_on_alone_is_obeyed() -> None:
    model, sample = build("bert")
    optimized = oxytorch.optimize(model, sample_input=sample)
    with torch.no_grad():
        before = call(optimized, sample)
        for module in optimized.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.5
                module.train()
        assert not torch.allclose(call(optimized, sample), before)
        optimized.eval()
        assert torch.equal(call(optimized, sample), before)


@pytest.mark.parametrize("padding", [(1, 1), (1, 1, 2, 2), (0, 0, 0, 0), (0, 1, 0, 1)])
def test_padding_before_a_convolution_is_taken_in(padding: tuple[int, ...]) -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 4, 3, padding=(1, 0), stride=2)
            self.sides = padding

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.layer(nn.functional.pad(x, self.sides, "constant", 0.0)))

    torch.manual_seed(0)
    model = Padded().eval()
    x = torch.randn(2, 3, 9, 8)
    optimized = oxytorch.optimize(model, sample_input=x)
    even = padding[0] == padding[1]
    assert ("padding + convolution" in _details(optimized)) == even
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            assert torch.allclose(optimized(x), model(x), atol=1e-6)


fast_attention = pytest.mark.skipif(
    not is_fast(), reason=f"attention is torch's own at {isa.active()}"
)


def _mask(kind: str | None) -> torch.Tensor | None:
    made = {None: None, "bool": torch.rand(2, 1, 3, 3) > 0.2, "float": torch.randn(3, 3)}[kind]
    if kind == "bool":
        made[..., 0] = True
    return made


@fast_attention
@pytest.mark.parametrize(
    ("causal", "mask"), [(False, None), (True, None), (False, "bool"), (False, "float")]
)
def test_attention_agrees_with_torch(causal: bool, mask: str | None) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 16).transpose(1, 2) for n in (5, 5, 5))
    given = _mask(mask)
    torchs = nn.functional.scaled_dot_product_attention
    expected = torchs(q, k, v, given, is_causal=causal)
    found = scaled_dot_product_attention(q, k, v, given, is_causal=causal)
    torch.testing.assert_close(found, expected)
    half = [t.bfloat16() for t in (q, k, v)]
    given = given.bfloat16() if mask == "float" else given
    error = (torchs(*half, given, is_causal=causal).float() - expected).abs().max()
    found = scaled_dot_product_attention(*half, given, is_causal=causal)
    assert (found.float() - expected).abs().max() <= 2 * error + 0.01


@pytest.mark.parametrize("mask", ["bool", "float"])
def test_a_mask_beside_is_causal_is_left_to_torch(mask: str) -> None:
    """torch 2.15 refuses the two together; older ones apply both."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 16).transpose(1, 2) for _ in range(3))
    given = _mask(mask)
    torchs = nn.functional.scaled_dot_product_attention
    try:
        expected = torchs(q, k, v, given, is_causal=True)
    except (RuntimeError, ValueError) as error:
        with pytest.raises(type(error), match=re.escape(str(error).splitlines()[0])):
            scaled_dot_product_attention(q, k, v, given, is_causal=True)
    else:
        assert torch.equal(scaled_dot_product_attention(q, k, v, given, is_causal=True), expected)


def test_attention_calls_of_other_kinds_go_to_torch() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 5, 8) for _ in range(3))
    torchs = nn.functional.scaled_dot_product_attention
    ours = scaled_dot_product_attention
    for args in ((q[0], k[0], v[0]), (q.double(), k.double(), v.double()), (q, k, v[..., :6])):
        assert torch.equal(ours(*args), torchs(*args))
    grouped = (q, k[:, :2], v[:, :2])
    torch.testing.assert_close(ours(*grouped, enable_gqa=True), torchs(*grouped, enable_gqa=True))
    q.requires_grad_()
    assert torch.equal(ours(q, k, v), torchs(q, k, v))
    assert ours(q, k, v).requires_grad
    assert ours(q, k, v, dropout_p=1.0).abs().sum() == 0


@fast_attention
def test_attention_pass_changes_only_the_modules_that_call_it() -> None:
    torch.manual_seed(0)
    model, x = Attention().eval(), torch.randn(2, 5, 32)
    for dtype, tolerance in ((None, 1e-5), (torch.bfloat16, 0.02)):
        if dtype and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            continue
        optimized = oxytorch.optimize(model, dtype=dtype, sample_input=x)
        done = [e.module for e in oxytorch.explain(optimized).applied if e.pass_name == "attention"]
        assert done == [""]
        with torch.no_grad():
            assert (optimized(x).float() - model(x)).abs().max() < tolerance


def test_small_linear_layers_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from oxytorch.optimize.passes import pack

    monkeypatch.setattr(pack, "SMALLEST_LINEAR", 1 << 12)
    monkeypatch.setattr(pack, "first_win", lambda *_: 0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 600)).eval()
    optimized = oxytorch.optimize(model)
    assert not isinstance(optimized[0].weight, PackedTensor)
    assert isinstance(optimized[2].weight, PackedTensor)
    left = {e.module: e.detail for e in oxytorch.explain(optimized).skipped}
    assert "64 weights are too few to gain" in left["0"]
    x = torch.randn(3, 8)
    with torch.no_grad():
        assert torch.allclose(optimized(x), model(x), atol=1e-6)


@pytest.mark.parametrize("has_bias", [True, False])
def test_parametrized_layers_are_cast_too(has_bias: bool) -> None:
    """Else what follows them computes with float32, and code that reads weights itself fails."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            made = nn.Conv1d(8, 8, 3, padding=1, bias=has_bias)
            self.first, self.positions = (
                nn.Linear(8, 8),
                nn.utils.parametrizations.weight_norm(made),
            )
            self.last = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            x = x + self.positions(x.mT).mT
            return nn.functional.linear(x, self.last.weight, self.last.bias)

    torch.manual_seed(0)
    model, x = Reader().eval(), torch.randn(2, 5, 8)
    for sample in (None, x):
        optimized = oxytorch.optimize(model, dtype=torch.bfloat16, sample_input=sample)
        with torch.no_grad():
            found = optimized(x)
            assert found.dtype == torch.bfloat16
            assert (found.float() - model(x)).abs().max() < 0.03
        assert {p.dtype for p in optimized.parameters()} == {torch.bfloat16}
        oxytorch.undo(optimized)
        assert {p.dtype for p in optimized.parameters()} == {torch.float32}
        with torch.no_grad():  # the values stay those that were used
            assert (optimized(x) - model(x)).abs().max() < 0.03


@pytest.mark.parametrize("name", ["graph", "inplace", "verify", "tune"])
def test_switches_are_true_or_false(name: str) -> None:
    switch: Any = {name: "yes"}
    with pytest.raises(TypeError, match=f"expected {name} to be True.* False.*, got 'yes'"):
        oxytorch.optimize(nn.Linear(4, 4).eval(), sample_input=torch.ones(2, 4), **switch)


def test_a_model_without_values_is_named() -> None:
    with pytest.raises(ValueError, match="got weight on the device meta; load the weights first"):
        oxytorch.optimize(nn.Linear(4, 4, device="meta").eval(), sample_input=torch.ones(2, 4))


def test_a_key_of_dtype_that_is_no_path_is_named() -> None:
    with pytest.raises(ValueError, match=r"paths as in model\.named_modules\(\), got 'nope'"):
        oxytorch.optimize(nn.Linear(4, 4).eval(), dtype={"nope": torch.bfloat16})
