"""The options of `oxytorch tune`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..environment import ALLOCATORS
from .figures import COMBINE, read_limit
from .measure import add_options as add_options_of_programs
from .placements import ALL_THREADS, PER_CORE

USAGE = """\
oxytorch tune [options] script.py [arguments]
       oxytorch tune [options] -m module [arguments]
       oxytorch tune [options] model.oxy
       oxytorch tune [--forget]"""

DESCRIPTION = """\
Finds out how a script runs best on this machine: how many instances of it, on how many cores each,
with which memory allocator and OpenMP runtime. Starts it in one placement after the other, as
`oxytorch run` does, reads the figure that it prints, and ends with the winning command line. For a
program that oxytorch.save wrote, it measures throughput and latency itself.

Without a script it shows what optimize(tune=True) has learnt about this machine."""

EXAMPLES = """\
examples:
  oxytorch tune --maximize throughput script.py
      script.py prints a line such as `throughput: 87.5`; the sum over the instances counts
  oxytorch tune --at-most "latency: 20" --plot tune.svg model.oxy
      the most calls a second of a saved program, with a median call of at most 20 ms

Each trial is kept in a file. After Ctrl-C, the same command goes on from there.
"""

STRATEGIES = ("halving", "grid", "random")
RUN_SWITCHES = ("use_e_cores", "bind_numa_node", "optimize", "sample_first_call")
RUN_VALUES = ("nodes_list", "cores_list", "dtype")
"""Options that `oxytorch run` gets in every trial."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Gives the parser all options."""
    parser.usage, parser.description, parser.epilog = USAGE, DESCRIPTION, EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.allow_abbrev = False
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    what = parser.add_argument_group("what runs")
    _switch(what, "-m", "--module", help="run a module, as `python -m` does")
    _switch(what, "--dry-run", help="list what would be tried, and start nothing")
    add_options_of_programs(what)
    _switch(what, "--optimize", help="optimize models of the script, as `oxytorch run` does")
    what.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="with --optimize: of weights"
    )
    _switch(what, "--sample-first-call", help="with --optimize: fuse operators too")

    goal = parser.add_argument_group("the figure")
    either = goal.add_mutually_exclusive_group()
    either.add_argument(
        "--maximize",
        metavar="NAME",
        help="of lines `NAME: NUMBER`, the last one of each instance; or a regular expression "
        "with a group (throughput)",
    )
    either.add_argument("--minimize", metavar="NAME", help="the same, where less is better")
    goal.add_argument(
        "--combine",
        choices=tuple(COMBINE),
        help="one figure of those of several instances (sum, or max where less is better)",
    )
    goal.add_argument(
        "--at-most",
        action="append",
        type=_checked(read_limit),
        default=[],
        metavar="'NAME: NUMBER'",
        help="another figure must not be more, in any instance; repeatable",
    )

    tried = parser.add_argument_group("what is tried (lists: 1,2,4)")
    tried.add_argument("--ninstances", type=_counts, default=(), metavar="LIST", help="instances")
    tried.add_argument(
        "--ncores-per-instance", type=_counts, default=(), metavar="LIST", help="cores of each"
    )
    tried.add_argument(
        "--nthreads-per-instance",
        type=_threads,
        default=(),
        metavar="LIST",
        help="OpenMP threads of each: numbers, `cores` for as many as cores, `all` for all threads "
        "of a core (cores,all)",
    )
    tried.add_argument(
        "--memory-allocator",
        type=_names(("default", *ALLOCATORS)),
        metavar="LIST",
        help="default,tcmalloc,jemalloc (those that are installed)",
    )
    tried.add_argument(
        "--omp-runtime",
        type=_names(("default", "intel")),
        metavar="LIST",
        help="default,intel (those that are installed)",
    )
    _switch(
        tried,
        "--full",
        help="all combinations of threads, allocator and OpenMP, not one change at a time",
    )
    tried.add_argument("--nodes-list", metavar="LIST", help="on these NUMA nodes: 0,2-3")
    tried.add_argument("--cores-list", metavar="LIST", help="on these cores: 0-7,16")
    _switch(tried, "--use-e-cores", help="on efficiency cores too")
    _switch(tried, "--bind-numa-node", help="memory of each instance from its own NUMA node alone")

    search = parser.add_argument_group("the search")
    search.add_argument(
        "--search",
        choices=STRATEGIES,
        default="halving",
        help="all once and the better half again, all equally often, or some by chance (halving)",
    )
    search.add_argument(
        "--repeats",
        type=_positive,
        default=None,
        metavar="N",
        help="trials of a placement, with halving of the best ones (5; grid and random: 3)",
    )
    search.add_argument(
        "--placements", type=_positive, metavar="N", help="random: how many are tried (10)"
    )
    search.add_argument("--seed", type=int, metavar="N", help="random: which ones (0)")
    search.add_argument(
        "--timeout", type=_positive, default=600, metavar="S", help="seconds of a trial (600)"
    )
    _switch(search, "--ignore-memory", help="try what seems not to fit into memory too")

    results = parser.add_argument_group("results")
    results.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help="JSON lines, read first (tune-NAME-ID.jsonl, an ID for each search)",
    )
    _switch(results, "--restart", help="measure again what is in the file")
    results.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the figures into a .svg or .png"
    )
    results.add_argument(
        "--forget",
        action="store_true",
        help="without a script: remove all times that optimize(tune=True) has kept",
    )


def conflict(given: argparse.Namespace) -> str:
    """What is wrong with the options together; an empty string if nothing is."""
    if given.forget:
        return "--forget: expected no script; it removes times of optimize(tune=True)"
    if given.search != "random":
        for name in ("placements", "seed"):
            if getattr(given, name) is not None:
                return f"--{name}: needs --search random"
    if given.cores_list and ALL_THREADS in given.nthreads_per_instance:
        return "--nthreads-per-instance: expected no `all` with --cores-list, which names threads"
    return ""


def options_for_run(given: argparse.Namespace) -> list[str]:
    """Options of `oxytorch run` that are the same in every trial."""
    switches = [name for name in RUN_SWITCHES if getattr(given, name)]
    values = [(name, getattr(given, name)) for name in RUN_VALUES if getattr(given, name)]
    return [
        *(f"--{name.replace('_', '-')}" for name in switches),
        *(f"--{name.replace('_', '-')}={value}" for name, value in values),
    ]


def _switch(group: Any, *names: str, help: str) -> None:
    group.add_argument(*names, action="store_true", help=help)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a number from 1, got {text!r}")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_positive(word.strip()) for word in text.split(",")))


def _threads(text: str) -> tuple[int, ...]:
    words = {"cores": PER_CORE, "all": ALL_THREADS}
    found = (word.strip() for word in text.split(","))
    return tuple(dict.fromkeys(words[w] if w in words else _positive(w) for w in found))


def _names(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def read(text: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"expected {', '.join(known)}, got {name!r}")
        return found

    return read


def _checked(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A reader whose ValueError argparse shows."""

    def checked(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked
