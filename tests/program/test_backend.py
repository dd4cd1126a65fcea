"""`torch.compile(model, backend="oxytorch")` computes what the model computes."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from seen import Seen
from torch import Tensor, nn
from torch.nn import functional as F

from oxytorch.program.backend import compile_graph
from threads import errors_in_threads
from tiny import Formula, tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def _compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend=compile_graph, fullgraph=True, **options)


X, Y = torch.linspace(-2, 2, 24).reshape(2, 3, 4), torch.linspace(0.5, 3, 24).reshape(2, 3, 4)
IDS = torch.arange(24).reshape(2, 3, 4)


def _resized(x: Tensor, **options: Any) -> Tensor:
    return F.interpolate(x[None], **options)


OPERATORS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "add a number": (lambda x: x + 1.5, (X,)),
    "add with a factor": (lambda x, y: torch.add(x, y, alpha=0.3), (X, Y)),
    "subtract": (lambda x, y: 2 - (x - y * 3), (X, Y)),
    "rsub": (lambda x: torch.rsub(x, 2, alpha=3), (X,)),
    "divide": (lambda x, y: 1 / y + x / 7, (X, Y)),
    "powers": (lambda x, y: x**2 + x**3 + y**0.5 + y**-1.3 + 2**x, (X, Y)),
    "clamp": (lambda x: x.clamp(-0.3, 0.7) + x.clamp(min=0.1) + x.clamp_max(0.2), (X,)),
    "clamp integers": (lambda i: i.clamp(2, 6) + i.clamp(min=3) + i.clamp(max=4), (IDS,)),
    "relu6": (lambda x: F.relu6(3 * x) + (x / 0).clamp(-1, 1) + (0 * x / 0).clamp(0, 6), (X,)),
    "comparisons": (lambda x: (x > 0.5) | (x <= -1) & (x != 0), (X,)),
    "where": (lambda x: torch.where(x > 0, x, -0.1) + torch.where(x > 1, 2.0, 3.0), (X,)),
    "masked_fill": (lambda x: x.masked_fill(x > 0, float("-inf")), (X,)),
    "activations": (
        lambda x: F.leaky_relu(x, 0.3) + F.elu(x) + F.softplus(x) + F.hardtanh(x),
        (X,),
    ),
    "more activations": (
        lambda x: F.gelu(x, approximate="tanh") + F.silu(x) + F.hardswish(x),
        (X,),
    ),
    "threshold": (lambda x: F.threshold(x, 0.3, 7.0), (X,)),
    "norms": (lambda x: F.layer_norm(x, (4,)) + F.normalize(x, dim=1) + F.rms_norm(x, (4,)), (X,)),
    "reductions": (lambda x: x.mean(-1) + x.sum((-1,)) + x.amax(-1) + x.std(-1), (X,)),
    "integers": (lambda i: (i + 3) * 2 - i // 4 + i % 5, (IDS,)),
    "integers with a float": (lambda i: i * 0.1 + i / 3, (IDS,)),
    "bool": (lambda i: (i > 3) & (i < 9) | ~(i == 5), (IDS,)),
    "arange": (lambda x: torch.arange(x.shape[1]) + torch.arange(2, 8, 2), (X,)),
    "full": (lambda x: torch.full((3, 4), 2.5) + torch.zeros_like(x) + torch.ones(4), (X,)),
    "triangle": (lambda x: torch.full((4, 4), float("-inf")).triu(1), (X,)),
    "pad": (lambda x: F.pad(x, (1, 2), value=0.5), (X,)),
    "other pads": (
        lambda x: F.pad(F.pad(x, (1, 2), mode="reflect"), (3, 0), mode="replicate"),
        (X,),
    ),
    "scatter": (
        lambda x: x.scatter(1, torch.tensor([[[0, 2], [1, 1]]]).expand(2, 2, 2), 0.5),
        (X,),
    ),
    "split": (lambda x: sum(x.chunk(2, -1)) + x.split([1, 3], -1)[1].sum(-1, keepdim=True), (X,)),
    "cat": (lambda x, y: torch.cat([x, y], 1).transpose(0, 1).reshape(-1), (X, Y)),
    "index": (lambda x: x[:, [0, 2]][..., 1:, None] + x[torch.tensor([0]), :, 0].sum(), (X,)),
    "dtypes": (lambda x: x.bfloat16() * 0.1 + x.half().float().bfloat16(), (X,)),
    "float64": (lambda x: x.double() * 0.1 + torch.where(x > 0, x.double(), 0.1), (X,)),
    "matmul": (lambda x, y: x @ y.transpose(1, 2) + torch.baddbmm(x @ y.mT, x, y.mT), (X, Y)),
    "attention": (lambda x, y: F.scaled_dot_product_attention(x, y, x), (X[None], Y[None])),
    "topk": (lambda x: x.topk(2).values + x.sort(-1).values[..., :2], (X,)),
    "einsum": (lambda x, y: torch.einsum("bij,bkj->bik", x, y), (X, Y)),
    "cumsum": (lambda x: x.cumsum(-1) + x.flip(-1).roll(1, 0), (X,)),
    "several outputs": (lambda x: (x + 1, None, {"a": x * 2, "b": [x.sum()]}, 3), (X,)),
    "the input itself": (lambda x: (x, x.view(6, 4), x * 1), (X,)),
    "in place": (lambda x: x.clone().add_(1).mul_(2).relu_(), (X,)),
}


def _leaves(value: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(value)


def _same(found: Any, wanted: Any, tolerance: float = 1e-6) -> None:
    ours, theirs = _leaves(found), _leaves(wanted)
    assert len(ours) == len(theirs)
    for own, right in zip(ours, theirs, strict=True):
        if isinstance(right, Tensor):
            assert (own.dtype, own.shape) == (right.dtype, right.shape)
            assert own.stride() == right.stride()
            torch.testing.assert_close(own, right, rtol=tolerance, atol=tolerance, equal_nan=True)
        else:
            assert own == right


@pytest.mark.parametrize(("function", "inputs"), OPERATORS.values(), ids=OPERATORS)
def test_operators_become_programs(
    seen: Seen, function: Callable[..., Any], inputs: tuple[Tensor, ...]
) -> None:
    with torch.no_grad():
        _same(_compiled(function)(*inputs), function(*inputs))
    assert not seen.reasons and len(seen.programs) == 1


class Attention(nn.Module):
    """An encoder layer as authors write it, with a mask and residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, ids: Tensor) -> Tensor:
        batch, length = ids.shape
        x = self.embedding(ids)
        x = x + (torch.arange(length)[None, :, None] * 0.01).to(x.dtype)
        q, k, v = self.qkv(x).view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        scores = (q @ k.transpose(-2, -1) / 8**0.5).masked_fill(~mask, float("-inf"))
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, 32))
        return self.norm(x + self.mlp(x))


class Convolutions(nn.Module):
    def __init__(self, resizes: bool = True) -> None:
        super().__init__()
        self.resizes = resizes
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, stride=2, groups=4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        x = self.second(x)
        x = F.interpolate(x, scale_factor=2.0) if self.resizes else x
        return F.adaptive_avg_pool2d(x, 1).flatten(1)


def _ids(batch: int, length: int) -> Tensor:
    return torch.arange(batch * length).reshape(batch, length) % 50


SIZES: dict[str, Callable[[Tensor], Any]] = {
    # a size among tensors
    "times": lambda x: x * x.shape[0] - x / (2 * x.shape[0] + 1),
    "sum": lambda x: (x + x.shape[0], x.shape[0] - x, torch.rsub(x, x.shape[0], alpha=2)),
    "sum of integers": lambda x: (x.int() + x.shape[0], x.int() - x.shape[0] * 2, x.long() - 1),
    "compared": lambda x: (x > x.shape[0] - 1, x.int() == x.shape[0], (x > 0) == x.shape[0]),
    "chosen": lambda x: torch.where(x > 0.5, x, x.shape[0]),
    "filled": lambda x: (torch.full((2, 3), x.shape[0]), torch.full_like(x, x.shape[0])),
    "masked": lambda x: x.masked_fill(x > 0, x.shape[0]),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_size_is_a_tensor_among_tensors(name: str, seen: Seen) -> None:
    function = SIZES[name]
    compiled = _compiled(function, dynamic=True)
    for rows in (3, 5, 2, 300):
        x = torch.linspace(-9, 9, rows * 4).view(rows, 4)
        found, wanted = compiled(x), function(x)
        pairs = zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]
        for own, right in pairs:
            assert own.dtype == right.dtype
            torch.testing.assert_close(own, right)
    assert not seen.reasons and len(seen.programs) == 1


def test_one_program_serves_all_sizes(seen: Seen) -> None:
    model = Attention().eval()
    compiled = _compiled(model, dynamic=True)
    with torch.no_grad():
        for batch, length in ((2, 5), (3, 7), (4, 16), (9, 3)):
            _same(compiled(_ids(batch, length)), model(_ids(batch, length)), 1e-5)
    assert not seen.reasons and len(seen.programs) == 1
    assert "$" in seen.text


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_convolutions(seen: Seen, memory_format: torch.memory_format) -> None:
    model = Convolutions(resizes=False).eval().to(memory_format=memory_format)  # type: ignore[call-overload]
    x = torch.randn(2, 3, 16, 16).to(memory_format=memory_format)
    with torch.no_grad():
        _same(_compiled(model)(x), model(x), 1e-5)
    assert not seen.reasons and len(seen.programs) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inference", [torch.no_grad, torch.inference_mode])
def test_modes_and_dtypes(seen: Seen, dtype: torch.dtype, inference: Any) -> None:
    model = Attention().eval().to(dtype)
    with inference():
        _same(_compiled(model)(_ids(2, 5)), model(_ids(2, 5)), 1e-2)
    assert not seen.reasons


def test_autocast_around(seen: Seen) -> None:
    model = Attention().eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        _same(_compiled(model)(_ids(2, 5)), model(_ids(2, 5)), 2e-2)


def test_written_weights_are_seen(seen: Seen) -> None:
    model = Attention().eval()
    compiled = _compiled(model)
    with torch.no_grad():
        compiled(_ids(2, 5))
        for parameter in model.parameters():
            parameter.mul_(1.5)
        model.out.weight = nn.Parameter(torch.randn(32, 32))
        _same(compiled(_ids(2, 5)), model(_ids(2, 5)), 1e-5)


def test_inputs_and_buffers_are_written(seen: Seen) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1.0)
            x.mul_(2)
            return x + self.count

    stock, model = Counts(), Counts()
    compiled = _compiled(model)
    ours, theirs = torch.ones(2, 3), torch.ones(2, 3)
    with torch.no_grad():
        for _ in range(3):
            _same(compiled(ours), stock(theirs))
            _same(ours, theirs)
            _same(model.count, stock.count)


@pytest.mark.parametrize("make", [Attention, Convolutions])
def test_training_is_that_of_torch(seen: Seen, make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    stock = make()
    model = copy.deepcopy(stock)
    compiled = _compiled(model)
    x = _ids(2, 5) if make is Attention else torch.randn(2, 3, 16, 16)
    for _ in range(2):
        for run, own in ((compiled, model), (stock, stock)):
            own.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                run(x).square().sum().backward()
            with torch.no_grad():
                for parameter in own.parameters():
                    parameter -= 1e-3 * parameter.grad  # type: ignore[operator]
    for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4)


def test_random_numbers_are_those_of_torch(seen: Seen) -> None:
    def noisy(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5) + torch.rand(4)

    def drawn(function: Any) -> list[Tensor]:
        torch.manual_seed(3)
        with torch.no_grad():
            return [function(X) for _ in range(2)]

    found, wanted = drawn(_compiled(noisy)), drawn(noisy)
    _same(found, wanted)
    assert not torch.equal(found[0], found[1])


def test_what_a_program_cannot_hold_runs_all_the_same(seen: Seen) -> None:
    def function(x: Tensor) -> Tensor:
        return torch.renorm(x, 2, 0, 1.0) + 1

    with torch.no_grad():
        _same(_compiled(function)(X), function(X))
    assert seen.programs == [] and "renorm" in seen.reasons[0]


@pytest.mark.parametrize(
    "options",
    [
        {"size": (5, 9), "mode": "bicubic"},
        {"scale_factor": 1.7, "mode": "bilinear", "align_corners": True},
        {"scale_factor": 2.0},
        {"size": (6, 8), "mode": "nearest-exact"},
    ],
)
def test_images_are_resized(seen: Seen, options: dict[str, Any]) -> None:
    with torch.no_grad():
        _same(_compiled(_resized)(X, **options), _resized(X, **options))


def test_what_fails_in_a_program_runs_as_torchs_own_operators(seen: Seen) -> None:
    """Operators whose sizes torch does not take from a library: their program fails."""

    def function(x: Tensor) -> Tensor:
        return F.pad(x[None], (1, 1, 1, 1), mode="reflect") + 1

    compiled = _compiled(function)
    with torch.no_grad():
        for _ in range(3):
            _same(compiled(X), function(X))


def test_what_is_returned_may_be_written(seen: Seen) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        ids = torch.arange(4)
        return ids, torch.arange(5)[1:].unsqueeze(0), torch.scalar_tensor(3.0), x + ids, x

    compiled = _compiled(function)
    with torch.no_grad():
        for _ in range(3):
            found = compiled(torch.ones(4))
            _same(found, function(torch.ones(4)))
            for tensor in found[:4]:
                tensor.add_(100)
    assert not seen.reasons


@pytest.mark.parametrize(
    ("function", "make"),
    [
        (lambda x: torch.add(x, x, alpha=3 + 2j), lambda: torch.ones(3, dtype=torch.complex64)),
        (lambda x: x + 1, lambda: _jagged()),
        (lambda x: x + (2**40 + 1), lambda: torch.tensor(3, dtype=torch.int32)),
        (lambda x: x * (2**63 - 1), lambda: torch.tensor(3, dtype=torch.uint8)),
    ],
    ids=["complex", "nested", "int32", "uint8"],
)
def test_unusual_numbers_and_tensors(
    seen: Seen, function: Callable[[Tensor], Tensor], make: Callable[[], Tensor]
) -> None:
    with torch.no_grad():
        found, wanted = _compiled(function)(make()), function(make())
    if wanted.is_nested:
        found, wanted = found.values(), wanted.values()
    _same(found, wanted)


def _jagged() -> Tensor:
    parts = [torch.ones(2), torch.ones(3)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def test_breaks_of_the_graph_are_no_error(seen: Seen) -> None:
    def function(x: Tensor) -> Tensor:
        x = x * 2
        if x.sum().item() > 0:
            return x + 1
        return x - 1

    compiled = torch.compile(function, backend=compile_graph)
    with torch.no_grad():
        for x in (X, Y, -Y):
            _same(compiled(x), function(x))
    assert len(seen.programs) > 1


def test_images_of_any_size_are_resized(seen: Seen) -> None:
    def resized(x: Tensor, like: Tensor) -> Tensor:
        return F.interpolate(x, size=like.shape[-2:], mode="bilinear", align_corners=False) + like

    run = torch.compile(resized, backend=compile_graph, dynamic=True)
    with torch.no_grad():
        for side in (5, 8, 11):
            x, like = torch.randn(2, 3, 4, 6), torch.randn(2, 3, side, side + 1)
            _same(run(x, like), resized(x, like), 1e-5)


def test_options_of_other_backends_are_ignored_with_a_warning(seen: Seen) -> None:
    run = torch.compile(lambda x: x + 1, backend=compile_graph, mode="reduce-overhead")
    with pytest.warns(UserWarning, match="takes no mode: ignored"):
        _same(run(X), X + 1)


class _Block(nn.Module):
    """What passes join: a sum with a norm, a gate, attention, an activation that is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.gates, self.out = nn.Linear(16, 48), nn.Linear(16, 64), nn.Linear(32, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.parts(x).view(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(x.shape)
        x = self.norm(x + found)
        gate, up = self.gates(x).chunk(2, -1)
        return self.norm(x + self.out(F.silu(gate) * up)) + x.shape[1]


def test_a_fused_graph_is_handed_on_to_another_backend() -> None:
    graphs: list[Any] = []

    def other(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = _Block().eval()
    run = torch.compile(model, backend=compile_graph, options={"then": other}, dynamic=True)
    with torch.no_grad():
        for length in (5, 9):
            x = torch.randn(2, length, 16)
            _same(run(x), model(x), 1e-5)
    assert len(graphs) == 1
    targets = {str(node.target) for node in graphs[0].graph.nodes}
    assert {"oxytorch.add_layer_norm.default", "oxytorch.silu_mul.default"} <= targets


@pytest.mark.parametrize("then", ["eager", "aot_eager"])
def test_gradients_of_a_graph_that_is_handed_on_are_torchs(then: str) -> None:
    model, x = _Block(), torch.randn(2, 5, 16)
    run = torch.compile(copy.deepcopy(model), backend=compile_graph, options={"then": then})
    found, wanted = run(x), model(x)
    _same(found, wanted, 1e-5)
    found.square().sum().backward()
    wanted.square().sum().backward()
    for own, right in zip(run.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own.grad, right.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_a_fused_graph_is_handed_on_to_inductor() -> None:
    model, x = _Block().eval(), torch.randn(2, 5, 16)
    run = torch.compile(model, backend=compile_graph, options={"then": "inductor"})
    with torch.no_grad():
        _same(run(x), model(x), 1e-5)
        _same(run(x + 1), model(x + 1), 1e-5)


def _images() -> tuple[nn.Module, Tensor]:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    rest = [nn.Conv2d(8, 8, 3), nn.Mish(), nn.Flatten(), nn.Linear(72, 5)]
    return nn.Sequential(*layers, *rest), torch.randn(2, 3, 12, 12)


def _llama() -> tuple[nn.Module, Tensor]:
    model = tiny_llama(use_cache=False)
    return Formula(lambda ids: model(ids).logits), _ids(2, 5)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("made", [_images, _llama, lambda: (Attention(), _ids(2, 5))])
def test_inductor_compiles_what_is_handed_on(
    made: Callable[[], tuple[nn.Module, Tensor]], dynamic: bool
) -> None:
    torch._dynamo.reset()
    model, x = made()
    model = model.eval()
    options = {"then": "inductor"}
    run = torch.compile(model, backend=compile_graph, options=options, dynamic=dynamic)
    with torch.no_grad():
        for given in (x, torch.cat((x, x))):
            _same(run(given), model(given), 1e-4)


def test_other_options_are_ignored_with_a_warning(seen: Seen) -> None:
    run = torch.compile(lambda x: x + 1, backend=compile_graph, options={"max_autotune": True})
    with pytest.warns(UserWarning, match="takes no option max_autotune: ignored"):
        _same(run(X), X + 1)


def test_a_program_with_an_effect_says_what_failed(seen: Seen) -> None:
    run = _compiled(lambda x, i: (torch.rand(3), x[i]))
    with torch.no_grad(), pytest.raises(RuntimeError, match="aten::index fails"):
        run(X, torch.tensor([99]))


def test_an_error_of_the_model_is_its_own(seen: Seen) -> None:
    compiled = _compiled(Attention().eval(), dynamic=True)
    with torch.no_grad():
        compiled(_ids(2, 5))
        with pytest.raises((RuntimeError, IndexError)):
            compiled(_ids(2, 5) + 1000)
        assert compiled(_ids(2, 5)).shape == (2, 5, 32)


def test_many_threads_call_one_model(seen: Seen) -> None:
    model = Attention().eval()
    compiled = _compiled(model, dynamic=True)
    with torch.no_grad():
        compiled(_ids(2, 5)), compiled(_ids(3, 6))

    def run(seed: int) -> None:
        with torch.no_grad():
            for step in range(20):
                ids = _ids(1 + (seed + step) % 4, 3 + step % 5)
                _same(compiled(ids), model(ids), 1e-5)

    assert not errors_in_threads(run, range(4))


COMPILERLESS = """
import torch
from oxytorch.program.backend import compile_graph
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).eval()
with torch.no_grad():
    x = torch.randn(2, 8)
    compiled = torch.compile(model, backend=compile_graph)
    torch.testing.assert_close(compiled(x), model(x))
import sys
assert "torch._inductor.compile_fx" not in sys.modules
"""


def test_no_compiler_is_needed() -> None:
    environment = {**os.environ, "PATH": "", "CC": "/nowhere", "CXX": "/nowhere"}
    subprocess.run([sys.executable, "-c", COMPILERLESS], check=True, env=environment)


BY_NAME = """
import sys, torch
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).eval()
assert "oxytorch" not in sys.modules
compiled = torch.compile(model, backend="oxytorch", dynamic=True)
with torch.no_grad():
    for rows in (2, 5):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(compiled(x), model(x))
assert "oxytorch.program.program" in sys.modules
"""


@pytest.mark.skipif(
    not [*importlib.metadata.entry_points(group="torch_dynamo_backends", name="oxytorch")],
    reason="the package is not installed",
)
def test_the_name_is_enough_without_an_import() -> None:
    subprocess.run([sys.executable, "-c", BY_NAME], check=True)


def test_the_backend_is_found_by_its_name() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    found = re.search(r'torch_dynamo_backends\]\noxytorch = "([\w.]+):(\w+)"\n', text)
    assert found is not None
    module, function = found.groups()
    assert getattr(importlib.import_module(module), function) is compile_graph
