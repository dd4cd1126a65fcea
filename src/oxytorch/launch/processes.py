"""Starts the processes of a run, passes their output on, and leaves none of them running."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from .output import Printer, Pump

GRACE = 10.0
"""Seconds between the request to end and the end by force."""
GRACE_OF_THE_REST = 2.0
"""The same for processes that instances have left behind."""
TIMED_OUT = 124
"""The exit status after too long a run, as timeout(1) has it."""
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Job:
    """A process to start.

    name: what messages call it.
    label: what its lines begin with.
    is_piped: whether its output goes through this process, and it has no terminal; otherwise it has
        this process's own input and output.
    log: the file that gets its output too.
    is_shown: False for output that goes there alone.
    """

    name: str
    command: Sequence[str]
    label: str = ""
    is_piped: bool = True
    log: Path | None = None
    is_shown: bool = True


@dataclass(frozen=True)
class Outcome:
    """How a job ended: seconds, and the exit status as a shell gives it.

    was_ended: whether that was by the launcher, since another job failed or the user asked for it.
    """

    seconds: float
    status: int
    was_ended: bool


@dataclass(frozen=True)
class Result:
    """How all jobs ended, in their order, and the exit status of the run.

    cause: why they were ended: "signal", "time" or "output" (which could not be written); "" where
    they ended by themselves.
    """

    outcomes: tuple[Outcome, ...]
    status: int
    cause: str = ""


def run_jobs(
    jobs: Sequence[Job], say: Callable[[str], None], seconds: float | None = None
) -> Result:
    """Run all jobs at once until all have ended; the first that fails ends the others.

    An ending signal is passed on to all of them. seconds: after so many they are ended, with status
    124. When this returns, no process that they have started is running.
    """
    with ExitStack() as stack:
        signals = stack.enter_context(_Signals())
        stack.enter_context(_adopting())
        return _Run(jobs, say, signals, seconds).until_all_have_ended()


class _Run:
    """The processes of one run, and what has become of them."""

    def __init__(
        self,
        jobs: Sequence[Job],
        say: Callable[[str], None],
        signals: _Signals,
        seconds: float | None,
    ) -> None:
        self._jobs, self._say, self._signals = jobs, say, signals
        self._seconds = seconds
        self._limit = math.inf if seconds is None else time.monotonic() + seconds
        self._cause = ""
        self._others = _descendants(set())
        self._processes: list[subprocess.Popen[bytes]] = []
        self._began: list[float] = []
        self._outcomes: dict[int, Outcome] = {}
        self._status = 0
        self._deadline: float | None = None
        self._is_killed = False
        self._write_error: OSError | None = None

    def until_all_have_ended(self) -> Result:
        printer = Printer(self._cannot_write)
        with ExitStack() as logs:
            pumps: list[Pump] = []
            try:
                for job in self._jobs:
                    log = None if job.log is None else logs.enter_context(job.log.open("wb"))
                    pumps += self._start(job, printer, log)
                while len(self._outcomes) < len(self._processes):
                    self._step()
            finally:
                for process in self._processes:
                    if process.poll() is None:  # an error in this program
                        process.kill()
                        process.wait()
                self._end_the_rest()
                for pump in pumps:
                    pump.join()
        outcomes = tuple(self._outcomes[i] for i in range(len(self._jobs)))
        return Result(outcomes, self._status, self._cause)

    def _start(self, job: Job, printer: Printer, log: BinaryIO | None) -> list[Pump]:
        pipe = subprocess.PIPE if job.is_piped else None
        process = subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL if job.is_piped else None,
            stdout=pipe,
            stderr=pipe,
            start_new_session=job.is_piped,
        )
        self._processes.append(process)
        self._began.append(time.monotonic())
        label = job.label.encode()
        pairs = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        return [
            Pump(printer, source, target.buffer if job.is_shown else None, label, log)
            for source, target in pairs
            if source is not None
        ]

    def _step(self) -> None:
        """Wait for something to happen, and do what it asks for."""
        left = None if self._deadline is None else self._deadline - time.monotonic()
        until = self._limit - time.monotonic() if left is None else left
        self._signals.wait(min(1.0, max(until, 0.0)))
        for index, process in enumerate(self._processes):
            if index not in self._outcomes and process.poll() is not None:
                self._note_end(index, process.returncode)
        if self._write_error is not None and self._deadline is None:
            closed = isinstance(self._write_error, BrokenPipeError)
            if not closed:
                self._say(f"cannot write the output: {self._write_error}; ending all")
            self._end_all(signal.SIGTERM, 128 + signal.SIGPIPE if closed else 1, "output")
        is_running = len(self._outcomes) < len(self._processes)
        if is_running and self._deadline is None and time.monotonic() >= self._limit:
            self._say(f"still running after {self._seconds:g} seconds; ending all")
            self._end_all(signal.SIGTERM, TIMED_OUT, "time")
        for number in self._signals.taken():
            self._pass_on(number)
        if left is not None and left <= 0 and not self._is_killed:
            self._kill()

    def _note_end(self, index: int, code: int) -> None:
        seconds = time.monotonic() - self._began[index]
        was_ended = self._deadline is not None
        status = 128 - code if code < 0 else code
        self._outcomes[index] = Outcome(seconds, status, was_ended)
        if status and not was_ended:
            others = len(self._outcomes) < len(self._processes)
            name = self._jobs[index].name
            self._say(f"{name} {_cause(code)}" + ("; ending the others" if others else ""))
            self._end_all(signal.SIGTERM, status)

    def _pass_on(self, number: signal.Signals) -> None:
        """Hand a signal to all processes; the second one ends them at once."""
        if self._deadline is not None and self._status == 128 + number:
            self._kill()
            return
        self._say(f"{number.name}: ending all; once more ends them at once")
        self._end_all(number, 128 + number, "signal")

    def _end_all(self, number: signal.Signals, status: int, cause: str = "") -> None:
        self._status, self._cause = status, cause
        self._deadline = time.monotonic() + GRACE
        self._send(number)

    def _kill(self) -> None:
        self._is_killed = True
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        for job, process in zip(self._jobs, self._processes, strict=False):
            if process.poll() is not None:
                continue
            if job.is_piped:
                # The group's leader has not been waited for, so that the number is its own.
                os.killpg(process.pid, number)
            elif number != signal.SIGINT or not _is_in_foreground():
                process.send_signal(number)
            # Otherwise the terminal has sent Ctrl-C to that process as well.

    def _end_the_rest(self) -> None:
        """End what the jobs have started and left behind, in whatever session."""
        sessions = {
            process.pid
            for job, process in zip(self._jobs, self._processes, strict=False)
            if job.is_piped
        }
        deadline = time.monotonic() + GRACE_OF_THE_REST
        asked: set[int] = set()
        while rest := _descendants(sessions) - self._others:
            number = signal.SIGKILL if time.monotonic() > deadline else signal.SIGTERM
            for pid in rest:
                # Those that have ended, and those of another user.
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
                if number == signal.SIGKILL or pid not in asked:
                    asked.add(pid)
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, number)
            if time.monotonic() > deadline + GRACE_OF_THE_REST:
                self._say(f"still running: processes {', '.join(map(str, sorted(rest)))}")
                return
            time.sleep(0.01)

    def _cannot_write(self, error: OSError) -> None:
        self._write_error = error
        self._signals.wake()


class _Signals:
    """Ending signals and the end of children, as something to wait for."""

    def __init__(self) -> None:
        self._taken: list[signal.Signals] = []
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> _Signals:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in ENDING:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves it
                self._before[number] = signal.signal(number, self._take)
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._read)
        os.close(self._write)

    def _take(self, number: int, _: FrameType | None) -> None:
        self._taken.append(signal.Signals(number))

    def wait(self, seconds: float) -> None:
        """Return after a signal, `wake` or so many seconds."""
        if select.select([self._read], [], [], seconds)[0]:
            os.read(self._read, 4096)

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full, so that it wakes already
            os.write(self._write, b"\0")

    def taken(self) -> list[signal.Signals]:
        """The ending signals since the last call."""
        taken, self._taken = self._taken, []
        return taken


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Orphans among the descendants of this process become its children, where Linux can."""
    library = ctypes.CDLL(None)
    before = ctypes.c_int()
    library.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    library.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        library.prctl(PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def _descendants(sessions: set[int]) -> set[int]:
    """Processes below this one, and those of the sessions."""
    children: dict[int, list[int]] = {}
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # "pid (name) state parent group session": the name can have anything in it
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        pid = int(folder.name)
        children.setdefault(int(fields[1]), []).append(pid)
        if int(fields[3]) in sessions:
            found.add(pid)
    todo = [os.getpid(), *found]
    while todo:
        below = [pid for pid in children.get(todo.pop(), ()) if pid not in found]
        found.update(below)
        todo += below
    return found


def _is_in_foreground() -> bool:
    """Whether Ctrl-C in the terminal reaches this process's group."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):  # no terminal
        return False


def _cause(code: int) -> str:
    if code >= 0:
        return f"failed with exit status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a signal without a name
        return f"was killed by signal {-code}"
