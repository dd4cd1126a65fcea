"""`oxytorch bench serve`: the options, and what is shown."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from oxytorch.benchmark.serve.load import Figures, Load, measured, models_of
from oxytorch.command_line import positive

SUMMARY = "tokens per second and waiting times of a server of OpenAI's format"

DESCRIPTION = """\
Ask a running server (`oxytorch serve`, or another of OpenAI's format) by 1, 8 and 32 clients at the
same time. Each client sends its requests one after the other. Prompts are random tokens, so that
no two begin alike; answers are greedy and streamed.
"""

COLUMNS = ("clients", "tokens/s", "first token", "95 %", "between tokens", "95 %")


def add_parser(what: Any) -> None:
    """Adds `serve` to what `oxytorch bench` measures."""
    parser: argparse.ArgumentParser = what.add_parser(
        "serve",
        help=SUMMARY,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="(default: http://127.0.0.1:8000)"
    )
    parser.add_argument("--model", help="(default: the first that the server has)")
    parser.add_argument("--token", help="the server's token, or API key")
    parser.add_argument(
        "--clients", type=_counts, default=(1, 8, 32), metavar="N,N", help="(default: 1,8,32)"
    )
    for name, default, text in (
        ("--requests", 4, "requests of each client"),
        ("--vocabulary", 256, "prompts are of tokens below this"),
    ):
        text = f"{text} (default: {default})"
        parser.add_argument(name, type=positive, default=default, metavar="N", help=text)
    for name, text in (("--prompt", "tokens of a prompt"), ("--tokens", "new tokens of an answer")):
        parser.add_argument(
            name,
            type=_range,
            default=(64, 64),
            metavar="N",
            help=f"{text}, or at least and at most, such as 50-200 (default: 64)",
        )
    parser.add_argument(
        "--logprobs",
        action="store_true",
        help="ask for them, so that tokens without text count as parts too",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers there")


def run(arguments: argparse.Namespace) -> int:
    """Measures and shows a table. Raises ValueError where the server does not answer."""
    try:
        model = arguments.model or models_of(arguments.url, arguments.token)[0]
        load = Load(
            arguments.url,
            model,
            arguments.prompt,
            arguments.tokens,
            arguments.requests,
            arguments.vocabulary,
            arguments.logprobs,
            arguments.token,
        )
        measured(load, 1, lambda _: None)  # the first requests make what later ones use
        found = [
            measured(Load(**{**vars(load), "seed": clients}), clients, _tell)
            for clients in arguments.clients
        ]
    except OSError as error:
        raise ValueError(f"bench serve: {arguments.url} does not answer: {error}") from error
    print(table(found))
    if arguments.json is not None:
        data = {
            "model": model,
            "prompt": load.prompt,
            "tokens": load.tokens,
            "requests": load.requests,
            "results": [each.as_data() for each in found],
        }
        arguments.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 0


def table(found: list[Figures]) -> str:
    """The figures as a Markdown table."""
    rows = [
        (
            str(each.clients),
            f"{each.tokens_per_second:.1f}",
            *(
                f"{seconds * 1e3:.0f} ms"
                for seconds in (
                    each.first_token,
                    each.first_token_95,
                    each.between,
                    each.between_95,
                )
            ),
        )
        for each in found
    ]
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _range(text: str) -> tuple[int, int]:
    least, _, most = text.partition("-")
    found = positive(least), positive(most or least)
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(
            f"expected at least and at most, such as 50-200, got {text!r}"
        )
    return found


def _counts(text: str) -> tuple[int, ...]:
    return tuple(positive(word.strip()) for word in text.split(","))
