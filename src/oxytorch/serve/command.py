"""The `oxytorch serve` subcommand."""

from __future__ import annotations

import argparse
import importlib.util
import ipaddress
from pathlib import Path

import torch

from .. import config
from ..command_line import fail, positive, report_errors
from ..llm_command.options import PRECISIONS, add_count, add_tokenizer, precision

NEEDS = ("fastapi", "uvicorn")

DESCRIPTION = """\
Serve a model over HTTP.

MODEL is a folder in Hugging Face's format, or a file that oxytorch.save wrote:
  language model      /v1/completions, /v1/chat/completions, as OpenAI's clients call them
  model of sentences  /v1/embeddings
  program             /v2/models/NAME/infer (Open Inference Protocol, JSON)
  cross-encoder       /v1/rerank: scores of documents for a query
Also: /v1/models, /health, /ready, /metrics (Prometheus), /docs, and a status page at /.

Sequences of different lengths are decoded together: each step reads the weights once for all of
them, and a new request joins between two tokens. Greedy decoding gives the tokens of
oxytorch.llm.generate (with --exact on every processor).

The server listens to this machine alone. Another --host needs a token, which clients send as their
API key. Requests wait in a queue of limited length; beyond it the response is 429. SIGTERM or
Ctrl-C finishes what runs; a second one does not wait.
"""

EXAMPLES = """\
examples:
  oxytorch serve ./model --weights int4
  oxytorch serve model.oxy --tokenizer ./model --slots 4 --context 8192
  oxytorch serve ./model --host 0.0.0.0 --token "$(openssl rand -hex 16)"

then
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
    -d '{"model": "model", "prompt": "Once upon a time", "max_tokens": 32, "temperature": 0}'
or, in Python,
  client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
  client.chat.completions.create(model="model", messages=[{"role": "user", "content": "Hello"}])
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Gives the parser the options of `oxytorch serve`."""
    parser.description, parser.epilog = DESCRIPTION, EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder or file of the model")
    parser.add_argument("--name", help="model name in requests (default: that of MODEL)")
    parser.add_argument("--threads", type=positive, metavar="N", help="threads (default: torch's)")
    _add_listening(parser.add_argument_group("listening"))
    _add_limits(parser.add_argument_group("limits"))
    _add_batches(parser.add_argument_group("models of sentences and programs"))
    _add_language(parser.add_argument_group("language models"))


def _add_listening(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="address (default: 127.0.0.1)")
    group.add_argument(
        "--port", type=_port, default=8000, metavar="N", help="port; 0: a free one (default: 8000)"
    )
    group.add_argument(
        "--instances",
        type=positive,
        metavar="N",
        help="servers behind the port, each on its own cores; restarted if they end",
    )
    group.add_argument("--listener", type=int, help=argparse.SUPPRESS)  # what instances are given
    group.add_argument(
        "--token", help="token that requests must have (default: OXYTORCH_SERVE_TOKEN)"
    )
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="level of the log: JSON lines on standard error (default: info)",
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    add_count(group, "--queue", 128, "requests that may wait; more get 429")
    group.add_argument(
        "--timeout",
        type=_seconds,
        default=600.0,
        metavar="S",
        help="most seconds of a request, including its wait in the queue (default: 600)",
    )
    add_count(group, "--max-request-bytes", 4 << 20, "size of a request")
    add_count(group, "--drain", 60, "seconds to finish what runs after a signal", "S")


def _add_language(group: argparse._ArgumentGroup) -> None:
    add_tokenizer(group)
    group.add_argument(
        "--weights",
        type=precision,
        metavar="PRECISION",
        help=f"{', '.join(PRECISIONS)} (default: as the folder has them, bf16 where plain)",
    )
    group.add_argument(
        "--kv-cache", choices=("bf16", "int8"), help="format of the KV cache (default: bf16)"
    )
    group.add_argument(
        "--group-size", type=positive, metavar="N", help="weights that share a scale (default: 128)"
    )
    add_count(group, "--slots", 8, "sequences that are decoded together")
    group.add_argument(
        "--context",
        type=positive,
        metavar="N",
        help="tokens of a prompt and its completion (default: the model's, at most 4096)",
    )
    group.add_argument(
        "--exact",
        action="store_true",
        help="batch only as many sequences as leave the tokens of each unchanged",
    )
    add_count(
        group, "--prompt-part", 256, "tokens of prefill between two decode steps of other requests"
    )
    group.add_argument(
        "--max-new-tokens",
        type=positive,
        metavar="N",
        help="most tokens of a completion (default: --context)",
    )
    add_count(group, "--max-choices", 16, "completions of one request (n times its prompts)")


def _add_batches(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dtype", choices=("fp32", "bf16"), help="dtype of the computation (default: fp32)"
    )
    group.add_argument(
        "--pooling",
        choices=("mean", "cls", "last"),
        help="how hidden states become one vector (default: as the folder says)",
    )
    group.add_argument(
        "--max-batch",
        type=positive,
        metavar="N",
        help="inputs of one call (default: 32; programs: 1; more joins their rows)",
    )
    group.add_argument(
        "--max-wait",
        type=_milliseconds,
        metavar="MS",
        help="milliseconds to wait for a full batch (default: 0, those that have arrived)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serves until a signal; 2 for a mistake in the command or the model, or a port in use."""
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        return fail(
            "serve", f"needs {', '.join(missing)}; install with: pip install 'oxytorch[serve]'"
        )
    token = arguments.token if arguments.token is not None else config.current.serve_token or None
    is_local = _is_loopback(arguments.host)
    if token is not None and not token.strip():
        return fail("serve", "--token: expected one that is not empty")
    if token is None and not is_local:
        return fail(
            "serve",
            f"--host {arguments.host} can be reached from elsewhere: give --token or "
            "OXYTORCH_SERVE_TOKEN, or listen to 127.0.0.1",
        )
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    from .instances import serve_instances
    from .serving import serve

    def act() -> int:
        if arguments.instances is not None and arguments.listener is None:
            return serve_instances(arguments)
        serve(arguments, token, is_local)
        return 0

    kinds = (ValueError, TypeError, OSError, MemoryError)
    return report_errors("serve", act, dict.fromkeys(kinds, 2))


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"expected a port, 0 to 65535, got {text!r}")
    return int(text)


def _milliseconds(text: str) -> float:
    return 0.0 if text.strip() in ("0", "0.0") else _seconds(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected seconds, got {text!r}") from error
    if not 0 < seconds < 1e9:
        raise argparse.ArgumentTypeError(f"expected seconds above 0, got {text!r}")
    return seconds
