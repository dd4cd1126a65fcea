"""`with oxytorch.verbose():` which operators and kernels ran, and how long they took."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TextIO

import torch

from . import _library


@dataclass(frozen=True)
class Row:
    """One call of an operator.

    source: "oxytorch", or "onednn" inside torch.
    op: its name.
    kernel: the kernels that ran, in their order.
    level: the instruction set.
    shapes: of all arguments, or oneDNN's description of the problem.
    microseconds: the call's time, without what the dispatcher takes.
    """

    source: str
    op: str
    kernel: str
    level: str
    shapes: str
    microseconds: float


@dataclass
class Log:
    """The calls that were noted, in the order in which they ended."""

    rows: list[Row] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([*self._calls(), "", *self._summary()])

    def _calls(self) -> list[str]:
        cells = [
            (
                f"{row.source}::{row.op}",
                row.kernel,
                row.level,
                row.shapes,
                f"{row.microseconds:.1f}",
            )
            for row in self.rows
        ]
        return _table(("op", "kernel", "level", "shapes", "us"), cells)

    def _summary(self) -> list[str]:
        sums: dict[str, tuple[int, float]] = {}
        for row in self.rows:
            name = f"{row.source}::{row.op}"
            calls, time = sums.get(name, (0, 0.0))
            sums[name] = calls + 1, time + row.microseconds
        whole = sum(time for _, time in sums.values())
        cells = [
            (name, str(calls), f"{time:.1f}", f"{100 * time / whole if whole else 0:.1f} %")
            for name, (calls, time) in sorted(sums.items(), key=lambda item: -item[1][1])
        ]
        cells.append(("all", str(len(self.rows)), f"{whole:.1f}", ""))
        return _table(("op", "calls", "total us", "share"), cells)


@contextmanager
def verbose(file: TextIO | None = None) -> Iterator[Log]:
    """Print each call of our operators, and of oneDNN's, that runs in a block, and a summary.

    file: where the table is printed when the block ends, standard output by default. The block gets
    the `Log`, which has the rows when it has ended.

    Calls of all threads are recorded, from Python and from programs. Plain PyTorch in place of a
    kernel (float64, other devices) is named "reference" where the library calls it, and not
    recorded elsewhere. Blocks cannot be nested. While one runs, what C code prints to standard
    output passes through the library.

    Raises RuntimeError where the compiled library is missing, or within another block.
    """
    global _is_open
    if not _library.loaded:
        raise RuntimeError(f"verbose: needs the compiled library: {_library.why_missing}")
    if _is_open:
        raise RuntimeError("verbose: already on; blocks cannot be nested")
    library = _library.functions()
    log = Log()
    _is_open = True
    library.oxytorch_verbose_lines()  # of calls that ended after the last block
    library.oxytorch_verbose_begin()
    try:
        _tell_onednn(1)
        try:
            yield log
        finally:
            _tell_onednn(0)
    finally:
        library.oxytorch_verbose_end()
        _is_open = False
        lines = str(library.oxytorch_verbose_lines(), "utf-8", "replace").splitlines()
        log.rows += [row for row in map(_row, lines) if row is not None]
        print(log, file=file or sys.stdout)


_is_open = False


def _tell_onednn(level: int) -> None:
    if torch._C._has_mkldnn:
        torch._C._verbose.mkldnn_set_verbose(level)


def _row(line: str) -> Row | None:
    """A line of the library's, or one of oneDNN's; None for those that are no call."""
    own = line.split("\t")
    if own[0] == "oxytorch" and len(own) == 6:
        _, op, kernel, level, shapes, time = own
        return Row("oxytorch", op, kernel or "-", level, shapes, float(time))
    # Template of oneDNN's documentation, "Verbose mode": onednn_verbose,v1,primitive,exec,engine,
    # primitive,implementation,propagation,memory descriptors,attributes,auxiliary,problem,time
    words = line.split(",")
    if len(words) < 11 or words[0] != "onednn_verbose" or "exec" not in words[2:4]:
        return None
    place = words.index("exec")
    kernel, _, level = words[place + 3].partition(":")
    dtypes = [part.split(":")[1] for part in words[place + 5].split() if ":" in part]
    shapes = f"{words[-2]} {'/'.join(dict.fromkeys(dtypes))}"
    return Row("onednn", words[place + 2], kernel, level or "-", shapes, 1000 * float(words[-1]))


_WIDEST = 60


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns of one width; texts left, numbers right."""
    cut = [[cell if len(cell) <= _WIDEST else f"{cell[: _WIDEST - 3]}..." for cell in row]
           for row in (head, *rows)]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*cut, strict=True)]
    is_number = [name in ("us", "calls", "total us", "share") for name in head]
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        ).rstrip()
        for row in cut
    ]
