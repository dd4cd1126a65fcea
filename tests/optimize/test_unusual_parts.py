"""Models with parts, parameters and inputs that no pass knows are optimized around them."""

from __future__ import annotations

import copy
import inspect
import typing
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import oxytorch
from oxytorch.optimize import PASSES

SIZE = 16


class Block(nn.Module):
    """A residual block around a part that `before` makes of the input."""

    def __init__(self, before: Callable[[Any, torch.Tensor], torch.Tensor], **held: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.norm = nn.LayerNorm(SIZE)
        self.before = before
        for name, value in held.items():
            if isinstance(value, nn.Parameter) or not isinstance(value, torch.Tensor):
                setattr(self, name, value)
            else:
                self.register_buffer(name, value)

    def core(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.second(F.gelu(self.first(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.core(self.before(self, x))


def _scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU()))


def _traced() -> nn.Module:
    layers = nn.Sequential(nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE))
    return torch.jit.trace(layers.eval(), torch.randn(6, SIZE))


def _nested(layout: torch.layout) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    def before(m: Any, x: torch.Tensor) -> torch.Tensor:
        parts = torch.nested.nested_tensor([x[:2], x[:4]], layout=layout)
        found = m.norm(F.gelu(m.second(F.gelu(m.first(parts)))))
        return found.values() if layout == torch.jagged else found.to_padded_tensor(0.0)[0]

    return before


def _sparse(values: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


def _quantized() -> nn.Module:
    return torch.ao.nn.quantized.Linear(SIZE, SIZE)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "scripted": lambda: Block(lambda m, x: m.part(x), part=_scripted()),
    "traced": lambda: Block(lambda m, x: m.part(x), part=_traced()),
    "jagged": lambda: Block(_nested(torch.jagged)),
    "nested": lambda: Block(_nested(torch.strided)),
    "sparse": lambda: Block(
        lambda m, x: torch.sparse.mm(m.a, x.mT).mT, a=_sparse(torch.eye(SIZE).to_sparse())
    ),
    "sparse_rows": lambda: Block(
        lambda m, x: (m.a @ x.mT).mT, a=_sparse(torch.eye(SIZE).to_sparse_csr())
    ),
    "sparse_buffer": lambda: Block(
        lambda m, x: torch.sparse.mm(m.a, x.mT).mT, a=torch.eye(SIZE).to_sparse()
    ),
    "complex": lambda: Block(
        lambda m, x: (x.to(torch.complex64) @ m.a).real,
        a=nn.Parameter(torch.randn(SIZE, SIZE, dtype=torch.complex64)),
    ),
    "double": lambda: Block(
        lambda m, x: (x.double() @ m.a).to(x.dtype), a=nn.Parameter(torch.eye(SIZE).double())
    ),
    "unused_on_meta": lambda: Block(
        lambda m, x: x, a=nn.Parameter(torch.ones(SIZE, SIZE, device="meta"))
    ),
    "empty": lambda: Block(lambda m, x: x, part=nn.Linear(0, SIZE)),
    "quantized": lambda: Block(
        lambda m, x: m.part(
            torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8)
        ).dequantize(),
        part=_quantized(),
    ),
}


FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "sample": {"sample": True},
    "all": {"sample": True, "passes": [p for p in PASSES if p != "program"], "verify": True},
    "inplace": {"sample": True, "inplace": True},
    "bfloat16": {"sample": True, "dtype": torch.bfloat16},
    "bfloat16_inplace": {"dtype": torch.bfloat16, "inplace": True, "sample": True},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", [*FORMS])
@pytest.mark.parametrize("name", [*MODELS])
def test_parts_that_no_pass_knows(name: str, form: str) -> None:
    options = dict(FORMS[form])
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = MODELS[name]().eval()
        x = torch.randn(6, SIZE)
        with torch.no_grad():
            expected = model(x)
        if options.pop("sample", False):
            options["sample_input"] = x
        optimized = oxytorch.optimize(model, **options)
        with torch.no_grad():
            for _ in range(3):
                found = optimized(x)
                tolerance = 5e-2 if "dtype" in options else 1e-4
                torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)
        str(oxytorch.explain(optimized))
        oxytorch.undo(optimized)
        with torch.no_grad():
            torch.testing.assert_close(optimized(x), expected, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("form", ["sample", "all", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "size"),
    [
        (nn.Conv1d, (8, 20)),
        (nn.Conv2d, (8, 9, 9)),
        (nn.Conv3d, (8, 5, 5, 5)),
        (nn.ConvTranspose2d, (8, 9, 9)),
        (nn.Conv2d, (0, 8, 9, 9)),
    ],
)
def test_samples_without_a_batch(kind: Any, size: tuple[int, ...], form: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(kind(8, 8, 3), nn.ReLU(), kind(8, 8, 3)).eval()
    x = torch.randn(size)
    options = {name: value for name, value in FORMS[form].items() if name != "sample"}
    optimized = oxytorch.optimize(model, sample_input=x, **options)
    batch = torch.randn(2, *size[-(model[0].weight.dim() - 1) :])
    tolerance = 5e-2 if "dtype" in options else 1e-4
    with torch.no_grad():
        for given in (x, batch, batch[0]):
            torch.testing.assert_close(
                optimized(given).float(), model(given), rtol=tolerance, atol=tolerance
            )


def test_copies_of_models_with_scripted_parts_are_apart() -> None:
    model = MODELS["scripted"]().eval()
    optimized = oxytorch.optimize(model, sample_input=torch.randn(6, SIZE))
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in optimized.parameters():
            parameter.zero_()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("passes", [None, [p for p in PASSES if p != "program"]])
def test_the_replaced_forward_shows_the_models_own_names(passes: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(SIZE, SIZE)

        def forward(self, x: torch.Tensor, scale: float = 1.0, *, flag: bool = False) -> Any:
            return torch.relu(self.layer(x)) * scale

    model = Model().eval()
    optimized = oxytorch.optimize(model, sample_input=torch.randn(6, SIZE), passes=passes)
    for module in optimized.modules():  # which gives a class annotations of its own
        _ = type(module.__dict__.get("forward")).__annotations__
    for ask in (
        inspect.signature,
        inspect.getfullargspec,
        inspect.getsource,
        lambda forward: inspect.unwrap(forward).__name__,
        lambda forward: (forward.__code__, forward.__defaults__, forward.__kwdefaults__),
    ):
        assert ask(optimized.forward) == ask(model.forward)
        assert ask(optimized.layer.forward) == ask(model.layer.forward)
    assert typing.get_type_hints(optimized.layer.forward)["input"] is torch.Tensor


@pytest.mark.parametrize(
    ("indices", "offsets"),
    [
        ([1, 11], [0]),
        ([1, -1], [0]),
        ([1, 2], [1]),
        ([1, 2], [0, 5]),
        ([[1, 2]], [0]),
        ([1, 2], None),
    ],
)
def test_errors_of_embedding_bags_are_torchs(indices: Any, offsets: Any) -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = nn.ModuleList([nn.EmbeddingBag(10, SIZE, mode="sum") for _ in range(2)])

        def forward(self, indices: Any, offsets: Any) -> Any:
            return torch.cat([bag(indices, offsets) for bag in self.bags], 1)

    model = Bags().eval()
    sample = torch.tensor([1, 2]), torch.tensor([0])
    given = torch.tensor(indices), None if offsets is None else torch.tensor(offsets)
    for options in ({}, {"sample_input": sample}):
        optimized = oxytorch.optimize(model, **options)
        errors = []
        for each in (model, optimized):
            with torch.no_grad(), pytest.raises((RuntimeError, ValueError)) as caught:
                each(*given)
            errors.append((type(caught.value), str(caught.value)))
        assert errors[0] == errors[1]


def test_an_operand_that_onednn_refuses_is_added_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from oxytorch.graph import fused

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.conv(x)

    refused = []
    convolution = fused.convolution

    def without_binary(
        x: torch.Tensor, weight: Any, bias: Any, post_op: Any, *others: Any
    ) -> torch.Tensor:
        if post_op.binary is not None:
            refused.append(post_op)
            raise RuntimeError("could not create a memory")
        return convolution(x, weight, bias, post_op, *others)

    torch.manual_seed(0)
    stock, x = Residual().eval(), torch.randn(2, 8, 6, 6)
    model = oxytorch.optimize(stock, sample_input=x)
    monkeypatch.setattr(fused, "convolution", without_binary)
    with torch.inference_mode():
        for _ in range(3):
            torch.testing.assert_close(model(x), stock(x), rtol=1e-5, atol=1e-5)
    assert len(refused) == 1  # and is not asked for again
