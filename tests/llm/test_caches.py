"""Caches of transformers that fused layers and the model's own code share, and that users edit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from language_models import VOCABULARY, build, distance, prompt, tokens
from torch import Tensor, nn

from oxytorch import llm

transformers = pytest.importorskip("transformers")


class Adapter(nn.Module):
    """A linear layer with something of the same size added."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x)
        return result + 0.5 * result.flip(-1)


def _layers(model: Any) -> Any:
    return model.model.layers


def _wrapped(index: int) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        attention = _layers(model)[index].self_attn
        attention.o_proj = Adapter(attention.o_proj)

    return change


def _hooked(index: int) -> Callable[[Any], None]:
    return lambda model: _layers(model)[index].mlp.register_forward_hook(
        lambda module, args, output: output * 1.5
    )


def _without(index: int) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        del _layers(model)[index]

    return change


CHANGES = {
    "none": lambda model: None,
    "first wrapped": _wrapped(0),
    "last wrapped": _wrapped(1),
    "first hooked": _hooked(0),
    "last removed": _without(1),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("family", ["mistral", "gemma3", "cohere2"])
def test_windows_stay_right_when_one_layer_runs_its_own_code(family: str, change: str) -> None:
    """The windows of 8 tokens are passed by the prompt, or by what is written."""
    model: Any = build(family)
    fast: Any = llm.optimize(model, dtype=torch.float32)
    for one in (model, fast):
        CHANGES[change](one)
    for length in (6, 21):
        given = prompt(2, length)
        for options in ({}, {"num_beams": 3}):
            expected = tokens(model, given, max_new_tokens=14, **options)
            assert torch.equal(tokens(fast, given, max_new_tokens=14, **options), expected)
        found = llm.generate(fast, **given, max_new_tokens=14, eos_token_id=[])
        assert torch.equal(found[:, length:], tokens(model, given, max_new_tokens=14))


@torch.no_grad()
def _loop(model: Any, ids: Tensor, mask: Tensor, change: Callable[[int, Any], None]) -> Tensor:
    """Logits of a prompt of half the tokens, single tokens, and a few together."""
    half = ids.shape[1] // 2
    parts = [(0, half), *((i, i + 1) for i in range(half, ids.shape[1] - 4)), (ids.shape[1] - 4,)]
    cache, found = None, []
    for step, part in enumerate(parts):
        change(step, model)
        begin, end = part[0], ids.shape[1] if len(part) == 1 else part[1]
        output = model(
            ids[:, begin:end],
            attention_mask=mask[:, :end],
            past_key_values=cache,
            use_cache=True,
        )
        cache = output.past_key_values
        found.append(output.logits)
    return torch.cat(found, 1)[mask.bool()]


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
@pytest.mark.parametrize("half", [6, 12])
def test_layers_may_change_while_a_cache_is_in_use(family: str, half: int) -> None:
    model: Any = build(family)
    fast: Any = llm.optimize(model, dtype=torch.float32)
    ids = torch.randint(3, VOCABULARY, (2, 2 * half))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0

    def change(step: int, one: Any) -> None:
        if step in (1, 4):  # one layer, and then the other
            CHANGES["first hooked" if step == 1 else "last wrapped"](one)

    assert distance(_loop(fast, ids, mask, change), _loop(model, ids, mask, change)) < 1e-5


def _assign(part: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    def edit(cache: Any) -> None:
        for layer in cache.layers:
            layer.keys = part(layer.keys)
            layer.values = part(layer.values)

    return edit


def _in_place(cache: Any) -> None:
    for layer in cache.layers:
        layer.values.mul_(0.5)
        layer.keys[:, :, 2:4] = 0.25


def _moved(cache: Any) -> None:
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()


EDITS: dict[str, Callable[[Any], None]] = {
    "last removed": _assign(lambda part: part[:, :, :-3]),
    "first removed": _assign(lambda part: part[:, :, 2:]),
    "chosen": _assign(lambda part: part[:, :, [0, 3, 4, 8]]),
    "scaled": _assign(lambda part: part * 0.5),
    "in place": _in_place,
    "moved": _moved,
    "keys only": lambda cache: setattr(cache.layers[1], "keys", cache.layers[1].keys.flip(2)),
    "cropped": lambda cache: cache.crop(-4),
    "repeated": lambda cache: cache.batch_repeat_interleave(2),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("kv_cache", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_written_to_a_cache_counts(edit: str, kv_cache: str, mode: Any) -> None:
    model: Any = build("llama")
    fast: Any = llm.optimize(model, dtype=torch.float32, kv_cache=kv_cache)
    ids = torch.randint(3, VOCABULARY, (1, 12))
    found, lengths, before = [], [], []
    for one in (model, fast):
        with mode():
            cache = one(ids, use_cache=True).past_key_values
            EDITS[edit](cache)
            lengths.append(cache.get_seq_length())
            rows = cache.layers[0].keys.shape[0]
            after = ids[:, :5].expand(rows, -1)
            found.append(one(after, past_key_values=cache).logits)
            other = one(ids, use_cache=True).past_key_values
            before.append(one(ids[:, :5], past_key_values=other).logits)
    assert lengths[0] == lengths[1]
    if edit not in ("moved", "repeated"):
        assert distance(found[0], before[0]) > 0.05, "the edit has to show"
    allowed = {"fp32": 1e-5, "bf16": 0.02, "int8": 0.02}[kv_cache]
    assert distance(found[1], found[0]) < allowed


def test_to_read_a_cache_changes_nothing() -> None:
    fast: Any = llm.optimize(build("llama"), kv_cache="int8")
    ids = torch.randint(3, VOCABULARY, (1, 12))
    found = []
    for reads in (False, True):
        with torch.no_grad():
            cache = fast(ids, use_cache=True).past_key_values
            if reads:
                assert next(iter(cache))[0].shape == (1, 2, 12, 16)
            found.append(fast(ids[:, :1], past_key_values=cache).logits)
    assert torch.equal(*found)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_copies_of_a_cache_go_on_by_themselves(family: str) -> None:
    fast: Any = llm.optimize(build(family), kv_cache="int8")
    ids = torch.randint(3, VOCABULARY, (1, 12))
    with torch.no_grad():
        cache = fast(ids, use_cache=True).past_key_values
        copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
        expected = fast(ids[:, :1], past_key_values=cache).logits
        for one in copies:
            assert torch.equal(fast(ids[:, :1], past_key_values=one).logits, expected)


class Shifted(transformers.DynamicCache):
    """A cache of the user's own, which changes what is put into it."""

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(keys, values * 0.5, *args, **kwargs)


def _patched() -> Any:
    cache = transformers.DynamicCache()
    update = cache.update
    cache.update = lambda keys, values, *args, **kwargs: update(keys, values * 0.5, *args, **kwargs)
    return cache


@pytest.mark.parametrize("make", [Shifted, _patched])
def test_caches_with_an_update_of_their_own_see_all_keys(make: Callable[[], Any]) -> None:
    model: Any = build("llama")
    fast: Any = llm.optimize(model, dtype=torch.float32)
    ids = torch.randint(3, VOCABULARY, (1, 12))
    found = []
    for one in (model, fast):
        with torch.no_grad():
            cache = one(ids, past_key_values=make()).past_key_values
            found.append(one(ids[:, :3], past_key_values=cache).logits)
    assert distance(found[1], found[0]) < 1e-5


@pytest.mark.parametrize("edit", ["scaled", "in place", "keys only", "moved"])
@pytest.mark.parametrize("length", [6, 12])
def test_what_is_written_to_the_cache_of_a_window_counts(edit: str, length: int) -> None:
    model: Any = build("mistral")
    fast: Any = llm.optimize(model, dtype=torch.float32)
    ids = torch.randint(3, VOCABULARY, (1, length))
    found = []
    for one in (model, fast):
        with torch.no_grad():
            cache = one(ids, use_cache=True).past_key_values
            assert cache.layers[0].keys.shape[2] == min(length, 7)
            EDITS[edit](cache)
            parts = (ids[:, :1], ids[:, :5], ids[:, 2:3])
            found.append(torch.cat([one(p, past_key_values=cache).logits for p in parts], 1))
    assert distance(found[1], found[0]) < 1e-5


MODES = [torch.no_grad, torch.inference_mode, torch.enable_grad]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("after", MODES)
@pytest.mark.parametrize("before", MODES)
def test_a_cache_goes_from_one_mode_to_another(
    before: Any, after: Any, family: str, own: bool
) -> None:
    model: Any = build(family)
    fast: Any = llm.optimize(model, dtype=torch.float32)
    ids = torch.randint(3, VOCABULARY, (2, 9))
    found, gradients = [], []
    for one in (model, fast):
        if own:
            _hooked(1)(one)
        with before():
            cache = one(ids, use_cache=True).past_key_values
            cache.reorder_cache(torch.tensor([1, 0]))
        with after():
            parts = [one(ids[:, i : i + 1], past_key_values=cache).logits for i in range(3)]
            if after is torch.enable_grad:
                torch.cat(parts).square().sum().backward()
                gradients.append(_layers(one)[0].self_attn.k_proj.weight.grad)
        found.append(torch.cat(parts, 1).detach())
    assert distance(found[1], found[0]) < 1e-5
    if gradients:
        assert distance(gradients[1], gradients[0]) < 1e-4


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3"])
@pytest.mark.parametrize("kept", [3, 12])
def test_crops_that_transformers_refuses_are_refused(family: str, kept: int) -> None:
    model = build(family)
    fast = llm.optimize(model, dtype=torch.float32)
    told = []
    for one in (model, fast):
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            one(torch.full((1, 12), 5), past_key_values=cache)
        try:
            cache.crop(kept)
            told.append((None, cache.get_seq_length()))
        except (ValueError, RuntimeError) as error:
            told.append((type(error), str(error)))
    assert told[0] == told[1]
