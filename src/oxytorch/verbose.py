"""`with oxytorch.verbose():` which operators and kernels ran, and how long they took."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

import torch
from torch import nn

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
    module: the path of the innermost module whose call it was in, "" for the model itself; None
        outside of the model's calls, and where no model was given.
    """

    source: str
    op: str
    kernel: str
    level: str
    shapes: str
    microseconds: float
    module: str | None = None


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
        head = ("op", "kernel", "level", "shapes", "us")
        if all(row.module is None for row in self.rows):
            return _table(head, cells)
        shown = {None: "-", "": "(the model)"}
        places = [shown.get(row.module, row.module or "") for row in self.rows]
        with_places = [(each, *cell) for each, cell in zip(places, cells, strict=True)]
        return _table(("module", *head), with_places)

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
def verbose(file: TextIO | None = None, model: nn.Module | None = None) -> Iterator[Log]:
    """Print each call of our operators, and of oneDNN's, that runs in a block, and a summary.

    file: where the table is printed when the block ends, standard output by default. The block gets
    the `Log`, which has the rows when it has ended.
    model: also tell which module each call was in, the innermost one, by its path in `model`.
        Modules have hooks until the block ends. While a module has hooks, fused code runs layer by
        layer, and a program (`graph=True`) runs the model's own code.

    Calls of all threads are recorded, from Python and from programs. Plain PyTorch in place of a
    kernel (float64, other devices) is named "reference" where the library calls it, and not
    recorded elsewhere. Blocks cannot be nested. While one runs, what C code prints to standard
    output passes through the library.

    Raises TypeError if `model` is no module or a scripted one, or `file` cannot be written to, and
    RuntimeError where the compiled library is missing, or within another block.
    """
    global _is_open
    _check(file, model)
    if not _library.loaded:
        raise RuntimeError(f"verbose: needs the compiled library: {_library.why_missing}")
    if _is_open:
        raise RuntimeError("verbose: already on; blocks cannot be nested")
    library = _library.functions()
    log = Log()
    places = None if model is None else _Places(model)
    _is_open = True
    library.oxytorch_verbose_lines()  # of calls that ended after the last block
    library.oxytorch_verbose_begin()
    try:
        _tell_onednn(1)
        try:
            with nullcontext() if places is None else places.told():
                yield log
        finally:
            _tell_onednn(0)
    finally:
        library.oxytorch_verbose_end()
        _is_open = False
        lines = str(library.oxytorch_verbose_lines(), "utf-8", "replace").splitlines()
        paths = [] if places is None else places.paths
        log.rows += [row for line in lines if (row := _labelled(line, paths)) is not None]
        print(log, file=file or sys.stdout)


_is_open = False


def _check(file: Any, model: Any) -> None:
    if file is not None and not hasattr(file, "write"):
        raise TypeError(
            f"verbose: expected file to be a text file, got a {type(file).__name__}; a model is "
            "given by name: verbose(model=model)"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "verbose: expected model to be a torch.nn.Module, got a module of TorchScript, whose "
            "parts take no hooks"
        )
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(
            f"verbose: expected model to be a torch.nn.Module, got a {type(model).__name__}"
        )


class _Places:
    """Tells the library by hooks which module a thread is in."""

    def __init__(self, model: nn.Module) -> None:
        named = [*model.named_modules()]
        self.paths = [path for path, _ in named]
        self._numbers = {module: number for number, (_, module) in enumerate(named)}
        self._around = threading.local()

    @contextmanager
    def told(self) -> Iterator[None]:
        """Have hooks on all modules within a block."""
        with ExitStack() as hooks:
            for module in self._numbers:
                if isinstance(module, torch.jit.ScriptModule):
                    continue  # which takes no hooks
                hooks.enter_context(module.register_forward_pre_hook(self._enter, prepend=True))
                hooks.enter_context(module.register_forward_hook(self._leave, always_call=True))
            try:
                yield
            finally:
                _library.functions().oxytorch_verbose_label(-1)

    def _stack(self) -> list[int]:
        stack: list[int] = self._around.__dict__.setdefault("stack", [])
        return stack

    def _enter(self, module: nn.Module, _: object) -> None:
        self._stack().append(self._numbers[module])
        _library.functions().oxytorch_verbose_label(self._numbers[module])

    def _leave(self, module: nn.Module, _: object, __: object) -> None:
        stack = self._stack()
        if stack and stack[-1] == self._numbers[module]:  # else a hook before ours has raised
            stack.pop()
        _library.functions().oxytorch_verbose_label(stack[-1] if stack else -1)


def _tell_onednn(level: int) -> None:
    if torch._C._has_mkldnn:
        torch._C._verbose.mkldnn_set_verbose(level)


def _labelled(line: str, paths: Sequence[str]) -> Row | None:
    """A line with the number of a path before it, or with none."""
    number, _, rest = line.partition("\t")
    row = _row(rest)
    return row if row is None or not number else replace(row, module=paths[int(number)])


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
