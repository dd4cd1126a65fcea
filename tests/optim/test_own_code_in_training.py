"""Code of the model's author that brings its parameters, which are split, together with float32."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

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


def _interpolated(w: Tensor) -> Tensor:
    grid = w.reshape(1, 4, 8, 32).permute(0, 3, 1, 2)
    return functional.interpolate(grid, size=(3, 5), mode="bicubic", antialias=True)


def _rotation(w: Tensor) -> Tensor:
    return torch.matrix_exp(w - w.mT)


ALONE: dict[str, Callable[[Tensor], Tensor]] = {
    "matrix_exp": _rotation,
    "interpolate": _interpolated,
    "matrix_norm": lambda w: torch.linalg.matrix_norm(w, 2),
    "nuclear norm": lambda w: torch.linalg.norm(w, "nuc"),
    "complex": lambda w: torch.complex(w, w.flip(0)).abs(),
    "pdist": functional.pdist,
    "lu": lambda w: torch.linalg.lu(w)[1],
    "quantile": lambda w: w[1:].quantile(0.3),
    "det of a view": lambda w: torch.linalg.det(w[:, :16].mT[:, 4:20]),
    "cumulative": lambda w: w.view(-1).logcumsumexp(0),
    "parts": lambda w: torch.stack([torch.matrix_exp(v) for v in w.reshape(2, 16, 32)[..., :16]]),
    "property": lambda w: torch.matrix_exp(w.T),
    "input=": lambda w: torch.reshape(input=w, shape=(-1,)).quantile(0.5),
    "table": lambda w: functional.embedding(torch.arange(9), w),
    "sparsemax": lambda w: w.softmax(-1).topk(3).values,
}


@pytest.mark.parametrize("name", ALONE)
def test_what_own_code_makes_of_its_weights_alone_is_as_under_autocast(name: str) -> None:
    """In float32, unless autocast or a layer would have it otherwise."""
    torch.manual_seed(0)
    stock = Own(lambda own, x: ALONE[name](own.weight).float().square().mean() + x.mean())
    optimizer = torch.optim.SGD(stock.parameters(), lr=0.1)
    model, optimizer = oxytorch.optimize(stock, optimizer=optimizer, dtype=torch.bfloat16)
    x = torch.zeros(4, 32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = stock(x)
    expected.backward()
    found = model(x)
    found.backward()
    torch.testing.assert_close(found.float(), expected.float(), rtol=0.01, atol=1e-6)
    wanted, own = stock.weight.grad, model.weight.grad
    assert wanted is not None and own is not None and own.isfinite().all()
    assert (own.float() - wanted).norm() <= 0.02 * wanted.norm()
    optimizer.step()
    assert model.weight.isfinite().all()


MOVED: dict[str, Callable[[Tensor], Tensor]] = {
    "[]": lambda w: w[3:, ::2],
    "[tensor]": lambda w: w[torch.tensor([4, 1])],
    "[mask]": lambda w: w[torch.arange(32) > 7],
    "view": lambda w: w.view(4, -1),
    "reshape": lambda w: w.reshape(16, 64),
    "permute": lambda w: w.permute(1, 0),
    "T": lambda w: w.T,
    "expand": lambda w: w[None].expand(3, 32, 32),
    "chunk": lambda w: w.chunk(3)[2],
    "unbind": lambda w: w.unbind(1)[5],
    "split": lambda w: w.split([30, 2])[1],
    "flip": lambda w: w.flip(0, 1),
    "roll": lambda w: w.roll(3, 0),
    "tril": torch.tril,
    "gather": lambda w: w.gather(1, torch.arange(64).view(32, 2) % 32),
    "take": lambda w: w.take(torch.arange(9)),
    "index_select": lambda w: w.index_select(0, torch.tensor([1, 1])),
    "masked_select": lambda w: w.masked_select(torch.eye(32) > 0),
    "repeat_interleave": lambda w: w.repeat_interleave(2, 0),
    "diagonal": torch.diagonal,
    "clone": lambda w: w.clone(),
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "twice": lambda w: w[2:].detach().T.unflatten(0, (2, 16)).contiguous(),
}


COPIED = (
    "[tensor]", "[mask]", "flip", "roll", "tril", "gather", "take", "index_select", "masked_select",
    "repeat_interleave", "clone", "twice",
)  # fmt: skip
"""Those that are no views of the weight."""


@pytest.mark.parametrize("name", MOVED)
def test_elements_of_weights_are_float32_beside_16_bits_too(name: str) -> None:
    torch.manual_seed(0)
    seen: list[Tensor] = []

    def code(own: Own, x: Tensor) -> Tensor:
        part = MOVED[name](own.weight)
        seen.extend((part.double(), torch.ones(1, dtype=torch.bfloat16) + part, part))
        return x

    stock = Own(code)
    optimizer = torch.optim.SGD(stock.parameters(), lr=0.1)
    model, _ = oxytorch.optimize(stock, optimizer=optimizer, dtype=torch.bfloat16)
    with torch.no_grad():
        model(torch.zeros(1, 32))
        exact = MOVED[name](stock.weight).double()
    assert torch.equal(seen[0], exact), "all bits of the weight"
    assert type(seen[1]) is Tensor and seen[1].dtype == torch.float32
    assert torch.equal(seen[1].double(), (1 + exact.float()).double())
    copied = pickle.loads(pickle.dumps(seen[2]))
    assert copied.dtype == torch.float32 and torch.equal(copied.double(), exact)


PROMOTING: dict[str, Callable[[Own, Tensor], Tensor]] = {
    "sum": lambda own, y: y + own.weight[0],
    "of the weight": lambda own, y: own.weight[0] + y,
    "product": lambda own, y: y * own.weight[0],
    "where": lambda own, y: torch.where(y > 0, y, own.weight[0]),
    "cat": lambda own, y: torch.cat([y, own.weight]),
    "stack": lambda own, y: torch.stack([y[0], own.weight[0]]),
    "maximum": lambda own, y: torch.maximum(y, own.weight[0]),
    "lerp": lambda own, y: torch.lerp(y.float(), own.weight[0], 0.3),
    "exponential": lambda own, y: y * own.weight[0].exp(),
    "logaddexp": lambda own, y: torch.logaddexp(y, own.weight[0]),
    "in place": lambda own, y: y.float().add_(own.weight[0]),
}


@pytest.mark.parametrize("name", PROMOTING)
def test_weights_beside_outputs_of_layers_are_float32_as_under_autocast(name: str) -> None:
    torch.manual_seed(0)
    seen: list[Tensor] = []

    def code(own: Own, x: Tensor) -> Tensor:
        seen.append(PROMOTING[name](own, x @ own.weight))
        return seen[-1]

    stock, x = Own(code), torch.randn(4, 32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = stock(x)
    optimizer = torch.optim.SGD(stock.parameters(), lr=0.1)
    model, _ = oxytorch.optimize(stock, optimizer=optimizer, dtype=torch.bfloat16)
    model(x)
    assert seen[-1].dtype == expected.dtype == torch.float32
    torch.testing.assert_close(seen[-1], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_tables_of_numbers_stay_float32(kind: type[nn.Module]) -> None:
    class Energies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 1)
            self.reference = kind(100, 1)
            nn.init.normal_(self.reference.weight, -108.8, 0.3)  # type: ignore[arg-type]

        def forward(self, x: Tensor, atoms: Tensor) -> Tensor:
            reference = self.reference(atoms if kind is nn.Embedding else atoms[:, None])
            return self.layer(x) + reference.view(-1, 1)

    torch.manual_seed(0)
    stock = Energies()
    x, atoms = torch.randn(6, 8), torch.randint(100, (6,))
    optimizer = torch.optim.AdamW(stock.parameters(), lr=1e-3)
    model, trained = oxytorch.optimize(stock, optimizer=optimizer, dtype=torch.bfloat16)
    torch.testing.assert_close(model(x, atoms), stock(x, atoms), rtol=0, atol=0.02)
    model(x, atoms).sum().backward()
    trained.step()
    assert model.reference.weight.dtype == torch.float32
    assert "fewer than 8 columns" in str(oxytorch.explain(model).full())


def test_a_recurrence_over_a_weight_grows_as_under_autocast() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 5)
            self.start = nn.Parameter(torch.zeros(5))
            self.between = nn.Parameter(torch.randn(5, 5) / 3)

        def forward(self, x: Tensor) -> Tensor:
            emissions = self.layer(x)
            state = self.start + emissions[0]
            for each in emissions[1:]:
                state = torch.logsumexp(state[:, None] + self.between, 0) + each
            return torch.logsumexp(state, 0)

    torch.manual_seed(0)
    stock, x = Chain(), torch.randn(300, 8)
    optimizer = torch.optim.SGD(stock.parameters(), lr=0.1)
    model, _ = oxytorch.optimize(stock, optimizer=optimizer, dtype=torch.bfloat16)
    expected, found = stock(x), model(x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0.1)
    expected.backward()
    found.backward()
    assert model.between.grad is not None and stock.between.grad is not None
    difference = model.between.grad.float() - stock.between.grad
    assert difference.norm() < 0.05 * stock.between.grad.norm()  # each step's is rounded


def test_what_a_model_returns_of_its_weights_is_an_ordinary_tensor() -> None:
    stock = Own(lambda own, x: {"x": x, "rows": (own.weight[:3],)})  # type: ignore[arg-type,return-value]
    optimizer = torch.optim.SGD(stock.parameters(), lr=0.1)
    model, _ = oxytorch.optimize(stock, optimizer=optimizer, dtype=torch.bfloat16)
    found: Any = model(torch.zeros(1, 32))
    assert type(found["rows"][0]) is Tensor and found["rows"][0].requires_grad


@pytest.mark.parametrize("reentrant", [False, True])
def test_elements_of_weights_pass_checkpoints_of_activations(reentrant: bool) -> None:
    def code(own: Own, x: Tensor) -> Tensor:
        def inner(part: Tensor, x: Tensor) -> Tensor:
            return (x @ torch.matrix_exp(part - part.T))[:, :7]

        return torch.utils.checkpoint.checkpoint(
            inner, own.weight[:, :].T, x, use_reentrant=reentrant
        )

    torch.manual_seed(0)
    stock = Own(code)
    x = torch.randn(8, 32, requires_grad=True)
    optimizer = torch.optim.SGD(stock.parameters(), lr=0.1)
    model, _ = oxytorch.optimize(stock, optimizer=optimizer, dtype=torch.bfloat16)
    expected, gradients = _train(stock, x)
    found, own = _train(model, x)
    assert (found - expected).norm() <= 0.02 * expected.norm()
    for ours, theirs in zip(own, gradients, strict=True):
        assert (ours - theirs).norm() <= 0.03 * theirs.norm() + 1e-6


def _set_elements(w: Tensor) -> None:
    w.data[0] = torch.full((32,), 0.3)
    w.data[torch.tensor([4, 5])] = torch.full((32,), 0.7)


def _data_in_place(w: Tensor) -> None:
    w.data *= 0.9999


def _rows(w: Tensor) -> None:
    for row in w.data:
        row.div_(row.norm())


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "clamp_": lambda w: w.data.clamp_(-0.25, 0.25),
    "fill_diagonal_": lambda w: w.data.fill_diagonal_(0),
    "renorm_": lambda w: w.data.renorm_(2, 0, 0.9),
    "set elements": _set_elements,
    "rows": _rows,
    "view": lambda w: w[:2].mul_(0.9),
    "view of a view": lambda w: w.view(-1)[:100].unflatten(0, (10, 10)).T.sub_(0.1),
    "lerp_": lambda w: w[3].lerp_(w[4], 0.25),
    "out": lambda w: functional.normalize(w.data, dim=1, out=w.data),
    "out of a view": lambda w: torch.add(w[0], 1.0, out=w[0]),
    "foreach": lambda w: torch._foreach_mul_([w[0], w[5:9]], 0.3),
    "init": lambda w: nn.init.constant_(w[7], 0.1),
    "itself": lambda w: w.mul_(0.9),
    "data in place": _data_in_place,
    "own data": lambda w: setattr(w, "data", w.data),
    "clamped data": lambda w: setattr(w, "data", w.data.clamp_(-0.25, 0.25)),
    "turned data": lambda w: setattr(w, "data", w.data.flip(0)),
    "data of another order": lambda w: setattr(w, "data", w.data.T.contiguous().T),
    "nothing": lambda w: w[:2].mul_(1.0),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_own_code_writes_to_its_weights_is_written_to_all_bits(name: str) -> None:
    def code(own: Own, x: Tensor) -> Tensor:
        with torch.no_grad():
            WRITES[name](own.weight)
        return x @ own.weight

    torch.manual_seed(0)
    stock = Own(code)
    optimizer = torch.optim.SGD(stock.parameters(), lr=0.1)
    model, ours = oxytorch.optimize(stock, optimizer=optimizer, dtype=torch.bfloat16)
    for _ in range(2):
        found, wanted = model(torch.ones(1, 32)), stock(torch.ones(1, 32))
        torch.testing.assert_close(found.float(), wanted, rtol=0.02, atol=0.02)
        torch.testing.assert_close(
            model.weight.detach(), stock.weight.detach(), rtol=1e-6, atol=1e-7
        )
    found.float().sum().backward()
    before = model.weight.detach().clone()
    ours.step()
    assert model.weight.grad is not None
    torch.testing.assert_close(
        model.weight.detach(), before - 0.1 * model.weight.grad.float(), rtol=1e-6, atol=1e-7
    )


class WrittenLater(nn.Module):
    """Writes to its weights once it has computed with them."""

    def __init__(self, write: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(64, 64), nn.Parameter(torch.randn(64, 64) / 8)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        result = torch.tanh(self.layer(torch.tanh(self.layer(x)))) @ self.weight
        self.write(self)
        return result


LATER: dict[str, Callable[[Any], Any]] = {
    "layer": lambda m: m.layer.weight.data.mul_(0.99),
    "own": lambda m: m.weight.data.mul_(0.99),
    "elements": lambda m: m.weight.data[:4].mul_(0.9),
    "item": lambda m: m.weight.data.__setitem__(slice(4), 0.25),
    "assigned": lambda m: setattr(m.weight, "data", m.weight.data * 0.99),
    "detached": lambda m: m.weight.detach().mul_(0.99),  # which torch's backward refuses
}


@pytest.mark.parametrize("name", LATER)
def test_data_is_written_after_it_was_used_as_in_torch(name: str) -> None:
    torch.manual_seed(0)
    stock = WrittenLater(LATER[name])
    optimizer = torch.optim.SGD(stock.parameters(), lr=0.01)
    model, ours = oxytorch.optimize(stock, optimizer=optimizer, dtype=torch.bfloat16)
    for _ in range(3):
        x = torch.randn(8, 64)
        for each, stepped in ((stock, optimizer), (model, ours)):
            loss = each(x).float().square().mean()
            if name == "detached":
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()
                continue
            loss.backward()
            stepped.step()
            stepped.zero_grad()
    for found, wanted in zip(model.state_dict().values(), stock.state_dict().values(), strict=True):
        assert (found - wanted).norm() <= 1e-3 * wanted.norm() + 1e-4


class Prototypes(nn.Module):
    """Writes to the weight of a layer of torch, in a class without parameters of its own."""

    def __init__(self, write: Callable[[nn.Linear], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, bias=False)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.write(self.layer)
        result: Tensor = self.layer(x)
        return result


class Clamped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class Shadowed(nn.Linear):
    """Computes with the signs of the weight, which is put back."""

    def forward(self, x: Tensor) -> Tensor:
        full = self.weight.data.clone()
        self.weight.data = full.sign() * 0.1
        result = super().forward(x)
        self.weight.data = full
        return result


def _hooked() -> nn.Module:
    layer = nn.Linear(64, 64)
    layer.register_forward_pre_hook(lambda m, args: (m.weight.data.clamp_(-0.1, 0.1), None)[1])
    return layer


def _normalized_rows(layer: nn.Linear) -> None:
    layer.weight.copy_(functional.normalize(layer.weight.data.clone(), dim=1))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "prototypes": lambda: Prototypes(_normalized_rows),
    "norms": lambda: Prototypes(lambda m: m.weight.div_(m.weight.norm(dim=1, keepdim=True))),
    "rows": lambda: Prototypes(lambda m: m.weight[:32].mul_(0.999)),
    "padding row": lambda: Prototypes(lambda m: m.weight.data[0].zero_()),
    "subclass": lambda: Clamped(64, 64),
    "swapped": lambda: Shadowed(64, 64),
    "hook": _hooked,
}


@pytest.mark.parametrize("name", LAYERS)
def test_weights_of_layers_that_forwards_write_to_keep_all_bits(name: str) -> None:
    torch.manual_seed(0)
    stock = nn.Sequential(LAYERS[name](), nn.Tanh(), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(stock.parameters(), lr=1e-4, weight_decay=0)
    model, ours = oxytorch.optimize(stock, optimizer=optimizer, dtype=torch.bfloat16)
    for step in range(30):
        torch.manual_seed(step)
        x = torch.randn(16, 64)
        for each, stepped in ((stock, optimizer), (model, ours)):
            stepped.zero_grad()
            (each(x).float() - x.roll(1, 1)).square().mean().backward()
            stepped.step()
    for (key, found), wanted in zip(
        model.state_dict().items(), stock.state_dict().values(), strict=True
    ):
        assert (found.float() - wanted).norm() <= 2e-3 * wanted.norm() + 1e-3, key


class Typed(nn.Module):
    """Few rows that many positions read."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.table = nn.Embedding(64, 64, padding_idx=1 if kind == "padding" else None)
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, ids: Tensor) -> Tensor:
        if self.kind == "index":
            return self.weight[ids]
        if self.kind == "own":
            return functional.embedding(ids, self.weight)
        found: Tensor = self.table(ids)
        return found


@pytest.mark.parametrize("kind", ["layer", "own", "index", "padding"])
def test_gradients_of_rows_that_are_read_often_are_summed_in_float32(kind: str) -> None:
    torch.manual_seed(0)
    stock = Typed(kind)
    optimizer = torch.optim.SGD(stock.parameters(), lr=0.1)
    model, _ = oxytorch.optimize(stock, optimizer=optimizer, dtype=torch.bfloat16)
    ids = torch.randint(3, (32, 512))
    for each in (stock, model):
        (each(ids).float() - 3).square().mean().backward()
    for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        if theirs.grad is not None:
            assert ours.grad is not None
            assert (ours.grad.float() - theirs.grad).norm() <= 0.01 * theirs.grad.norm()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": 3}, {"padding_idx": -1}, {"scale_grad_by_freq": True}], ids=str
)
@pytest.mark.parametrize("form", ["rows", "offsets", "last offset"])
def test_gradients_of_rows_in_bags_are_summed_in_float32(
    mode: str, options: dict[str, Any], form: str
) -> None:
    if mode == "max" and "scale_grad_by_freq" in options:
        pytest.skip("torch has no such mode")
    torch.manual_seed(0)
    stock = nn.EmbeddingBag(64, 64, mode=mode, include_last_offset=form == "last offset", **options)
    stock.weight.data.copy_(stock.weight.data.bfloat16())  # rows that are equal, are so in both
    optimizer = torch.optim.SGD(stock.parameters(), lr=0.1)
    model, _ = oxytorch.optimize(stock, optimizer=optimizer, dtype=torch.bfloat16)
    ids = torch.randint(0, 8, (64, 128))
    given = (ids,)
    if form != "rows":
        offsets = torch.arange(0, ids.numel() + 128 * (form == "last offset"), 128)
        offsets[5] = offsets[4]  # an empty bag
        given = (ids.reshape(-1), offsets)
    gradient = torch.randn(64, 64).bfloat16()
    wanted, found = stock(*given), model(*given)
    assert found.dtype == torch.bfloat16
    wanted.backward(gradient.float())
    found.backward(gradient)
    assert (found.float() - wanted).norm() <= 0.01 * wanted.norm()
    error = (model.weight.grad.float() - stock.weight.grad).norm()
    assert error <= 0.006 * stock.weight.grad.norm()


def test_views_that_require_grad_are_not_written() -> None:
    stock = Own(lambda own, x: x @ own.weight[:3].mul_(2).mT)
    optimizer = torch.optim.SGD(stock.parameters(), lr=0.1)
    model, _ = oxytorch.optimize(stock, optimizer=optimizer, dtype=torch.bfloat16)
    for each in (stock, model):
        with pytest.raises(RuntimeError, match=r"leaf Variable that requires grad"):
            each(torch.ones(1, 32))


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "grad": lambda f, x: torch.func.grad(lambda v: f(v).sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda v: f(v).sum()))(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x[0]),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x[0]),
    "hessian": lambda f, x: torch.func.hessian(lambda v: f(v).sum())(x[0]),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.cos(),))[1],
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](x.cos())[0],
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_torch_func_in_own_code(name: str) -> None:
    def code(own: Own, x: Tensor) -> Tensor:
        return TRANSFORMS[name](lambda v: torch.tanh(v @ own.weight), x)

    torch.manual_seed(0)
    stock = Own(code)
    x = torch.randn(8, 32)
    optimizer = torch.optim.SGD(stock.parameters(), lr=0.1)
    model, _ = oxytorch.optimize(stock, optimizer=optimizer, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        expected, gradients = _train(stock, x)
    found, own = _train(model, x)
    assert (found - expected).norm() <= 0.02 * expected.norm()
    for ours, theirs in zip(own, gradients, strict=True):
        assert (ours - theirs).norm() <= 0.05 * theirs.norm() + 1e-6


class Table(nn.Module):
    """A look-up whose rows are kept from growing, by a layer or in own code."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.rows = nn.Embedding(256, 32, max_norm=4.0)
        self.bag = nn.EmbeddingBag(256, 32, max_norm=4.0, mode="sum")
        self.weight = nn.Parameter(torch.randn(256, 32))

    def forward(self, ids: Tensor) -> Tensor:
        if self.kind == "layer":
            return self.rows(ids)
        if self.kind == "bag":
            return self.bag(ids)
        if self.kind == "own":
            return functional.embedding(ids, self.weight, None, 4.0)
        if self.kind == "keyword":
            return functional.embedding(input=ids, weight=self.weight, max_norm=4.0)
        scales = torch.linspace(0.5, 1, ids.numel()).view(ids.shape)
        return functional.embedding_bag(ids, self.weight, mode="sum", per_sample_weights=scales)


@pytest.mark.parametrize("kind", ["layer", "bag", "own", "keyword", "weighed"])
def test_tables_whose_look_up_writes_to_them_keep_all_bits(kind: str) -> None:
    torch.manual_seed(0)
    stock = Table(kind)
    optimizer = torch.optim.AdamW(stock.parameters(), lr=1e-4, weight_decay=0)
    model, ours = oxytorch.optimize(stock, optimizer=optimizer, dtype=torch.bfloat16)
    before = {name: value.clone() for name, value in stock.state_dict().items()}
    for step in range(5):
        torch.manual_seed(step)
        ids = torch.randint(128, (16, 2))
        for each, stepped in ((stock, optimizer), (model, ours)):
            stepped.zero_grad()
            (each(ids).float() - 0.1).square().mean().backward()
            stepped.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value[128:].float(), before[name][128:]), "rows that nobody read"
        torch.testing.assert_close(value.float(), stock.state_dict()[name], rtol=1e-3, atol=1e-3)


class MovingNorm(nn.Module):
    """A batch normalization whose statistics have names of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(32)), nn.Parameter(torch.zeros(32))
        self.register_buffer("moving_mean", torch.zeros(32))
        self.register_buffer("moving_var", torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        return functional.batch_norm(
            x, self.moving_mean, self.moving_var, self.gamma, self.beta, self.training, 0.1
        )


def test_a_batch_norm_of_own_names_is_trained() -> None:
    torch.manual_seed(0)
    stock = nn.Sequential(nn.Linear(32, 32), MovingNorm(), nn.ReLU(), nn.Linear(32, 4))
    x = torch.randn(16, 32)
    optimizer = torch.optim.SGD(stock.parameters(), lr=0.1)
    model, _ = oxytorch.optimize(stock, optimizer=optimizer, dtype=torch.bfloat16)
    expected, gradients = _train(stock, x)
    found, own = _train(model, x)
    assert (found - expected).norm() <= 0.02 * expected.norm()
    for ours, theirs in zip(own, gradients, strict=True):
        assert (ours - theirs).norm() <= 0.03 * theirs.norm() + 1e-3


@pytest.mark.parametrize("key", ["haed", "0.weight", "9"])
def test_keys_of_dtype_that_name_no_module_are_refused(key: str) -> None:
    stock = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(stock.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=rf"named_modules\(\), got '{key}'"):
        oxytorch.optimize(
            stock, optimizer=optimizer, dtype={"": torch.bfloat16, key: torch.float32}
        )


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
    # Compiled, sums of the weight's elements begin with its upper half.
    assert losses[6:] == (losses[:6] if kind != "masked" else pytest.approx(losses[:6], rel=0.02))


def test_layers_compute_with_weights_that_were_rounded_to_nearest() -> None:
    """Bits that were cut off would make each layer's output a little smaller."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(16):
        layers += [nn.Linear(256, 256, bias=False), nn.ReLU()]
        nn.init.kaiming_normal_(layers[-2].weight, nonlinearity="relu")  # type: ignore[arg-type]
    stock, x = nn.Sequential(*layers), torch.randn(64, 256)
    wanted = stock(x)
    optimizer = torch.optim.SGD(stock.parameters(), lr=1e-4)
    model, optimizer = oxytorch.optimize(stock, optimizer=optimizer, dtype=torch.bfloat16)
    for step in range(2):  # once as they were split, once as a step wrote them
        found = model(x).float()
        scale = (found * wanted).sum() / (wanted * wanted).sum()
        assert abs(scale - 1) < 0.01
        if step == 0:
            found.square().mean().backward()
            for parameter in model.parameters():
                parameter.grad.mul_(1e-6)
            optimizer.step()
