"""Runs in a new process before the user's command: takes its cores, its memory, its variables.

A program by itself, without the package, so that it starts in milliseconds:

    python -I -S binding.py PLACES COMMAND ...

PLACES is JSON, a list of {"cpus": [...], "memory_nodes": [...], "variables": {...}, "parent": N},
of which the process takes the one of its LOCAL_RANK, or the only one.
"""

import ctypes
import json
import os
import platform
import signal
import sys

PR_SET_PDEATHSIG = 1
MPOL_BIND = 2
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}


def main() -> None:
    """Bind this process, then become the command."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
    places, command = json.loads(sys.argv[1]), sys.argv[2:]
    rank = int(os.environ["LOCAL_RANK"]) if len(places) > 1 else 0
    place = places[rank]
    library = ctypes.CDLL(None, use_errno=True)
    # Whatever happens to the process that started this one, this one does not outlive it.
    library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if place.get("parent") not in (None, os.getppid()):
        sys.exit(1)  # it has ended already
    try:
        os.sched_setaffinity(0, place["cpus"])
    except OSError as error:
        complain(f"cannot run on cores {place['cpus']}: {error.strerror}")
    if place["memory_nodes"]:
        bind_memory(library, place["memory_nodes"])
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    # Python ignores these two; the command expects them as a shell gives them.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, {**os.environ, **place["variables"]})
    except OSError as error:
        complain(f"cannot run {command[0]}: {error.strerror}", 127 if error.errno == 2 else 126)


def bind_memory(library: ctypes.CDLL, nodes: list[int]) -> None:
    """Take memory from these NUMA nodes alone, as `numactl --membind` does."""
    bits = 64 * (max(nodes) // 64 + 1)
    mask = (ctypes.c_ulong * (bits // 64))()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    call = SET_MEMPOLICY.get(platform.machine())
    # The kernel reads one bit less than it is told.
    if call is None or library.syscall(call, MPOL_BIND, mask, ctypes.c_ulong(bits + 1)):
        reason = os.strerror(ctypes.get_errno()) if call else f"unknown on {platform.machine()}"
        complain(f"--bind-numa-node: cannot bind memory to nodes {nodes}: {reason}; leave it out")


def complain(text: str, status: int = 1) -> None:
    """Say why there is no command, and end."""
    print(f"oxytorch run: {text}", file=sys.stderr, flush=True)
    sys.exit(status)


main()
