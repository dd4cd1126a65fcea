"""The driver of `optimize`, `llm.optimize` and `quantize_`: a list of passes over one context."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from torch import nn

from .changes import ATTRIBUTE, ChangeLog
from .memory import nbytes


class Context(Protocol):
    """What the passes of a front end share; log: of all that they change in the model."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def log(self) -> ChangeLog: ...


_Context = TypeVar("_Context", bound=Context)


def run_passes(
    context: _Context,
    passes: Iterable[Callable[[_Context], None]],
    attribute: str = ATTRIBUTE,
    *,
    keeps_changes: bool = False,
) -> None:
    """Run passes one after the other and keep the log on the model, in `attribute`.

    The log's report gets the time and the bytes of the parameters before and after. Where a pass
    raises, the changes of this run are taken back, or stay where keeps_changes is set; a log
    without changes does not stay on a model that had none.
    """
    began = time.perf_counter()
    model, log = context.model, context.log
    report, begin, reported = log.report, len(log.changes), len(log.report.entries)
    is_new = model.__dict__.get(attribute) is not log
    report.bytes_before = report.bytes_before or nbytes(model)
    model.__dict__[attribute] = log
    try:
        for run in passes:
            run(context)
    except BaseException:
        if not keeps_changes:
            log.undo(begin)
            del report.entries[reported:]
        if is_new and not log.changes:
            del model.__dict__[attribute]
        raise
    finally:
        report.seconds = time.perf_counter() - began
        report.bytes_after = nbytes(model)
