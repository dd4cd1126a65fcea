"""Rows of a batch have the results that the model gives each alone."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy
import pytest
import ray
import torch
from small_servers import application as served
from small_servers import write_language_model
from starlette.testclient import TestClient
from torch import nn

import oxytorch
from oxytorch.ray import writing
from oxytorch.ray.rows import Rows


def test_language_model_answers_rows_as_the_server_does(tmp_path: Path) -> None:
    folder = write_language_model(tmp_path / "tiny")
    prompts = ["Once upon", "a time", "", "tiny model " * 9]
    rows = Rows(folder, request={"max_tokens": 9}, options={"context": 64, "slots": 2})
    found = rows({"text": prompts, "id": [3, 1, 2, 0]})
    rows.close()
    assert found["id"] == [3, 1, 2, 0]
    app, service, _ = served(str(folder), "--context", "64")
    service.worker.start()
    try:
        client = TestClient(app)
        for prompt, answer, error in zip(prompts, found["answer"], found["error"], strict=True):
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 9, "temperature": 0}
            response = client.post("/v1/completions", json=body)
            assert (response.status_code == 200) == (error is None)
            if error is None:
                assert answer == response.json()["choices"][0]["text"]
            else:
                assert answer is None and error == response.json()["error"]["message"]
    finally:
        service.worker.close()
    assert [error is None for error in found["error"]] == [True, True, False, True]


def test_program_takes_columns_of_its_inputs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    sizes = ({0: torch.export.Dim("rows", max=1024)},)
    exported = torch.export.export(model, (torch.randn(4, 6),), dynamic_shapes=sizes)
    oxytorch.save(oxytorch.optimize(exported), tmp_path / "program.oxy")
    data = numpy.random.default_rng(0).normal(size=(9, 6)).astype("float32")
    rows = Rows(tmp_path / "program.oxy", ["numbers"])
    found = rows({"numbers": data})
    with torch.inference_mode():
        expected = model(torch.from_numpy(data)).numpy()
    numpy.testing.assert_allclose(found["output_0"], expected, atol=1e-5)
    with pytest.raises(ValueError, match="already"):
        rows({"numbers": data, "output_0": data})
    with pytest.raises(ValueError, match="there is no 'numbers'"):
        rows({"others": data})
    rows.close()


def test_wrong_options_are_named(tmp_path: Path) -> None:
    folder = write_language_model(tmp_path / "tiny")
    with pytest.raises(ValueError, match="there is no option port"):
        Rows(folder, options={"port": 1})
    with pytest.raises(ValueError, match="unknown precision"):
        Rows(folder, options={"weights": "int5"})
    with pytest.raises(ValueError, match="expected 1 for a language model"):
        Rows(folder, ["text", "more"])


def test_rows_that_would_wait_for_served_models_are_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "available_resources", lambda: {"memory": 1.0})
    with pytest.warns(UserWarning, match=r"wait for 1 CPU of the cluster, of which 0 are free; .*"):
        writing._tell_if_taken(1.0)
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 0.5})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        writing._tell_if_taken(0.5)
