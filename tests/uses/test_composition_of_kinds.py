"""What `llm.optimize` and `quantize` return in the hands of PyTorch's other parts, as in
`test_composition.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from .compare import Log
from .models import MODELS
from .test_composition import LONG_WAYS, WAYS, Way
from .transformers_models import llama, token_ids

FORMS = ("llm", "llm_int8", "llm_bfloat16", "program", "int8")
NOT_HERE = ("loaded_into_stock", "swapped_conversion", "part_to_double", "autocast_of_a_part")
"""Ways that only models of `models.py` take, or that torch refuses for tensors held elsewhere."""
FEW_BITS = {"llm_int8": 2e-2, "int8": 2e-2}
"""Values that a way writes are rounded again."""
CONVERTED = ("linear", "images", "encoder")


class Logits(nn.Module):
    """A user's module around a language model."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner(ids, use_cache=False).logits
        return logits


def _used(way: Way, sample: Callable[[], torch.Tensor]) -> Callable[[Any, Log], None]:
    def use(model: Any, log: Log) -> None:
        x = sample()
        with torch.no_grad():
            log(model(x), model(x))
        way(model, x, log)

    return use


def _cases(names: tuple[str, ...]) -> Iterator[Any]:
    every = {**WAYS, **LONG_WAYS}
    for number, way in enumerate(w for w in every if w not in NOT_HERE):
        for turn, name in enumerate(names):
            often = number % len(names) == turn and not way.startswith("compile")
            yield pytest.param(
                name, way, id=f"{name}-{way}", marks=() if often else pytest.mark.slow
            )


def _way(name: str) -> Way:
    return {**WAYS, **LONG_WAYS}[name]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("form", "way"), _cases(FORMS))
def test_language_model(check: Callable[..., None], form: str, way: str) -> None:
    pytest.importorskip("transformers")
    used = _used(_way(way), token_ids)
    tolerance = FEW_BITS.get(form, 3e-5)

    def build() -> Any:
        return llama().bfloat16() if form == "llm_bfloat16" else llama()

    check(
        build, lambda model, log: used(Logits(model).eval(), log), form.removesuffix("_bfloat16"),
        token_ids, tolerance=tolerance,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "way"), _cases(CONVERTED))
def test_layers_of_integers(check: Callable[..., None], name: str, way: str) -> None:
    build, sample, _ = MODELS[name]
    check(build, _used(_way(way), sample), "converted", sample, tolerance=0.1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_taken", [False, True])
@pytest.mark.parametrize("form", ["llm", "llm_int8", "llm_bfloat16", "int8", "default"])
def test_assigned_weights(check: Callable[..., None], form: str, is_taken: bool) -> None:
    """`p.data = values` is the weight, and what was made of the former one keeps its values."""
    pytest.importorskip("transformers")

    def use(model: Any, log: Log) -> None:
        layer = model.model.layers[0]
        for part in (layer.self_attn.q_proj, layer.self_attn.o_proj, layer.mlp.gate_proj):
            former = part.weight.data if is_taken else part.weight.detach()
            noted = former * 1
            part.weight.data = noted * 0.5
            with torch.no_grad():
                log(model(token_ids()).logits, model(token_ids()).logits)
            log(torch.equal(former * 1, noted), part.weight)

    def build() -> Any:
        return llama().bfloat16() if form == "llm_bfloat16" else llama()

    kind = form.removesuffix("_bfloat16")
    check(build, use, kind, {"input_ids": token_ids()}, tolerance=FEW_BITS.get(form, 3e-5))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["llm", "llm_int8", "default"])
def test_optimizers_in_backward(check: Callable[..., None], form: str) -> None:
    """Each weight is stepped as soon as it has its gradient, before others are used."""
    pytest.importorskip("transformers")

    def use(model: Any, log: Log) -> None:
        for p in model.parameters():
            optimizer = torch.optim.SGD([p], lr=0.01)
            p.register_post_accumulate_grad_hook(lambda _, own=optimizer: own.step())
        model(token_ids()).logits.pow(2).mean().backward()
        with torch.no_grad():
            log(model(token_ids()).logits, model(token_ids()).logits)

    check(llama, use, form, tolerance=FEW_BITS.get(form, 3e-5))
