"""The `oxytorch convert` subcommand: exported programs of torch to files of oxytorch."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from ..command_line import fail, report_errors
from ..core.whole_file import check_destination
from ..graph.agreement import CONVERTED, CONVERTED_NARROW
from . import files
from .model import ProgramModel

DESCRIPTION = """\
Convert a file that torch.export.save wrote to a file that oxytorch.load opens.

The result holds the weights and a list of operator calls: no code and no pickle. It is mapped into
memory in milliseconds, several processes share its weights, and it needs neither the model's Python
code nor a compiler. Sizes that the export left open stay open."""

EXAMPLES = """\
examples:
  oxytorch convert model.pt2 model.oxy      convert; compare both on the example of the export
  oxytorch convert model.pt2                the same, to model.oxy beside it
  oxytorch convert model.pt2 --text         print the list of operator calls, write nothing
  oxytorch convert bert.pt2 --import transformers.modeling_outputs
                                            a model that returns classes of a library

to make model.pt2, in Python:
  sizes = {"x": {0: torch.export.Dim("batch")}}
  exported = torch.export.export(model.eval(), (x,), dynamic_shapes=sizes)
  torch.export.save(exported, "model.pt2")

to use model.oxy, in Python:
  model = oxytorch.load("model.oxy")
  model(x)

A .pt2 file is read by torch, which may run code of it: convert files that you trust.
The exit status is 1 if the outputs differ, 2 if the model cannot be converted."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Gives the parser its options."""
    parser.description, parser.epilog = DESCRIPTION, EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("source", type=Path, metavar="MODEL.pt2", help="the file to convert")
    parser.add_argument(
        "target",
        type=Path,
        metavar="MODEL.oxy",
        nargs="?",
        help="the file to write (default: the name of the source with .oxy)",
    )
    parser.add_argument(
        "--text", action="store_true", help="print the list of operator calls instead of writing"
    )
    parser.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="import this first: it has classes that the model takes or returns; may be repeated",
    )
    parser.add_argument(
        "--no-check", action="store_true", help="do not compare the outputs of both files"
    )


def run(arguments: argparse.Namespace) -> int:
    """Converts; 1 if the outputs differ, 2 if that cannot be done."""
    return report_errors("convert", lambda: _convert(arguments), {ValueError: 2, OSError: 2})


def _convert(arguments: argparse.Namespace) -> int:
    source: Path = arguments.source
    target: Path = arguments.target or source.with_suffix(".oxy")
    if not arguments.text:
        check_destination(target, source)
    exported = _exported(source, arguments.modules)
    began = time.perf_counter()
    model = _program(exported)
    if arguments.text:
        print(model)
        return 0
    files.save(model, target)
    seconds = time.perf_counter() - began
    megabytes = target.stat().st_size / 1e6
    print(f"{target}: {megabytes:.1f} MB, {model!r}, in {seconds:.1f} s")
    if arguments.no_check:
        return 0
    return _compare(exported, target)


class _Reason(logging.Filter):
    """Keeps the error that torch logs, in place of printing it."""

    error: BaseException | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        found = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        self.error = found or self.error
        return found is None


def _exported(path: Path, modules: Sequence[str]) -> ExportedProgram:
    if not path.is_file():
        raise ValueError(f"expected a file that torch.export.save wrote, found no {path}")
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ValueError(f"--import {name}: {error}") from error
    try:
        return _loaded(path)
    except _UnreadError:
        if _QDQ_OPERATORS in sys.modules:
            raise
    # Files of quantized models call operators that torch imports where somebody asks for them.
    importlib.import_module(_QDQ_OPERATORS)
    return _loaded(path)


_QDQ_OPERATORS = "torch.ao.quantization.fx._decomposed"


class _UnreadError(ValueError):
    """torch cannot read a file."""


def _loaded(path: Path) -> ExportedProgram:
    log, reason = logging.getLogger("torch.export"), _Reason()
    log.addFilter(reason)
    try:
        return torch.export.load(path)
    except Exception as error:  # torch raises whatever its readers do
        cause = reason.error or error
        hint = "; name the module of that class with --import" if "pytree" in str(cause) else ""
        raise _UnreadError(
            f"{path}: expected a file that torch.export.save wrote; torch {torch.__version__} "
            f"cannot read it: {type(cause).__name__}: {cause}{hint}"
        ) from error
    finally:
        log.removeFilter(reason)


def _program(exported: ExportedProgram) -> ProgramModel:
    from .export import from_exported

    return from_exported(exported, storable=True)


def _compare(exported: ExportedProgram, target: Path) -> int:
    """Compare both files on the example of the export; remove the new one if they differ."""
    if exported.example_inputs is None:
        print("not compared: the source holds no example")
        return 0
    outputs = []
    for model in (exported.module(), files.load(target, verify=True)):
        args, kwargs = torch.utils._pytree.tree_map_only(
            Tensor, torch.clone, exported.example_inputs
        )
        torch.manual_seed(0)
        with torch.no_grad():
            outputs.append(_leaves(model(*args, **kwargs)))
    worst = max(map(_difference, *outputs), default=0.0)
    if worst > 1:
        target.unlink()
        return fail(
            "convert",
            f"the outputs differ by {worst:.1f} times the tolerance; {target} was removed. Please "
            "report this model",
            1,
        )
    print(f"compared on the example: the largest difference is {worst:.2g} of the tolerance")
    return 0


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in _leaves(part)]
    return [*vars(value).values()] if hasattr(value, "__dataclass_fields__") else [value]


def _difference(wanted: Any, found: Any) -> float:
    """How far two outputs differ, in tolerances."""
    if not isinstance(wanted, Tensor):
        return 0.0 if wanted == found else float("inf")
    is_like = isinstance(found, Tensor) and wanted.shape == found.shape
    if not is_like or wanted.dtype != found.dtype:
        return float("inf")
    if wanted.numel() == 0 or torch.equal(wanted, found):
        return 0.0
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return float("inf")
    tolerance = CONVERTED.get(wanted.dtype, CONVERTED_NARROW)
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    a, b = wanted.to(wide), found.to(wide)
    same = a.isfinite() & b.isfinite()
    if not torch.equal(a[~same].nan_to_num(), b[~same].nan_to_num()):
        return float("inf")
    scale = a[same].abs().max().clamp(min=1e-6) if same.any() else torch.tensor(1.0, device="cpu")
    return float(((a - b)[same].abs().max() / scale).item() / tolerance) if same.any() else 0.0
