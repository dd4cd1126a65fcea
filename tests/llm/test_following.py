"""What a user does to an optimized model afterwards is followed, in every way of running it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from language_models import VOCABULARY, assert_follows, build, distance, logits, prompt, tokens
from torch import Tensor, nn

import oxytorch
from oxytorch import llm
from oxytorch.core.looked_up import LookUpWeight
from oxytorch.llm.standing import tensors_of
from oxytorch.llm.weights import StackedWeight
from oxytorch.ops.panels import PanelWeight

transformers = pytest.importorskip("transformers")


class Adapter(nn.Module):
    """A linear layer with a low-rank one beside it, as PEFT wraps it."""

    def __init__(self, base: nn.Module, out: int, inputs: int) -> None:
        super().__init__()
        self.base = base
        generator = torch.Generator().manual_seed(1)
        self.a = nn.Parameter(torch.randn(4, inputs, generator=generator) * 0.3)
        self.b = nn.Parameter(torch.randn(out, 4, generator=generator) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        beside = x.to(self.a.dtype) @ self.a.t() @ self.b.t()
        result: Tensor = self.base(x) + beside.to(x.dtype)
        return result


def wrap(path: str, out: int = 64, inputs: int = 64) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        base = model.get_submodule(path)
        model.set_submodule(path, Adapter(base, out, inputs))

    return change


def doubled(path: str, kind: str = "forward") -> Callable[[Any], None]:
    def change(model: Any) -> None:
        module = model.get_submodule(path)
        if kind == "forward":
            module.register_forward_hook(
                lambda m, args, out: (
                    (out[0] * 1.5, *out[1:]) if isinstance(out, tuple) else out * 1.5
                )
            )
        else:
            module.register_forward_pre_hook(lambda m, args: tuple(a * 1.5 for a in args))

    return change


def written(path: str, write: Callable[[Any], None]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        with torch.no_grad():
            write(model.get_parameter(path))

    return change


def replaced(path: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        owner, _, name = path.rpartition(".")
        old = model.get_parameter(path)
        values = torch.randn(old.shape, generator=torch.Generator().manual_seed(2)) * 0.3
        setattr(model.get_submodule(owner), name, nn.Parameter(values.to(old.dtype)))

    return change


def _set(path: str, name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(model.get_submodule(path), name, value)


def _new_layer(model: Any) -> None:
    torch.manual_seed(4)
    layer = nn.Linear(64, 64, bias=False)
    nn.init.normal_(layer.weight, std=0.3)
    model.model.layers[1].self_attn.o_proj = layer.to(model.dtype)


def _shorter(model: Any) -> None:
    model.model.layers = nn.ModuleList([*model.model.layers[:1]])


def _scaled_angles(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


L = "model.layers.0"
CHANGES: dict[str, Callable[[Any], None]] = {
    **{f"adapter {name}": wrap(f"{L}.self_attn.{name}") for name in ("q_proj", "o_proj")},
    "adapter down_proj": wrap(f"{L}.mlp.down_proj", 64, 128),
    "adapter lm_head": wrap("lm_head", VOCABULARY, 64),
    "wrapped mlp": lambda m: setattr(
        m.model.layers[1], "mlp", nn.Sequential(m.model.layers[1].mlp, nn.Tanh())
    ),
    "wrapped norm": lambda m: setattr(
        m.model.layers[1],
        "input_layernorm",
        nn.Sequential(m.model.layers[1].input_layernorm, nn.Tanh()),
    ),
    "another layer": _new_layer,
    "fewer layers": _shorter,
    "another activation": lambda m: setattr(m.model.layers[0].mlp, "act_fn", nn.GELU()),
    "hook down_proj": doubled(f"{L}.mlp.down_proj"),
    "hook q_proj": doubled(f"{L}.self_attn.q_proj", "before"),
    "hook attention": doubled(f"{L}.self_attn"),
    "hook norm": doubled(f"{L}.post_attention_layernorm"),
    "hook layer": doubled("model.layers.0"),
    "hook last norm": doubled("model.norm"),
    "hook lm_head": doubled("lm_head", "before"),
    "hook embedding": doubled("model.embed_tokens"),
    "in place": written(f"{L}.self_attn.k_proj.weight", lambda p: p.mul_(2)),
    "data": written(f"{L}.mlp.up_proj.weight", lambda p: p.data.mul_(2)),
    "data assigned": written(
        f"{L}.mlp.gate_proj.weight", lambda p: setattr(p, "data", p.data.flip(0))
    ),
    "detached": written(f"{L}.mlp.down_proj.weight", lambda p: p.detach().mul_(-1)),
    "a view": written(f"{L}.self_attn.o_proj.weight", lambda p: p[3:9].fill_(0.5)),
    "head in place": written("lm_head.weight", lambda p: p.mul_(-1)),
    "embedding in place": written("model.embed_tokens.weight", lambda p: p.mul_(2)),
    "norm in place": written(f"{L}.input_layernorm.weight", lambda p: p.mul_(3)),
    "last norm in place": written("model.norm.weight", lambda p: p[::2].mul_(3)),
    "weight replaced": replaced(f"{L}.self_attn.v_proj.weight"),
    "norm replaced": replaced("model.layers.1.post_attention_layernorm.weight"),
    "a setting": _set(f"{L}.self_attn", "scaling", 0.9),
    "epsilon": _set(f"{L}.input_layernorm", "variance_epsilon", 0.5),
    "own forward": lambda m: setattr(m.model.layers[0].mlp, "forward", lambda x: torch.tanh(x)),
    "angles": _scaled_angles,
}
_SLOW = {"adapter o_proj", "wrapped norm", "hook q_proj", "hook norm", "hook embedding", "epsilon"}
_SLOW |= {"another activation", "data", "data assigned", "norm replaced", "last norm in place"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in _SLOW else ()) for n in CHANGES]
)
def test_changes_are_followed_everywhere(name: str) -> None:
    model = build("llama")
    fast = llm.optimize(model, dtype=torch.float32)
    given = prompt(1, 12)
    before = logits(fast, given)
    llm.generate(fast, given["input_ids"], max_new_tokens=20)  # a step is recorded
    for one in (model, fast):
        CHANGES[name](one)
    assert_follows(fast, model, given, before)


@pytest.mark.parametrize(
    "name", ["adapter q_proj", "hook down_proj", "in place", "data", "a view", "head in place"]
)
@pytest.mark.parametrize("weights", [None, "int8"])
def test_changes_of_packed_weights_are_followed(name: str, weights: str | None) -> None:
    model = build("llama")
    fast = llm.optimize(model, weights=weights)
    given = prompt(1, 12)
    usual = distance(logits(fast, given), logits(model, given))
    for one in (model, fast):
        CHANGES[name](one)
    expected = logits(model, given)
    assert distance(logits(fast, given), expected) < 1.5 * usual + 0.005
    whole = tokens(fast, given)
    assert torch.equal(llm.generate(fast, given["input_ids"], max_new_tokens=10)[:, 12:], whole)


def _is_fused(model: Any) -> bool:
    forwards = [layer.__dict__["forward"] for layer in model.model.layers]
    with torch.no_grad():
        return all(forward.standing.allows() for forward in forwards)


def test_what_is_as_before_is_fused_again() -> None:
    fast = llm.optimize(build("llama"))
    given = prompt(1, 12)
    before = logits(fast, given)
    assert _is_fused(fast)
    down = fast.model.layers[0].mlp.down_proj
    handle = down.register_forward_hook(lambda m, args, out: out)
    assert not _is_fused(fast)
    logits(fast, given)
    handle.remove()
    assert _is_fused(fast)
    fast.model.layers[0].mlp.down_proj = Adapter(down, 64, 128)
    assert not _is_fused(fast)
    fast.model.layers[0].mlp.down_proj = down
    assert _is_fused(fast)
    state = fast.state_dict()  # holds the plain values
    assert torch.equal(logits(fast, given), before) or distance(logits(fast, given), before) < 0.02
    del state
    assert _is_fused(fast)
    fast(given["input_ids"], output_hidden_states=True)  # transformers adds its own hooks
    assert _is_fused(fast)
    assert torch.equal(logits(fast, given), before)


def test_modes_run_the_models_own_code() -> None:
    model = build("llama")
    fast = llm.optimize(model, dtype=torch.float32)
    ids = prompt(1, 9)["input_ids"]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(fast(ids).logits, model(ids).logits)
        assert fast(ids).logits.dtype == model(ids).logits.dtype
    weight = fast.model.layers[0].mlp.down_proj.weight.requires_grad_()
    fast(ids).logits.square().sum().backward()
    model(ids).logits.square().sum().backward()
    own = model.model.layers[0].mlp.down_proj.weight
    torch.testing.assert_close(weight.grad, own.grad, rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        assert distance(fast(ids).logits, model(ids).logits) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_dtype_afterwards_runs(dtype: torch.dtype) -> None:
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    model = build("llama")
    fast = llm.optimize(model, dtype=dtype).to(other)
    ids = prompt(1, 9)["input_ids"]
    with torch.no_grad():
        found = fast(ids).logits
        assert found.dtype == other
        assert distance(found.float(), model(ids).logits) < 0.02
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(
        llm.generate(fast, ids, max_new_tokens=5)[:, 9:], tokens(fast, given, max_new_tokens=5)
    )


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.parametrize("weights", [None, "int8"])
def test_copies_follow_their_own_modules(way: str, weights: str | None) -> None:
    model = build("llama")
    fast = llm.optimize(model, weights=weights)
    given = prompt(1, 12)
    before = logits(fast, given)
    copied = copy.deepcopy(fast) if way == "deepcopy" else pickle.loads(pickle.dumps(fast))
    assert distance(logits(copied, given), before) < 0.01
    for one in (model, copied):
        CHANGES["in place"](one)
        CHANGES["adapter down_proj"](one)
    assert distance(logits(copied, given), logits(model, given)) < 0.05
    assert torch.equal(logits(fast, given), before)
    ids = given["input_ids"]
    found = llm.generate(copied, ids, max_new_tokens=6)[:, 12:]
    assert torch.equal(found, tokens(copied, given, max_new_tokens=6))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "mixtral"])
def test_a_deep_copy_holds_a_packed_weight_once(family: str) -> None:
    fast = llm.optimize(build(family))
    copied = copy.deepcopy(fast)
    for one, other in ((fast, copied), (copied, fast)):
        panels = {memory for parameter in one.parameters() for memory in _panels(parameter)}
        read = {memory for tensor in tensors_of(llm.fused_model(one)) for memory in _panels(tensor)}
        assert len(read) > 3 and read <= panels
        theirs = {memory for parameter in other.parameters() for memory in _panels(parameter)}
        assert not panels & theirs


def _panels(weight: Any) -> list[int]:
    """Where the panels of a weight lie: of all experts, of what its values are looked up in."""
    while isinstance(weight, LookUpWeight) and not isinstance(weight, StackedWeight):
        weight = weight.packed
    stored = weight.packed if isinstance(weight, StackedWeight) else [weight]
    return [
        one.packed.untyped_storage().data_ptr() for one in stored if isinstance(one, PanelWeight)
    ]


def test_changes_between_two_tokens_are_followed() -> None:
    given = prompt(1, 12)["input_ids"]
    runs = []
    for fused in (False, True):
        model: Any = build("llama")
        if fused:
            model = llm.optimize(model, dtype=torch.float32)
        found = []
        for place, token in enumerate(llm.stream(model, given, max_new_tokens=24)):
            found.append(int(token))
            if place == 4:
                CHANGES["norm in place"](model)
            if place == 18:
                CHANGES["hook down_proj"](model)
        runs.append(found)
    assert runs[0] == runs[1]


def test_undo_keeps_what_was_written() -> None:
    model = build("llama")
    fast = llm.optimize(model, inplace=True)
    with torch.no_grad():
        fast.model.layers[0].self_attn.q_proj.weight.fill_(0.25)
        fast.model.layers[0].mlp.up_proj.weight[2] = 0.5
    oxytorch.undo(fast)
    assert bool((fast.model.layers[0].self_attn.q_proj.weight == 0.25).all())
    assert bool((fast.model.layers[0].mlp.up_proj.weight[2] == 0.5).all())


@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_tied_head_and_its_embedding_stay_one_weight(name: str, weights: str | None) -> None:
    model: Any = build("gemma3")
    fast: Any = llm.optimize(model, weights=weights)
    given = prompt(1, 12)
    usual = distance(logits(fast, given), logits(model, given))
    llm.generate(fast, given["input_ids"], max_new_tokens=16)
    for one in (model, copy.deepcopy(fast), fast):
        with torch.no_grad():
            dict(one.named_parameters(remove_duplicate=False))[name][20:60].mul_(-2)
        if one is not model:
            assert distance(logits(one, given), logits(model, given)) < 1.5 * usual + 0.02
            found = llm.generate(one, given["input_ids"], max_new_tokens=10)[:, 12:]
            assert torch.equal(found, tokens(one, given))
