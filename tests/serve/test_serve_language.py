"""A language model behind HTTP gives what `oxytorch.llm.generate` gives."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from small_servers import (
    TEXT,
    Running,
    application,
    running,
    tokenizer,
    wait_until,
    write_language_model,
)

import oxytorch
from oxytorch.llm_command.folder import load_model, load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_language_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(str(folder), "--slots", "8", "--prompt-part", "64", "--exact") as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


class Single:
    """The same model by itself."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = load_tokenizer(folder)
        self.model = oxytorch.llm.optimize(load_model(folder), inplace=True)

    def tokens(self, prompt: str, new: int, **options: Any) -> list[int]:
        ids = torch.tensor([self.tokenizer(prompt)["input_ids"]])
        found = oxytorch.llm.generate(self.model, ids, max_new_tokens=new, **options)
        return found[0, ids.shape[1] :].tolist()

    def text(self, prompt: str, new: int, **options: Any) -> str:
        return self.tokenizer.decode(self.tokens(prompt, new, **options), skip_special_tokens=True)


@pytest.fixture(scope="module")
def single(folder: Path) -> Single:
    return Single(folder)


def test_completion_is_that_of_generate(client: openai.OpenAI, single: Single) -> None:
    answer = client.completions.create(
        model="tiny", prompt="Once upon a time", max_tokens=20, temperature=0
    )
    assert answer.choices[0].text == single.text("Once upon a time", 20)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20
    assert answer.usage.prompt_tokens == len(single.tokenizer("Once upon a time")["input_ids"])


def test_eight_clients_at_once_get_what_each_gets_alone(
    client: openai.OpenAI, single: Single, server: Running
) -> None:
    prompts = [(TEXT[7 * i : 7 * i + 5 + 47 * (i % 9)], 5 + 11 * (i % 4)) for i in range(40)]

    def ask(job: tuple[str, int]) -> str:
        prompt, new = job
        answer = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=new, temperature=0
        )
        return answer.choices[0].text

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, prompts))
    for (prompt, new), answer in zip(prompts, answers, strict=True):
        assert answer == single.text(prompt, new)
    assert server.metrics.batch.mean > 1
    assert server.figure("oxytorch_running") == 0


def chat_prompt(text: str) -> str:
    return f"<user>{text}<assistant>"


def _chat(client: openai.OpenAI, text: str, tokens: int, **options: Any) -> Any:
    """The answer of so many tokens to a message, of the most likely ones."""
    messages: Any = [{"role": "user", "content": text}]
    return client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=tokens, temperature=0, **options
    )


def test_chat_uses_the_template(client: openai.OpenAI, single: Single) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hello"}],
        max_completion_tokens=12,
        temperature=0,
    )
    assert answer.choices[0].message.content == single.text(chat_prompt("Hello"), 12)
    assert answer.choices[0].message.role == "assistant"


def test_tools_reach_the_template_and_answers_stay_text(
    client: openai.OpenAI, single: Single
) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": [{"type": "text", "text": "Weather?"}]}],
        tools=[{"type": "function", "function": {"name": "weather", "parameters": {}}}],
        max_tokens=8,
        temperature=0,
    )
    assert answer.choices[0].message.content == single.text(
        "<tool>weather" + chat_prompt("Weather?"), 8
    )
    assert answer.choices[0].message.tool_calls is None


def test_stream_is_the_whole_answer_in_parts(client: openai.OpenAI, single: Single) -> None:
    stream = _chat(client, "Hello", 30, stream=True, stream_options={"include_usage": True})
    parts = list(stream)
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == single.text(chat_prompt("Hello"), 30)
    assert parts[-2].choices[0].finish_reason == "length"
    assert parts[-1].usage is not None and parts[-1].usage.completion_tokens == 30
    assert len(parts) > 5


def test_streamed_completion_is_that_of_generate(client: openai.OpenAI, single: Single) -> None:
    parts = client.completions.create(
        model="tiny", prompt="A tiny", max_tokens=25, temperature=0, stream=True
    )
    assert "".join(part.choices[0].text for part in parts) == single.text("A tiny", 25)


def test_stop_ends_before_its_text(client: openai.OpenAI, single: Single) -> None:
    whole = single.text("Once", 40)
    stop = whole[11:14]
    for stream in (False, True):
        answer: Any = client.completions.create(
            model="tiny", prompt="Once", max_tokens=40, temperature=0, stop=[stop], stream=stream
        )
        if not stream:
            assert answer.choices[0].text == whole[: whole.index(stop)]
            assert answer.choices[0].finish_reason == "stop"
        else:
            text = "".join(part.choices[0].text for part in answer)
            assert text == whole[: whole.index(stop)]


def test_same_seed_gives_the_same_answer(client: openai.OpenAI, single: Single) -> None:
    def ask(seed: int, n: int = 1) -> list[str]:
        answer = client.completions.create(
            model="tiny", prompt="Once", max_tokens=20, temperature=0.9, top_p=0.9, seed=seed, n=n
        )
        return [choice.text for choice in sorted(answer.choices, key=lambda each: each.index)]

    first = ask(5)
    assert first == ask(5) != ask(6)
    assert first == [single.text("Once", 20, temperature=0.9, top_p=0.9, seed=5)]
    both = ask(5, n=2)
    assert both[0] == first[0] and both[1] == ask(6)[0]


def test_top_p_of_0_takes_the_most_likely_token(client: openai.OpenAI) -> None:
    texts = [
        client.completions.create(model="tiny", prompt="Once", max_tokens=20, **how).choices[0].text
        for how in ({"temperature": 0}, {"temperature": 1.5, "top_p": 0, "seed": 3})
    ]
    assert texts[0] == texts[1]


def test_logprobs_are_those_of_the_model(client: openai.OpenAI, single: Single) -> None:
    chat = _chat(client, "Hi", 6, logprobs=True, top_logprobs=3)
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content
    assert content is not None and len(content) == 6
    tokens = single.tokens(chat_prompt("Hi"), 6)
    assert [each.token for each in content] == [single.tokenizer.decode([t]) for t in tokens]
    for each in content:
        assert each.logprob == each.top_logprobs[0].logprob <= 0
        assert len(each.top_logprobs) == 3
    losses = oxytorch.llm.token_losses(
        single.model,
        torch.tensor(single.tokenizer(chat_prompt("Hi"))["input_ids"] + tokens),
        window=128,
    )
    torch.testing.assert_close(
        torch.tensor([-each.logprob for each in content]),
        losses.flatten()[-6:].float(),
        rtol=0.02,
        atol=0.02,
    )
    text = client.completions.create(
        model="tiny", prompt="Hi", max_tokens=4, temperature=0, logprobs=2
    )
    found = text.choices[0].logprobs
    assert found is not None and found.tokens is not None and found.text_offset is not None
    assert len(found.tokens) == 4 and found.text_offset[0] == 0


def test_several_prompts_and_choices_are_numbered(client: openai.OpenAI, single: Single) -> None:
    ids = single.tokenizer("Once upon")["input_ids"]
    answer = client.completions.create(
        model="tiny", prompt=["Once", "A tiny model"], n=2, max_tokens=7, temperature=0
    )
    texts = [choice.text for choice in answer.choices]
    first, second = single.text("Once", 7), single.text("A tiny model", 7)
    assert texts == [first, first, second, second]
    assert answer.usage is not None and answer.usage.completion_tokens == 28
    by_tokens = client.completions.create(model="tiny", prompt=ids, max_tokens=7, temperature=0)
    assert by_tokens.choices[0].text == single.text("Once upon", 7)


def test_long_answers_step_together(client: openai.OpenAI, single: Single, server: Running) -> None:
    before = server.metrics.batch.count
    answer = client.completions.create(
        model="tiny", prompt=["Once", "A tiny"], n=4, max_tokens=300, temperature=0
    )
    texts = [choice.text for choice in answer.choices]
    assert texts == [single.text("Once", 300)] * 4 + [single.text("A tiny", 300)] * 4
    # 8 x 299 tokens behind the first ones, in fewer steps than two of them would take.
    assert server.metrics.batch.count - before < 2 * 300


def test_shared_beginnings_are_read_once(
    client: openai.OpenAI, single: Single, server: Running
) -> None:
    start = TEXT[100:500]
    before = server.metrics.tokens.of("cached")
    for number in range(4):
        prompt = start + f" and then number {number} of them said something else to all the others."
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=9, temperature=0)
        assert answer.choices[0].text == single.text(prompt, 9)
    usage = answer.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens
    assert usage.prompt_tokens_details.cached_tokens > usage.prompt_tokens // 2
    assert server.metrics.tokens.of("cached") > before


def test_penalties_change_the_answer(client: openai.OpenAI, single: Single) -> None:
    plain = client.completions.create(model="tiny", prompt="aaaa", max_tokens=30, temperature=0)
    other = client.completions.create(
        model="tiny",
        prompt="aaaa",
        max_tokens=30,
        temperature=0,
        frequency_penalty=2.0,
        presence_penalty=2.0,
    )
    repeated = client.completions.create(
        model="tiny",
        prompt="aaaa",
        max_tokens=30,
        temperature=0,
        extra_body={"repetition_penalty": 1.8},
    )
    assert other.choices[0].text != plain.choices[0].text
    assert repeated.choices[0].text == single.text("aaaa", 30, repetition_penalty=1.8)


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"model": "other"}, 404, "'other' does not exist"),
        ({"prompt": TEXT * 5}, 400, "maximum context length is 512"),
        ({"max_tokens": 512}, 400, "maximum context length is 512"),
        ({"max_tokens": 600}, 400, "at most 512, got 600"),
        ({"n": 17}, 400, "at most 16 completions"),
        ({"n": 0}, 400, "n: "),
        ({"temperature": -1}, 400, "temperature: "),
        ({"prompt": None}, 400, "prompt is missing"),
        ({"prompt": ""}, 400, "prompt has no tokens"),
        ({"prompt": [5, 700]}, 400, "has the token 700"),
        ({"prompt": [-1]}, 400, "has the token -1"),
        ({"prompt": TEXT[:100] * 400}, 400, "a text of 40000 characters"),
        ({"prompt": ["a"] * 17}, 400, "17 prompts times n=1"),
        ({"prompt": [TEXT[:100] * 400] * 17}, 400, "17 prompts times n=1"),
        ({"stop": [""]}, 400, "stops that are not empty"),
        ({"stop": ["a"] * 17}, 400, "at most 16 stops, got 17"),
        ({"repetition_penalty": 1e-300}, 400, "repetition_penalty: "),
        (
            {"logit_bias": {"5": 1.0}},
            400,
            "logit_bias is not supported by this server; leave it out",
        ),
        ({"best_of": 4}, 400, "best_of"),
        ({"nonsense": 1}, 400, "nonsense is not supported"),
    ],
)
def test_wrong_completion_is_refused(
    server: Running, changes: dict[str, Any], status: int, words: str
) -> None:
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 4, **changes}
    answer = httpx.post(server.url + "/v1/completions", json=body)
    error = answer.json()["error"]
    assert answer.status_code == status, error
    assert words in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert server.figure("oxytorch_running") == server.figure("oxytorch_waiting") == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"messages": []}, "messages: "),
        ({"messages": [{"content": "x"}]}, "a role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "parts of type text",
        ),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 3}, "needs logprobs"),
        ({"max_tokens": 512}, "maximum context length"),
    ],
)
def test_wrong_chat_is_refused(server: Running, changes: dict[str, Any], words: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], **changes}
    answer = httpx.post(server.url + "/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_client_that_vanishes_frees_its_slot(server: Running) -> None:
    before = server.metrics.cancelled.total
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 500, "temperature": 0}
    with httpx.stream("POST", server.url + "/v1/completions", json={**body, "stream": True}) as one:
        next(one.iter_lines())
    wait_until(lambda: server.figure("oxytorch_running") == 0)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + "/v1/completions", json={**body, "n": 16}, timeout=0.3)
    wait_until(lambda: server.figure("oxytorch_running") + server.figure("oxytorch_waiting") == 0)
    assert server.metrics.cancelled.total >= before + 2


def test_model_file_gives_the_same_text(folder: Path, single: Single, tmp_path: Path) -> None:
    path = tmp_path / "tiny.oxy"
    oxytorch.save(single.model, path)
    with running(str(path), "--tokenizer", str(folder), "--slots", "2") as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        answer = client.completions.create(
            model="tiny", prompt="Once upon", max_tokens=20, temperature=0
        )
    assert answer.choices[0].text == single.text("Once upon", 20)


def test_unknown_model_takes_turns(tmp_path: Path) -> None:
    """A model that is not known as a whole: Mamba's state is no cache of keys."""
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path / "mamba"
    config = MambaConfig(
        vocab_size=512, hidden_size=32, num_hidden_layers=2, state_size=8, eos_token_id=None
    )
    MambaForCausalLM(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    alone = Single(folder)
    prompts = ["Once", "A tiny model", "there"]
    with running(str(folder), "--context", "128", "--slots", "3") as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)

        def ask(prompt: str) -> str:
            answer = client.completions.create(
                model="mamba", prompt=prompt, max_tokens=8, temperature=0
            )
            return answer.choices[0].text

        with ThreadPoolExecutor(3) as pool:
            answers = list(pool.map(ask, prompts))
    assert answers == [alone.text(prompt, 8) for prompt in prompts]


def with_template(folder: Path, template: str, to: Path) -> Path:
    """The tokenizer of a folder with another chat template."""
    made = load_tokenizer(folder)
    made.chat_template = template
    made.save_pretrained(to)
    return to


@pytest.mark.parametrize("template", ["{% for message in messages %}", "{{ messages | unknown }}"])
def test_what_is_no_chat_template_does_not_start(
    template: str, folder: Path, tmp_path: Path
) -> None:
    broken = with_template(folder, template, tmp_path / "broken")
    with pytest.raises(ValueError, match=r"in line 1: .*; mend or remove it \(chat_template.jinja"):
        application(str(folder), "--tokenizer", str(broken), "--slots", "1")


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{{ raise_exception('no user may ask') }}", "no user may ask"),
        ("{{ messages[0].content | length / 0 }}", "ZeroDivisionError"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "RecursionError"),
    ],
)
def test_chat_template_that_raises_refuses_chats_alone(
    template: str, error: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raising = with_template(folder, template, tmp_path / "raising")
    with running(str(folder), "--tokenizer", str(raising), "--slots", "1") as server:
        (warning,) = [each for each in caplog.records if each.levelname == "WARNING"]
        assert error in warning.__dict__["fields"]["error"]
        messages = [{"role": "user", "content": "Hello"}]
        chat = httpx.post(
            server.url + "/v1/chat/completions", json={"model": "tiny", "messages": messages}
        )
        completion = httpx.post(
            server.url + "/v1/completions",
            json={"model": "tiny", "prompt": "Once", "max_tokens": 2},
        )
    assert chat.status_code == 400
    assert error in chat.json()["error"]["message"]
    assert completion.status_code == 200
