"""Attention, transformer and recurrent layers get the dtype asked for where they are faster so."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence
from torch.utils import _pytree as pytree

import oxytorch
from oxytorch.optimize import PASSES
from oxytorch.optimize.passes import whole

SIZE = 16


def _encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(SIZE, 2, 8, batch_first=True)


def _encoder() -> nn.Module:
    return nn.TransformerEncoder(_encoder_layer(), 2, norm=nn.LayerNorm(SIZE))


def _decoder() -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(SIZE, 2, 8, batch_first=True), 2)


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (3, 5)), SIZE)


def _padding() -> torch.Tensor:
    return torch.arange(5) >= torch.tensor([[5], [3], [2]])


def _packed() -> PackedSequence:
    lengths = torch.tensor([2, 5, 3])
    return pack_padded_sequence(_x(), lengths, batch_first=True, enforce_sorted=False)


def _causal(size: int = 5) -> torch.Tensor:
    return nn.Transformer.generate_square_subsequent_mask(size)


class Around(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*args, **kwargs)


Call = tuple[tuple[Any, ...], dict[str, Any]]
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Call]]] = {
    "attention": (
        lambda: nn.MultiheadAttention(SIZE, 2, kdim=8, vdim=4, batch_first=True),
        lambda: ((_x(), torch.randn(3, 7, 8), torch.randn(3, 7, 4)), {}),
    ),
    "attention_masked": (
        lambda: nn.MultiheadAttention(SIZE, 2, add_bias_kv=True),
        lambda: ((_x(), _x(), _x()), {"attn_mask": _causal(3), "need_weights": False}),
    ),
    "attention_parametrized": (
        lambda: parametrizations.weight_norm(
            nn.MultiheadAttention(SIZE, 2, batch_first=True), "in_proj_weight"
        ),
        lambda: ((_x(), _x(), _x()), {}),
    ),
    "encoder_layer": (_encoder_layer, lambda: ((_x(),), {})),
    "encoder_layer_first": (
        lambda: nn.TransformerEncoderLayer(SIZE, 2, 8, norm_first=True, activation="gelu"),
        lambda: ((_x(),), {"src_mask": _causal(3)}),
    ),
    "encoder": (_encoder, lambda: ((_x(),), {})),
    "encoder_padded": (_encoder, lambda: ((_x(),), {"src_key_padding_mask": _padding()})),
    "decoder": (_decoder, lambda: ((_x(), _x(3, 7)), {"tgt_mask": _causal()})),
    "transformer": (
        lambda: nn.Transformer(SIZE, 2, 1, 1, 8, batch_first=True),
        lambda: ((_x(), _x(3, 4)), {"src_key_padding_mask": _padding()}),
    ),
    "gru": (lambda: nn.GRU(SIZE, 8, 2, bidirectional=True), lambda: ((_x(),), {})),
    "gru_state": (lambda: nn.GRU(SIZE, 8), lambda: ((_x(),), {"hx": torch.randn(1, 5, 8)})),
    "gru_packed": (lambda: nn.GRU(SIZE, 8, batch_first=True), lambda: ((_packed(),), {})),
    "rnn": (lambda: nn.RNN(SIZE, 8, nonlinearity="relu"), lambda: ((_x(),), {})),
    "rnn_packed": (lambda: nn.RNN(SIZE, 8), lambda: ((_packed(),), {})),
    "lstm": (lambda: nn.LSTM(SIZE, 8), lambda: ((_x(),), {})),
    "lstm_packed": (lambda: nn.LSTM(SIZE, 8), lambda: ((_packed(),), {})),
    "lstm_projected": (lambda: nn.LSTM(SIZE, 8, proj_size=4), lambda: ((_x(),), {})),
    "gru_cell": (lambda: nn.GRUCell(SIZE, 8), lambda: ((_x(3),), {})),
    "rnn_cell": (
        lambda: nn.RNNCell(SIZE, 8, bias=False),
        lambda: ((_x(3), torch.randn(3, 8)), {}),
    ),
    "lstm_cell": (
        lambda: nn.LSTMCell(SIZE, 8),
        lambda: ((_x(3), (torch.randn(3, 8), torch.randn(3, 8))), {}),
    ),
}
WITHOUT_PICKLE = ("attention_parametrized",)


def _cast(value: Any) -> Any:
    is_packed = isinstance(value, PackedSequence)
    is_floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(torch.bfloat16) if is_packed or is_floating else value


def _leaves(result: Any) -> list[torch.Tensor]:
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return [leaf for leaf in leaves if leaf.is_floating_point()]


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("form", ["default", "sample", "all"])
@pytest.mark.parametrize("name", [*CASES])
def test_a_layer_computes_as_a_model_that_was_cast(name: str, form: str, nested: bool) -> None:
    torch.manual_seed(0)
    model = (Around(CASES[name][0]()) if nested else CASES[name][0]()).eval()
    args, kwargs = CASES[name][1]()
    given: dict[str, Any] = {}
    if form != "default":
        first = {} if nested else _names(model)
        sample = {**dict(zip(first, args, strict=False)), **kwargs} if first else None
        if sample is None and kwargs:
            pytest.skip("a sample is positional or by name")
        given["sample_input"] = sample if sample is not None else args
    if form == "all":
        given["passes"] = [p for p in PASSES if p != "program"]
    optimized = oxytorch.optimize(model, dtype=torch.bfloat16, **given)
    with torch.no_grad():
        expected = _leaves(model(*args, **kwargs))
        cast = pytree.tree_map(_cast, (args, kwargs), is_leaf=_is_packed)
        stock = _leaves(copy.deepcopy(model).bfloat16()(*cast[0], **cast[1]))
        copies = [optimized]
        if name not in WITHOUT_PICKLE:
            copies += [copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized))]
        for one in copies:
            for call in ((args, kwargs), cast):
                found = _leaves(one(*call[0], **call[1]))
                for ours, theirs, right in zip(found, stock, expected, strict=True):
                    assert ours.dtype == theirs.dtype
                    error = (ours.float() - right).abs().max()
                    allowed = 2 * (theirs.float() - right).abs().max() + 2**-7 * right.abs().max()
                    assert error <= allowed
    layers = [m for m in optimized.modules() if isinstance(m, (*whole.ATTENTION, *whole.RECURRENT))]
    assert {p.dtype for layer in layers for p in layer.parameters()} == {torch.bfloat16}
    oxytorch.undo(optimized)
    with torch.no_grad():
        for ours, right in zip(_leaves(optimized(*args, **kwargs)), expected, strict=True):
            torch.testing.assert_close(ours, right, rtol=3e-2, atol=3e-2)


def _names(model: nn.Module) -> list[str]:
    import inspect

    return [*inspect.signature(model.forward).parameters]


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize(
    "name", ["attention", "encoder", "gru_packed", "lstm", "lstm_projected", "gru_cell"]
)
def test_a_layer_that_is_no_faster_keeps_its_dtype(
    monkeypatch: pytest.MonkeyPatch, name: str, sample: bool
) -> None:
    calls = []

    def never(key: Any, sizes: Any) -> None:
        calls.append((key, [[run() for run in both] for both in sizes]))

    monkeypatch.setattr(whole, "first_win", never)
    model = nn.Sequential(CASES[name][0]()).eval()
    args, _ = CASES[name][1]()
    if len(args) > 1:
        model = model[0]
    given = {"sample_input": args} if sample else {}
    optimized = oxytorch.optimize(model, dtype=torch.bfloat16, **given)
    assert "float32 is as fast here" in str(oxytorch.explain(optimized))
    kept = [m for m in optimized.modules() if type(m) in (*whole.ATTENTION, *whole.RECURRENT)]
    assert {p.dtype for m in kept for p in m.parameters()} == {torch.float32}
    with torch.no_grad():
        for ours, right in zip(_leaves(optimized(*args)), _leaves(model(*args)), strict=True):
            torch.testing.assert_close(ours.float(), right, rtol=2e-2, atol=2e-2)
    assert calls and all(len(results) == (1 if sample else len(results)) for _, results in calls)
    named = oxytorch.optimize(model, dtype={type(kept[0]): torch.bfloat16}, **given)
    if name not in ("attention", "encoder"):  # whose parts have other types
        assert {p.dtype for p in named.parameters()} == {torch.bfloat16}


def test_parts_of_several_dtypes_leave_the_whole_as_it_is() -> None:
    model, x = _encoder().eval(), _x()
    rules = {"": torch.bfloat16, "layers.0.linear1": torch.float32}
    optimized = oxytorch.optimize(model, dtype=rules, sample_input=x)
    assert {p.dtype for p in optimized.layers[0].parameters()} == {torch.float32}
    assert {p.dtype for p in optimized.layers[1].parameters()} == {torch.bfloat16}
    with torch.no_grad():
        torch.testing.assert_close(optimized(x).float(), model(x), rtol=5e-2, atol=5e-2)


def test_a_weight_shared_with_what_is_not_cast_keeps_the_whole_in_its_dtype() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = _encoder_layer()
            self.pair = nn.Bilinear(SIZE, SIZE, SIZE)
            self.pair.bias = self.layer.linear2.bias

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            return self.pair(y, y)

    model, x = Model().eval(), _x()
    optimized = oxytorch.optimize(model, dtype=torch.bfloat16)
    assert {p.dtype for p in optimized.parameters()} == {torch.float32}
    assert optimized.pair.bias is optimized.layer.linear2.bias
    with torch.no_grad():
        torch.testing.assert_close(optimized(x), model(x))


class Noting(nn.MultiheadAttention):
    def forward(self, query: Any, key: Any, value: Any, **options: Any) -> Any:
        self.seen = (query is key, key is value, query.dtype)
        return super().forward(query, key, value, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_tensor_stays_one(dtype: torch.dtype) -> None:
    model, x = Noting(SIZE, 2, batch_first=True).eval(), _x()
    rules = {"": torch.bfloat16, "0": dtype}
    optimized: Any = oxytorch.optimize(nn.ModuleList([model, nn.Linear(2, 2)]).eval(), dtype=rules)
    given = x.to(torch.bfloat16 if dtype == torch.float32 else torch.float32)
    with torch.no_grad():
        optimized[0](given, given, value=given)
        assert optimized[0].seen == (True, True, dtype)
        optimized[0](given, given, value=given.clone())
        assert optimized[0].seen == (True, False, dtype)


class Tagger(nn.Module):
    """Gives its LSTM a packed sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(pack_sequence([x, x[:2]]))[0].data


def test_an_lstm_that_the_sample_gives_a_packed_sequence_is_left_alone() -> None:
    model = oxytorch.optimize(Tagger().eval(), sample_input=torch.rand(5, 16))
    assert type(model.lstm.weight_ih_l0) is nn.Parameter
    assert any("PackedSequence" in entry.detail for entry in oxytorch.explain(model).skipped)
