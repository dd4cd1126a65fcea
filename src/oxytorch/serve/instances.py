"""Several instances of a server behind one port: started, placed, and brought back."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..core.system_files import ranges
from ..launch.command import BINDING
from ..launch.plan import Instance, Request, make_plan
from ..launch.topology import read_topology
from .logs import log, set_up
from .server import address, bound_socket

MISTAKE = 2
"""The exit status of a server that could not be started as it was asked for."""
RECENT = 60.0
"""Seconds after which an end is forgotten."""
LONGEST_WAIT = 30.0
"""Seconds between an end and the next start at most."""
GRACE = 10.0
"""Seconds beyond --drain until instances are killed."""
ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def serve_instances(arguments: argparse.Namespace) -> int:
    """Runs `--instances` servers until a signal. Each has cores of its own and accepts from the
    same socket; one that ends is started again.

    arguments: with `words`, the command line. Raises ValueError for more instances than cores, and
    OSError for a port in use. Returns the exit status.
    """
    set_up(arguments.log_level)
    request = Request(ninstances=arguments.instances, option="--instances")
    plan = make_plan(read_topology(), request)
    with bound_socket(arguments.host, arguments.port) as listener:
        os.set_inheritable(listener.fileno(), True)
        if arguments.port == 0:
            log.info("bound", extra={"fields": {"url": address(listener)}})
        # Whatever happens is waited for, and nothing in between is missed.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {*ENDING, signal.SIGCHLD})
        try:
            return _Supervisor(arguments, plan.instances, listener).until_the_end()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(eq=False)
class _Member:
    """One instance.

    ends: when it ended of late.
    due: when it is started next.
    """

    place: Instance
    process: subprocess.Popen[bytes] | None = None
    ends: list[float] = field(default_factory=list)
    due: float = 0.0


class _Supervisor:
    def __init__(
        self,
        arguments: argparse.Namespace,
        places: Sequence[Instance],
        listener: socket.socket,
    ) -> None:
        self._arguments = arguments
        self._listener = listener
        self._members = [_Member(place) for place in places]
        self._deadline: float | None = None
        self._status = 0

    def until_the_end(self) -> int:
        try:
            while self._deadline is None or any(each.process for each in self._members):
                self._start_those_due()
                self._wait()
                self._note_ends()
        finally:
            for each in self._members:
                if each.process is not None:
                    each.process.kill()
                    each.process.wait()
        return self._status

    def _start_those_due(self) -> None:
        if self._deadline is not None:
            return
        for each in self._members:
            if each.process is None and time.monotonic() >= each.due:
                each.process = self._started(each.place)
                fields = {"instance": each.place.index, "pid": each.process.pid}
                log.info(
                    "instance started",
                    extra={"fields": {**fields, "cores": ranges(each.place.cpus)}},
                )

    def _started(self, place: Instance) -> subprocess.Popen[bytes]:
        cpus = list(place.cpus)
        bound = {"cpus": cpus, "memory_nodes": [], "variables": {}, "parent": os.getpid()}
        threads = [] if self._arguments.threads is not None else [f"--threads={len(cpus)}"]
        handed = [f"--listener={self._listener.fileno()}", *threads]
        binding = [sys.executable, "-I", "-S", str(BINDING), json.dumps([bound])]
        command = [*binding, sys.executable, "-m", "oxytorch", *self._arguments.words, *handed]
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=[self._listener.fileno()],
            start_new_session=True,  # Ctrl-C reaches this process, which passes it on
        )

    def _wait(self) -> None:
        """Until a signal, or the time for something to do."""
        now = time.monotonic()
        if self._deadline is None:
            until = min(
                (each.due for each in self._members if each.process is None), default=math.inf
            )
        else:
            until = self._deadline
            if now >= until:
                self._send(signal.SIGKILL)
        found = signal.sigtimedwait({*ENDING, signal.SIGCHLD}, min(max(until - now, 0.01), 3600))
        if found is not None and found.si_signo in ENDING:
            log.info("shutting down", extra={"fields": {"signal": found.si_signo}})
            self._end()

    def _end(self) -> None:
        """Asks all to finish what runs; once more, not to wait."""
        self._send(signal.SIGTERM)
        if self._deadline is None:
            self._deadline = time.monotonic() + self._arguments.drain + GRACE

    def _send(self, number: signal.Signals) -> None:
        for each in self._members:
            if each.process is not None:
                each.process.send_signal(number)

    def _note_ends(self) -> None:
        now = time.monotonic()
        for each in self._members:
            if each.process is None or each.process.poll() is None:
                continue
            status, each.process = each.process.returncode, None
            if self._deadline is not None:
                continue
            if status == MISTAKE:  # it has said what is wrong, which another start would not mend
                self._status = MISTAKE
                self._end()
                continue
            each.ends = [*(end for end in each.ends if now - end < RECENT), now]
            wait = 0.0 if len(each.ends) == 1 else min(2.0 ** (len(each.ends) - 2), LONGEST_WAIT)
            each.due = now + wait
            fields = {"instance": each.place.index, "status": status, "again_in_s": wait}
            log.error("instance ended", extra={"fields": fields})
