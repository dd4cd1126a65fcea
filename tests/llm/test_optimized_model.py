"""What an optimized language model still does as before, and what is refused."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from language_models import FAMILIES, build, distance, logits, prompt, tokens, usual_distance

import oxytorch
from oxytorch import llm
from oxytorch.llm.optimize import optimize
from oxytorch.ops.panels import PanelWeight
from oxytorch.rewriting import memory

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def pair() -> Any:
    """A Llama and the same one optimized, both in float32."""
    model = build("llama")
    return model, llm.optimize(model, dtype=torch.float32)


def test_import_leaves_transformers_alone() -> None:
    code = "import sys, oxytorch; oxytorch.llm.optimize; print('transformers' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_sampling_streaming_and_returned_scores_are_as_before(pair: Any) -> None:
    given = prompt()
    drawn = []
    for one in pair:
        torch.manual_seed(5)
        drawn.append(tokens(one, given, do_sample=True, top_k=20, temperature=0.9))
    assert torch.equal(*drawn)

    class Streamer:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.seen += value.flatten().tolist()

        def end(self) -> None:
            self.seen.append(-1)

    streamers = [Streamer(), Streamer()]
    for one, streamer in zip(pair, streamers, strict=True):
        tokens(one, _first(given), streamer=streamer)
    assert streamers[0].seen == streamers[1].seen and streamers[0].seen[-1] == -1
    both = [
        one.generate(
            **given, max_new_tokens=4, output_scores=True, return_dict_in_generate=True,
            pad_token_id=0,
        )
        for one in pair
    ]  # fmt: skip
    for mine, own in zip(both[1].scores, both[0].scores, strict=True):
        torch.testing.assert_close(mine, own, rtol=1e-4, atol=1e-4)


def _first(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value[:1] for name, value in given.items()}


def test_beams_follow_a_table_instead_of_copying(pair: Any) -> None:
    model, fast = pair
    given = prompt(2, 14)
    options = {"num_beams": 4, "max_new_tokens": 300 - 14, "num_return_sequences": 2}
    assert torch.equal(tokens(fast, given, **options), tokens(model, given, **options))


def test_long_text_outgrows_the_first_room(pair: Any) -> None:
    model, fast = pair
    given = prompt(2, 200)
    assert torch.equal(
        tokens(fast, given, max_new_tokens=400), tokens(model, given, max_new_tokens=400)
    )


@pytest.mark.parametrize(
    "options",
    [
        {"use_cache": False},
        {"num_return_sequences": 3, "do_sample": True},
        {"num_beams": 3, "do_sample": True},
        {"past_key_values": transformers.DynamicCache},
    ],
    ids=lambda options: "-".join(options),
)
def test_generate_takes_its_options(pair: Any, options: dict[str, Any]) -> None:
    given = prompt()
    found = []
    for one in pair:
        torch.manual_seed(3)
        made = {name: value() if callable(value) else value for name, value in options.items()}
        found.append(tokens(one, given, **made))
    assert torch.equal(*found)


def test_forward_takes_its_arguments(pair: Any) -> None:
    given = prompt()
    ids, mask = given["input_ids"], given["attention_mask"]
    full = torch.ones(2, 1, 21, 21, dtype=torch.bool)
    calls: list[dict[str, Any]] = [
        {"input_ids": ids},
        {"input_ids": ids, "logits_to_keep": 2},
        {"input_ids": ids, "attention_mask": full},  # not causal: a mask says everything
        {"inputs_embeds": pair[0].get_input_embeddings()(ids).detach(), "attention_mask": mask},
        {"input_ids": ids, "labels": ids},
    ]
    for call in calls:
        with torch.no_grad():
            expected, found = (one(**call) for one in pair)
        seen = mask.bool()[:, -expected.logits.shape[1] :]
        torch.testing.assert_close(found.logits[seen], expected.logits[seen], rtol=1e-4, atol=1e-4)
        if expected.loss is not None:
            torch.testing.assert_close(found.loss, expected.loss)


def test_assisted_decoding_crops_the_cache(pair: Any) -> None:
    model, fast = pair
    helper = build("llama")
    with torch.no_grad():
        for parameter in helper.parameters():
            parameter += 0.002 * torch.randn_like(parameter)
    given = _first(prompt())
    options = {"max_new_tokens": 30, "eos_token_id": 199}  # older releases want one to look up
    expected = tokens(model, given, **options)
    assert torch.equal(tokens(fast, given, assistant_model=helper, **options), expected)
    looked_up = [tokens(one, given, prompt_lookup_num_tokens=3, **options) for one in pair]
    assert torch.equal(*looked_up)


@pytest.mark.parametrize("first_is", ["plain", "fused"])
def test_a_cache_of_one_model_is_taken_over_by_the_other(pair: Any, first_is: str) -> None:
    begins, goes_on = pair if first_is == "plain" else reversed(pair)
    ids = prompt(2, 12)["input_ids"]
    with torch.no_grad():
        first = begins(ids[:, :8], use_cache=True)
        second = goes_on(ids[:, 8:], past_key_values=first.past_key_values)
        torch.testing.assert_close(second.logits, pair[0](ids).logits[:, 8:], rtol=1e-4, atol=1e-4)
        assert second.past_key_values.get_seq_length() == 12


def test_calls_that_the_fused_layers_do_not_know_run_the_models_code(pair: Any) -> None:
    fast = pair[1]
    ids = prompt(1, 9)["input_ids"]
    hidden = [one(ids, output_hidden_states=True).hidden_states for one in pair]
    assert len(hidden[1]) == 3
    for mine, own in zip(hidden[1], hidden[0], strict=True):
        torch.testing.assert_close(mine, own, rtol=1e-4, atol=1e-4)
    static = [tokens(one, {"input_ids": ids}, cache_implementation="static") for one in pair]
    assert torch.equal(*static)
    gradients = []
    for one in pair:
        states = one.get_input_embeddings()(ids).detach().requires_grad_()
        one(inputs_embeds=states).logits.square().sum().backward()
        gradients.append(states.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-4)
    seen = []
    layer = fast.model.layers[0].mlp
    handle = layer.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    fast(ids)
    handle.remove()
    assert seen == [(1, 9, 64)]


def test_attentions_are_returned_where_they_are_asked_for() -> None:
    model = build("llama")
    model.set_attn_implementation("eager")
    fast = llm.optimize(model, dtype=torch.float32)
    ids = prompt(1, 9)["input_ids"]
    with torch.no_grad():
        plain = fast(ids).logits
        found = fast(ids, output_attentions=True)
        expected = model(ids, output_attentions=True)
        assert torch.equal(fast(ids).logits, plain)
    assert len(found.attentions) == 2
    for mine, own in zip(found.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(mine, own, rtol=1e-4, atol=1e-5)


def test_gradients_pass_packed_weights() -> None:
    model = build("llama")
    fast = llm.optimize(model)
    gradients = []
    for one in (model, fast):
        states = one.get_input_embeddings()(prompt(1, 9)["input_ids"] * 0 + 7).detach()
        states.requires_grad_()
        one(inputs_embeds=states).logits.float().square().sum().backward()
        gradients.append(states.grad.float())
    assert distance(gradients[1], gradients[0]) < 0.05


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "falcon_grouped", "mixtral", "gpt2"])
def test_undo_brings_the_model_back(family: str) -> None:
    model = build(family)
    given = prompt()
    expected = logits(model, given)
    kinds = {name: type(module) for name, module in model.named_modules()}
    fast = llm.optimize(model, weights="int8", inplace=True)
    assert fast is model
    assert oxytorch.undo(model) is model
    assert all(type(p) is torch.nn.Parameter and p.requires_grad for p in model.parameters())
    assert all(p.dtype == torch.float32 for p in model.parameters())
    for name, module in model.named_modules():
        assert type(module) is kinds[name] and "forward" not in module.__dict__
        assert not module._state_dict_hooks and not module._load_state_dict_post_hooks
    assert usual_distance(logits(model, given), expected) < 0.05
    assert llm.fused_model(model) is None
    with pytest.raises(ValueError, match="expected a model returned by"):
        oxytorch.explain(model)


@pytest.mark.parametrize("family", ["llama", "phi3", "opt", "falcon_grouped", "mixtral"])
def test_load_state_dict_reaches_the_packed_weights(family: str) -> None:
    model = build(family)
    other = build(family)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    fast = llm.optimize(model)
    fast.load_state_dict(other.state_dict())
    given = prompt()
    assert distance(logits(fast, given), logits(other, given)) < 0.05
    cache = llm.fused_model(fast).cache(1, 21)
    with torch.no_grad():
        found = llm.fused_model(fast).step(given["input_ids"][:1], cache, last=False)
    assert distance(found[0].float(), logits(other, given)[:21]) < 0.05


def test_tied_head_is_packed_beside_the_embedding() -> None:
    model = build("gemma3")
    fast = llm.optimize(model, weights="int8")
    assert isinstance(fast.lm_head.weight, PanelWeight)
    embedding = fast.get_input_embeddings().weight
    assert type(embedding) is torch.nn.Parameter and embedding.dtype == torch.bfloat16
    state = fast.state_dict()
    assert torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])
    oxytorch.undo(fast)
    assert fast.lm_head.weight is fast.get_input_embeddings().weight


@pytest.mark.parametrize("head", ["bf16", "int8", "int4"])
def test_head_has_a_format_of_its_own(head: str) -> None:
    options = {"weights": "int8", "activation_dtype": "int8", "group_size": 32}
    fast = llm.optimize(build("llama"), head=head, **options)
    assert fast.lm_head.weight.format == head
    assert fast.model.layers[0].self_attn.q_proj.weight.format == "int8"


def test_saved_model_has_plain_weights(tmp_path: Any) -> None:
    model = build("llama")
    fast = llm.optimize(model)
    fast.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
    assert again.dtype == torch.bfloat16
    assert type(again.lm_head.weight) is torch.nn.Parameter
    given = prompt()
    assert distance(logits(again, given), logits(model, given)) < 0.02


def test_copies_are_independent() -> None:
    model = build("llama")
    given = prompt()
    fast = llm.optimize(model)
    expected = logits(fast, given)
    twin = copy.deepcopy(fast)
    assert torch.equal(logits(twin, given), expected)
    other = build("llama")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    twin.load_state_dict(other.state_dict())
    assert distance(logits(twin, given), logits(other, given)) < 0.05
    assert torch.equal(logits(fast, given), expected)
    own = logits(model, given)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(logits(fast, given), expected)
    assert distance(expected, own) < 0.02


def test_weights_that_are_quantized_already_stay() -> None:
    model = build("phi3")
    given = prompt()
    oxytorch.quantize_(model, oxytorch.quantization.Int8Weight())
    expected = logits(model, given)
    fast = llm.optimize(model, dtype=torch.float32)
    report = oxytorch.explain(fast)
    assert (report.fused, report.weights, report.head) == (2, "int8", "float32")
    assert distance(logits(fast, given), expected) < 2e-2
    assert fast.model.layers[0].self_attn.qkv_proj.weight.format == "int8"
    oxytorch.undo(fast)
    assert fast.model.layers[0].self_attn.o_proj.weight.format == "int8"
    assert distance(logits(fast, given), expected) < 2e-2


def test_layers_that_are_quantized_in_part_are_not_joined() -> None:
    model = build("llama")
    oxytorch.quantize_(model, oxytorch.quantization.Int8Weight(), filter="*.q_proj")
    given = prompt()
    expected = logits(model, given)
    fast = llm.optimize(model)
    report = oxytorch.explain(fast)
    assert report.fused == 0 and "are packed in different ways" in str(report)
    assert "gated MLP as two products" in str(report)
    assert distance(logits(fast, given), expected) < 2e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_model_steps_without_transformers(family: str) -> None:
    model = build(family)
    fast = llm.optimize(model, dtype=torch.float32)
    whole = llm.fused_model(fast)
    given = prompt(2, 20)
    mask = given["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = whole.cache(2, 20)
    found = []
    with torch.no_grad():
        for begin, end in ((0, 12), (12, 13), (13, 20)):
            part = slice(begin, end)
            found.append(
                whole.step(
                    given["input_ids"][:, part],
                    cache,
                    positions=positions[:, part],
                    mask=mask[:, None, None, :end].bool(),
                    last=False,
                )
            )
        expected = model(**given, position_ids=positions).logits
    assert cache.length == 20
    seen = mask.bool()
    assert distance(torch.cat(found, 1)[seen], expected[seen]) < 1e-5


def test_prompt_longer_than_the_cache_is_refused() -> None:
    whole = llm.fused_model(llm.optimize(build("llama")))
    cache = whole.cache(1, 64)
    with pytest.raises(ValueError, match=r"expected at most 64 tokens.*got 65"):
        whole.step(torch.zeros(1, 65, dtype=torch.int64), cache)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"dtype": torch.float16},
            "expected dtype torch.bfloat16 or torch.float32, got torch.float16",
        ),
        ({"weights": "int3"}, "expected weights None, 'int8', 'int4', 'nf4', 'fp8', got 'int3'"),
        ({"kv_cache": "int4"}, "expected kv_cache None, 'bf16', 'fp32', 'int8', got 'int4'"),
        ({"weights": "int4"}, "divides in_features 64 of model.layers.0.self_attn.q_proj.weight"),
        ({"weights": "int4", "group_size": 48}, "expected group_size 32, 64, 128, 256 or None"),
        (
            {"activation_dtype": "int8"},
            "expected weights 'int8' or 'int4' with activation_dtype='int8'",
        ),
        (
            {"weights": "int8", "activation_dtype": "int4"},
            "expected activation_dtype None or 'int8'",
        ),
        (
            {"weights": oxytorch.quantization.Int4Weight(), "activation_dtype": "int8"},
            "expected activation_dtype=None with a configuration",
        ),
        ({"head": "int3"}, "head 'weights', 'bf16', 'int8', 'int4', 'nf4', 'fp8', got 'int3'"),
    ],
)
def test_arguments_that_do_not_fit_are_named(arguments: dict[str, Any], text: str) -> None:
    model = build("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError) as caught:
        llm.optimize(model, inplace=True, **arguments)
    assert text in str(caught.value)
    state = model.state_dict()
    assert all(torch.equal(state[name], before[name]) for name in before)
    assert "_oxytorch" not in model.__dict__


def test_models_that_do_not_fit_are_named() -> None:
    with pytest.raises(TypeError, match="expected a causal language model of transformers"):
        llm.optimize(torch.nn.Linear(4, 4))
    with pytest.raises(TypeError, match="expected a model with an output head"):
        llm.optimize(build("llama").model)
    with pytest.raises(ValueError, match="evaluation mode"):
        llm.optimize(build("llama").train())
    with pytest.raises(ValueError, match="not optimized yet"):
        llm.optimize(llm.optimize(build("llama")))


def test_values_that_are_not_finite_are_named_and_the_model_stays() -> None:
    model = build("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 3] = float("nan")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"finite values in .*down_proj"):
        llm.optimize(model, weights="int8", inplace=True)
    state = model.state_dict()
    assert all(torch.equal(state[name].nan_to_num(), before[name].nan_to_num()) for name in before)
    assert "_oxytorch" not in model.__dict__


def test_memory_is_asked_for_before_work_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    model = build("llama")
    with pytest.raises(MemoryError, match=r"llm.optimize: expected .* of free memory"):
        optimize(model, weights="int8", inplace=True)
    assert "_oxytorch" not in model.__dict__


def test_cache_arguments_are_checked() -> None:
    for arguments, text in (
        ({"batch": 0}, "batch of at least 1, got 0"),
        ({"capacity": 0}, "capacity of at least 1, got 0"),
        ({"dtype": torch.float16}, "expected dtype to be one of"),
    ):
        given = {"layers": 2, "batch": 1, "capacity": 10, "kv_heads": 2, "head_dim": 8, **arguments}
        with pytest.raises(ValueError, match=text):
            llm.KVCache(**given)
    cache = llm.KVCache(2, 3, 100, 2, 8, torch.int8)
    assert cache.capacity == 128 and cache.nbytes == 2 * 2 * 3 * 2 * 128 * (8 + 4)
    cache.length = 7
    with pytest.raises(ValueError, match="expected length 0 to 7, got 8"):
        cache.crop(8)


@pytest.mark.parametrize("weights", [None, "int4"])
def test_a_head_that_is_not_finite_is_refused(weights: str | None) -> None:
    model = build("llama")
    model.lm_head.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="finite values in the weight of the output head"):
        llm.optimize(model, weights=weights, group_size=32)
