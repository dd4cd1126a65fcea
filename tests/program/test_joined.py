"""Linear layers that share an input become one product, and nothing changes by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from seen import Seen
from torch import Tensor, nn
from torch.nn import functional as F

import oxytorch
from oxytorch.ops.linear import supports
from oxytorch.program.backend import compile_graph
from threads import errors_in_threads

pytestmark = [
    pytest.mark.usefixtures("everything_is_packed"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
SPLIT = "aten::split_with_sizes"


class Layers(nn.Module):
    """Layers of one input, of which some have no bias."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.value, self.small = nn.Linear(16, 16), nn.Linear(16, 8)
        self.gate, self.up = nn.Linear(16, 40, bias=False), nn.Linear(16, 40, bias=False)
        self.down = nn.Linear(40, 16)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def _heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:-1], -1, 4).transpose(1, 2)


def _attention(m: Any, x: Tensor) -> Tensor:
    found = F.scaled_dot_product_attention(*(_heads(y) for y in (m.query(x), m.key(x), m.value(x))))
    return m.query(found.transpose(1, 2).reshape(x.shape))


def _attention_alone(m: Any, x: Tensor) -> Tensor:
    found = F.scaled_dot_product_attention(*(_heads(y) for y in (m.query(x), m.key(x), m.value(x))))
    return found.transpose(1, 2).reshape(x.shape)


def _in_other_words(m: Any, x: Tensor) -> Tensor:
    rows = x.reshape(-1, 16)
    first = torch.addmm(m.query.bias, rows, m.query.weight.t())
    second = rows @ m.key.weight.transpose(0, 1)
    third = F.linear(x, m.value.weight.t(), m.value.bias)
    return first.view(x.shape) * second.view(x.shape) + third.exp()


JOINED: dict[str, tuple[Callable[[Any, Tensor], Any], list[str]]] = {
    "attention": (_attention_alone, ["16 16 16"]),
    "all spellings": (_in_other_words, ["16 16 16"]),
    "gate": (lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)), ["40 40", "oxytorch::silu_mul"]),
    "other sizes": (lambda m, x: (m.query(x)[..., :8] * m.small(x)).exp(), ["16 8"]),
    "one activation for all": (
        lambda m, x: F.gelu(m.query(x)).sin() * F.gelu(m.key(x)).cos(),
        ["16 16", "gelu"],
    ),
    "relu for all": (lambda m, x: m.query(x).relu() * m.key(x).relu(), ["16 16", "relu"]),
    "an activation for one": (
        lambda m, x: m.query(x) * m.key(x) * m.value(x).sigmoid(),
        ["16 16 ]", "sigmoid"],
    ),
    "parts that a layer takes": (lambda m, x: m.value(m.query(x)) * m.key(x), ["16 16"]),
    "a part that a sum takes": (lambda m, x: m.value(x.exp()) + m.query(x) * m.key(x), ["16 16"]),
    "a part that is added in a sweep": (
        lambda m, x: (lambda q: m.value(m.key(x).exp()) + q[..., :16])(m.query(x)),
        ["16 16"],
    ),
    "parts that are flattened": (
        lambda m, x: m.query(x).flatten(1).exp() * m.key(x).flatten(1).cos(),
        ["16 16", "aten::reshape"],
    ),
    "a norm of a part": (
        lambda m, x: F.layer_norm(m.query(x), [16]) * F.layer_norm(_heads(m.key(x)), [4]).sum(),
        ["16 16"],
    ),
}
APART: dict[str, Callable[[Any, Tensor], Any]] = {
    "a result is returned": lambda m, x: (m.query(x), m.key(x).exp()),
    "a view of a result is returned": lambda m, x: (m.query(x).view(-1, 16), m.key(x).exp()),
    "a sum follows": lambda m, x: m.query(x) + m.key(x),
    "another layer has the weight": lambda m, x: m.query(x).exp() * m.key(x) * m.query(x.exp()),
    "the weight is made at each call": lambda m, x: (
        m.query(x) * F.linear(x, m.key.weight * x.mean())
    ),
    "a step sees how it lies": lambda m, x: (
        m.query(x) * torch.view_as_complex(m.key(x).view(*x.shape[:-1], 8, 2)).abs().sum()
    ),
    "other inputs": lambda m, x: m.query(x) * m.key(x.exp()),
}


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend=compile_graph, fullgraph=True, **options)


def same(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture(params=["oneDNN's order", "panels", "plain"])
def order(request: pytest.FixtureRequest, packing_pays: Callable[..., None]) -> str:
    packing_pays(request.param != "plain", in_panels=request.param == "panels", joined=True)
    return str(request.param)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", JOINED)
def test_layers_of_one_input_are_joined(
    name: str, dtype: torch.dtype, order: str, seen: Seen
) -> None:
    function, wanted = JOINED[name]
    model = Layers(function).eval().to(dtype)
    run = compiled(model, dynamic=False)
    for shape in ((3, 5, 16), (1, 1, 16)):
        x = torch.randn(shape, dtype=dtype)
        for _ in range(2):
            found, expected = run(x), model(x)
            same(found, expected, TOLERANCE[dtype])
            assert found.stride() == expected.stride()
    assert not seen.reasons
    for call in seen.programs:
        text = str(call.program)
        assert text.count(SPLIT) == 1 and all(part in text for part in wanted), text
        if order == "panels":
            assert "oxytorch::linear_panels" in text and "mkldnn" not in text, text
        elif order == "plain":
            assert "aten::linear" in text
        elif supports(dtype) is None:
            assert "mkldnn::_linear_pointwise" in text, text


@pytest.mark.parametrize("name", APART)
def test_others_stay_apart(name: str, order: str, seen: Seen) -> None:
    model = Layers(APART[name]).eval()
    run = compiled(model, dynamic=False)
    x = torch.randn(3, 5, 16)
    found, expected = run(x), model(x)
    same(found, expected)
    assert not seen.reasons and SPLIT not in seen.text, seen.text


@pytest.mark.parametrize("name", ["attention", "gate", "one activation for all"])
def test_layers_of_unknown_sizes_are_joined(name: str, order: str, seen: Seen) -> None:
    model = Layers(JOINED[name][0]).eval()
    run = compiled(model, dynamic=True)
    for shape in ((2, 5, 16), (3, 4, 16), (7, 9, 16)):
        x = torch.randn(shape)
        same(run(x), model(x))
    assert SPLIT in seen.text and not seen.reasons


def test_products_that_are_not_faster_stay_apart(
    seen: Seen, packing_pays: Callable[..., None]
) -> None:
    packing_pays(True, joined=False)
    model, x = Layers(_attention_alone).eval(), torch.randn(3, 5, 16)
    same(compiled(model)(x), model(x))
    assert SPLIT not in seen.text and seen.text.count("_linear_pointwise") == 3


WRITES: dict[str, Callable[[Any], Any]] = {
    "a weight": lambda m: m.key.weight.mul_(2),
    "a bias": lambda m: m.value.bias.add_(1),
    "a row": lambda m: m.query.weight[3].zero_(),
    "another parameter": lambda m: setattr(m.key, "weight", nn.Parameter(torch.randn(16, 16))),
    "all": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_to_joined_weights_are_followed(name: str, order: str, seen: Seen) -> None:
    model = Layers(_attention_alone).eval()
    run, x = compiled(model), torch.randn(2, 5, 16)
    same(run(x), model(x))
    for _ in range(2):
        WRITES[name](model)
        for _ in range(2):
            same(run(x), model(x))
    assert not seen.reasons and all(SPLIT in str(call.program) for call in seen.programs)


def test_no_packed_weight_stays_beside_the_joined_one(order: str, seen: Seen) -> None:
    model, x = Layers(_attention_alone).eval(), torch.randn(2, 5, 16)
    run = compiled(model)
    run(x)
    (call,) = seen.programs
    kept = call._placed._derived._noted[2]
    assert len(kept) == 2  # the joined weight and bias
    assert sorted(tensor.numel() for tensor in kept)[0] == 48


def test_one_joined_weight_serves_two_inputs(order: str, seen: Seen) -> None:
    def twice(m: Any, x: Tensor) -> Tensor:
        first = m.query(x) * m.key(x)
        return m.query(first) * m.key(first) * 2

    model, x = Layers(twice).eval(), torch.randn(2, 5, 16)
    same(compiled(model)(x), model(x))
    (call,) = seen.programs
    assert seen.text.count(SPLIT) == 2
    weights = [t for t in call._placed._derived._noted[2] if t.numel() > 32]
    assert len(weights) == 1


def test_threads(order: str, seen: Seen) -> None:
    model, x = Layers(_attention_alone).eval(), torch.randn(2, 5, 16)
    run = compiled(model)
    expected = model(x)
    run(x)

    def work(_: int) -> None:
        with torch.no_grad():
            for _ in range(20):
                same(run(x), expected)

    assert not errors_in_threads(work, range(4)) and not seen.reasons


@pytest.mark.parametrize("name", JOINED)
def test_layers_of_exported_programs_are_joined(name: str, order: str) -> None:
    model, x = Layers(JOINED[name][0]).eval(), torch.randn(3, 5, 16)
    program = oxytorch.optimize(torch.export.export(model, (x,)))
    same(program(x), model(x))
    assert SPLIT in str(program)


@pytest.mark.parametrize("name", [name for name in (*JOINED, *APART) if name != "all spellings"])
def test_layers_of_torchscript(name: str) -> None:
    function = JOINED[name][0] if name in JOINED else APART[name]
    model, x = Layers(function).eval(), torch.randn(3, 5, 16)
    traced = torch.jit.trace(model, x)
    fast = oxytorch.optimize(traced, sample_input=x)
    for each in (x, torch.randn(4, 2, 16)):
        same(fast(each), model(each))
    assert ("aten::split_with_sizes" in str(fast.inlined_graph)) is (name in JOINED)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_of_a_recorded_model_are_joined(dtype: torch.dtype) -> None:
    model, x = Layers(_attention).eval().to(dtype), torch.randn(3, 5, 16, dtype=dtype)
    fast = oxytorch.optimize(model, sample_input=x, graph=True, passes=("program",))
    for shape in ((3, 5, 16), (2, 7, 16), (2, 7, 16), (4, 3, 16), (4, 3, 16)):
        x = torch.randn(shape, dtype=dtype)
        same(fast(x), model(x), TOLERANCE[dtype])


def test_explain_says_what_is_joined_and_why_not() -> None:
    model, x = Layers(_attention_alone).eval(), torch.randn(3, 5, 16)
    text = str(oxytorch.graph.explain(model, x))
    assert "joined.linear_layers: aten::linear became aten::split_with_sizes" in text
    assert "joined.linear_layers: aten::linear became part of another step" in text
    model = Layers(APART["a sum follows"]).eval()
    report = oxytorch.graph.explain(model, x)
    notes = [note.why for note in report.notes if note.by == "joined.linear_layers"]
    assert notes and all("its input is shared, but a sum follows it" in why for why in notes)
