"""Small models in Hugging Face's format, and servers of them."""

from __future__ import annotations

import argparse
import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from oxytorch.serve.access import App
from oxytorch.serve.app import Service, State, make_app
from oxytorch.serve.command import configure
from oxytorch.serve.metrics import Metrics
from oxytorch.serve.opening import open_service
from oxytorch.serve.server import Server, address, bound_socket

TEXT = Path(__file__).read_text(encoding="utf-8") + "Once upon a time there was a tiny model. " * 3

SENTENCE_SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
"""Of the configuration of a small BERT."""

TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
)


def tokenizer() -> Any:
    """Byte pairs of this file's text; no word is unknown to it."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([TEXT], trainer)
    found = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>")
    found.chat_template = TEMPLATE
    return found


def write_language_model(folder: Path, **changes: Any) -> Path:
    """A language model with random weights and its tokenizer."""
    torch.manual_seed(0)
    made = tokenizer()
    settings = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "eos_token_id": None,
        "initializer_range": 0.3,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **changes}))
    model.save_pretrained(folder)
    made.save_pretrained(folder)
    return folder


@dataclass
class Running:
    """A server in a thread of this process."""

    url: str
    service: Service
    metrics: Metrics
    server: Server
    state: State

    def figure(self, name: str) -> float:
        """A number that the server shows now."""
        return self.metrics.gauges()[name]


def options(*words: str) -> argparse.Namespace:
    """The options of a command line."""
    parser = argparse.ArgumentParser()
    configure(parser)
    return parser.parse_args(list(words))


def application(*words: str) -> tuple[App, Service, Metrics]:
    """The application of a command line, without a socket."""
    arguments = options(*words)
    metrics = Metrics()
    service = open_service(arguments, metrics)
    app = make_app(
        service,
        metrics,
        State(),
        token=arguments.token,
        largest=arguments.max_request_bytes,
        is_local=True,
    )
    return app, service, metrics


@contextlib.contextmanager
def running(*words: str) -> Iterator[Running]:
    """A server of a command line on a free port."""
    arguments = options(*words, "--port", "0")
    metrics, state = Metrics(), State()
    service = open_service(arguments, metrics)
    listener = bound_socket(arguments.host, arguments.port)
    app = make_app(
        service,
        metrics,
        state,
        token=arguments.token,
        largest=arguments.max_request_bytes,
        is_local=True,
    )
    server = Server(app, state, arguments.drain)
    service.worker.start()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield Running(address(listener), service, metrics, server, state)
    finally:
        server.should_exit = True
        thread.join()
        service.worker.close()
        listener.close()


def wait_until(holds: Any, seconds: float = 20) -> None:
    """Returns once `holds()`; fails after some seconds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
