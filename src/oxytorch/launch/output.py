"""What processes print: passed on line by line, with a label, and written to log files."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, BinaryIO

LONGEST = 1 << 16
"""Bytes after which a line is passed on before it ends."""


class Printer:
    """Whole lines from several threads to two streams; the first failure ends all printing.

    failed: is called, once, with the error of a stream or a log file that cannot be written.
    """

    def __init__(self, failed: Callable[[OSError], None]) -> None:
        self._lock = threading.Lock()
        self._failed = failed
        self._is_open = True

    def write(self, stream: BinaryIO, data: bytes) -> None:
        with self._lock:
            if not self._is_open:
                return  # the run is being ended; what still comes has nowhere to go
            try:
                stream.write(data)
                stream.flush()
            except OSError as error:
                self._is_open = False
                self._failed(error)


class Pump:
    """A thread that reads what one process prints to a pipe, until all who hold it have ended.

    target: None for what goes to the log alone.
    """

    def __init__(
        self,
        printer: Printer,
        source: IO[bytes],
        target: BinaryIO | None,
        label: bytes,
        log: BinaryIO | None,
    ) -> None:
        self._printer, self._source, self._target = printer, source, target
        self._label, self._log = label, log
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        rest = b""
        with self._source:
            while data := self._source.read1(LONGEST):  # type: ignore[attr-defined]
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > LONGEST:
                    lines, rest = [*lines, rest], b""
                self._pass_on(lines)
        if rest:
            self._pass_on([rest])

    def _pass_on(self, lines: list[bytes]) -> None:
        if not lines:
            return
        if self._log is not None:
            self._printer.write(self._log, b"".join(line + b"\n" for line in lines))
        if self._target is None:
            return
        # Of a line that was drawn over, as progress bars are, the last state.
        shown = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
        self._printer.write(self._target, b"".join(self._label + line + b"\n" for line in shown))


def log_path(folder: Path, prefix: str, started: str, what: str) -> Path:
    """The log file of `what` in a run that began at `started`."""
    return folder / f"{prefix}_{started}_{what}.log"
