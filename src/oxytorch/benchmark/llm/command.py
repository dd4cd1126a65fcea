"""`oxytorch llm bench`: how fast prompts and tokens are, next to peers and to the memory."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from oxytorch.llm_command.folder import is_quantized, read_config
from oxytorch.llm_command.options import (
    PRECISIONS,
    add_count,
    add_model_options,
    add_verb,
    output_file,
    precisions,
)

DEFAULT_PRECISIONS = "bf16,int8,int4,int8-int8,int4-int8"

DESCRIPTION = """\
Time prefill and decoding in every precision, next to peers and to the speed at which this machine
reads memory.

Every contestant has a process of its own, keeps its weights in memory and is first compared with
torch; those of one weight format then take turns. A peer that is not installed is named with the
command that installs it. Close other programs before you measure.
"""

EXAMPLES = """\
examples:
  oxytorch llm bench --shape tinyllama-1.1b               oxytorch alone; needs no files
  oxytorch llm bench --shape tinyllama-1.1b --peers all   and everybody who is installed
  oxytorch llm bench --shape tinyllama-1.1b --weights int4,int4-int8 --peers llama.cpp,openvino
  oxytorch llm bench ./model --weights int8 --json int8.json --plot int8.svg
"""


def add_parser(verbs: Any, name: str, summary: str) -> None:
    """Adds the verb with its options."""
    parser = add_verb(verbs, name, summary, DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "folder", type=Path, nargs="?", metavar="MODEL_DIR", help="folder with config.json"
    )
    parser.add_argument("--shape", metavar="NAME", help="random weights of this shape instead")
    parser.add_argument(
        "--weights",
        type=precisions,
        default=precisions(DEFAULT_PRECISIONS),
        metavar="A,B,...",
        help=f"precisions of oxytorch: {', '.join(PRECISIONS)} (default: {DEFAULT_PRECISIONS})",
    )
    parser.add_argument(
        "--peers", default="", metavar="A,B,...", help="who else takes part, or all (default: none)"
    )
    add_model_options(parser)
    add_count(parser, "--prompt", 256, "tokens of prompt")
    add_count(parser, "--tokens", 32, "new tokens")
    add_count(parser, "--rounds", 5, "turns of each")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="file for the results")
    parser.add_argument(
        "--plot", type=output_file, metavar="FILE", help="file for the plot (.svg, .png)"
    )
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="keep files in peers' formats here for later runs"
    )
    patience = "without a sign of life after which a contestant is given up"
    add_count(parser, "--timeout", 600, patience, "SECONDS")


def run(arguments: argparse.Namespace) -> int:
    """Measures and prints; 1 where a contestant failed.

    Raises ValueError for a mistake in the command or the folder.
    """
    settings = _settings(arguments)
    from oxytorch.benchmark.core.kept import keeping
    from oxytorch.benchmark.core.results import new_run
    from oxytorch.benchmark.llm.runs import run_llm
    from oxytorch.benchmark.report.drawing import draw_if_possible
    from oxytorch.benchmark.report.terminal import show_run, watching

    command = shlex.join(["oxytorch", *sys.argv[1:]])
    result = new_run("llm", command, asdict(settings))
    groups = list(dict.fromkeys(p.weights or "bf16" for p in settings.precisions))
    paths = [] if arguments.json is None else [arguments.json]
    with keeping(result, groups, paths) as kept, watching(1) as watcher:

        def keep(entry: dict[str, Any]) -> None:
            kept.add(entry)
            kept.finish(entry["weights"])

        watcher.start(f"llm bench {settings.shape or settings.folder}")
        run_llm(settings, keep, watcher.stage)
    show_run(result)
    drawn = arguments.plot is not None and draw_if_possible([result], arguments.plot)
    for path in [*paths, *([arguments.plot] if drawn else [])]:
        print(f"wrote {path}")
    records = [record for entry in result["results"] for record in entry["peers"]]
    return 1 if any(record["status"] in ("failed", "wrong") for record in records) else 0


def _settings(arguments: argparse.Namespace) -> Any:
    """The options as settings; raises ValueError for a name that does not exist."""
    import torch

    from oxytorch.benchmark.llm.contestants import PEERS
    from oxytorch.benchmark.llm.runs import OURS, LlmSettings
    from oxytorch.benchmark.llm.shapes import SHAPES
    from oxytorch.command_line import words

    if (arguments.folder is None) == (arguments.shape is None):
        raise ValueError(f"expected either a model's folder or --shape, one of {', '.join(SHAPES)}")
    if arguments.shape is not None and arguments.shape not in SHAPES:
        raise ValueError(f"--shape: unknown {arguments.shape!r}; choices: {', '.join(SHAPES)}")
    folder = arguments.folder
    if folder is not None and is_quantized(folder, read_config(folder)):
        raise ValueError(
            f"{folder} is quantized already; expected plain weights, which every contestant "
            "brings into its own formats"
        )
    others = [name for name in PEERS if name != OURS]
    names = words(arguments.peers)
    for name in names:
        if name not in (*others, "all"):
            raise ValueError(f"--peers: unknown {name!r}; choices: all, {', '.join(others)}")
    return LlmSettings(
        shape=arguments.shape or "",
        folder="" if arguments.folder is None else str(arguments.folder),
        precisions=arguments.weights,
        peers=tuple(others if "all" in names else names),
        kv_cache=arguments.kv_cache,
        group_size=arguments.group_size,
        prompt=arguments.prompt,
        tokens=arguments.tokens,
        rounds=arguments.rounds,
        threads=arguments.threads or torch.get_num_threads(),
        silence=float(arguments.timeout),
        work=None if arguments.work is None else str(arguments.work),
    )
