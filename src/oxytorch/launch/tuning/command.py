"""The `oxytorch tune` subcommand."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from ... import __version__, config
from ...command_line import report_errors, why_no_picture
from ...rewriting import kept
from ..environment import ALLOCATORS, WATCHED, found_libraries
from ..plan import PlanError, Request
from ..text import machine
from ..topology import Topology, read_topology
from .drawing import draw
from .figures import Figure
from .measure import example, open_program
from .options import add_options, conflict, options_for_run
from .placements import Axes, placements
from .report import conclusion, table
from .results_file import OtherSearchError, ResultsFile, contents, default_path
from .search import Goal, judge, sample
from .session import NoFigureError, Search, Session
from .trial import NotStartedError, Script, decide

MEASURE = "oxytorch.launch.tuning.measure"
INTERRUPTED = 130


def configure(parser: argparse.ArgumentParser) -> None:
    """Gives the parser its options."""
    add_options(parser)
    parser.set_defaults(parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Searches; 0 with a winner, 1 without one, 130 after Ctrl-C."""
    if not arguments.program:
        kept.forget() if arguments.forget else kept.show()
        return 0
    error = arguments.parser.error
    if not sys.platform.startswith("linux"):
        error("needs Linux")
    if wrong := conflict(arguments):
        error(wrong)
    if arguments.plot and (wrong := why_no_picture(arguments.plot, "tune")):
        error(f"--plot: {wrong}")
    topology = read_topology()
    search = _search(arguments, topology)
    file = _file(arguments, search, topology)
    _tell(search, file, topology)
    if arguments.dry_run:
        print("\n".join(f"{number:>4}  {each}" for number, each in enumerate(search.placements, 1)))
        return 0
    session = Session(search, file, _say, _begin)

    def act() -> int:
        try:
            is_whole = session.run()
        except KeyboardInterrupt:  # between two trials
            is_whole = False
        return _end(arguments, session, file, is_whole)

    return report_errors("tune", act, {NoFigureError: 2, OSError: 2})


def _search(arguments: argparse.Namespace, topology: Topology) -> Search:
    """What is tried, and what for; ends with a usage error where that cannot be."""
    error = arguments.parser.error
    script = _script(arguments)
    try:
        found = placements(topology, _request(arguments), _axes(arguments))
        if arguments.search == "random":
            found = sample(found, arguments.placements or 10, arguments.seed or 0)
        decide(script, found[0])
    except (PlanError, NotStartedError, argparse.ArgumentTypeError) as problem:
        error(str(problem))
    is_maximum = arguments.minimize is None
    combine = arguments.combine or ("sum" if is_maximum else "max")
    return Search(
        script=script,
        figure=Figure(arguments.minimize or arguments.maximize or "throughput", combine),
        goal=Goal(is_maximum, tuple(arguments.at_most)),
        placements=found,
        strategy=arguments.search,
        repeats=arguments.repeats or (5 if arguments.search == "halving" else 3),
        seconds=arguments.timeout,
        is_careful=not arguments.ignore_memory,
    )


def _script(arguments: argparse.Namespace) -> Script:
    """What runs in each trial; of a saved program, what measures it."""
    words = list(arguments.program)
    if words[0] == "--":
        del words[0]
    options = options_for_run(arguments)
    name = words[0] if words else ""
    if arguments.module or not name.endswith(".oxy"):
        if arguments.input:
            arguments.parser.error(
                "--input: expected model.oxy, a program that oxytorch.save wrote"
            )
        return Script(["-m", *words] if arguments.module else words, options)
    if len(words) > 1:
        arguments.parser.error(f"expected no arguments after {name}, got {shlex.join(words[1:])}")
    try:
        model = open_program(Path(name))
        args, kwargs = example(model, arguments.input)
        with torch.inference_mode():
            model(*args, **kwargs)
    except (OSError, ValueError, TypeError, RuntimeError) as problem:
        arguments.parser.error(str(problem))
    inputs = [word for text in arguments.input for word in ("--input", text)]
    measured = ["-m", MEASURE, name, f"--seconds={arguments.seconds:g}", *inputs]
    return Script(measured, options, meeting=True)


def _request(arguments: argparse.Namespace) -> Request:
    return Request(
        nodes=arguments.nodes_list,
        cores=arguments.cores_list,
        use_e_cores=arguments.use_e_cores,
    )


def _axes(arguments: argparse.Namespace) -> Axes:
    """What the options say is tried, and, of libraries, what is installed."""
    before = config.environment_of_processes()
    # A library that the user has preloaded is in use in any placement.
    is_ours = not before.get("LD_PRELOAD")
    allocators = found_libraries(before, ALLOCATORS) if is_ours else []
    openmps = found_libraries(before, ("intel",)) if is_ours else []
    return Axes(
        ninstances=arguments.ninstances,
        ncores=arguments.ncores_per_instance,
        threads=arguments.nthreads_per_instance,
        allocators=arguments.memory_allocator or ("default", *allocators),
        openmps=arguments.omp_runtime or ("default", *openmps),
        is_full=arguments.full,
    )


def _file(arguments: argparse.Namespace, search: Search, topology: Topology) -> ResultsFile:
    """The file of results, of this search alone."""
    described = _described(search, topology)
    name = next((w for w in search.script.words if not w.startswith("-") and w != MEASURE), "")
    path = arguments.results or default_path(Path(name).stem, described)
    try:
        if arguments.restart and not arguments.dry_run:
            path.unlink(missing_ok=True)
        if not os.access(path.absolute().parent, os.W_OK):
            raise OSError(f"cannot write to {path.absolute().parent}")
        return ResultsFile(path, described, search.seconds)
    except OtherSearchError as problem:
        arguments.parser.error(f"--results: {problem}; give another name, or --restart")
    except OSError as problem:
        arguments.parser.error(f"--results: {problem}")
    raise AssertionError("error() ends the program")


def _described(search: Search, topology: Topology) -> dict[str, Any]:
    """What figures depend on, beside the placement."""
    script = search.script
    files = [Path(word) for word in script.words if word.endswith((".py", ".oxy"))]
    own = config.environment_of_processes()
    return {
        "command": list(script.words),
        "options": list(script.options),
        "files": {str(path): contents(path) for path in files if path.is_file()},
        "figure": [search.figure.what, search.figure.combine],
        "limits": [limit.figure.what for limit in search.goal.limits],
        "machine": machine(topology),
        "variables": {name: own[name] for name in WATCHED if own.get(name)},
        "versions": [__version__, torch.__version__],
    }


def _tell(search: Search, file: ResultsFile, topology: Topology) -> None:
    """What will be tried."""
    goal = "most" if search.goal.is_maximum else "least"
    limits = "".join(f", {limit}" for limit in search.goal.limits)
    count = len(search.placements)
    print(
        f"oxytorch tune: the {goal} {search.figure.what}{limits}; {count} "
        f"placement{'s' * (count != 1)} on {machine(topology)}\n"
        f"  {search.strategy}, about {search.trials()} trials, {file.count()} of them known "
        f"from {file.path}",
        file=sys.stderr,
    )
    own = config.environment_of_processes()
    names = [name for name in WATCHED if own.get(name)]
    if names:
        kept_values = shlex.join(f"{name}={own[name]}" for name in names)
        print(f"  yours, kept in every placement: {kept_values}", file=sys.stderr)
    sys.stderr.flush()


def _end(arguments: argparse.Namespace, session: Session, file: ResultsFile, is_whole: bool) -> int:
    """The table, the picture and the winner."""
    search, tallies = session.search, session.tallies
    verdict = judge(tallies, search.goal)
    figure = search.figure.what
    print("\n".join(table(tallies, search.goal, figure)))
    print()
    print("\n".join(conclusion(verdict, tallies, search.goal, figure, search.script)))
    if search.script.meeting and verdict.winner is not None:
        print("\nput a script of your own in the place of `-m ...`")
    sys.stdout.flush()
    if arguments.plot and any(tally.is_measured() for tally in tallies):
        name = shlex.join(arguments.program)
        draw(tallies, search.goal, verdict, figure, f"oxytorch tune {name}", arguments.plot)
        _say(f"drawn: {arguments.plot}")
    if not is_whole:
        _say(f"interrupted; {file.count()} trials are in {file.path}, the same command goes on")
        return INTERRUPTED
    return 0 if verdict.winner is not None else 1


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _begin(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)
