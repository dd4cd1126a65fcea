"""Models and inputs of other dtypes, layouts and sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import oxytorch

from .compare import Log
from .models import MODELS, cases


def _call(model: Any, x: Any, log: Log) -> None:
    """Call twice and log answers or errors."""
    for _ in range(2):
        try:
            with torch.no_grad():
                log(model(x))
        except Exception as error:
            log(error)


@pytest.mark.parametrize("form", ["default", pytest.param("sample", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
@pytest.mark.parametrize("name", [*MODELS])
def test_model_of_dtype(check: Callable[..., None], name: str, dtype: str, form: str) -> None:
    """The user's model has this dtype before it is optimized."""
    build, sample, own_form = MODELS[name]
    kind = getattr(torch, dtype)

    def given() -> torch.Tensor:
        return sample().to(kind) if sample().is_floating_point() else sample()

    def use(model: Any, log: Log) -> None:
        _call(model, given(), log)
        result = model(given())
        log(result)
        (result[0] if isinstance(result, tuple) else result).float().sum().backward()
        log([p.grad is None or p.grad.dtype for p in model.parameters()], model.state_dict())

    used = own_form if form == "default" else form
    limits = {"float16": 5e-3, "bfloat16": 3e-2}
    check(lambda: build().to(kind), use, used, given, tolerance=limits.get(dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", [*MODELS])
def test_dtype_asked_for(settle: Callable[..., None], name: str, dtype: str) -> None:
    """`dtype=` gives answers close to float32, plain state, and gradients."""
    from .compare import _run, judge

    build, sample, _ = MODELS[name]
    kind = getattr(torch, dtype)
    stock, ours = Log(), Log()

    def made() -> Any:
        torch.manual_seed(0)
        return build()

    def use(model: Any, log: Log) -> None:
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                result = model(sample())
                result = result[0] if isinstance(result, tuple) else result
                log(result.detach().float().clone())
        result.float().sum().backward()
        log({key: value.float() for key, value in model.state_dict().items()})
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(p * 0.5)
            result = model(sample())
            log((result[0] if isinstance(result, tuple) else result).float())

    _run(made, use, stock)
    _run(lambda: oxytorch.optimize(made(), dtype=kind), use, ours)
    settle(judge(stock, ours, 5e-2))


INPUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "double": lambda x: x.double(),
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "int": lambda x: (x * 3).int(),
    "long": lambda x: (x * 3).long(),
    "bool": lambda x: x > 0,
    "complex": lambda x: torch.complex(x.float(), x.float()),
    "sparse": lambda x: x.to_sparse(),
    "sparse_rows": lambda x: x.reshape(-1, x.shape[-1]).to_sparse_csr(),
    "mkldnn": lambda x: x.to_mkldnn(),
    "nested": lambda x: torch.nested.nested_tensor([x[0], x[0]]),
    "empty_batch": lambda x: x[:0],
    "zero_size": lambda x: x[..., :0],
    "scalar": lambda x: x.reshape(-1)[0],
    "one_dimension": lambda x: x.reshape(-1)[: x.shape[-1]],
    "no_batch": lambda x: x[0],
    "one_more_dimension": lambda x: x[None],
    "two_more_dimensions": lambda x: x[None, None],
    "too_wide": lambda x: torch.cat([x, x], -1),
    "too_narrow": lambda x: x[..., :1],
    "too_many_channels": lambda x: torch.cat([x, x], 1) if x.dim() > 1 else x,
    "not_contiguous": lambda x: torch.stack([x, x], -1)[..., 0],
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "expanded": lambda x: x[:1].expand(3, *x.shape[1:]),
    "flipped": lambda x: x.flip(0),
    "offset": lambda x: torch.cat([x.reshape(-1)[:1], x.reshape(-1)])[1:].view_as(x),
    "unaligned": lambda x: _unaligned(x),
    "overlapping": lambda x: x.reshape(-1).unfold(0, x.shape[-1], 1)[: x.shape[0]],
    "conjugate": lambda x: torch.complex(x.float(), x.float()).conj().imag,
    "inference": lambda x: _inference(x),
    "requires_grad": lambda x: x.float().clone().requires_grad_(),
    "parameter": lambda x: nn.Parameter(x.clone(), requires_grad=False),
    "large": lambda x: x * 1e30 if x.is_floating_point() else x,
    "denormal": lambda x: x * 1e-41 if x.is_floating_point() else x,
    "none": lambda x: None,
    "list": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "meta": lambda x: x.to("meta"),
    "subclass": lambda x: x.as_subclass(Subclass),
    "tensor_of_mode": lambda x: torch.nn.Buffer(x),
}


class Subclass(torch.Tensor):
    """A tensor subclass that does nothing."""


def _inference(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.clone()


def _unaligned(x: torch.Tensor) -> torch.Tensor:
    raw = torch.zeros(x.nbytes + 8, dtype=torch.uint8)
    memory = memoryview(raw.numpy())[2:]
    result = torch.frombuffer(memory, dtype=x.dtype, count=x.numel()) if x.nbytes else x
    return result.reshape(x.shape).copy_(x)


OFTEN = ("linear", "conv2d_norm", "lstm", "gated", "encoder", "quantized")
TAKEN = (("quantized", "half"), ("quantized", "bfloat16"))
"""Models with inputs that torch refuses and they take."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["default", pytest.param("sample", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "given"), [c for c in cases(MODELS, INPUTS, OFTEN) if c.values not in TAKEN]
)
def test_input(check: Callable[..., None], name: str, given: str, form: str) -> None:
    build, sample, own_form = MODELS[name]

    def use(model: Any, log: Log) -> None:
        _call(model, sample(), log)
        try:
            x = INPUTS[given](sample())
        except Exception:  # an input that cannot be made of this model's sample
            return
        _call(model, x, log)
        _call(model, sample(), log)

    check(build, use, own_form if form == "default" else form, sample)


STATES: dict[str, Callable[[], Any]] = {
    "both": lambda: (torch.zeros(4, 2, 8), torch.ones(4, 2, 8)),
    "none": lambda: None,
    "wrong_batch": lambda: (torch.zeros(4, 3, 8), torch.zeros(4, 3, 8)),
    "wrong_size": lambda: (torch.zeros(4, 2, 7), torch.zeros(4, 2, 7)),
    "wrong_layers": lambda: (torch.zeros(2, 2, 8), torch.zeros(2, 2, 8)),
    "one_tensor": lambda: torch.zeros(4, 2, 8),
    "double": lambda: (torch.zeros(4, 2, 8).double(), torch.zeros(4, 2, 8).double()),
    "unbatched": lambda: (torch.zeros(4, 8), torch.zeros(4, 8)),
}


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("state", [*STATES])
def test_lstm_states(check: Callable[..., None], state: str, keyword: bool) -> None:
    def build() -> nn.Module:
        return nn.LSTM(6, 8, num_layers=2, batch_first=True, bidirectional=True).eval()

    def use(model: Any, log: Log) -> None:
        x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(5))
        for given in (x, x[:1], x[0], x.transpose(0, 1)):
            try:
                with torch.no_grad():
                    if keyword:
                        log(model(input=given, hx=STATES[state]()))
                    else:
                        log(model(given, STATES[state]()))
            except Exception as error:
                log(error)

    check(build, use)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"num_layers": 2, "dropout": 0.5}, {"bidirectional": True}],
    ids=["plain", "no_bias", "layers", "both_ways"],
)
def test_packed_sequences(check: Callable[..., None], kind: str, options: dict[str, Any]) -> None:
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

    def build() -> nn.Module:
        return nn.Sequential(getattr(nn, kind)(6, 8, batch_first=True, **options)).eval()

    def use(model: Any, log: Log) -> None:
        x = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(5))
        packed = pack_padded_sequence(x, torch.tensor([2, 5, 3]), True, enforce_sorted=False)
        with torch.no_grad():
            out, state = model(packed)
            log(type(out), *pad_packed_sequence(out, batch_first=True), state)
            log(model(x), model(x[0]), model(x[:, :0] if kind == "none" else x[:, :1]))
        model.train()
        torch.manual_seed(3)
        log(model(x))

    check(build, use)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize(
    "form", ["plain", "offsets", "weights", "keywords", "last", "padding", "empty"]
)
def test_embedding_bags(check: Callable[..., None], form: str, dtype: str, mode: str) -> None:
    kind = getattr(torch, dtype)

    def build() -> nn.Module:
        options: dict[str, Any] = {"padding_idx": 0} if form == "padding" else {}
        bag = nn.EmbeddingBag(30, 8, mode=mode, include_last_offset=form == "last", **options)
        return nn.ModuleList([bag.to(kind)]).eval()

    def use(model: Any, log: Log) -> None:
        bag = model[0]
        ids = torch.tensor([[1, 0, 3], [4, 5, 0]])
        flat, offsets = ids.reshape(-1), torch.tensor([0, 2, 2])
        weights = torch.tensor([[0.5, 1.0, 2.0], [0.1, 0.2, 0.3]])
        with torch.no_grad():
            for _ in range(2):
                try:
                    if form in ("plain", "padding"):
                        log(bag(ids), bag(ids.int()))
                    elif form in ("offsets", "last"):
                        log(bag(flat, offsets), bag(flat.int(), offsets.int()))
                    elif form == "weights":
                        log(bag(ids, None, weights.to(kind)), bag(ids, per_sample_weights=weights))
                    elif form == "keywords":
                        log(bag(input=flat, offsets=offsets))
                    else:
                        log(bag(flat[:0], offsets[:0]), bag(flat, offsets * 0))
                except Exception as error:
                    log(error)
        log(bag(ids))

    check(build, use)
