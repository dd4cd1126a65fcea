"""The loop of `generate`: the tokens of `model.generate`, and what is its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from oxytorch import llm
from tiny import tiny_llama

transformers = pytest.importorskip("transformers")

VOCABULARY = 96


@pytest.fixture(scope="module")
def model():
    """A Llama with large random weights: its answers depend on the whole prompt."""
    return tiny_llama(
        3, vocab_size=VOCABULARY, hidden_size=48, intermediate_size=80, num_hidden_layers=3,
        num_attention_heads=6, max_position_embeddings=256, initializer_range=0.3,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip


class Letters:
    """A tokenizer of one letter a token."""

    def decode(self, tokens, skip_special_tokens=False):
        return "".join(chr(ord(" ") + int(token)) for token in tokens)


def _prompt(batch: int = 1, length: int = 12) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


def _stock(model, ids, new, **options):
    return model.generate(ids, max_new_tokens=new, do_sample=False, **options)


@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_tokens_equal_those_of_the_model(model, batch):
    ids = _prompt(batch)
    found = llm.generate(model, ids, max_new_tokens=24, eos_token_id=[])
    assert torch.equal(found, _stock(model, ids, 24, eos_token_id=None))
    assert found.dtype == torch.int64 and len(set(found[0, 12:].tolist())) > 3


def test_repetition_penalty_gives_the_tokens_of_the_model(model):
    ids = _prompt(2)
    found = llm.generate(model, ids, max_new_tokens=24, repetition_penalty=1.3, eos_token_id=[])
    expected = _stock(model, ids, 24, repetition_penalty=1.3, eos_token_id=None)
    assert torch.equal(found, expected)
    assert not torch.equal(found, llm.generate(model, ids, max_new_tokens=24, eos_token_id=[]))


def test_padding_before_or_after_a_prompt_changes_nothing(model):
    short, long = _prompt(1, 5), _prompt(1, 9)
    alone = [
        llm.generate(model, ids, max_new_tokens=16, eos_token_id=[])[:, ids.shape[1] :]
        for ids in (short, long)
    ]
    mask = torch.ones(2, 9, dtype=torch.int64)
    before, after = mask.clone(), mask.clone()
    before[0, :4] = 0
    after[0, 5:] = 0
    padding = torch.full((1, 4), 7)
    left = torch.cat([torch.cat([padding, short], 1), long])
    right = torch.cat([torch.cat([short, padding], 1), long])
    for ids, kept in ((left, before), (right, after.bool())):
        found = llm.generate(model, ids, attention_mask=kept, max_new_tokens=16, eos_token_id=[])
        assert torch.equal(found[:, :9], ids)
        assert torch.equal(found[:, 9:], torch.cat(alone))
    stock = _stock(model, left, 16, attention_mask=before, eos_token_id=None)
    assert torch.equal(stock[:, 9:], torch.cat(alone))


def test_end_tokens_fill_complete_rows_with_padding(model):
    ids = _prompt(3)
    free = llm.generate(model, ids, max_new_tokens=20, eos_token_id=[])
    end = int(free[0, 14])
    model.generation_config.eos_token_id = end
    try:
        found = llm.generate(model, ids, max_new_tokens=20)
        expected = _stock(model, ids, 20)
    finally:
        model.generation_config.eos_token_id = 2
    assert torch.equal(found, expected)
    complete = found[0, 12:].tolist()
    assert complete[complete.index(end) + 1 :] == [0] * (len(complete) - complete.index(end) - 1)
    assert torch.equal(found, llm.generate(model, ids, max_new_tokens=20, eos_token_id=end))


def test_stop_strings_and_sequences_end_where_they_are_complete(model):
    ids = _prompt()
    new = llm.generate(model, ids, max_new_tokens=20, eos_token_id=[])[0, 12:].tolist()
    wanted = new[7:10]
    place = next(i for i in range(20) if new[i : i + 3] == wanted) + 3
    options = {"max_new_tokens": 20, "eos_token_id": []}
    found = llm.generate(model, ids, stop=[wanted], **options)
    assert found[0, 12:].tolist() == new[:place]
    text = Letters().decode(wanted)
    found = llm.generate(model, ids, stop=text, tokenizer=Letters(), **options)
    assert found[0, 12:].tolist() == new[:place]
    absent = next(t for t in range(3, VOCABULARY) if t not in new)
    found = llm.generate(model, ids, stop=[[absent]], **options)
    assert found[0, 12:].tolist() == new


@pytest.mark.parametrize("guesses", [1, 4, 7])
def test_prompt_lookup_changes_no_token_and_saves_steps(model, guesses):
    calls = []
    hook = model.register_forward_pre_hook(lambda *given: calls.append(1))
    try:
        repeated = _prompt(1, 6).repeat(1, 4)
        for ids in (repeated, _prompt(1, 12)):
            plain = llm.generate(model, ids, max_new_tokens=60, eos_token_id=[])
            steps = len(calls)
            calls.clear()
            found = llm.generate(
                model, ids, max_new_tokens=60, eos_token_id=[], prompt_lookup=guesses
            )
            assert torch.equal(found, plain)
            assert len(calls) < steps == 60
            calls.clear()
    finally:
        hook.remove()


def test_prompt_lookup_stops_at_end_tokens_and_with_a_penalty(model):
    ids = _prompt(1, 6).repeat(1, 4)
    free = llm.generate(model, ids, max_new_tokens=40, eos_token_id=[])
    end = int(free[0, 24 + 17])
    for options in ({"eos_token_id": end}, {"repetition_penalty": 1.2, "eos_token_id": []}):
        plain = llm.generate(model, ids, max_new_tokens=40, **options)
        found = llm.generate(model, ids, max_new_tokens=40, prompt_lookup=5, **options)
        assert torch.equal(found, plain)


def test_seeds_repeat_and_differ(model):
    ids = _prompt(2)

    def draw(seed):
        return llm.generate(model, ids, max_new_tokens=12, temperature=1.5, top_p=0.9, seed=seed)

    assert torch.equal(draw(5), draw(5))
    assert not torch.equal(draw(5), draw(6))


def test_streamers_and_iterators_get_the_tokens_of_the_result(model):
    ids = _prompt(2)
    result = llm.generate(model, ids, max_new_tokens=8, eos_token_id=[])
    columns: list[Tensor] = []
    llm.generate(model, ids, max_new_tokens=8, eos_token_id=[], streamer=columns.append)
    assert torch.equal(torch.stack(columns, 1), result[:, 12:])
    columns = list(llm.stream(model, ids, max_new_tokens=8, eos_token_id=[]))
    assert torch.equal(torch.stack(columns, 1), result[:, 12:])


def test_streamers_of_transformers_write_what_follows_the_prompt(model, capsys):
    class Tokenizer(Letters):
        def decode(self, tokens, **options):
            return super().decode(tokens)

    ids = _prompt()
    streamer = transformers.TextStreamer(Tokenizer(), skip_prompt=True)
    result = llm.generate(model, ids, max_new_tokens=8, eos_token_id=[], streamer=streamer)
    assert capsys.readouterr().out == Letters().decode(result[0, 12:]) + "\n"


def test_stream_runs_the_model_only_as_far_as_it_is_asked(model):
    calls = []
    hook = model.register_forward_pre_hook(lambda *given: calls.append(1))
    try:
        tokens = llm.stream(model, _prompt(), max_new_tokens=8, eos_token_id=[])
        assert calls == []
        next(tokens)
        next(tokens)
        assert len(calls) == 2
    finally:
        hook.remove()
    assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()


BAD = [
    ({"input_ids": torch.zeros(1, 0, dtype=torch.int64)}, r"\[1, 0\] has no token"),
    ({"input_ids": torch.zeros(4, dtype=torch.int64)}, r"got torch.int64 \[4\]"),
    ({"input_ids": torch.zeros(1, 4)}, r"got torch.float32 \[1, 4\]"),
    ({"input_ids": [[1, 2]]}, "got list"),
    ({"input_ids": torch.tensor([[5, VOCABULARY]])}, "token 96, the model knows 0 to 95"),
    ({"input_ids": torch.tensor([[5, -1]])}, "token -1"),
    ({"attention_mask": torch.ones(1, 3)}, r"shape \[1, 4\], got \[1, 3\]"),
    ({"attention_mask": torch.tensor([[1, 0, 1, 1]])}, "both sides of padding"),
    ({"attention_mask": torch.zeros(1, 4)}, "row 0 of attention_mask has no token"),
    ({"max_new_tokens": 0}, "max_new_tokens >= 1, got 0"),
    ({"max_new_tokens": 2.5}, "max_new_tokens >= 1, an integer, got 2.5"),
    ({"max_new_tokens": True}, "max_new_tokens >= 1, got True"),
    ({"seed": 2**70}, "seed 0 to 18446744073709551615, got 1180591620717411303424"),
    ({"seed": "a"}, "seed 0 to 18446744073709551615, an integer, got 'a'"),
    ({"eos_token_id": "a"}, "eos_token_id >= -1, an integer, got 'a'"),
    ({"eos_token_id": [1, None]}, "eos_token_id >= -1, an integer, got None"),
    ({"pad_token_id": 1.5}, "pad_token_id .* an integer, got 1.5"),
    ({"temperature": "hot"}, "temperature >= 0, got 'hot'"),
    ({"temperature": 1.0, "top_k": 2.5}, "top_k >= 1, an integer, got 2.5"),
    ({"temperature": 1.0, "top_p": "a"}, r"top_p in \(0, 1\], got 'a'"),
    ({"repetition_penalty": "a"}, "repetition_penalty > 0, got 'a'"),
    ({"capacity": 99.5}, "capacity >= 1, an integer, got 99.5"),
    ({"stop": 5}, "stop to be a string, or a list .* got 5"),
    ({"stop": [5]}, r"stop to be a string, or a list .* got \[5\]"),
    ({"stop": [["a"]]}, "stop >= 0, an integer, got 'a'"),
    ({"streamer": 3}, "streamer to be a function .* got a int"),
    ({"prompt_lookup": 1.5}, "prompt_lookup 0 to 7, an integer, got 1.5"),
    ({"max_new_tokens": 300}, "4 tokens and 300 new ones are more than the 256 positions"),
    ({"capacity": 5}, "4 tokens and 8 new ones do not fit capacity 5"),
    ({"temperature": -1.0}, "temperature >= 0, got -1.0"),
    ({"temperature": float("nan")}, "temperature >= 0, got nan"),
    ({"temperature": 1.0, "top_k": 0}, "top_k >= 1, got 0"),
    ({"temperature": 1.0, "top_p": 1.5}, r"top_p in \(0, 1\] or None, got 1.5"),
    ({"repetition_penalty": 0.0}, "repetition_penalty > 0, got 0.0"),
    ({"stop": "end"}, "stop 'end' is text"),
    ({"stop": [""]}, "stops that are not empty"),
    ({"prompt_lookup": 8}, "prompt_lookup 0 to 7, got 8"),
    ({"prompt_lookup": -1}, "prompt_lookup 0 to 7, got -1"),
    ({"prompt_lookup": 2, "temperature": 1.0}, "prompt_lookup needs temperature 0, got 1.0"),
    (
        {"prompt_lookup": 2, "input_ids": torch.ones(2, 4, dtype=torch.int64)},
        "prompt_lookup takes a single sequence, got 2",
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input_is_named_before_the_model_runs(model, change, message):
    def fail(*given):
        raise AssertionError("the model ran")

    arguments = {"input_ids": torch.tensor([[4, 5, 6, 7]]), "max_new_tokens": 8, **change}
    hook = model.register_forward_pre_hook(fail)
    try:
        with pytest.raises(ValueError, match=message):
            llm.generate(model, **arguments)
    finally:
        hook.remove()


def test_models_of_another_kind_are_refused():
    with pytest.raises(TypeError, match="causal language model of transformers, got a Linear"):
        llm.generate(torch.nn.Linear(2, 2), torch.ones(1, 2, dtype=torch.int64), max_new_tokens=1)


def test_logits_that_are_not_finite_are_an_error(model):
    weight = model.lm_head.weight
    kept = weight.detach().clone()
    try:
        with torch.no_grad():
            weight[3, :] = float("nan")
        with pytest.raises(RuntimeError, match="finite logits, the largest of row 0 is nan"):
            llm.generate(model, _prompt(), max_new_tokens=2)
    finally:
        with torch.no_grad():
            weight.copy_(kept)


def test_import_of_llm_loads_no_transformers():
    code = "import sys, oxytorch.llm; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
