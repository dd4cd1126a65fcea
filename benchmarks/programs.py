"""Times `oxytorch.optimize(model, sample_input=x, graph=True)` beside stock PyTorch and beside
`optimize` with `graph=False`, in turns.

    python benchmarks/programs.py [MODEL ...] [--dtype bfloat16] [--batch N] [--json FILE]

Prints a line of Markdown for each model as soon as it is measured: milliseconds of a call, medians
of the ratios of single rounds, and the seconds that both ways of `optimize` took. Geometric means
stand at the end, and why a model is no program.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from oxytorch.benchmark.core.contest import Progress
from oxytorch.benchmark.core.jobs import Job, OnResult, Settings, contest
from oxytorch.benchmark.core.results import Result
from oxytorch.benchmark.core.subject import DTYPES, Subject
from oxytorch.benchmark.models.cases import CASES
from oxytorch.benchmark.programs import runs, tables
from oxytorch.benchmark.runs import measure, start
from oxytorch.command_line import positive

DESCRIPTION = """\
Time whole models: stock PyTorch, oxytorch.optimize(sample_input=x), and the same with graph=True,
which runs all of a model's operators as one program. Each model has a process of its own, in which
all give the right answer first and then take turns, round by round.
"""

EXAMPLES = f"""\
examples:
  python benchmarks/programs.py                             the models of `oxytorch bench models`
  python benchmarks/programs.py bert swin --batch 8         models of `oxytorch bench zoo`, by name
  python benchmarks/programs.py all --dtype bfloat16 --json programs.json
  oxytorch bench report programs.json                       the same tables from that file

Stock in bfloat16 is the fastest of autocast, the cast model and float32. The file of --json is
written after each model; what is there stays when the run is interrupted.

models: {", ".join(runs.MODELS)}
"""

HEADER = "| " + " | ".join(tables.COLUMNS) + " |\n" + "|---" * len(tables.COLUMNS) + "|"


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(
        prog="programs.py",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="names, or `all` (default: the models of `oxytorch bench models`)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--batch", type=positive, help="batch size (default: each model's own)")
    parser.add_argument("--rounds", type=positive, default=9, help="rounds (default: 9)")
    parser.add_argument("--threads", type=positive, help="threads (default: what torch takes)")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args(words)
    unknown = [name for name in arguments.models if name not in (*runs.MODELS, "all")]
    if unknown:
        parser.error(f"MODEL: unknown name {unknown[0]!r}; --help lists all")
    return arguments


def settings_of(arguments: argparse.Namespace) -> Settings:
    """What the arguments ask for."""
    models = [*CASES] if not arguments.models else arguments.models
    return Settings(
        only=tuple(dict.fromkeys(runs.MODELS if "all" in models else models)),
        dtypes=(arguments.dtype,),
        rounds=arguments.rounds,
        threads=arguments.threads or torch.get_num_threads(),
        batch=arguments.batch,
    )


def jobs(settings: Settings) -> list[Job]:
    """One for each model, which prints its line."""
    found = []
    [dtype] = settings.dtypes
    labels = {name: runs.CONTESTANTS[name].label for name in runs.contestants(dtype)}
    for model in settings.only:
        what = {"model": model, "dtype": dtype, "batch": settings.batch}
        job = contest(f"{model} {dtype}", runs, settings, labels, **what)
        found.append(Job(job.name, partial(_tell, job)))
    return found


def _tell(job: Job, progress: Progress, on_result: OnResult) -> None:
    def tell(result: Result) -> None:
        on_result(result)
        print(f"| {' | '.join(tables.row(result))} |", flush=True)

    job.do(progress, tell)


def main(words: Sequence[str]) -> int:
    """Measure what the command line asks for; 1 where something could not be measured."""
    arguments = parse(words)
    settings = settings_of(arguments)
    subject = Subject("programs", "whole models as programs", 9, jobs)
    command = shlex.join(["python", "benchmarks/programs.py", *words])
    run = start(subject, command, settings)
    print(HEADER, flush=True)
    try:
        measure(subject, settings, run, [] if arguments.json is None else [arguments.json])
    finally:
        if run["results"]:
            print(f"| {' | '.join(tables.means(run['results']))} |")
            [table] = tables.program_tables(run["results"])
            print("\n".join(["", *table.notes]), flush=True)
    return 1 if run["failures"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
