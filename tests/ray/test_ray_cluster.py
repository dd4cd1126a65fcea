"""Models on a cluster of Ray give what they give alone, also where a node is killed."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy
import pyarrow.parquet
import pytest
import ray
from clusters import STORE, cluster, texts, write_sentence_model
from ray import serve
from small_servers import wait_until, write_language_model

from oxytorch.ray import Rows, application, plan, write_results

OPTIONS = {"pooling": "mean"}
INVITES_RETRY = (429, 503)


def dataset(rows: list[str], blocks: int = 8) -> Any:
    items = [{"id": number, "text": text} for number, text in enumerate(rows)]
    return ray.data.from_items(items, override_num_blocks=blocks)


def written(folder: Path, name: str = "embedding") -> dict[int, Any]:
    """Results by key; fails where a key is there twice."""
    found: dict[int, Any] = {}
    for path in folder.glob("*.parquet"):
        for row in pyarrow.parquet.read_table(path).to_pylist():
            assert row["id"] not in found
            found[row["id"]] = row[name]
    return found


def started() -> str:
    """Starts Ray's proxies, and tells the URL of the first one."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    serve.start(proxy_location="HeadOnly", http_options={"port": port})
    return f"http://127.0.0.1:{port}"


def asked(url: str, text: str) -> httpx.Response:
    body = {"model": "small", "input": text}
    return httpx.post(f"{url}/v1/embeddings", json=body, timeout=60)


def test_rows_and_requests_on_a_cluster_have_the_results_of_the_model_alone(tmp_path: Path) -> None:
    folder = write_sentence_model(tmp_path / "small")
    rows = [*texts(90), "word " * 200]
    alone = Rows(folder, options=OPTIONS)
    expected = alone({"text": rows})
    alone.close()
    assert expected["error"][-1] and "maximum context length" in expected["error"][-1]
    with cluster(1):
        assert [node.cpus for node in plan()] == [1.0]
        given = {"key": "id", "batch_size": 16, **OPTIONS}
        done = write_results(dataset(rows[:40]), folder, tmp_path / "out", **given)
        assert (done.rows, done.skipped) == (40, 0)
        seen: list[int] = []
        more = write_results(dataset(rows), folder, tmp_path / "out", progress=seen.append, **given)
        assert (more.rows, more.skipped, more.errors) == (51, 40, 1)
        assert seen[-1] == 51
        found = written(tmp_path / "out")
        assert sorted(found) == list(range(91))
        for number in range(90):
            numpy.testing.assert_allclose(found[number], expected["embedding"][number], atol=1e-5)
        assert found[90] is None

        url = started()
        serve.run(application(folder, replicas=1, **OPTIONS), route_prefix="/")
        vector = asked(url, rows[3]).json()["data"][0]["embedding"]
        numpy.testing.assert_allclose(vector, expected["embedding"][3], atol=1e-5)
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "small"
        refused = asked(url, rows[-1])
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.slow
def test_killed_node_loses_and_doubles_no_row(tmp_path: Path) -> None:
    folder = write_sentence_model(tmp_path / "small")
    rows = texts(3000)
    with cluster(3) as (found, workers):
        killed: list[int] = []

        def kill(count: int) -> None:
            if count >= 600 and not killed:
                killed.append(count)
                found.remove_node(workers[0], allow_graceful=False)

        given = {"key": "id", "batch_size": 20, "progress": kill, **OPTIONS}
        done = write_results(dataset(rows, 30), folder, tmp_path / "out", **given)
    assert killed and done.rows == len(rows)
    results = written(tmp_path / "out")
    assert sorted(results) == list(range(len(rows)))
    alone = Rows(folder, options=OPTIONS)
    expected = alone({"text": rows})["embedding"]
    alone.close()
    for number, vector in results.items():
        numpy.testing.assert_allclose(vector, expected[number], atol=1e-5)


@pytest.mark.slow
def test_requests_while_a_node_is_killed_are_answered_or_may_be_tried_again(tmp_path: Path) -> None:
    folder = write_sentence_model(tmp_path / "small")
    rows = texts(40)
    alone = Rows(folder, options=OPTIONS)
    expected = alone({"text": rows})["embedding"]
    alone.close()
    statuses: list[int] = []
    wrong: list[str] = []
    stop = threading.Event()

    def client(number: int) -> None:
        count = number
        while not stop.is_set():
            text = count % len(rows)
            response = asked(url, rows[text])
            statuses.append(response.status_code)
            if response.status_code == 200:
                vector = response.json()["data"][0]["embedding"]
                if not numpy.allclose(vector, expected[text], atol=1e-5):
                    wrong.append(rows[text])
            elif response.status_code not in INVITES_RETRY or "retry-after" not in response.headers:
                wrong.append(f"{response.status_code} {dict(response.headers)} {response.text}")
            count += 7

    with cluster(3) as (found, workers):
        url = started()
        serve.run(application(folder, **OPTIONS), route_prefix="/")
        clients = [threading.Thread(target=client, args=(number,)) for number in range(8)]
        for each in clients:
            each.start()
        time.sleep(4)
        found.remove_node(workers[0], allow_graceful=False)
        before = len(statuses)
        time.sleep(8)
        found.add_node(num_cpus=1, object_store_memory=STORE)
        wait_until(lambda: ready_replicas() == 3, 60)
        stop.set()
        for each in clients:
            each.join()
        assert asked(url, rows[0]).status_code == 200
    assert not wrong, wrong[:3]
    assert statuses[before:].count(200) > 100
    print({status: statuses.count(status) for status in set(statuses)})


@pytest.mark.slow
def test_replicas_come_with_load_and_go_without(tmp_path: Path) -> None:
    folder = write_sentence_model(tmp_path / "small")
    stop = threading.Event()
    wrong: list[int] = []

    def client() -> None:
        while not stop.is_set():
            status = asked(url, "a text " * 20).status_code
            if status != 200:
                wrong.append(status)

    scaling = {
        "target_ongoing_requests": 1,
        "upscale_delay_s": 1,
        "downscale_delay_s": 2,
        "look_back_period_s": 2,
    }
    with cluster(2):
        url = started()
        serve.run(application(folder, autoscaling=scaling, **OPTIONS), route_prefix="/")
        assert ready_replicas() == 1
        clients = [threading.Thread(target=client) for _ in range(8)]
        for each in clients:
            each.start()
        try:
            wait_until(lambda: ready_replicas() == 2, 90)
        finally:
            stop.set()
            for each in clients:
                each.join()
        wait_until(lambda: ready_replicas() == 1, 90)
        assert asked(url, "a text").status_code == 200
    assert not wrong


@pytest.mark.slow
def test_replicas_of_a_language_model_give_the_answers_of_the_model_alone(tmp_path: Path) -> None:
    folder = write_language_model(tmp_path / "tiny")
    prompts = [f"once upon {'a time ' * (1 + row % 5)}{row}" for row in range(24)]
    request = {"max_tokens": 12}
    alone = Rows(folder, request=request, options={"context": 128})
    expected = alone({"text": prompts})["answer"]
    alone.close()

    def answer(prompt: str) -> str:
        body = {"model": "tiny", "prompt": prompt, "temperature": 0, **request}
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        response.raise_for_status()
        return str(response.json()["choices"][0]["text"])

    with cluster(3):  # the replicas take two nodes, the rows the third
        url = started()
        serve.run(application(folder, replicas=2, context=128), route_prefix="/")
        with ThreadPoolExecutor(8) as pool:
            assert [*pool.map(answer, prompts)] == expected
        body = {"model": "tiny", "prompt": prompts[0], "temperature": 0, "stream": True, **request}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        parts = [json.loads(line)["choices"][0]["text"] for line in lines[:-1]]
        assert "".join(parts) == expected[0]
        done = write_results(
            dataset(prompts), folder, tmp_path / "out", key="id", request=request, context=128
        )
    assert done.rows == len(prompts) and done.errors == 0
    found = written(tmp_path / "out", "answer")
    assert [found[row] for row in range(len(prompts))] == expected


def ready_replicas() -> int:
    (one,) = serve.status().applications["default"].deployments.values()
    return one.replica_states.get("RUNNING", 0)
