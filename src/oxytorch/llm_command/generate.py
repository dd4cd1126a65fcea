"""`oxytorch llm generate`: text after a prompt, as it is written, and the speed it had."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..command_line import positive
from ..files import save
from ..llm.configured import checked_penalty
from ..llm.generation import generate
from ..llm.sampling import Sampler
from .folder import chat_prompt, is_quantized, load_tokenizer, read_config
from .model import PreparedModel
from .options import (
    GROUP_SIZE,
    PRECISIONS,
    add_count,
    add_model_options,
    add_tokenizer,
    add_verb,
    output_file,
    precision,
    text_of,
)

DESCRIPTION = """\
Write text after a prompt with a model from a local folder, or from a file that --save or
oxytorch.save wrote. The text goes to standard output as it is generated, times go to standard
error.
"""

EXAMPLES = """\
examples:
  oxytorch llm generate ./model --prompt "Once upon a time" --weights int4
  oxytorch llm generate ./model --chat --prompt "Why is the sky blue?" --temperature 0.7 --top-p 0.9
  oxytorch llm generate ./model --prompt-file notes.txt --max-new-tokens 300 --prompt-lookup 5
  oxytorch llm generate ./model --prompt "1, 2, 3," --stop "10" --json speed.json
  oxytorch llm generate ./model --weights int4 --prompt "Hello" --save model.oxy
  oxytorch llm generate model.oxy --tokenizer ./model --prompt "Hello"
"""


def add_parser(verbs: Any, name: str, summary: str) -> None:
    """Adds the verb with its options."""
    parser = add_verb(verbs, name, summary, DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "folder", type=Path, metavar="MODEL", help="folder with config.json, or file of oxytorch"
    )
    add_tokenizer(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="the same from a file")
    parser.add_argument(
        "--chat", action="store_true", help="the prompt is a question; uses the chat template"
    )
    parser.add_argument(
        "--weights",
        type=precision,
        metavar="PRECISION",
        help=f"{', '.join(PRECISIONS)}; after the dash that of activations (default: as the folder "
        "has them, bf16 where they are plain)",
    )
    add_model_options(parser)
    parser.set_defaults(**dict.fromkeys(_OF_FOLDERS))
    parser.add_argument(
        "--save", type=output_file, metavar="FILE", help="also save the packed model to this file"
    )
    add_count(parser, "--max-new-tokens", 128, "maximum number of new tokens")
    parser.add_argument(
        "--context", type=positive, metavar="N", help="positions of the cache (default: as needed)"
    )
    _add_sampling_options(parser)
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the text after this string; may be repeated",
    )
    parser.add_argument(
        "--prompt-lookup",
        type=int,
        default=0,
        metavar="N",
        help="guess up to N (at most 7) tokens from earlier text and check them in one step: the "
        "same text, often faster",
    )
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="also write the times to this file"
    )


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """The options of how tokens are chosen."""
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0: the most likely token (default)",
    )
    parser.add_argument(
        "--top-k", type=int, metavar="K", help="sample among the K most likely tokens"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="sample among the most likely tokens up to probability P",
    )
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        metavar="R",
        help="above 1: repeat less (default: the model's)",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="makes sampling reproducible")


@dataclass(frozen=True)
class Speed:
    """What one generation took.

    Times are seconds: first_token from the call to the first new token, the prompt's run included;
    token is the median of those after it, where steps that gave several tokens count for each.
    token_bytes: weights that one token reads.
    bandwidth, limit: bytes per second, of token_bytes and of plain reading in this process.
    """

    precision: str
    prompt_tokens: int
    new_tokens: int
    load_seconds: float
    optimize_seconds: float
    first_token_seconds: float
    token_seconds: float | None
    token_bytes: int
    bandwidth: float | None
    limit: float

    def lines(self) -> list[str]:
        """For a person."""
        first = (
            f"loaded in {self.load_seconds:.1f} s, optimized in {self.optimize_seconds:.1f} s, "
            f"{self.prompt_tokens} tokens of prompt, first token after "
            f"{self.first_token_seconds * 1e3:.0f} ms"
        )
        if self.token_seconds is None or self.bandwidth is None:
            return [first]
        second = (
            f"{self.new_tokens} tokens, {self.token_seconds * 1e3:.1f} ms each "
            f"({1 / self.token_seconds:.1f} a second); {self.precision} weights read at "
            f"{self.bandwidth / 1e9:.1f} GB/s, {self.bandwidth / self.limit:.0%} of the "
            f"{self.limit / 1e9:.1f} GB/s that this process can read"
        )
        return [first, second]


class TextPrinter:
    """Writes the text of tokens as soon as its characters are complete."""

    def __init__(self, tokenizer: Any, write: Callable[[str], object]) -> None:
        self._tokenizer = tokenizer
        self._write = write
        self._tokens: list[int] = []
        # Text of the tokens from `begin` on; those before `told` are written already.
        self._begin = 0
        self._told = 0

    def put(self, tokens: Sequence[int]) -> None:
        """Take the next tokens."""
        self._tokens += tokens
        told = self._text(self._begin, self._told)
        now = self._text(self._begin, len(self._tokens))
        # A token may end within a character, which then reads as U+FFFD until the next one.
        if len(now) > len(told) and not now.endswith("\ufffd"):
            self._write(now[len(told) :])
            self._begin, self._told = self._told, len(self._tokens)

    def end(self) -> None:
        """Write what is left."""
        told = self._text(self._begin, self._told)
        self._write(self._text(self._begin, len(self._tokens))[len(told) :])

    def _text(self, begin: int, end: int) -> str:
        return str(self._tokenizer.decode(self._tokens[begin:end], skip_special_tokens=True))


def run(arguments: argparse.Namespace) -> int:
    """Loads, optimizes, writes; raises ValueError for a mistake in the command or the folder."""
    tokenizer, ids = _prompt(arguments)
    prepared = _prepared(arguments)
    if arguments.save is not None:
        save(prepared.model, arguments.save)
        _tell(f"wrote {arguments.save}, {arguments.save.stat().st_size / 1e6:.0f} MB")
    times = [time.perf_counter()]
    new: list[int] = []
    printer = TextPrinter(tokenizer, _write)

    def put(column: Tensor) -> None:
        times.append(time.perf_counter())
        new.append(int(column[0]))
        printer.put(new[-1:])

    generate(
        prepared.model,
        ids,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        repetition_penalty=arguments.repetition_penalty,
        seed=arguments.seed,
        stop=arguments.stop,
        tokenizer=tokenizer,
        streamer=put,
        prompt_lookup=arguments.prompt_lookup,
        capacity=arguments.context,
    )
    printer.end()
    _write("\n")
    speed = measured_speed(prepared, ids.shape[1], times)
    for line in speed.lines():
        _tell(line)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(asdict(speed), indent=1) + "\n", encoding="utf-8")
    return 0


_OF_FOLDERS = ("kv_cache", "group_size")
"""Options that a file has its own values of."""


def _prepared(arguments: argparse.Namespace) -> PreparedModel:
    if arguments.folder.is_file():
        return PreparedModel.from_file(arguments.folder, _tell)
    return PreparedModel.from_folder(
        arguments.folder,
        arguments.weights or PRECISIONS["bf16"],
        arguments.kv_cache or "bf16",
        arguments.group_size or GROUP_SIZE,
        _tell,
    )


def _check_model(arguments: argparse.Namespace) -> None:
    """Raises ValueError for what is no model, and for options that it has no use for."""
    model: Path = arguments.folder
    if model.is_file():
        for name in ("weights", *_OF_FOLDERS):
            if getattr(arguments, name) is not None:
                raise ValueError(
                    f"--{name.replace('_', '-')}: {model} was packed when it was written and runs "
                    "as it is; leave the option out, or give the folder of the model"
                )
        if arguments.tokenizer is None:
            raise ValueError(f"{model} has no tokenizer; give --tokenizer with its folder")
    elif arguments.weights is not None and is_quantized(model, read_config(model)):
        raise ValueError(
            f"--weights: {model} is quantized already and runs as it is; leave the "
            "option out, or give a folder with plain weights"
        )
    else:
        read_config(model)


def _prompt(arguments: argparse.Namespace) -> tuple[Any, Tensor]:
    """The tokenizer and the prompt's tokens; mistakes are reported before a model is loaded."""
    _check_model(arguments)
    text = _prompt_text(arguments)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    tokenizer = load_tokenizer(arguments.tokenizer or arguments.folder)
    ids = prompt_tokens(tokenizer, text, arguments.chat)
    Sampler(arguments.temperature, arguments.top_k, arguments.top_p)
    if arguments.repetition_penalty is not None:
        checked_penalty(arguments.repetition_penalty)
    _check_context(ids.shape[1], arguments.max_new_tokens, arguments.context)
    return tokenizer, ids


def _check_context(length: int, new: int, context: int | None) -> None:
    if context is not None and length + new > context:
        raise ValueError(
            f"--context: a prompt of {length} tokens and {new} new ones do not fit {context} "
            f"positions; give --context {length + new} or more, fewer --max-new-tokens or a "
            "shorter prompt"
        )


def measured_speed(prepared: PreparedModel, prompt: int, times: Sequence[float]) -> Speed:
    """The speed from the moments of the call and of each new token."""
    from .read_limit import read_limit

    sizes = prepared.token_reads()
    limit = read_limit(sizes)
    token = None
    if len(times) > 2:
        # Tokens of one step come together, so that single gaps say nothing with prompt lookup.
        gaps = [after - before for before, after in pairwise(times[1:])]
        token = statistics.median(gaps)
        if token < 0.2 * statistics.fmean(gaps):
            token = statistics.fmean(gaps)
    return Speed(
        precision=prepared.precision,
        prompt_tokens=prompt,
        new_tokens=len(times) - 1,
        load_seconds=prepared.load_seconds,
        optimize_seconds=prepared.optimize_seconds,
        first_token_seconds=times[1] - times[0],
        token_seconds=token,
        token_bytes=sum(sizes),
        bandwidth=None if token is None else sum(sizes) / token,
        limit=limit,
    )


def _prompt_text(arguments: argparse.Namespace) -> str:
    if arguments.prompt_file is not None:
        text = text_of(arguments.prompt_file, "--prompt-file")
    else:
        text = arguments.prompt
    if not text:
        raise ValueError("the prompt is empty; give some text to continue from")
    return str(text)


def prompt_tokens(tokenizer: Any, text: str, chat: bool) -> Tensor:
    """The prompt's tokens, int64 [1, length]; raises ValueError where there are none."""
    if chat:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("--chat: this model's tokenizer has no chat template; leave it out")
        text = chat_prompt(tokenizer, [{"role": "user", "content": text}])
    # A chat template writes the start token itself.
    found = tokenizer(text, add_special_tokens=not chat)["input_ids"]
    if not found:
        raise ValueError(f"the prompt {text!r} has no tokens; give some text to continue from")
    return torch.tensor([found], dtype=torch.int64, device="cpu")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _tell(line: str) -> None:
    print(f"oxytorch llm: {line}", file=sys.stderr, flush=True)
