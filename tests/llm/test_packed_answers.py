"""What `llm.optimize` makes of layers that cannot be exact, that went wrong, and of interrupts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from language_models import build, distance, logits, prompt, usual_distance

import oxytorch
from oxytorch import llm
from oxytorch.llm import arguments, passes
from oxytorch.llm.packing import Packer
from tiny import tiny_llama


def _coarse(family: str, seed: int = 0, factor: float = 1.0) -> Any:
    """A model whose answers bfloat16 gives badly: its experts' scores are nearly alike, or its
    weights are large."""
    model = build(family)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * factor)
            if name.endswith("gate.weight"):
                alike = parameter[:1] + 1e-3 * torch.randn(parameter.shape, generator=generator)
                parameter.copy_(alike)
    return model


_FORMATS: list[dict[str, Any]] = [
    {},
    {"weights": "int8"},
    {"weights": "int4", "group_size": 32},
    {"weights": "int8", "activation_dtype": "int8", "group_size": 32},
    {"kv_cache": "int8"},
]


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "mixtral", "qwen3_moe"])
def test_layers_that_bfloat16_gives_badly_are_fused_all_the_same(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    beyond = _spied(monkeypatch)
    for options in _FORMATS:
        for seed in range(4):
            report = oxytorch.explain(llm.optimize(_coarse(family, seed), **options))
            assert report.fused == report.layers, f"{options}, {seed}: {report}"
    assert beyond, "no layer of these models is hard to give in bfloat16"


def _spied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """The answers of the second look at a layer, as they come."""
    found: list[tuple[float, float]] = []
    real = llm.checking.gap_of_own_weights

    def spy(*args: Any) -> tuple[float, float]:
        found.append(real(*args))
        return found[-1]

    monkeypatch.setattr(llm.checking, "gap_of_own_weights", spy)
    return found


def _in_another_order(products: Any) -> Any:
    """Wrong products of a model's own weights: inputs, or experts, in another order."""
    if isinstance(products, list):
        return products[::-1]
    count = products.weight.shape[1]
    products.order = torch.arange(count).flip(0)
    return products


@pytest.mark.parametrize(
    ("family", "method", "options"),
    [
        ("llama", "of", {}),
        ("llama", "of", {"weights": "int8", "activation_dtype": "int8", "group_size": None}),
        ("gpt2", "of", {"weights": "int8"}),
        ("mixtral", "stacked", {}),
        ("mixtral", "stacked", {"weights": "int4", "group_size": 32}),
    ],
)
def test_layers_that_packing_spoils_are_left_as_they_were(
    family: str, method: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(family)
    given = prompt()
    expected = logits(llm.optimize(model, **options), given)
    real: Callable[..., Any] = getattr(Packer, method)
    spoils = iter([True])

    def spoiled(packer: Packer, layer: Any, plan: Any, *args: Any, **named: Any) -> Any:
        found = real(packer, layer, plan, *args, **named)
        return _in_another_order(found) if next(spoils, False) else found

    monkeypatch.setattr(Packer, method, spoiled)
    fast = llm.optimize(model, **options, inplace=True)
    report = oxytorch.explain(fast)
    assert report.fused == 1 and len(report.differing) == 1, str(report)
    assert "packed, it differs from its own code" in report.skipped[0].detail
    assert usual_distance(logits(fast, given), expected) < 0.2  # other experts may be chosen
    assert oxytorch.undo(fast) is model


class Stop(BaseException):
    """What nobody catches."""


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gemma3", "mixtral"])
@pytest.mark.parametrize("options", [{}, {"weights": "int8"}, {"dtype": torch.float32}], ids=str)
@pytest.mark.parametrize("moment", ["in a layer", "between layers", "at the end"])
def test_what_is_interrupted_leaves_the_model_as_it_was(
    family: str, options: dict[str, Any], moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(family)
    before = _all_of(model)

    def stops(*args: Any, **named: Any) -> Any:
        raise Stop

    def progress(done: int, layers: int) -> None:
        if moment == "between layers" and done == 1:
            raise Stop

    if moment == "in a layer":
        monkeypatch.setattr(llm.checking, "packed_gap", stops)
    if moment == "at the end":
        monkeypatch.setattr(passes, "fuse", stops)
    with pytest.raises(Stop):
        llm.optimize(model, **options, inplace=True, progress=progress)
    after = _all_of(model)
    assert after.keys() == before.keys()
    for name, (tensor, values, attributes) in before.items():
        now, its_values, its_attributes = after[name]
        assert now is tensor and torch.equal(its_values, values), name
        assert its_attributes == attributes, name


def _all_of(model: torch.nn.Module) -> dict[str, Any]:
    """Every parameter and buffer, its values, and what its module's dictionary holds."""
    return {
        f"{path}.{name}": (tensor, tensor.detach().clone(), _attributes(module))
        for path, module in model.named_modules()
        for name, tensor in {**module._parameters, **module._buffers}.items()
        if tensor is not None
    }


def _attributes(module: torch.nn.Module) -> dict[str, int]:
    hooks = {name: len(value) for name, value in vars(module).items() if name.endswith("_hooks")}
    return {**dict.fromkeys(vars(module), 0), **hooks}


def test_what_is_interrupted_where_memory_is_short_leaves_plain_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arguments, "available_bytes", lambda: 1000)
    model = build("llama")
    given = prompt()
    expected = logits(model, given)

    def progress(done: int, layers: int) -> None:
        if done == 1:
            raise Stop

    with pytest.raises(Stop):
        llm.optimize(model, inplace=True, progress=progress)
    for parameter in model.parameters():
        assert type(parameter) is torch.nn.Parameter and parameter.dtype == torch.float32
    assert "_oxytorch" not in model.__dict__
    assert 0 < distance(logits(model, given), expected) < 0.05


@pytest.mark.parametrize("position", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("weights", "activation_dtype"),
    [
        ("int8", None),
        ("int4", None),
        ("nf4", None),
        ("fp8", None),
        ("int8", "int8"),
        ("int4", "int8"),
    ],
)
@pytest.mark.parametrize("off", [0.0, 0.1])
def test_a_layer_that_is_a_tenth_off_beyond_rounding_is_left(
    off: float,
    weights: str,
    activation_dtype: str | None,
    position: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first layer of its structure, and one that is expected to be like the first."""
    real = llm.checking.fused
    generator = torch.Generator().manual_seed(0)
    packed: list[Any] = []

    def spoiled(record: Any, plan: Any, runs: Any, *args: Any) -> tuple[torch.Tensor, ...]:
        found = real(record, plan, runs, *args)
        hidden = runs[0][0]
        if hidden.dtype != torch.bfloat16:  # the plan is tried in float32
            return found
        if all(record is not known for known in packed):
            packed.append(record)
        if off == 0 or len(packed) - 1 != position:
            return found
        added = (found[0] - hidden).float()
        noise = torch.randn(added.shape, generator=generator)
        return (found[0] + (off * added.norm() / noise.norm() * noise).to(hidden.dtype),)

    monkeypatch.setattr(llm.checking, "fused", spoiled)
    model = tiny_llama(0, hidden_size=256, intermediate_size=512, num_hidden_layers=4)
    fast = llm.optimize(model, weights=weights, activation_dtype=activation_dtype)
    report = oxytorch.explain(fast)
    assert len(packed) == report.layers == 4
    assert report.fused == (4 if off == 0 else 3), str(report)
