"""`quantize_`: weights of linear layers become codes of 4 or 8 bits, in place, layer by layer."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from ..rewriting.changes import QUANTIZED, ChangeLog, log_of
from ..rewriting.memory import Returned, check_available, nbytes
from ..rewriting.report import Entry
from .calibration import Batch, input_moments
from .configs import WeightConfig
from .layers import Filter, Layer, find, install
from .report import QuantizationReport, QuantizedLayer
from .weights import quantized

Progress = Callable[[int, int, str], None]
"""Called with the number of layers done, of all, and the path of the next one ("" at the end)."""


def quantize_(
    model: nn.Module,
    config: WeightConfig,
    *,
    filter: Filter = None,
    calibration: Iterable[Batch] | None = None,
    progress: bool | Progress = False,
) -> QuantizationReport:
    """Quantize the weights of a model's linear layers in place; return what was done.

    model: on the CPU; nn.Linear and layers that compute the same (GPT-2's Conv1D) are quantized,
        wherever their sizes are any. LSTMs, embeddings and attention of torch.nn stay as they are.
    config: `Int8Weight`, `Int4Weight`, `NF4Weight`, `Int8DynamicActivationInt8Weight` or
        `Int8DynamicActivationInt4Weight`.
    filter: which layers: a callable of (path, module), or names from model.named_modules() (a name
        takes all below it; * stands for anything), one or several. None takes all but the output
        head of a language model. An embedding that shares its weight with the head stays plain.
    calibration: batches that the model reads, so that rounding keeps what its layers compute on
        such data (see `calibrated_codes`): token ids [batch, length] for a language model, or
        keyword arguments. 32,000 tokens of typical text do much for int4. None: round to nearest.
    progress: True shows a line on standard error; a callable gets (done, all, path).

    Layers are quantized one after the other and their plain weights dropped, so that memory never
    needs more than the model and one layer. What is needed is computed first, and shapes and values
    are looked at first: TypeError, ValueError or MemoryError leave the model as it was. An
    interrupt leaves it with some layers quantized.

    state_dict() has the same keys with plain (rounded) values, and load_state_dict() quantizes
    again. `oxytorch.undo(model)` makes all weights plain; they keep their rounded values. Calling
    `quantize_` again takes the layers that are still plain, and `oxytorch.optimize` improves the
    rest of a quantized model; quantize first.
    """
    _check(model, config)
    layers, left = find("quantize_", model, filter)
    _check_shapes(layers, config)
    check_available("quantize_", _needed(layers, config), f"{len(layers)} quantized layers")
    _check_values(layers)
    turns = _in_turn(model, layers, calibration)
    began = time.perf_counter()
    kind = type(model).__name__
    report = QuantizationReport(kind, repr(config), ["quantize_"])
    report.bytes_before = nbytes(model)
    report.entries += [Entry("-", item.path, False, item.reason) for item in left]
    log = log_of(model, QUANTIZED) or ChangeLog(report)
    model.__dict__[QUANTIZED] = log
    show = _shown(progress)
    returned = Returned()
    for index, (layer, moments) in enumerate(turns):
        show(index, len(layers), layer.path)
        before = layer.weight.nbytes
        weight = layer.weight.t() if layer.transposed else layer.weight
        packed = quantized(weight, config, layer.weight_name, moments)
        del weight, moments
        install(log, layer, packed)
        returned.add(before)
        sizes = QuantizedLayer(layer.path, layer.shape, before, packed.nbytes_packed())
        report.add(sizes, config.format, layer.beside)
    show(len(layers), len(layers), "")
    report.bytes_after = nbytes(model)
    report.seconds = time.perf_counter() - began
    _extend(log, report)
    return report


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


def _extend(log: ChangeLog, report: QuantizationReport) -> None:
    """Add a later call's report to the one that `explain` gives."""
    first = log.report
    if first is report or not isinstance(first, QuantizationReport):
        return
    done = {entry.module for entry in report.done}
    first.entries = [e for e in first.entries if e.module not in done] + report.done
    first.layers += report.layers
    first.dtype = f"{first.dtype}, {report.dtype}"
    first.seconds += report.seconds
    first.bytes_after = report.bytes_after


def _check(model: nn.Module, config: WeightConfig) -> None:
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"quantize_: expected model to be a torch.nn.Module, got a {type(model).__name__}"
        )
    if isinstance(config, type) and issubclass(config, WeightConfig):
        raise TypeError(
            f"quantize_: expected a configuration such as {config.__name__}(), got the class"
        )
    if not isinstance(config, WeightConfig):
        raise TypeError(
            "quantize_: expected config to be Int8Weight(), Int4Weight() or another of "
            f"oxytorch.quantization, got a {type(config).__name__}"
        )
    if log_of(model) is not None:
        raise ValueError(
            "quantize_: expected a model that is not optimized yet, got an optimized one; "
            "call oxytorch.undo(model) first, quantize, then optimize"
        )


def _check_shapes(layers: Iterable[Layer], config: WeightConfig) -> None:
    size = config.group_size
    for layer in layers:
        if size is not None and layer.shape[1] % size:
            raise ValueError(
                f"quantize_: expected a group_size that divides in_features {layer.shape[1]} of "
                f"{layer.name}, got {size}; {_advice(layer)}"
            )


def _advice(layer: Layer) -> str:
    fitting = [size for size in (256, 128, 64, 32) if layer.shape[1] % size == 0]
    found = f"group_size={fitting[0]} fits" if fitting else "use group_size=None"
    return f"{found}, or leave the layer out with a filter" if layer.path else found


def _check_values(layers: Iterable[Layer]) -> None:
    for layer in layers:
        least, most = torch.aminmax(layer.weight.detach())
        if not (bool(least.isfinite()) and bool(most.isfinite())):
            raise ValueError(
                f"quantize_: expected finite values in {layer.weight_name}, got NaN or infinity"
            )


def _needed(layers: Iterable[Layer], config: WeightConfig) -> int:
    """The most bytes beyond those of the model that are in use at any time.

    While a layer is quantized its plain weight, its codes (a byte each) and its panels stand side
    by side; then the plain weight goes, unless an embedding keeps it.
    """
    grown = most = 0
    for layer in layers:
        packed = config.nbytes(*layer.shape)
        most = max(most, grown + layer.weight.numel() + packed)
        grown += packed - (0 if layer.beside else layer.weight.nbytes)
    return most


def _shown(progress: bool | Progress) -> Progress:
    if callable(progress):
        return progress
    if not progress:
        return lambda done, all, path: None
    stream = sys.stderr

    def show(done: int, all: int, path: str) -> None:
        width = 24
        filled = "=" * (width * done // max(all, 1))
        stream.write(f"\r\x1b[Kquantizing [{filled:<{width}}] {done}/{all} {path}")
        if done == all:
            stream.write("\n")
        stream.flush()

    return show
