"""The `oxytorch run` subcommand."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO

from .. import config
from ..core.system_files import ranges
from .environment import Environment, MissingLibraryError, make_environment
from .options import add_options, conflict, is_training, torchrun_options
from .output import log_path
from .plan import Instance, Plan, PlanError, Request, make_plan
from .processes import Job, run_jobs
from .text import describe, rows_of, summary
from .topology import read_topology

BINDING = Path(__file__).with_name("binding.py")
PARENT = str(Path(__file__).parents[2])
OPTIMIZING = """\
import signal, sys
before = signal.getsignal(signal.SIGINT)
if before is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.path[:1] = sys.argv[1:2]
from oxytorch.launch.script import main
signal.signal(signal.SIGINT, before)
main(sys.argv[2:])
"""
"""Python code that runs a script with --optimize. Until the script's own folder takes its place,
modules are imported from the package's folder, and not from the current one. Ctrl-C during that
ends the process without a traceback, as the script has none of its code in it yet."""


@dataclass(frozen=True)
class Run:
    """All that is decided before anything starts.

    command: the words of an instance's process, before it is bound to cores.
    text: the plan for a person.
    """

    plan: Plan
    environment: Environment
    command: Sequence[str]
    text: str


def configure(parser: argparse.ArgumentParser) -> None:
    """Gives the parser its options."""
    add_options(parser)
    parser.set_defaults(parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Starts what was asked for; the exit status is that of the first process that failed."""
    if not sys.platform.startswith("linux"):
        arguments.parser.error("needs Linux; start the script with `python`")
    decided = decide(arguments)
    if arguments.dry_run:
        print(decided.text)
        return 0
    started = datetime.now().strftime("%Y%m%d%H%M%S")
    with ExitStack() as stack:
        log, started = stack.enter_context(_opened(arguments, started))

        def say(text: str) -> None:
            _print(text, log)

        say(decided.text)
        if is_training(arguments):
            folder = arguments.log_dir or stack.enter_context(tempfile.TemporaryDirectory())
            jobs = [_training(arguments, decided, folder)]
            cpus = {number for one in decided.plan.instances for number in one.cpus}
            what, rows = "ranks", [(f"0-{len(decided.plan.instances) - 1}", ranges(cpus))]
        else:
            jobs = instances_of(arguments, decided, started)
            what, rows = "instance", rows_of(decided.plan.instances)
        result = run_jobs(jobs, lambda text: say(f"oxytorch run: {text}"))
        say(summary(what, rows, result))
    return result.status


def decide(arguments: argparse.Namespace) -> Run:
    """The plan, the environment and the command; ends with a usage error where they cannot be."""
    error = arguments.parser.error
    if wrong := conflict(arguments):
        error(wrong)
    shown, command = _command(arguments)
    topology = read_topology()
    try:
        plan = make_plan(topology, _request(arguments))
        environment = make_environment(
            config.environment_of_processes(),
            allocator=arguments.memory_allocator,
            openmp=arguments.omp_runtime,
            threads=arguments.nthreads_per_instance,
            benchmark=arguments.benchmark,
            unbuffered=len(plan.instances) > 1 or bool(arguments.log_dir),
        )
    except (PlanError, MissingLibraryError) as problem:
        error(str(problem))
    if is_training(arguments):
        shown = ["torchrun", *torchrun_options(arguments, len(plan.instances)), *shown]
    text = describe(
        topology,
        plan,
        environment,
        shown,
        is_training=is_training(arguments),
        models=_models(arguments),
    )
    return Run(plan, environment, command, text)


def _command(arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    """What runs, as the user would write it and as it is started."""
    error = arguments.parser.error
    program = list(arguments.program)
    if program[:1] == ["--"]:
        del program[0]
    if not program:
        error("expected a script, -m module or a command; see `oxytorch run --help`")
    name = program[0]
    if name.startswith("-"):
        error(f"expected a script, -m module or a command, got {name}")
    is_script = name.endswith(".py") and not arguments.no_python
    if not arguments.module and not is_script:
        return program, _found(arguments, program)
    if is_script and not arguments.module and not Path(name).is_file():
        error(f"there is no file {name} in {Path.cwd()}")
    words = ["-m", *program] if arguments.module else program
    if not arguments.optimize:
        return ["python", *words], [sys.executable, *words]
    options = [f"--dtype={arguments.dtype}"] if arguments.dtype else []
    options += ["--sample"] if arguments.sample_first_call else []
    options += ["--module"] if arguments.module else []
    start = [sys.executable, "-c", OPTIMIZING, PARENT]
    return ["python", *words], [*start, *options, "--", *program]


def _found(arguments: argparse.Namespace, program: list[str]) -> list[str]:
    """The words of a command that is no Python script, which has to be there."""
    error, name = arguments.parser.error, program[0]
    if arguments.optimize:
        error(f"--optimize: expected a Python script (.py) or -m module, got the command {name}")
    if shutil.which(name) is not None:
        return program
    if Path(name).is_dir():
        error(f"{name} is a folder; expected a script, -m module or a command")
    if Path(name).is_file():
        where = "" if "/" in name else " or not on PATH, as ./" + name
        error(
            f"{name} is not executable{where}; if it is a Python script, run `python {name}`, "
            "otherwise `chmod +x` it"
        )
    error(f"there is no command {name} on PATH, and no such file in {Path.cwd()}")
    raise AssertionError("error() ends the program")


def _models(arguments: argparse.Namespace) -> str:
    if not arguments.optimize:
        return ""
    dtype = f", in {arguments.dtype}" if arguments.dtype else ""
    sample = ", with its inputs as the sample" if arguments.sample_first_call else ""
    return f"optimized at their first call in evaluation mode{dtype}{sample}"


def _request(arguments: argparse.Namespace) -> Request:
    """What the options say about cores."""
    count, mode = arguments.ninstances, ""
    if is_training(arguments):
        by_node = arguments.nproc_per_node in (None, "auto")
        count, mode = (0, "throughput") if by_node else (arguments.nproc_per_node, "")
    elif arguments.throughput_mode:
        mode = "throughput"
    elif arguments.latency_mode:
        mode = "latency"
    return Request(
        ninstances=count,
        ncores_per_instance=arguments.ncores_per_instance,
        nodes=arguments.nodes_list,
        cores=arguments.cores_list,
        use_logical_cores=arguments.use_logical_cores,
        use_e_cores=arguments.use_e_cores,
        mode=mode,
        strategy=arguments.strategy,
        one_node=arguments.skip_cross_node_cores or arguments.bind_numa_node,
        bind_memory=arguments.bind_numa_node,
        instance_idx=arguments.instance_idx,
    )


def instances_of(arguments: argparse.Namespace, decided: Run, started: str) -> list[Job]:
    """A process for each instance; one alone keeps the terminal, unless it is logged."""
    instances = decided.plan.instances
    is_alone = len(instances) == 1
    jobs = []
    for one in instances:
        log = None
        if arguments.log_dir:
            what = f"instance_{one.index}_cores_{ranges(one.cpus)}"
            log = log_path(Path(arguments.log_dir), arguments.log_file_prefix, started, what)
        place = _place(one, decided.environment, parent=os.getpid())
        jobs.append(
            Job(
                name=f"instance {one.index}",
                command=_bound([place], decided.command),
                label="" if is_alone else f"[{one.index}] ",
                is_piped=not is_alone or log is not None,
                log=log,
            )
        )
    return jobs


def _training(arguments: argparse.Namespace, decided: Run, folder: str) -> Job:
    """torchrun, which starts each rank through `binding`. It labels what ranks print."""
    instances = decided.plan.instances
    places = [_place(one, decided.environment) for one in instances]
    options = torchrun_options(arguments, len(instances))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", *options),
        *("--tee=3", f"--log-dir={folder}", "--no-python"),
        *_bound(places, decided.command),
    ]
    threads = min(len(one.cpus) for one in instances)
    variables = {
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}] ",
        **decided.environment.variables_of(threads),
    }
    own = {
        "cpus": [number for one in instances for number in one.cpus],
        "memory_nodes": [],
        "variables": variables,
        "parent": os.getpid(),
    }
    return Job(name="torchrun", command=_bound([own], command), is_piped=False)


def _place(one: Instance, environment: Environment, parent: int | None = None) -> dict[str, object]:
    """What `binding` gets of an instance."""
    return {
        "cpus": one.cpus,
        "memory_nodes": one.memory_nodes,
        "variables": environment.variables_of(len(one.cpus)),
        "parent": parent,
    }


def _bound(places: list[dict[str, object]], command: Sequence[str]) -> list[str]:
    """The command, run by a process that first goes to its place."""
    return [sys.executable, "-I", "-S", str(BINDING), json.dumps(places), *command]


@contextmanager
def _opened(arguments: argparse.Namespace, started: str) -> Iterator[tuple[TextIO | None, str]]:
    """The log file of what the launcher itself says, None without --log-dir; and what the names of
    this run's files have in common, which no run has that began in the same second."""
    if not arguments.log_dir:
        yield None, started
        return
    folder, prefix = Path(arguments.log_dir), arguments.log_file_prefix
    for number in itertools.count(1):
        unique = started if number == 1 else f"{started}-{number}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            log = log_path(folder, prefix, unique, "instances").open("x", encoding="utf-8")
        except FileExistsError:
            continue
        except OSError as problem:
            arguments.parser.error(f"--log-dir: {problem}")
        with log:
            yield log, unique
        return


def _print(text: str, log: TextIO | None) -> None:
    """To standard error, which leaves standard output to the instances, and to the log file."""
    print(text, file=sys.stderr, flush=True)
    if log is not None:
        print(text, file=log, flush=True)
