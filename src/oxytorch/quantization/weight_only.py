"""`quantize_`: quantize the weights of linear layers to 4 or 8 bits, in place."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..core.modes import with_normal_tensors
from ..graph.state import random_unmoved
from ..rewriting.changes import QUANTIZED, ChangeLog, log_of
from ..rewriting.driver import run_passes
from ..rewriting.measure import steady_heap
from ..rewriting.memory import Returned, check_available
from ..rewriting.refusals import check_finite, check_module, check_not_optimized
from ..rewriting.report import Entry, Report
from .calibration import Batch, input_moments
from .configs import Int8DynamicActivationInt8Weight, WeightConfig
from .layers import Filter, Layer, find, install
from .other_layers import OtherLayer, Packed, install_other, pays, sizes_of
from .quantization_report import QuantizationReport, QuantizedLayer
from .weights import quantized

_SHOWN = 3
"""Reasons in the warning that nothing was quantized."""

Progress = Callable[[int, int, str], None]
"""Called with the number of finished layers, of all, and the next one's path ("" at the end)."""


@with_normal_tensors
def quantize_(
    model: nn.Module,
    config: WeightConfig,
    *,
    filter: Filter = None,
    calibration: Iterable[Batch] | None = None,
    progress: bool | Progress = False,
) -> QuantizationReport:
    """Quantize the weights of a model's linear layers in place and return a report.

    model: on the CPU and not optimized. nn.Linear and layers that compute the same (GPT-2's Conv1D)
        are quantized, of any size. Recurrent layers and embeddings are quantized by some
        configurations (docs/quantization.md); convolutions and attention stay unchanged.
    config: `Int8Weight`, `Int4Weight`, `NF4Weight`, `Float8Weight`,
        `Int8DynamicActivationInt8Weight` or `Int8DynamicActivationInt4Weight`.
    filter: the layers: one or several names from model.named_modules() (each includes all below it;
        * matches anything), or a function of (path, module). None: all except the output head of a
        language model. An embedding that shares its weight with the head stays plain.
    calibration: batches of typical inputs, so that rounding preserves the layers' outputs on them
        (see `calibrated_codes`): token ids [batch, length] for a language model, or positional or
        keyword arguments. About 32,000 tokens are enough. None: round to nearest.
    progress: True prints a line to standard error; a callable receives (done, all, path).

    Layers are quantized one after the other and their plain weights freed, so memory holds at most
    the model and one layer more. state_dict() has the same keys with plain, rounded values;
    load_state_dict() quantizes again. `oxytorch.undo(model)` makes the weights plain, with rounded
    values. A second call quantizes the layers that are still plain. Quantize before you optimize.

    Raises TypeError, ValueError or MemoryError before anything is changed if an argument, a shape
    or a value does not fit, or memory does not suffice. An interrupt leaves some layers quantized.
    """
    _check(model, config)
    layers, others, left = find("quantize_", model, filter, config)
    _check_layers(layers, others, config)
    count = len(layers) + len(others)
    turns = _in_turn(model, layers, calibration)
    report = QuantizationReport(type(model).__name__, repr(config), ["quantize_"])
    report.entries += [Entry("-", item.path, False, item.reason) for item in left]
    log = log_of(model, QUANTIZED) or ChangeLog(report)
    earlier, log.report = log.report, report
    context = _QuantizeContext(model, log, report, config, count, turns, others, shown(progress))
    try:
        passes = [_replace_weights, _replace_others]
        run_passes(context, passes, QUANTIZED, keeps_changes=True)
    finally:
        log.report = _extended(earlier, report)
    if not report.layers and not any(item.is_packed for item in left):
        warnings.warn(_nothing(model, report, config), UserWarning, stacklevel=3)
    return report


def _check_layers(layers: list[Layer], others: list[OtherLayer], config: WeightConfig) -> None:
    """Raises unless shapes and values can be quantized, and memory suffices."""
    for layer in layers:
        also = ", or leave the layer out with a filter" if layer.path else ""
        config.check_groups("quantize_", layer.name, layer.shape[1], "group_size=None", also)
    count = len(layers) + len(others)
    check_available("quantize_", _needed(layers, others, config), f"{count} quantized layers")
    for layer in layers:
        check_finite("quantize_", layer.weight_name, layer.weight)
    for other in others:
        for name, weight in other.weights.items():
            check_finite("quantize_", other.name_of(name), weight)


def _nothing(model: nn.Module, report: Report, config: WeightConfig) -> str:
    """Says that nothing was quantized, and why."""
    reasons = "; ".join([*dict.fromkeys(entry.detail for entry in report.entries)][:_SHOWN])
    found = reasons or "it has no linear layer"
    kinds = {type(module) for module in model.modules()}
    if kinds & {nn.LSTM, nn.GRU} and not isinstance(config, Int8DynamicActivationInt8Weight):
        found += "; Int8DynamicActivationInt8Weight() takes recurrent layers"
    if kinds & {nn.Conv1d, nn.Conv2d, nn.Conv3d}:
        found += "; oxytorch.quantize takes convolutions"
    return (
        f"quantize_: nothing of {type(model).__name__} was quantized by "
        f"{type(config).__name__}: {found}"
    )


@dataclass
class _QuantizeContext:
    """One `quantize_` call in progress.

    count: of all layers.
    turns: the linear ones, each with the moments of its inputs.
    """

    model: nn.Module
    log: ChangeLog
    report: QuantizationReport
    config: WeightConfig
    count: int
    turns: Iterable[tuple[Layer, Tensor | None]]
    others: list[OtherLayer]
    show: Progress
    done: int = 0


def _replace_weights(context: _QuantizeContext) -> None:
    """The pass: put packed weights into the layers, one after the other."""
    returned = Returned()
    for layer, moments in context.turns:
        context.show(context.done, context.count, layer.path)
        context.done += 1
        before = layer.weight.nbytes
        weight = layer.weight.t() if layer.transposed else layer.weight
        packed = quantized(weight, context.config, layer.weight_name, moments)
        del weight, moments
        install(context.log, layer, packed)
        returned.add(before)
        sizes = QuantizedLayer(layer.path, layer.shape, before, packed.nbytes_packed())
        context.report.add(sizes, context.config.format, layer.beside)


def _replace_others(context: _QuantizeContext) -> None:
    """The pass: put weights of bytes into recurrent layers and embeddings, where that pays."""
    returned = Returned()
    for layer in context.others:
        context.show(context.done, context.count, layer.path)
        context.done += 1
        packed = layer.rounded()
        if getattr(context.config, "only_faster", False) and not _pays(layer, packed):
            why = f"{type(layer.module).__name__}: floating point is as fast here"
            context.log.skipped("-", layer.path, f"{why}; only_faster=False takes it, for memory")
            continue
        sizes = [
            QuantizedLayer(path, shape, before, packed[name].nbytes_packed())
            for name, path, shape, before in sizes_of(layer)
        ]
        for name, weight in layer.weights.items():
            install_other(context.log, layer.module, name, packed[name], weight.requires_grad)
        returned.add(sum(size.bytes_before for size in sizes))
        for size in sizes:
            context.report.add(size, context.config.format, ())
    context.show(context.count, context.count, "")


def _pays(layer: OtherLayer, packed: Packed) -> bool:
    with random_unmoved(), torch.autocast("cpu", enabled=False), steady_heap():
        return pays(layer, packed)


def _in_turn(
    model: nn.Module, layers: Iterable[Layer], calibration: Iterable[Batch] | None
) -> Iterator[tuple[Layer, Tensor | None]]:
    """Return each layer with the moments of its inputs, in an order that calibration can use."""
    if calibration is None:
        return ((layer, None) for layer in layers)
    by_path = {layer.path: layer for layer in layers}
    modules = {path: layer.module for path, layer in by_path.items()}
    found = input_moments(model, modules, calibration)
    return ((by_path[path], moments) for path, moments in found)


def _extended(earlier: Report, report: QuantizationReport) -> Report:
    """The report of all calls, which `explain` gives; earlier: of those before."""
    if earlier is report or not report.layers or not isinstance(earlier, QuantizationReport):
        return earlier
    done = {entry.module for entry in report.applied}
    earlier.entries = [e for e in earlier.entries if e.module not in done] + report.applied
    earlier.layers += report.layers
    earlier.dtype = f"{earlier.dtype}, {report.dtype}"
    earlier.seconds += report.seconds
    earlier.bytes_after = report.bytes_after
    return earlier


def _check(model: nn.Module, config: WeightConfig) -> None:
    check_module("quantize_", model, scripted=False)
    if isinstance(config, type) and issubclass(config, WeightConfig):
        raise TypeError(
            f"quantize_: expected a configuration such as {config.__name__}(), got the class"
        )
    if not isinstance(config, WeightConfig):
        raise TypeError(
            "quantize_: expected config to be Int8Weight(), Int4Weight() or another of "
            f"oxytorch.quantization, got a {type(config).__name__}"
        )
    check_not_optimized("quantize_", model, ", quantize, then optimize")


def _needed(layers: Iterable[Layer], others: Iterable[OtherLayer], config: WeightConfig) -> int:
    """The most bytes beyond those of the model that are in use at any time.

    While a layer is quantized its plain weight, its quantized values (a byte each) and its panels
    exist together; then the plain weight goes, unless an embedding keeps it.
    """
    grown = most = 0
    for layer in layers:
        packed = config.nbytes(*layer.shape)
        most = max(most, grown + layer.weight.numel() + packed)
        grown += packed - (0 if layer.beside else layer.weight.nbytes)
    for other in others:
        most = max(most, grown + other.needed())
        grown += other.stored() - sum(weight.nbytes for weight in other.weights.values())
    return most


def shown(progress: bool | Progress) -> Progress:
    """What shows how far it is: a line on standard error, or a function of the caller's."""
    if callable(progress):
        return progress
    if not progress:
        return lambda done, all, path: None
    stream = sys.stderr

    def show(done: int, all: int, path: str) -> None:
        width = 24
        bar = f"[{'=' * (width * done // all):<{width}}] {done}/{all}" if all else str(done)
        stream.write(f"\r\x1b[Kquantizing {bar} {path}")
        if done == all:
            stream.write("\n")
        stream.flush()

    return show
