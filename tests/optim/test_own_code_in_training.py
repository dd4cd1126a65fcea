"""Code of the model's author that brings its parameters, which are split, together with float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import oxytorch
from oxytorch.graph.errors import DtypeError


class Own(nn.Module):
    """Computes with a parameter of its own, a float32 buffer beside it."""

    def __init__(self, code: Callable[[Own, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 6)
        self.mask = torch.nn.Buffer(torch.tril(torch.ones(32, 32)))
        self.norm = nn.LayerNorm(32)
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x)


def _recurrent(own: Own, x: Tensor) -> Tensor:
    state = torch.zeros(x.shape[0], 32)
    for _ in range(2):
        state = torch.tanh(state @ own.weight.T + x)
    return state


def _attention(own: Own, x: Tensor) -> Tensor:
    queries = own.norm(x) @ own.weight
    scores = queries @ queries.T + own.mask[: x.shape[0], : x.shape[0]]
    return scores.softmax(-1) @ queries


CODES: dict[str, Callable[[Own, Tensor], Tensor]] = {
    "product": lambda own, x: x @ own.weight,
    "transposed": lambda own, x: x @ own.weight.T,
    "slice": lambda own, x: functional.linear(x, own.weight[:16]),
    "chunk": lambda own, x: x @ own.weight.chunk(2, 1)[0],
    "batched": lambda own, x: torch.bmm(x[None], own.weight.expand(1, 32, 32)),
    "einsum": lambda own, x: torch.einsum("bi,io->bo", x, own.weight.T),
    "scaled": lambda own, x: x @ (own.weight * 0.5),
    "normalized": lambda own, x: functional.linear(x, functional.normalize(own.weight)),
    "masked": lambda own, x: functional.linear(x, own.weight * own.mask),
    "convolution": lambda own, x: functional.conv1d(x[None].mT, own.weight[:, :, None]),
    "low rank": lambda own, x: x + x @ own.weight[:4].T @ own.weight[:, :4].T,
    "recurrent": _recurrent,
    "attention": _attention,
}


def _train(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    out = model(x)
    out.float().square().mean().backward()
    return out.detach().float(), [
        torch.zeros_like(p) if p.grad is None else p.grad.float() for p in model.parameters()
    ]


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("place", ["model", "part"])
def test_own_code_trains_with_float32_inputs(kind: str, place: str) -> None:
    torch.manual_seed(0)
    stock: nn.Module = Own(CODES[kind])
    if place == "part":
        stock = nn.Sequential(nn.LayerNorm(32), stock)
    x = torch.randn(8, 32)
    optimizer = torch.optim.SGD(stock.parameters(), lr=0.1)
    model, _ = oxytorch.optimize(stock, optimizer=optimizer, dtype=torch.bfloat16)
    expected, expected_gradients = _train(stock, x)
    out, gradients = _train(model, x)
    assert (out - expected).norm() <= 0.02 * expected.norm()
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        assert (ours - theirs).norm() <= 0.03 * theirs.norm() + 1e-6
    oxytorch.undo(model)
    assert torch.equal(model(x), stock(x))


def test_products_of_own_code_are_bfloat16() -> None:
    seen = []

    class Log(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if "mm" in str(func):
                seen.append(args[0].dtype)
            return func(*args, **(kwargs or {}))

    stock = Own(_attention)
    optimizer = torch.optim.SGD(stock.parameters(), lr=0.1)
    model, _ = oxytorch.optimize(stock, optimizer=optimizer, dtype=torch.bfloat16)
    with Log():
        model(torch.randn(8, 32))
    assert seen == [torch.bfloat16] * 3


class Scattering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add_(0, torch.arange(len(x)), self.layer(x))


def test_dtypes_that_torch_does_not_convert_are_explained() -> None:
    stock = Scattering()
    optimizer = torch.optim.SGD(stock.parameters(), lr=0.1)
    model, _ = oxytorch.optimize(stock, optimizer=optimizer, dtype=torch.bfloat16)
    with pytest.raises(DtypeError, match=r"Scattering.*pass its inputs in bfloat16") as raised:
        model(torch.randn(8, 32))
    assert isinstance(raised.value.__cause__, RuntimeError)
    model(torch.randn(8, 32).bfloat16()).float().sum().backward()


class Head(nn.Module):
    """A part that is named float32: its products are."""

    def __init__(self) -> None:
        super().__init__()
        self.own = Own(CODES["transposed"])
        self.layer = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32
        return self.layer(self.own(x) @ x.new_ones(32, 32))


def test_a_part_that_is_named_float32_computes_so() -> None:
    torch.manual_seed(0)
    body, head = nn.Linear(32, 32), Head()
    stock = nn.Sequential(body, head)
    optimizer = torch.optim.SGD(stock.parameters(), lr=0.1)
    wanted = {"": torch.bfloat16, "1": torch.float32}
    model, _ = oxytorch.optimize(stock, optimizer=optimizer, dtype=wanted)
    x = torch.randn(8, 32)
    hidden = model[0](x).float()
    assert torch.equal(model(x), head(hidden))


def test_own_code_without_a_sample_is_explained_in_inference() -> None:
    stock = Own(_recurrent).eval()
    model = oxytorch.optimize(stock, dtype={"": torch.bfloat16, nn.Linear: torch.bfloat16})
    with torch.no_grad(), pytest.raises(DtypeError, match="sample_input"):
        model(torch.randn(8, 32))


class Recurrent(nn.Module):
    """Layers that torch's compiler does not take: it gives up what calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 32)
        self.first = nn.GRU(32, 32)
        self.second = nn.LSTM(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(self.embedding(x))[0])[0]
        return result


class Routed(nn.Module):
    """A loop that torch's compiler gives up, over values of tensors."""

    def __init__(self, code: Callable[[Own, Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 32)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.own = Own(code)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        result = torch.zeros_like(x)
        for k in range(2):
            rows = (torch.arange(len(x)) % 2 == k).nonzero().squeeze(1)
            result = result.index_add(0, rows, self.experts[k](x[rows]))
        return self.own(result)


@pytest.mark.parametrize("kind", ["product", "masked", "attention"])
def test_own_code_trains_alike_after_the_compiler_gave_up_other_code(kind: str) -> None:
    losses = []
    for compiled in (False, True):
        torch._dynamo.reset()
        for make, x in (
            (Recurrent, torch.arange(8)),
            (lambda: Routed(CODES[kind]), torch.arange(8)),
        ):
            torch.manual_seed(0)
            stock = make()
            optimizer = torch.optim.SGD(stock.parameters(), lr=0.1)
            model, optimizer = oxytorch.optimize(stock, optimizer=optimizer, dtype=torch.bfloat16)
            call = torch.compile(model, backend="eager") if compiled else model
            for _ in range(3):
                loss = call(x).float().square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    torch._dynamo.reset()
    assert losses[:6] == losses[6:]
