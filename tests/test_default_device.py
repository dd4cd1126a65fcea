"""Under a default device (`torch.set_default_device`, `with torch.device(...)`), what oxytorch
makes for itself stays on the CPU, and what it made of a model is used as without one."""

from __future__ import annotations

import ast
import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import oxytorch
from oxytorch import optim
from oxytorch.quantization import Int4Weight, Int8DynamicActivationInt8Weight, Int8Weight
from tiny import tiny_llama

SOURCES = Path(oxytorch.__file__).parent
OF_USERS = ("benchmark/", "demo/", "testing.py", "compat/layers.py", "compat/language_modules.py")
"""What makes tensors for users, or runs in processes of its own."""

FACTORIES = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace",
    "logspace", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor",
    "tril_indices", "triu_indices", "zeros",
}  # fmt: skip


def test_what_makes_tensors_names_their_device() -> None:
    found = []
    for path in SOURCES.rglob("*.py"):
        name = path.relative_to(SOURCES).as_posix()
        if name.startswith(OF_USERS):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if not is_call or not isinstance(node.func.value, ast.Name):
                continue
            given = {keyword.arg for keyword in node.keywords}
            is_factory = node.func.value.id == "torch" and node.func.attr in FACTORIES
            if is_factory and given.isdisjoint({"device", None}):
                found.append(f"{name}:{node.lineno} torch.{node.func.attr}")
    assert not found


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64), nn.ReLU()
    )


def _images() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 64, 4),
    )  # fmt: skip


X = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(64, (1, 8), generator=torch.Generator().manual_seed(0))

RULES = [
    getattr(optim, name)
    for name in optim.__all__
    if isinstance(getattr(optim, name), type)
    and issubclass(getattr(optim, name), optim.FusedOptimizer)
    and name != "FusedOptimizer"
]


def _trained(rule: type, device: str | None, **options: object) -> list[Tensor]:
    model = _layers()
    with default_device(device) if device else nullcontext():
        optimizer = rule(model.parameters(), lr=1e-2, **options)
        for _ in range(3):
            optimizer.zero_grad()
            model(X).square().mean().backward()
            optim.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_steps_are_those_without_one(rule: type, device: str) -> None:
    torch.testing.assert_close(_trained(rule, device), _trained(rule, None), rtol=0, atol=0)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_split_and_quantized_steps_are_those_without_one(device: str) -> None:
    def split(name: str | None) -> list[Tensor]:
        model = _layers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with default_device(name) if name else nullcontext():
            model, optimizer = oxytorch.optimize(model, optimizer=optimizer, dtype=torch.bfloat16)
            for _ in range(3):
                optimizer.zero_grad()
                model(X).float().square().mean().backward()
                optimizer.step()
            return [*model.state_dict().values()]

    torch.testing.assert_close(split(device), split(None), rtol=0, atol=0)
    both = (_trained(optim.AdamW, name, state_dtype=torch.int8) for name in (device, None))
    torch.testing.assert_close(*both, rtol=0, atol=0)


def _saved(model: nn.Module, x: Tensor, folder: Path) -> Tensor:
    oxytorch.save(model, folder / "m.oxy", sample_input=x)
    return oxytorch.load(folder / "m.oxy")(x)


WAYS: dict[str, tuple[Callable[[], nn.Module], Tensor, Callable[..., Tensor]]] = {
    "default": (_layers, X, lambda model, x, _: oxytorch.optimize(model)(x)),
    "sample": (_layers, X, lambda model, x, _: oxytorch.optimize(model, sample_input=x)(x)),
    "program": (
        _layers, X, lambda model, x, _: oxytorch.optimize(model, sample_input=x, graph=True)(x)
    ),
    "tune": (
        _layers, X, lambda model, x, _: oxytorch.optimize(model, sample_input=x, tune=True)(x)
    ),
    "bfloat16": (
        _layers, X,
        lambda model, x, _: oxytorch.optimize(model, sample_input=x, dtype=torch.bfloat16)(x),
    ),
    "images": (_images, IMAGES, lambda model, x, _: oxytorch.optimize(model, sample_input=x)(x)),
    "compile": (_layers, X, lambda model, x, _: torch.compile(model, backend="oxytorch")(x)),
    "file": (_layers, X, _saved),
    "int8": (_images, IMAGES, lambda model, x, _: oxytorch.quantize(model, [x])(x)),
}  # fmt: skip


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("way", WAYS)
def test_models_give_what_they_give_without_one(way: str, device: str, tmp_path: Path) -> None:
    tolerance = 2e-2 if way in ("bfloat16", "int8") else 1e-5
    make, x, run = WAYS[way]
    model = make().eval()
    with torch.no_grad():
        expected = run(model, x, tmp_path)
        with default_device(device):
            found = run(model, x, tmp_path)
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize(
    "config",
    [Int8Weight(), Int4Weight(64), Int8DynamicActivationInt8Weight()],
    ids=lambda config: type(config).__name__,
)
def test_quantized_weights_are_those_without_one(config: object) -> None:
    found = []
    for device in (None, "meta", "cpu"):
        model = _layers().eval()
        with torch.no_grad(), default_device(device) if device else nullcontext():
            oxytorch.quantize_(model, config)
            found.append(model(X))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("kv_cache", ["bf16", "int8"])
def test_language_models_generate_as_without_one(
    weights: str | None, kv_cache: str, device: str
) -> None:
    model = tiny_llama(seed=0)

    def generated() -> tuple[Tensor, float]:
        fast = oxytorch.llm.optimize(copy.deepcopy(model), weights=weights, kv_cache=kv_cache)
        tokens = oxytorch.llm.generate(fast, TOKENS, max_new_tokens=8)
        return tokens, oxytorch.llm.perplexity(fast, TOKENS[0].repeat(4), window=16)

    expected = generated()
    with default_device(device):
        found = generated()
    assert torch.equal(found[0], expected[0])
    assert found[1] == pytest.approx(expected[1])


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_what_was_made_of_a_model_runs_under_one(graph: bool, device: str) -> None:
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).eval()
    x = torch.randn(16, 256)
    fast = oxytorch.optimize(model, sample_input=x, graph=graph)

    def calls() -> list[str]:
        with torch.inference_mode(), oxytorch.verbose(io.StringIO()) as log:
            fast(x)
        return [row.op for row in log.rows]

    expected = calls()
    with default_device(device):
        assert calls() == expected
    with torch.device(device):
        assert calls() == expected


def test_new_sizes_get_programs_and_proofs_under_one() -> None:
    model = _layers().eval()
    with default_device("cpu"), torch.no_grad():
        fast = oxytorch.optimize(model, sample_input=X, passes=["program"])
        for rows in (8, 5, 3, 7):
            x = torch.randn(rows, 64)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
        assert "checked for other sizes: new ones" in str(oxytorch.explain(fast))


def test_compiled_training_in_bfloat16_runs_under_one() -> None:
    torch._dynamo.reset()
    with default_device("cpu"):
        model = _layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = oxytorch.optimize(model, optimizer=optimizer, dtype=torch.bfloat16)
        compiled = torch.compile(model, backend="aot_eager")
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = compiled(X).float().square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0]
