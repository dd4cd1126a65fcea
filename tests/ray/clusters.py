"""Clusters of Ray on this machine, and small models of sentences for them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import torch
from ray import serve
from ray.cluster_utils import Cluster
from small_servers import SENTENCE_SIZES, TEXT, tokenizer
from transformers import BertConfig, BertModel

STORE = 100 << 20
"""Bytes of a node's object store."""


def write_sentence_model(folder: Path) -> Path:
    """A model of sentences with random weights."""
    torch.manual_seed(0)
    BertModel(BertConfig(**SENTENCE_SIZES)).eval().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def texts(count: int) -> list[str]:
    """Texts of several lengths, each another one."""
    return [f"{row} {TEXT[7 * row % 1000 :][: 5 + 11 * (row % 7)]}" for row in range(count)]


@contextlib.contextmanager
def cluster(nodes: int) -> Iterator[tuple[Cluster, list[Any]]]:
    """A cluster whose head computes nothing, and nodes of one CPU that can be killed."""
    variables = {
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "oxytorch.ray.proxy.middlewares",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Nodes that died are noticed in seconds.
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_failure_threshold": "4",
        "RAY_health_check_initial_delay_ms": "0",
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    head = {"num_cpus": 0, "object_store_memory": STORE, "include_dashboard": False}
    found = Cluster(initialize_head=True, head_node_args=head)
    try:
        workers = [found.add_node(num_cpus=1, object_store_memory=STORE) for _ in range(nodes)]
        ray.init(address=found.address, log_to_driver=False)
        found.wait_for_nodes()
        yield found, workers
    finally:
        serve.shutdown()
        ray.shutdown()
        found.shutdown()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
