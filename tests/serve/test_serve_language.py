"""A language model behind HTTP gives what `oxytorch.llm.generate` gives."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from small_servers import TEXT, Running, running, write_language_model

import oxytorch
from oxytorch.llm_command.folder import load_model, load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_language_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(str(folder), "--slots", "8", "--prompt-part", "64") as found:
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
    assert server.metrics.batch.mean > 2
    assert server.figure("oxytorch_running") == 0
