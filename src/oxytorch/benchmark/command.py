"""The command line of `oxytorch bench`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

EXAMPLES = """\
examples:
  oxytorch bench models                            every model, fp32 and bf16, all peers
  oxytorch bench models --only bert,resnet50 --dtype bfloat16
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add `bench` to the subparsers of the `oxytorch` command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench", help="measure ops and whole models next to their peers"
    )
    configure(parser)
    return parser


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def configure(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `oxytorch bench`."""
    parser.description = "Measure ops and whole models next to their peers, in the same run."
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    what = parser.add_subparsers(dest="what", required=True)
    models = what.add_parser("models", help="whole models")
    models.add_argument("--only", type=_words)
    models.add_argument("--dtype", type=_words, default=["float32", "bfloat16"])
    models.add_argument("--peers", type=_words)
    models.add_argument("--batch", type=int)
    models.add_argument("--rounds", type=int, default=15)
    models.add_argument("--threads", type=int)
    models.add_argument("--json", type=Path)


def run(arguments: argparse.Namespace) -> int:
    """Do what the arguments ask; the exit status."""
    import torch

    from oxytorch.benchmark.jobs import JobError, run_job
    from oxytorch.benchmark.models import CASES
    from oxytorch.benchmark.peers import PEERS
    from oxytorch.benchmark.results import new_run, write_run

    run = new_run("models", "oxytorch " + shlex.join(sys.argv[1:]), {"rounds": arguments.rounds})
    for name in arguments.only or CASES:
        for dtype in arguments.dtype:
            job = {
                "kind": "model",
                "model": name,
                "dtype": dtype,
                "peers": arguments.peers or list(PEERS),
                "batch": arguments.batch or CASES[name].batch,
                "rounds": arguments.rounds,
                "threads": arguments.threads or torch.get_num_threads(),
            }
            try:
                result = run_job(job, silence=300, on_stage=lambda peer, stage: None)
            except JobError as error:
                print(name, dtype, error)
                continue
            run["results"].append(result)
            _print_result(result)
            if arguments.json:
                write_run(run, arguments.json)
    return 0


def _print_result(result: dict[str, Any]) -> None:
    print(
        f"{result['model']} {result['dtype']}: eager interleaved / alone "
        f"{result['eager_interleaved_over_alone']:.2f}"
    )
    records: Sequence[Any] = result["peers"]
    for record in records:
        if record["status"] == "measured":
            print(
                f"  {record['peer']:12s} {record['seconds']['median'] * 1e3:9.2f} ms  "
                f"{record['speedup']['median']:5.2f}x  difference {record['difference']:.1e}  "
                f"{record['notes']}"
            )
        else:
            print(f"  {record['peer']:12s} {record['status']}: {record['reason']}")
    sys.stdout.flush()
