"""What users do to a model, tried on every family and at every place in it, beside stock."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from language_models import (
    FAMILIES,
    LEFT,
    MORE,
    STATES,
    VOCABULARY,
    build,
    distance,
    logits,
    prompt,
    tokens,
)
from torch import Tensor, nn

import oxytorch
from oxytorch import llm

transformers = pytest.importorskip("transformers")

_EVERY = (*FAMILIES, *LEFT, *MORE, *STATES)
_QUICK = ("gpt2", "opt_350m", "mixtral", "cohere2", "deepseek_v3", "mamba", "jamba", "rwkv")


def _of(families: Sequence[str], **known: str) -> Any:
    """known: families of which it is not true yet, or not of stock, and why."""
    marked = [
        pytest.param(
            family,
            marks=[
                *([] if family in _QUICK else [pytest.mark.slow]),
                *([pytest.mark.xfail(reason=known[family])] if family in known else []),
            ],
        )
        for family in families
    ]
    return pytest.mark.parametrize("family", marked)


class Changed(nn.Module):
    """A module in place of another one, whose results it halves."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _halved(self.base(*args, **kwargs))


def _halved(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output * 0.5 if output.is_floating_point() else output
    if type(output) is tuple:
        return tuple(_halved(part) if place == 0 else part for place, part in enumerate(output))
    return output


def _hooked(model: Any, path: str) -> Callable[[], Any]:
    hook = model.get_submodule(path).register_forward_hook(lambda m, args, out: _halved(out))
    return hook.remove


def _hooked_before(model: Any, path: str) -> Callable[[], Any]:
    hook = model.get_submodule(path).register_forward_pre_hook(lambda m, args: _halved(args))
    return hook.remove


def _replaced(model: Any, path: str) -> Callable[[], Any]:
    base = model.get_submodule(path)
    model.set_submodule(path, Changed(base))
    return lambda: model.set_submodule(path, base)


def _places(model: Any) -> list[str]:
    """A path to a module of each kind and name, the last that there is."""
    found = {}
    for path, module in model.named_modules():
        if path and not isinstance(module, (nn.ModuleList, nn.Dropout)):
            found[type(module), path.rpartition(".")[2] if "." in path else path] = path
    return [*found.values()]


@pytest.mark.parametrize("change", [_hooked, _hooked_before, _replaced])
@_of(_EVERY)
def test_a_change_at_every_place_is_followed(family: str, change: Callable[..., Any]) -> None:
    model: Any = build(family)
    fast: Any = llm.optimize(model, dtype=torch.float32)
    given = prompt(1, 9)
    ids = given["input_ids"]
    before = logits(model, given)
    llm.generate(fast, ids, max_new_tokens=4)  # a step is recorded
    shown = 0
    for path in _places(model):
        back = [change(one, path) for one in (model, fast)]
        try:
            expected = logits(model, given)
            wanted = tokens(model, given, max_new_tokens=4, eos_token_id=None)
        except (
            AttributeError,
            TypeError,
            NotImplementedError,
        ):  # code that looks into what was there
            expected = None
        if expected is not None:
            shown += distance(before, expected) > 1e-3
            assert distance(logits(fast, given), expected) < 1e-5, path
            try:
                found = llm.generate(fast, ids, max_new_tokens=4, eos_token_id=[])
            except TypeError as error:  # the embedding cannot be found in what stands in for it
                assert change is _replaced and "use its own generate" in str(error), path
                found = torch.cat([ids, wanted], 1)
            # This one's own steps call other code than its whole runs, which llm.generate makes.
            if family != "recurrent_gemma":
                assert torch.equal(found[:, 9:], wanted), path
        for undone in back:
            undone()
    assert shown >= 3
    assert distance(logits(fast, given), before) < 1e-5


@pytest.mark.parametrize("weights", [None, "int8"])
@_of(
    _EVERY,
    recurrent_gemma="its whole runs, which llm.generate makes, and its steps round otherwise",
    gemma3n="rounds otherwise; not looked into",
)
def test_tokens_in_bfloat16_are_those_of_generate(family: str, weights: str | None) -> None:
    model: Any = llm.optimize(build(family), weights=weights)
    for seed in range(3):
        torch.manual_seed(seed)
        ids = torch.randint(3, VOCABULARY, (1, 6 + 5 * seed))
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        expected = tokens(model, given, max_new_tokens=40, eos_token_id=None)
        found = llm.generate(model, ids, max_new_tokens=40, eos_token_id=[])
        assert torch.equal(found[:, ids.shape[1] :], expected)


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
@_of(_EVERY)
def test_undo_gives_plain_weights_that_are_tied_as_before(family: str, weights: str | None) -> None:
    model: Any = build(family)
    values, ties = copy.deepcopy(model.state_dict()), _ties(model)
    try:
        llm.optimize(model, weights=weights, group_size=32, inplace=True)
    except ValueError as error:
        assert weights == "int4" and "group_size that divides" in str(error)
        pytest.skip(str(error))
    oxytorch.undo(model)
    assert _ties(model) == ties
    near = {None: 0.004, "int8": 0.02, "int4": 0.2}[weights]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert type(parameter) is nn.Parameter and parameter.dtype == torch.float32
        gap = (parameter.detach() - values[name]).norm()
        assert gap <= near * values[name].norm(), name
    if family == "rwkv":
        return  # its code writes in place to what gradients need
    given = prompt(1, 9)
    before = logits(model, given)
    model(**given).logits.float().square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert distance(logits(model, given), before) > 0


def _ties(model: Any) -> set[frozenset[str]]:
    """The names of parameters that are the same object."""
    found: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), set()).add(name)
    return {frozenset(names) for names in found.values()}


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "opt_350m"])
def test_loaded_values_are_packed_as_those_of_optimize(family: str, weights: str) -> None:
    """With the search for scales."""
    model, other = build(family), build(family)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.1 if parameter.dim() > 1 else 1))
    fast, wanted = (llm.optimize(m, weights=weights, group_size=32) for m in (model, other))
    fast.load_state_dict(other.state_dict())
    logits(fast, prompt(1, 9))  # packs
    packed = [fast.state_dict(), wanted.state_dict()]
    for name, value in packed[1].items():
        assert torch.equal(packed[0][name], value), name
