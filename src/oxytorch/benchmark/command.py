"""The command line of `oxytorch bench`."""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from oxytorch import config
from oxytorch.benchmark import runs
from oxytorch.benchmark.core.jobs import Settings
from oxytorch.benchmark.core.kept import reopened
from oxytorch.benchmark.core.results import Run, read_runs
from oxytorch.benchmark.kinds import KINDS
from oxytorch.benchmark.machine.description import machine_name
from oxytorch.benchmark.report.drawing import draw_if_possible
from oxytorch.benchmark.report.pages import fill_page, report
from oxytorch.benchmark.report.terminal import show_run
from oxytorch.benchmark.serve.command import add_parser as add_serve_parser
from oxytorch.benchmark.serve.command import run as run_serve
from oxytorch.benchmark.subjects import SUBJECTS
from oxytorch.command_line import positive

DESCRIPTION = """\
Measure oxytorch next to its peers, in the same run, and next to this machine's own limits.

Outputs are compared first; then all contestants take turns, round by round, with the
same number of threads. A peer that is not installed, or fails, is named with its reason.
Close other programs before you measure.

Every result is written as soon as it is there (--json, --output, or a file in the cache folder that
the first line names). A run that was cut off goes on with `oxytorch bench continue FILE`.
"""

EXAMPLES = """\
examples:
  oxytorch bench                              everything below; files in benchmarks/results
  oxytorch bench models                       every model in fp32 and bf16 with all peers (~25 min)
  oxytorch bench models --only bert,resnet50 --dtype bfloat16 --peers eager,openvino,oxytorch
  oxytorch bench models --output benchmarks/results          also write JSON and a plot there
  oxytorch bench zoo --models bert,swin --batch 1    models of many kinds: where are we slower?
  oxytorch bench streams --models resnet50 --batch 16    one model in 1, 2, 4 ... streams
  oxytorch bench ops --only rms_norm --peers eager           one op against plain PyTorch
  oxytorch bench ops --isa avx2,avx512_bf16 --size cache     kernels of several levels
  oxytorch bench optim --only AdamW --format float32,split+int8      one optimizer's step
  oxytorch bench gpu-optim --only AdamW       steps on a GPU
  oxytorch bench cold-start --rounds 3        process start to the first step on a GPU
  oxytorch bench limits                       bandwidth and matrix products of this machine
  oxytorch bench import-time                  what `import oxytorch` adds to `import torch`
  oxytorch bench optimize-cost                time and peak memory of optimize(BERT-base)
  oxytorch bench serve --clients 1,8,32       a running `oxytorch serve`, or a server like it
  oxytorch bench continue FILE                what a run that was cut off has not measured
  oxytorch bench report benchmarks/results    tables from the files of earlier runs
  oxytorch bench report benchmarks/results --into README.md
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `oxytorch bench`."""
    parser.description, parser.epilog = DESCRIPTION, EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    what = parser.add_subparsers(dest="what", metavar="WHAT")

    everything = what.add_parser("all", help="all of the following; the same as no WHAT")
    everything.add_argument("--threads", type=positive, help="threads (default: torch's)")
    everything.add_argument(
        "--output",
        type=Path,
        default=Path("benchmarks/results"),
        help="folder for JSON and plots, one per machine (default: benchmarks/results)",
    )

    for subject in SUBJECTS.values():
        options = what.add_parser(subject.name, help=subject.summary)
        _add_common(options, subject.rounds)
        for option in subject.options:
            options.add_argument(option.flag, dest=option.field, **option.keywords)

    add_serve_parser(what)
    rest = what.add_parser("continue", help="measure what is left of a run that was cut off")
    rest.add_argument("path", type=Path, metavar="FILE", help="its results file")

    report = what.add_parser("report", help="Markdown tables from the files of earlier runs")
    report.add_argument("paths", nargs="+", type=Path, help="results files, or folders of them")
    report.add_argument("--into", type=Path, help="page whose <!-- bench:... --> blocks to fill")
    report.add_argument("--plot", type=Path, help="plot to draw of the models (.svg or .png)")


def _add_common(parser: argparse.ArgumentParser, rounds: int) -> None:
    parser.add_argument(
        "--rounds", type=positive, default=rounds, help=f"rounds (default: {rounds})"
    )
    parser.add_argument("--threads", type=positive, help="threads (default: what torch takes)")
    parser.add_argument("--output", type=Path, help="folder for JSON and plot, one per machine")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--plot", type=Path, help="file for the plot (.svg or .png)")
    parser.add_argument(
        "--allocation",
        choices=("reuse", "system"),
        default="reuse",
        help="reuse: freed memory stays in the process, for all contestants, so that nobody pays "
        "page faults by chance; system: as the C library has it (default: reuse)",
    )
    parser.add_argument(
        "--timeout",
        type=positive,
        default=300,
        help="seconds without a sign of life after which a contestant is given up (default: 300)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Do what the arguments ask.

    Returns:
        0, 1 where something could not be measured, 2 for arguments that make no sense.
    """
    try:
        if arguments.what == "report":
            return _report(arguments)
        if arguments.what == "serve":
            return run_serve(arguments)
        if arguments.what == "continue":
            return _continue(arguments.path)
        if arguments.what in (None, "all"):
            return _measure_everything(arguments)
        return _measure(arguments, _words_after_bench(sys.argv))
    except (ValueError, FileNotFoundError) as error:
        print(f"oxytorch {error}", file=sys.stderr)
        return 2


def _report(arguments: argparse.Namespace) -> int:
    found = read_runs(arguments.paths)
    if arguments.plot is not None:
        draw_if_possible(found, arguments.plot)
    if arguments.into is None:
        print(report(found), end="")
        return 0
    filled = fill_page(arguments.into, found)
    print(f"filled {', '.join(filled)} in {arguments.into}")
    return 0


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="oxytorch bench")
    configure(parser)
    return parser.parse_args(words)


def _measure_everything(arguments: argparse.Namespace) -> int:
    """Every kind of run with its defaults; the worst of their exit statuses."""
    if arguments.what is None:
        arguments = _parse(["all"])
    options = ["--output", str(arguments.output)]
    if arguments.threads is not None:
        options += ["--threads", str(arguments.threads)]
    kinds = ["limits", "import-time", "optimize-cost", "ops", "optim", "models"]
    if torch.cuda.is_available():
        kinds += ["gpu-optim", "cold-start"]
    status = 0
    for what in kinds:
        words = [what, *options]
        status = max(status, _measure(_parse(words), words))
    return status


def _measure(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    settings = _settings(arguments)
    command = shlex.join(["oxytorch", "bench", *words])
    run = runs.start(SUBJECTS[arguments.what], command, settings)
    paths = [] if arguments.json is None else [arguments.json]
    if arguments.output is not None:
        paths.append(_free_path(arguments.output / machine_name(run["machine"]), arguments.what))
    if not paths:
        folder = config.cache_folder("bench")
        paths = [] if folder is None else [_free_path(folder, arguments.what)]
    return _do(arguments, settings, run, paths)


def _continue(path: Path) -> int:
    """Measure what is left of a run that was cut off, by the command in its file."""
    run = reopened(path)
    words = shlex.split(str(run["command"]))
    if words[:2] != ["oxytorch", "bench"]:
        raise ValueError(
            f"bench continue: {path} is of `{' '.join(words[:3])}`, which has to be given again, "
            f"for what is left: {', '.join(run['left'])}"
        )
    arguments = _parse(words[2:])
    settings = _settings(arguments)
    # As they stand in the file: tuples are lists there.
    for name, value in json.loads(json.dumps(asdict(settings))).items():
        if run["settings"].get(name) != value:
            raise ValueError(
                f"bench continue: {path}: expected {name} {run['settings'].get(name)}, with which "
                f"it was begun, got {value}; begin a new run"
            )
    print(
        f"oxytorch bench: {path} of {run['date']} has {len(run['results'])} results; "
        f"done: {', '.join(run['done']) or 'nothing'}; left: {', '.join(run['left'])}",
        file=sys.stderr,
    )
    return _do(arguments, settings, run, [path])


def _do(arguments: argparse.Namespace, settings: Settings, run: Run, paths: Sequence[Path]) -> int:
    """Measure what is left of a run, and show all of it; 1 where something failed."""
    for path in paths:
        print(f"oxytorch bench: results go to {path} as they come", file=sys.stderr)
    runs.measure(SUBJECTS[arguments.what], settings, run, paths)
    show_run(run)
    plots = [] if arguments.plot is None else [arguments.plot]
    if arguments.output is not None and KINDS[run["kind"]].draw and run["results"]:
        plots.append(paths[-1].with_suffix(".svg"))
    for path in [*paths, *(plot for plot in plots if draw_if_possible([run], plot))]:
        print(f"wrote {path}")
    return 1 if run["failures"] else 0


def _words_after_bench(argv: Sequence[str]) -> Sequence[str]:
    """The arguments as typed, whether after `oxytorch bench` or a module's name."""
    return argv[argv.index("bench") + 1 :] if "bench" in argv[:2] else argv[1:]


def _free_path(folder: Path, what: str) -> Path:
    """<folder>/<date>-<what>.json, numbered from the second of a day on."""
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    base = folder / f"{today}-{what}"
    path, number = base.with_suffix(".json"), 2
    while path.exists():
        path = base.with_name(f"{base.name}-{number}").with_suffix(".json")
        number += 1
    return path


def _settings(arguments: argparse.Namespace) -> Settings:
    """The options as settings; raises ValueError for a name that does not exist."""
    subject, given = SUBJECTS[arguments.what], vars(arguments)
    for option in subject.options:
        option.check(given[option.field])
    settings = Settings(
        rounds=arguments.rounds,
        threads=arguments.threads or torch.get_num_threads(),
        allocation=arguments.allocation,
        silence=float(arguments.timeout),
        **{option.field: given[option.field] for option in subject.options},
    )
    subject.check(settings)
    return settings
