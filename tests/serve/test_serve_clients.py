"""Clients that people have work unchanged: the page's lines of curl, and langchain-openai."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from small_servers import SENTENCE_SIZES, Running, running, tokenizer, write_language_model
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, BertModel

import oxytorch

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
ADDRESS = "http://127.0.0.1:8000"


def lines_of_the_page() -> dict[str, list[str]]:
    """The words of each line of curl in the page's blocks, by the path that it asks."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    commands = [
        shlex.split(line, comments=True)
        for block in blocks
        for line in block.replace("\\\n", "").splitlines()
    ]
    asked = [words for words in commands if words[:1] == ["curl"]]
    return {words[1].removeprefix(ADDRESS): words for words in asked}


CURL = lines_of_the_page()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clients")


@pytest.fixture(scope="module")
def language(folder: Path) -> Iterator[Running]:
    with running(str(write_language_model(folder / "model"))) as server:
        yield server


@pytest.fixture(scope="module")
def embedding(folder: Path) -> Iterator[Running]:
    torch.manual_seed(0)
    written = write(folder / "embed", BertModel(BertConfig(**SENTENCE_SIZES)))
    with running(str(written), "--pooling", "mean") as server:
        yield server


def write(folder: Path, model: Any) -> Path:
    model.eval().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def asked_by_curl(server: Running, path: str) -> str:
    """What the page's line for this path prints, with the server's own address."""
    words = [word.replace(ADDRESS, server.url) for word in CURL[path]]
    done = subprocess.run(
        [*words, "--silent", "--show-error", "--fail-with-body", "--noproxy", "*"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Linear(nn.Linear):
    """With the page's name of the input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


def test_page_has_a_line_for_each_kind_of_model() -> None:
    assert {*CURL} == {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/embeddings",
        "/v1/rerank",
        "/v2/models/net/infer",
        "/v1/models",
    }


@needs_curl
def test_curl_completes_and_chats(language: Running) -> None:
    answer = json.loads(asked_by_curl(language, "/v1/completions"))
    assert answer["usage"]["completion_tokens"] == 32
    events = asked_by_curl(language, "/v1/chat/completions").split("\n\n")
    parts = [json.loads(event.removeprefix("data: ")) for event in events if "{" in event]
    assert all(part["object"] == "chat.completion.chunk" for part in parts)
    assert "data: [DONE]" in events


@needs_curl
def test_curl_embeds_and_ranks(embedding: Running, folder: Path) -> None:
    data = json.loads(asked_by_curl(embedding, "/v1/embeddings"))["data"]
    assert [len(each["embedding"]) for each in data] == [SENTENCE_SIZES["hidden_size"]] * 2
    config = BertConfig(**SENTENCE_SIZES, num_labels=1)
    written = write(folder / "cross", BertForSequenceClassification(config))
    with running(str(written)) as server:
        results = json.loads(asked_by_curl(server, "/v1/rerank"))["results"]
    assert len(results) == 1 and results[0]["index"] in (0, 1)


@needs_curl
def test_curl_calls_a_program(folder: Path) -> None:
    model = Linear(4, 2)
    exported = torch.export.export(model.eval(), (torch.ones(1, 4),))
    path = folder / "net.oxy"
    oxytorch.save(oxytorch.optimize(exported), path)
    with running(str(path)) as server:
        (output,) = json.loads(asked_by_curl(server, "/v2/models/net/infer"))["outputs"]
    found = torch.tensor(output["data"]).view(output["shape"])
    torch.testing.assert_close(found, model(torch.tensor([[1.0, 2, 3, 4]])))


def test_langchain_gets_what_openai_gets(language: Running, embedding: Running) -> None:
    langchain = pytest.importorskip("langchain_openai")
    url = {"base_url": language.url + "/v1", "api_key": "none"}
    own = openai.OpenAI(**url, max_retries=0)
    told: Any = [{"role": "user", "content": "Once upon"}]
    wanted = own.chat.completions.create(
        model="model", messages=told, max_tokens=16, temperature=0
    ).choices[0]

    chat = langchain.ChatOpenAI(model="model", temperature=0, max_tokens=16, max_retries=0, **url)
    answer = chat.invoke("Once upon")
    assert answer.content == wanted.message.content
    assert answer.usage_metadata["output_tokens"] == 16
    assert answer.response_metadata["finish_reason"] == "length"
    parts = [part.content for part in chat.stream("Once upon")]
    assert len(parts) > 1 and "".join(parts) == wanted.message.content
    assert [each.content for each in chat.batch(["Once upon"] * 3)] == [answer.content] * 3
    tool = {"name": "look", "description": "looks", "parameters": {"type": "object"}}
    assert isinstance(chat.bind_tools([tool]).invoke("Once upon").content, str)

    text = langchain.OpenAI(model="model", temperature=0, max_tokens=16, max_retries=0, **url)
    completed = own.completions.create(
        model="model", prompt="Once upon", max_tokens=16, temperature=0
    )
    assert text.invoke("Once upon") == completed.choices[0].text

    vectors = langchain.OpenAIEmbeddings(
        model="embed",
        base_url=embedding.url + "/v1",
        api_key="none",
        check_embedding_ctx_length=False,
        max_retries=0,
    )
    found = vectors.embed_documents(["a text", "and one more"])
    data = openai.OpenAI(base_url=embedding.url + "/v1", api_key="none").embeddings.create(
        model="embed", input=["a text", "and one more"]
    )
    torch.testing.assert_close(
        torch.tensor(found), torch.tensor([each.embedding for each in data.data])
    )
