"""What goes into the layers of a model when it reads calibration data, block after block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..rewriting.changes import forwards_set
from ..rewriting.memory import check_available
from ..rewriting.refusals import check_data

Batch = Tensor | Mapping[str, Any] | Sequence[Any]
"""Arguments of one call of the model: a tensor, keyword arguments, or positional ones."""


class _Enough(Exception):
    """Ends a call of the model once the block that is looked at has been computed."""


class Moments:
    """The mean of x x^T over all inputs x [in_features] of each of some layers.

    Sums are float32. Layers that get the same tensor (query, key and value) share the product.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._sums: dict[nn.Module, Tensor | None] = dict.fromkeys(layers)
        self._counts = dict.fromkeys(self._sums, 0)
        self._last: tuple[Tensor, Tensor] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Adds what the layers read meanwhile."""
        with ExitStack() as hooks:
            hooks.callback(self._forget_last)
            for layer in self._sums:
                hooks.enter_context(layer.register_forward_pre_hook(self._add))
            yield

    def _forget_last(self) -> None:
        self._last = None

    def _add(self, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        given: Tensor = arguments[0]
        if self._last is None or self._last[0] is not given:
            rows = given.detach().flatten(0, -2).float()
            self._last = given, rows.t() @ rows
        product = self._last[1]
        known = self._sums[layer]
        self._sums[layer] = product.clone() if known is None else known.add_(product)
        self._counts[layer] += given.numel() // given.shape[-1]

    def take(self, layer: nn.Module) -> Tensor | None:
        """Returns a layer's mean [in_features, in_features] and forgets it; None if never called.

        Raises ValueError if what the layer read was not finite.
        """
        total = self._sums.pop(layer)
        if total is None:
            return None
        if not bool(total.diagonal().isfinite().all()):
            raise ValueError("calibration: expected finite inputs of layers, got NaN or infinity")
        return total.div_(self._counts[layer])


def input_moments(
    model: nn.Module, layers: Mapping[str, nn.Module], batches: Iterable[Batch]
) -> Iterator[tuple[str, Tensor | None]]:
    """Yields (name, moments) for every layer once; moments as in `Moments.take`.

    layers: linear layers of the model by name.
    batches: arguments of calls of the model; a tensor is the only one. Padding counts like anything
        else.

    Where the model calls a list of blocks one after the other (decoder layers), a block is run once
    what came before it has been yielded: layers that the caller has quantized by then count with
    their errors. Inputs of one block are kept for all batches. Other models are run once.
    The model runs in evaluation mode, without gradients, and is left as it was.
    Raises ValueError if there are no batches, MemoryError if inputs and moments need more than
    there is, and what the model raises for the first batch, before anything is yielded; later
    ValueError if an input of a layer is not finite.
    """
    check_data("quantize_", "calibration", batches)
    calls = [*batches]
    if not calls:
        raise ValueError("calibration: expected at least one batch, got none")
    blocks = _blocks(model, layers.values())
    trial = _tried(model, blocks, layers.values(), calls[0])
    if trial.called != blocks:
        blocks = []
    needed = trial.kept * len(calls) if blocks else 0
    needed += _moments_bytes(trial.widths, blocks)
    check_available("calibration", needed, "inputs of layers and their moments")
    return _moments_by_block(model, layers, calls, blocks)


def _moments_by_block(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    calls: Sequence[Batch],
    blocks: Sequence[nn.Module],
) -> Iterator[tuple[str, Tensor | None]]:
    """The iterator of `input_moments`."""
    names = {layer: name for name, layer in layers.items()}
    outputs: list[Any] = [None] * len(calls)
    for index, block in enumerate(blocks):
        inside = [module for module in block.modules() if module in names]
        moments = Moments(inside)
        done = blocks[:index]
        if inside:
            with moments.watching():
                _run_block(model, calls, done, outputs, block)
        for layer in inside:
            yield names.pop(layer), moments.take(layer)
        outputs = _run_block(model, calls, done, outputs, block)
    if names:
        moments = Moments([*names])
        with moments.watching(), _running(model):
            for call, output in zip(calls, outputs, strict=True):
                with _answering(blocks, output):
                    _call(model, call)
        for layer in [*names]:
            yield names.pop(layer), moments.take(layer)


def _blocks(model: nn.Module, layers: Iterable[nn.Module]) -> list[nn.Module]:
    """The children of the list of modules that holds most of the layers; none of a single one."""
    wanted = {*layers}
    best: list[nn.Module] = []
    most = 0
    for module in model.modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1:
            held = sum(part in wanted for part in module.modules())
            if held > most:
                best, most = [*module], held
    return best


@dataclass
class _Trial:
    """What one call of a model showed.

    called: blocks in the order of their calls.
    kept: bytes of the largest output of a block.
    widths: in_features of the layers that were called.
    """

    called: list[nn.Module] = field(default_factory=list)
    kept: int = 0
    widths: dict[nn.Module, int] = field(default_factory=dict)


def _tried(
    model: nn.Module, blocks: Sequence[nn.Module], layers: Iterable[nn.Module], call: Batch
) -> _Trial:
    """Calls the model once and looks."""
    trial = _Trial()

    def answered(block: nn.Module, arguments: Any, output: Any) -> None:
        trial.called.append(block)
        parts = output if isinstance(output, (tuple, list)) else (output,)
        size = sum(part.nbytes for part in parts if isinstance(part, Tensor))
        trial.kept = max(trial.kept, size)

    def read(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        trial.widths[layer] = arguments[0].shape[-1]

    with ExitStack() as hooks, _running(model):
        for block in blocks:
            hooks.enter_context(block.register_forward_hook(answered))
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(read))
        _call(model, call)
    return trial


def _moments_bytes(widths: Mapping[nn.Module, int], blocks: Sequence[nn.Module]) -> int:
    """Bytes of the moments in memory at a time, and of what is computed from the largest one."""
    sizes = {layer: 4 * width * width for layer, width in widths.items()}
    held = [sum(sizes.pop(part, 0) for part in block.modules()) for block in blocks]
    held.append(sum(sizes.values()))
    return max(held) + 3 * max((4 * width * width for width in widths.values()), default=0)


def _run_block(
    model: nn.Module,
    calls: Sequence[Batch],
    done: Sequence[nn.Module],
    outputs: Sequence[Any],
    block: nn.Module,
) -> list[Any]:
    """Returns the outputs of `block` in each call; `outputs`: those of the blocks before it."""
    found: list[Any] = []

    def keep(module: nn.Module, arguments: Any, output: Any) -> None:
        found.append(output)
        raise _Enough

    with block.register_forward_hook(keep), _running(model):
        for call, output in zip(calls, outputs, strict=True):
            with suppress(_Enough), _answering(done, output):
                _call(model, call)
    return found


@contextmanager
def _answering(blocks: Sequence[nn.Module], output: Any) -> Iterator[None]:
    """Has the blocks return `output` at once."""
    answer: Callable[..., Any] = lambda *arguments, **options: output  # noqa: E731
    with forwards_set(dict.fromkeys(blocks, answer)):
        yield


@contextmanager
def _running(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every module is in the mode that it had."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def _call(model: nn.Module, call: Batch) -> None:
    if isinstance(call, Tensor):
        model(call)
    elif isinstance(call, Mapping):
        model(**call)
    else:
        model(*call)
