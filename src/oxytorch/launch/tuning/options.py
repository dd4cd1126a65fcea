"""The options of `oxytorch tune`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...command_line import checked, positive
from ...core.system_files import ranges
from ..environment import ALLOCATORS
from ..shared_options import (
    add_core_options,
    add_model_options,
    set_texts,
    switch,
)
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
RUN_LISTS = ("nodes_list", "cores_list")
"""Options that `oxytorch run` gets in every trial."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Gives the parser all options."""
    set_texts(parser, USAGE, DESCRIPTION, EXAMPLES)
    _add_program_options(parser.add_argument_group("what runs"))
    _add_figure_options(parser.add_argument_group("the figure"))
    _add_tried_options(parser.add_argument_group("what is tried (lists: 1,2,4)"))
    _add_search_options(parser.add_argument_group("the search"))
    _add_results_options(parser.add_argument_group("results"))


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
    lists = [(name, ranges(getattr(given, name))) for name in RUN_LISTS if getattr(given, name)]
    return [
        *(f"--{name.replace('_', '-')}" for name in switches),
        *(f"--{name.replace('_', '-')}={value}" for name, value in lists),
        *([f"--dtype={given.dtype}"] if given.dtype else []),
    ]


def _add_program_options(group: Any) -> None:
    switch(group, "-m", "--module", help="run a module, as `python -m` does")
    switch(group, "--dry-run", help="list what would be tried, and start nothing")
    add_options_of_programs(group)
    add_model_options(group)


def _add_figure_options(group: Any) -> None:
    either = group.add_mutually_exclusive_group()
    either.add_argument(
        "--maximize",
        metavar="NAME",
        help="of lines `NAME: NUMBER`, the last one of each instance; or a regular expression "
        "with a group (throughput)",
    )
    either.add_argument("--minimize", metavar="NAME", help="the same, where less is better")
    group.add_argument(
        "--combine",
        choices=tuple(COMBINE),
        help="one figure of those of several instances (sum, or max where less is better)",
    )
    group.add_argument(
        "--at-most",
        action="append",
        type=checked(read_limit),
        default=[],
        metavar="'NAME: NUMBER'",
        help="another figure must not be more, in any instance; repeatable",
    )


def _add_tried_options(group: Any) -> None:
    group.add_argument("--ninstances", type=_counts, default=(), metavar="LIST", help="instances")
    group.add_argument(
        "--ncores-per-instance", type=_counts, default=(), metavar="LIST", help="cores of each"
    )
    group.add_argument(
        "--nthreads-per-instance",
        type=_threads,
        default=(),
        metavar="LIST",
        help="OpenMP threads of each: numbers, `cores` for as many as cores, `all` for all threads "
        "of a core (cores,all)",
    )
    group.add_argument(
        "--memory-allocator",
        type=_names(("default", *ALLOCATORS)),
        metavar="LIST",
        help="default,tcmalloc,jemalloc (those that are installed)",
    )
    group.add_argument(
        "--omp-runtime",
        type=_names(("default", "intel")),
        metavar="LIST",
        help="default,intel (those that are installed)",
    )
    switch(
        group,
        "--full",
        help="all combinations of threads, allocator and OpenMP, not one change at a time",
    )
    add_core_options(group)
    switch(group, "--bind-numa-node", help="memory of each instance from its own NUMA node alone")


def _add_search_options(group: Any) -> None:
    group.add_argument(
        "--search",
        choices=STRATEGIES,
        default="halving",
        help="all once, then the better half again; all equally often; a random sample (halving)",
    )
    group.add_argument(
        "--repeats",
        type=positive,
        default=None,
        metavar="N",
        help="trials of a placement, with halving of the best ones (5; grid and random: 3)",
    )
    group.add_argument(
        "--placements", type=positive, metavar="N", help="random: how many are tried (10)"
    )
    group.add_argument("--seed", type=int, metavar="N", help="random: seed of the sample (0)")
    group.add_argument(
        "--timeout", type=positive, default=600, metavar="S", help="most seconds of a trial (600)"
    )
    switch(group, "--ignore-memory", help="also try what seems not to fit into memory")


def _add_results_options(group: Any) -> None:
    group.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help="JSON lines, read first (tune-NAME-ID.jsonl, an ID for each search)",
    )
    switch(group, "--restart", help="measure again what the file has")
    group.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the figures into a .svg or .png"
    )
    group.add_argument(
        "--forget",
        action="store_true",
        help="without a script: remove all times that optimize(tune=True) has stored",
    )


def _counts(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(positive(word.strip()) for word in text.split(",")))


def _threads(text: str) -> tuple[int, ...]:
    words = {"cores": PER_CORE, "all": ALL_THREADS}
    found = (word.strip() for word in text.split(","))
    return tuple(dict.fromkeys(words[w] if w in words else positive(w) for w in found))


def _names(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def read(text: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"expected {', '.join(known)}, got {name!r}")
        return found

    return read
