"""The command line of `oxytorch bench`."""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oxytorch import config
from oxytorch.benchmark.machine.description import machine_name

SUMMARY = "measure ops, optimizers and whole models next to their peers"

DESCRIPTION = """\
Measure oxytorch next to its peers, in the same run, and next to this machine's own limits.

Every contestant first has to give the right answer; then all take turns, round by round, with the
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
  oxytorch bench ops --only rms_norm --peers eager           one op against plain PyTorch
  oxytorch bench ops --isa avx2,avx512_bf16 --size cache     kernels of several levels
  oxytorch bench optim --only AdamW --format float32,split+int8      one optimizer's step
  oxytorch bench gpu-optim --only AdamW       steps on a GPU
  oxytorch bench cold-start --rounds 3        process start to the first step on a GPU
  oxytorch bench limits                       bandwidth and matrix products of this machine
  oxytorch bench import-time                  what `import oxytorch` adds to `import torch`
  oxytorch bench optimize-cost                time and peak memory of optimize(BERT-base)
  oxytorch bench continue FILE                what a run that was cut off has not measured
  oxytorch bench report benchmarks/results    tables from the files of earlier runs
  oxytorch bench report benchmarks/results --into README.md
"""

PLOTTED = ("models", "ops", "optim", "gpu-optim", "cold-start")
MODEL_DTYPES = ("float32", "bfloat16")
OP_DTYPES = ("float32", "bfloat16", "float16")


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add `bench` to the subparsers of the `oxytorch` command."""
    parser: argparse.ArgumentParser = subparsers.add_parser("bench", help=SUMMARY)
    configure(parser)
    return parser


def configure(parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of `oxytorch bench`."""
    parser.description, parser.epilog = DESCRIPTION, EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    what = parser.add_subparsers(dest="what", metavar="WHAT")

    everything = what.add_parser("all", help="all of the following; the same as no WHAT")
    everything.add_argument("--threads", type=_positive, help="threads (default: torch's)")
    everything.add_argument(
        "--output",
        type=Path,
        default=Path("benchmarks/results"),
        help="folder for JSON and plots, one per machine (default: benchmarks/results)",
    )

    models = what.add_parser("models", help="whole models with random weights")
    _add_common(models, rounds=15)
    _add_list(models, "--only", "models to measure (default: all)")
    _add_list(models, "--dtype", "precisions (default: float32,bfloat16)", MODEL_DTYPES)
    _add_list(models, "--peers", "contestants (default: all); eager always takes part")
    models.add_argument("--batch", type=_positive, help="batch size (default: each model's own)")

    zoo = what.add_parser("zoo", help="models of many kinds beside stock PyTorch: who loses?")
    _add_common(zoo, rounds=7)
    _add_list(zoo, "--models", "models to measure (default: all)")
    _add_list(zoo, "--dtype", "precisions (default: float32,bfloat16)", MODEL_DTYPES)
    zoo.add_argument(
        "--batch", type=_sizes, default=(1, 8), metavar="N,M,...", help="batch sizes (default: 1,8)"
    )

    ops = what.add_parser("ops", help="every op of the registry")
    _add_common(ops, rounds=15)
    _add_list(ops, "--only", "ops to measure (default: all)")
    _add_list(ops, "--dtype", "dtypes (default: float32,bfloat16)", MODEL_DTYPES)
    _add_list(ops, "--peers", "contestants (default: eager,compile,oxytorch)")
    _add_list(ops, "--size", "samples (default: cache,memory)", ("cache", "memory"))
    _add_list(ops, "--isa", "levels at which oxytorch runs (default: the active one)")

    optim = what.add_parser("optim", help="steps of every optimizer")
    _add_common(optim, rounds=15)
    _add_list(optim, "--only", "optimizers to measure, such as AdamW (default: all)")
    _add_list(optim, "--case", "tensors: bert,small (default: both)")
    _add_list(optim, "--peers", "contestants (default: foreach,fused,predecessor,oxytorch)")
    _add_list(optim, "--format", "formats of oxytorch, such as split+int8 (default: all)")

    gpu = what.add_parser("gpu-optim", help="steps of every optimizer on a GPU")
    _add_common(gpu, rounds=10)
    _add_list(gpu, "--only", "optimizers to measure, such as AdamW (default: all)")
    _add_list(gpu, "--case", "tensors: llama,resnet50,small (default: all)")
    _add_list(gpu, "--peers", "contestants (default: all), such as fused,optimi,oxytorch")
    _add_list(gpu, "--format", "formats of oxytorch (default: float32,bfloat16,split,split+int8)")

    cold = what.add_parser("cold-start", help="process start to an optimizer's first step")
    _add_common(cold, rounds=3)
    _add_list(cold, "--case", "tensors: llama,resnet50,small (default: resnet50)")
    _add_list(cold, "--peers", "ways (default: all), such as fused,compile,oxytorch")
    cold.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu"), help="where (default: cuda)"
    )

    _add_common(what.add_parser("limits", help="bandwidth and matrix products"), rounds=10)
    _add_common(what.add_parser("import-time", help="what `import oxytorch` adds"), rounds=1)
    optimize = what.add_parser("optimize-cost", help="time and peak memory of optimize()")
    _add_common(optimize, rounds=1)
    _add_list(optimize, "--only", "models to optimize (default: bert)")
    _add_list(optimize, "--dtype", "precisions (default: float32,bfloat16)", MODEL_DTYPES)

    rest = what.add_parser("continue", help="measure what is left of a run that was cut off")
    rest.add_argument("path", type=Path, metavar="FILE", help="its results file")

    report = what.add_parser("report", help="Markdown tables from the files of earlier runs")
    report.add_argument("paths", nargs="+", type=Path, help="results files, or folders of them")
    report.add_argument("--into", type=Path, help="page whose <!-- bench:... --> blocks to fill")
    report.add_argument("--plot", type=Path, help="plot to draw of the models (.svg or .png)")


def _add_common(parser: argparse.ArgumentParser, rounds: int) -> None:
    parser.add_argument(
        "--rounds", type=_positive, default=rounds, help=f"rounds (default: {rounds})"
    )
    parser.add_argument("--threads", type=_positive, help="threads (default: what torch takes)")
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
        type=_positive,
        default=300,
        help="seconds without a sign of life after which a contestant is given up (default: 300)",
    )


def _add_list(
    parser: argparse.ArgumentParser, name: str, text: str, default: Sequence[str] = ()
) -> None:
    parser.add_argument(name, type=_words, default=tuple(default), metavar="A,B,...", help=text)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_positive(word) for word in _words(text))


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number >= 1, got {text!r}")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Do what the arguments ask.

    Returns:
        0, 1 where something could not be measured, 2 for arguments that make no sense.
    """
    try:
        if arguments.what == "report":
            return _report(arguments)
        if arguments.what == "continue":
            return _continue(arguments.path)
        if arguments.what in (None, "all"):
            return _measure_everything(arguments)
        return _measure(arguments, _words_after_bench(sys.argv))
    except (ValueError, FileNotFoundError) as error:
        print(f"oxytorch {error}", file=sys.stderr)
        return 2


def _report(arguments: argparse.Namespace) -> int:
    from oxytorch.benchmark.core.results import read_runs
    from oxytorch.benchmark.report.pages import fill_page, report

    runs = read_runs(arguments.paths)
    if arguments.plot is not None:
        _draw(runs, arguments.plot)
    if arguments.into is None:
        print(report(runs), end="")
        return 0
    filled = fill_page(arguments.into, runs)
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
    import torch

    kinds = ["limits", "import-time", "optimize-cost", "ops", "optim", "models"]
    if torch.cuda.is_available():
        kinds += ["gpu-optim", "cold-start"]
    status = 0
    for what in kinds:
        words = [what, *options]
        status = max(status, _measure(_parse(words), words))
    return status


def _measure(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    from oxytorch.benchmark import runs

    settings = _settings(arguments)
    run = runs.start(arguments.what, shlex.join(["oxytorch", "bench", *words]), settings)
    paths = [] if arguments.json is None else [arguments.json]
    if arguments.output is not None:
        paths.append(_free_path(arguments.output / machine_name(run["machine"]), arguments.what))
    if not paths:
        folder = config.cache_folder("bench")
        paths = [] if folder is None else [_free_path(folder, arguments.what)]
    return _do(arguments, settings, run, paths)


def _continue(path: Path) -> int:
    """Measure what is left of a run that was cut off, by the command in its file."""
    from dataclasses import asdict

    from oxytorch.benchmark.core.kept import reopened

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


def _do(arguments: argparse.Namespace, settings: Any, run: Any, paths: Sequence[Path]) -> int:
    """Measure what is left of a run, and show all of it; 1 where something failed."""
    from oxytorch.benchmark import runs
    from oxytorch.benchmark.report.pages import provenance, tables_of
    from oxytorch.benchmark.report.terminal import show_table

    for path in paths:
        print(f"oxytorch bench: results go to {path} as they come", file=sys.stderr)
    runs.measure(arguments.what, settings, run, paths)
    for table in tables_of(run):
        show_table(table)
    if run["results"]:
        print(provenance(run))
    plots = [] if arguments.plot is None else [arguments.plot]
    if arguments.output is not None and arguments.what in PLOTTED and run["results"]:
        plots.append(paths[-1].with_suffix(".svg"))
    for plot in plots:
        _draw([run], plot)
    for path in [*paths, *plots]:
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


def _draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw a plot of the runs; without matplotlib, say so and go on."""
    if importlib.util.find_spec("matplotlib") is None:
        print(
            f"oxytorch bench: {path} not drawn: matplotlib is not installed "
            f"(pip install 'oxytorch[bench]')",
            file=sys.stderr,
        )
        return
    from oxytorch.benchmark.report.plot import draw

    draw(runs, path)


def _settings(arguments: argparse.Namespace) -> Any:
    """The options as settings; raises ValueError for a name that does not exist."""
    import torch

    from oxytorch.benchmark.gpu import cases as gpu_optim_cases
    from oxytorch.benchmark.gpu import cold_start
    from oxytorch.benchmark.models.cases import CASES
    from oxytorch.benchmark.models.contestants import PEERS
    from oxytorch.benchmark.ops import runs as op_runs
    from oxytorch.benchmark.optim import cases as optim_cases
    from oxytorch.benchmark.runs import Settings
    from oxytorch.benchmark.zoo.cases import ZOO

    of_ops = arguments.what == "ops"
    chosen = vars(arguments)
    batch = chosen.get("batch")
    contestants: dict[str, Mapping[str, object]] = {
        "ops": op_runs.PEERS,
        "optim": optim_cases.PEERS,
        "gpu-optim": gpu_optim_cases.PEERS,
        "cold-start": cold_start.WAYS,
    }
    everybody = contestants.get(arguments.what, PEERS)
    if of_ops:
        registry = importlib.import_module("oxytorch.ops").registry()
        _check_names("--only", arguments.only, registry)
        _check_names("--dtype", arguments.dtype, OP_DTYPES)
        _check_names("--peers", arguments.peers, op_runs.PEERS)
        _check_names("--size", arguments.size, op_runs.SIZES)
        isa = importlib.import_module("oxytorch.isa")
        levels = [level.name for level in isa.levels() if level.supported]
        _check_names("--isa", arguments.isa, levels)
    elif arguments.what in ("optim", "gpu-optim", "cold-start"):
        cases = optim_cases.CASES if arguments.what == "optim" else gpu_optim_cases.CASES
        _check_names("--only", chosen.get("only", ()), optim_cases.OPTIMIZERS)
        _check_names("--case", arguments.case, cases)
        _check_names("--peers", arguments.peers, everybody)
        _check_names("--format", chosen.get("format", ()), optim_cases.FORMATS)
        _check_gpu(arguments)
    elif arguments.what == "zoo":
        _check_names("--models", arguments.models, ZOO)
        _check_names("--dtype", arguments.dtype, MODEL_DTYPES)
    else:
        _check_names("--only", chosen.get("only", ()), CASES)
        _check_names("--dtype", chosen.get("dtype", ()), MODEL_DTYPES)
        _check_names("--peers", chosen.get("peers", ()), PEERS)
    return Settings(
        only=chosen.get("only") or chosen.get("models") or (),
        dtypes=chosen.get("dtype", ()),
        peers=chosen.get("peers", ()) or tuple(everybody),
        rounds=arguments.rounds,
        threads=arguments.threads or torch.get_num_threads(),
        batch=batch if isinstance(batch, int) else None,
        batches=batch if isinstance(batch, tuple) else (),
        sizes=chosen.get("size", ()),
        levels=chosen.get("isa", ()),
        cases=chosen.get("case", ()),
        formats=chosen.get("format", ()),
        device=chosen.get("device", "cuda"),
        allocation=arguments.allocation,
        silence=float(arguments.timeout),
    )


def _check_gpu(arguments: argparse.Namespace) -> None:
    """Refuses what needs a GPU where there is none."""
    import torch

    wants = arguments.what == "gpu-optim" or vars(arguments).get("device") == "cuda"
    if wants and not torch.cuda.is_available():
        raise ValueError(
            f"bench {arguments.what}: expected a CUDA device, found none that torch "
            f"{torch.__version__} can use"
        )


def _check_names(option: str, names: Sequence[str], known: Any) -> None:
    for name in names:
        if name not in known:
            raise ValueError(
                f"bench: {option}: unknown name {name!r}; choices: {', '.join(known) or 'none'}"
            )
