"""The options of `oxytorch run`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from ..command_line import positive
from .shared_options import add_core_options, add_model_options, set_texts, switch

USAGE = """\
oxytorch run [options] script.py [arguments]
       oxytorch run [options] -m module [arguments]
       oxytorch run [options] command [arguments]"""

DESCRIPTION = """\
Starts a script on cores of its own: one process on all physical cores, or several instances side
by side, or the ranks of a training through torchrun. Shows what it starts, labels and logs what
the instances print, and leaves none of their processes running."""

EXAMPLES = """\
examples:
  oxytorch run --dry-run script.py
      what would run where, without starting it
  oxytorch run script.py
      one instance on all physical cores
  oxytorch run --throughput-mode script.py
      one instance for each NUMA node
  oxytorch run --latency-mode --log-dir logs script.py
      one instance for every four cores, with a log file each
  oxytorch run --ninstances 4 --ncores-per-instance 6 script.py
      four instances of six cores
  oxytorch run --nodes-list 1 -m package.module --batch-size 8
      a module, on the cores of NUMA node 1
  oxytorch run --ninstances 4 --instance-idx 2 script.py
      the third of four instances alone
  oxytorch run --optimize --dtype bfloat16 script.py
      models of the script are optimized, without a change to it
  oxytorch run --nproc-per-node 2 train.py
      a training with two ranks on this machine
  oxytorch run --nnodes 2 --nproc-per-node 2 --rdzv-endpoint HOST:29400 train.py
      the same on each of two machines
"""

TORCHRUN = {
    "--nnodes": "machines, or a range MIN:MAX",
    "--node-rank": "number of this machine, where the rendezvous is static",
    "--rdzv-backend": "how ranks find each other (c10d, unless --node-rank is given)",
    "--rdzv-endpoint": "HOST:PORT at which they do",
    "--rdzv-id": "name of the job, the same on all machines",
    "--rdzv-conf": "settings of the rendezvous: KEY=VALUE,...",
    "--master-addr": "address of the first machine, where the rendezvous is static",
    "--master-port": "port there",
    "--local-addr": "address of this machine",
    "--max-restarts": "times that all ranks are started again after a failure",
    "--monitor-interval": "seconds between looks at the ranks",
}
"""Options that torchrun gets as they are."""

LOG_PREFIX = "run"
ONE_MACHINE = (None, "1", "1:1")
"""Values of --nnodes."""

ELSEWHERE = {
    "--auto-ipex": "use --optimize",
    "--auto-ipex-verbose": "--optimize always says what it did",
    "--disable-ipex-graph-mode": "leave it out: --optimize makes no graphs",
    "--nprocs-per-node": "use --nproc-per-node, as torchrun does",
    "--hostfile": "start the command on each machine, with --nnodes and --rdzv-endpoint",
    "--extra-mpi-params": "leave it out: ranks are started by torchrun, not by MPI",
    "--ccl-worker-count": "leave it out: no cores are set apart for oneCCL",
    "--logical-cores-for-ccl": "leave it out: no cores are set apart for oneCCL",
    "--multi-task-manager": "leave it out: neither numactl nor taskset is needed to bind cores",
    "--disable-numactl": "leave it out: numactl is not used",
    "--disable-taskset": "leave it out: taskset is not used",
    "--multi-instance": "use --ninstances",
    "--use-logical-core": "use --use-logical-cores",
    "--core-list": "use --cores-list",
    "--node-id": "use --nodes-list",
    "--rank": "use --instance-idx",
    "--log-path": "use --log-dir",
    "--enable-jemalloc": "use --memory-allocator jemalloc",
    "--enable-tcmalloc": "use --memory-allocator tcmalloc",
    "--use-default-allocator": "use --memory-allocator default",
    "--disable-iomp": "use --omp-runtime default",
    "--convert-fp64-to-fp32": "leave it out: GPUs run as in plain PyTorch",
}
"""Options of ipexrun and torch.backends.xeon.run_cpu that there are none of, and what to do."""


class _Elsewhere(argparse.Action):
    """An option of another launcher: the error says what to do."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        parser.error(f"{option_string} is no option of oxytorch run: {self.const}")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Gives the parser all options."""
    set_texts(parser, USAGE, DESCRIPTION, EXAMPLES)
    _add_program_options(parser.add_argument_group("what runs"))
    _add_instance_options(parser.add_argument_group("instances"))
    cores = parser.add_argument_group("cores")
    add_core_options(cores)
    switch(cores, "--use-logical-cores", help="all threads of a core, not one")
    _add_library_options(parser.add_argument_group("libraries"))
    _add_output_options(parser.add_argument_group("output"))
    add_model_options(parser.add_argument_group("models"))
    _add_rank_options(parser.add_argument_group("ranks of a training, by torchrun"))
    for name, remedy in ELSEWHERE.items():
        parser.add_argument(name, action=_Elsewhere, nargs=0, const=remedy, help=argparse.SUPPRESS)


def conflict(given: argparse.Namespace) -> str:
    """What is wrong with the options together; an empty string if nothing is."""
    set_names = {name for name, value in vars(given).items() if value not in (None, False, 0, "")}

    def first(*names: str) -> str | None:
        return next((name for name in names if name in set_names), None)

    def option(name: str) -> str:
        return f"--{name.replace('_', '-')}"

    exclusive: Sequence[tuple[str, ...]] = (
        ("throughput_mode", "latency_mode"),
        ("throughput_mode", "ninstances"),
        ("throughput_mode", "ncores_per_instance"),
        ("latency_mode", "ninstances"),
        ("latency_mode", "ncores_per_instance"),
        ("cores_list", "nodes_list"),
        ("cores_list", "use_logical_cores"),
        ("cores_list", "use_e_cores"),
        ("module", "no_python"),
    )
    for one, other in exclusive:
        if first(one) and first(other):
            return f"{option(one)} and {option(other)} exclude each other; leave one out"
    if is_training(given):
        ours = ("ninstances", "throughput_mode", "latency_mode", "instance_idx")
        name = first(*ours) or (None if given.instance_idx is None else "instance_idx")
        if name:
            return f"{option(name)}: ranks are counted by --nproc-per-node; leave one out"
        if first("ncores_per_instance") and given.nproc_per_node in (None, "auto"):
            return "--ncores-per-instance: needs --nproc-per-node with a number"
        if given.nnodes not in ONE_MACHINE and not first("rdzv_endpoint", "master_addr"):
            return (
                "--nnodes: needs a place where machines meet: --rdzv-endpoint HOST:PORT, or "
                "--master-addr HOST and --node-rank"
            )
    if not given.optimize and (name := first("dtype", "sample_first_call")):
        return f"{option(name)}: needs --optimize"
    if not given.log_dir and given.log_file_prefix != LOG_PREFIX:
        return "--log-file-prefix: needs --log-dir"
    return ""


def is_training(given: argparse.Namespace) -> bool:
    """Whether any option for torchrun is there."""
    names = [name.lstrip("-").replace("-", "_") for name in TORCHRUN]
    return given.standalone or any(
        getattr(given, name) is not None for name in ("nproc_per_node", *names)
    )


def torchrun_options(given: argparse.Namespace, ranks: int) -> list[str]:
    """What torchrun is called with; a machine alone needs no rendezvous of the user's."""
    options = [f"--nproc-per-node={ranks}"]
    for name in TORCHRUN:
        value = getattr(given, name.lstrip("-").replace("-", "_"))
        options += [] if value is None else [f"{name}={value}"]
    where = (given.rdzv_endpoint, given.rdzv_backend, given.master_addr, given.master_port)
    if given.standalone or (given.nnodes in ONE_MACHINE and where == (None,) * 4):
        return ["--standalone", *options]
    if given.rdzv_endpoint and (given.rdzv_backend, given.node_rank) == (None, None):
        # torchrun's own default takes every machine for the first one.
        return ["--rdzv-backend=c10d", *options]
    return options


def _add_program_options(group: Any) -> None:
    switch(group, "-m", "--module", help="run a module, as `python -m` does")
    switch(group, "--no-python", help="run a command, even if its name ends with .py")
    switch(group, "--dry-run", help="print the plan and start nothing")


def _add_instance_options(group: Any) -> None:
    group.add_argument(
        "--ninstances",
        type=positive,
        default=0,
        metavar="N",
        help="number of instances (default: 1)",
    )
    group.add_argument(
        "--ncores-per-instance",
        type=_cores_per_instance,
        default=0,
        metavar="N",
        help="cores of each; 0: an equal share, -1: the rest goes to the first ones (default: 0)",
    )
    group.add_argument(
        "--nthreads-per-instance",
        type=positive,
        metavar="N",
        help="OpenMP threads of each (default: as many as it has cores)",
    )
    switch(group, "--throughput-mode", help="one instance for each NUMA node")
    switch(group, "--latency-mode", help="one instance for every four cores")
    group.add_argument(
        "--instance-idx", type=int, metavar="I", help="run that instance alone, from 0"
    )
    group.add_argument(
        "--strategy",
        choices=("scatter", "close"),
        default="scatter",
        help="which cores, if not all: spread over NUMA nodes, or in turn (default: scatter)",
    )
    switch(
        group,
        "--skip-cross-node-cores",
        help="keep each instance within one NUMA node; cores left over are not used",
    )
    switch(
        group,
        "--bind-numa-node",
        help="the same, and take its memory from that node alone (not if there is none left)",
    )


def _add_library_options(group: Any) -> None:
    group.add_argument(
        "--memory-allocator",
        choices=("auto", "default", "jemalloc", "tcmalloc"),
        default="auto",
        help="auto: tcmalloc or jemalloc, where installed (default: auto)",
    )
    group.add_argument(
        "--omp-runtime",
        choices=("auto", "default", "intel"),
        default="default",
        help="OpenMP: torch's own, or Intel's; auto: Intel's, where installed (default: default)",
    )
    switch(group, "--benchmark", help="jemalloc keeps freed memory: faster, and memory may run out")


def _add_output_options(group: Any) -> None:
    group.add_argument("--log-dir", default="", metavar="DIR", help="write log files there")
    group.add_argument(
        "--log-file-prefix",
        default=LOG_PREFIX,
        metavar="NAME",
        help="prefix of their names (default: run)",
    )


def _add_rank_options(group: Any) -> None:
    group.add_argument(
        "--nproc-per-node",
        type=_ranks,
        metavar="N",
        help="ranks on this machine; auto: one for each NUMA node (default: auto)",
    )
    switch(group, "--standalone", help="a rendezvous of this machine alone")
    for name, meaning in TORCHRUN.items():
        group.add_argument(name, metavar=name.rpartition("-")[2].upper(), help=meaning)


def _cores_per_instance(text: str) -> int:
    if text != "-1" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number from 0, or -1, got {text!r}")
    return int(text)


def _ranks(text: str) -> int | str:
    return text if text == "auto" else positive(text)
