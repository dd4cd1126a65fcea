"""Steps of one token for each sequence, recorded once and run without Python between their ops.

A step of a small model takes its ops less time than Python needs to call them; with many cores that
holds for large models too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..core.modes import is_unseen
from ..graph.errors import CaptureError
from ..program.program import Program
from ..program.tape import Recorder
from .cache import KVCache
from .record import FusedModel

UNRECORDED = 12
"""Steps of a model that run as they are first: recording takes as long as about a hundred save."""


@dataclass
class _Known:
    """What is known of a model: steps so far, and its programs by form; None where there is none.

    renewals: how often values had been written to the model when its programs were made.
    """

    renewals: int
    steps: int = 0
    programs: dict[tuple[Any, ...], Program | None] = field(default_factory=dict)


_KNOWN: WeakKeyDictionary[FusedModel, _Known] = WeakKeyDictionary()


class SingleSteps:
    """The steps of one run over a cache.

    padding: int64 [batch], tokens at the start of each sequence that are not to be seen, or None.
    Call it under `torch.inference_mode`.
    """

    def __init__(self, model: FusedModel, cache: KVCache, padding: Tensor | None) -> None:
        self.model = model
        self.cache = cache
        self.padding = padding
        windows = any(layer.attention.window is not None for layer in model.layers)
        changing = any(table.changing for table in model.tables)
        # With padding a mask says everything, and a window moves with each step.
        self._known = None if changing or (windows and padding is not None) else _known(model)
        self._form = (cache.batch, cache.layers[0].keys.dtype, padding is None)
        self._start = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._program: Program | None = None
        self._kept: list[Tensor] = []

    def __call__(self, tokens: Tensor) -> Tensor | None:
        """Logits [batch, 1, vocabulary] after tokens int64 [batch, 1], which the cache then counts.

        None, with nothing done, where the step has to run as it is.
        """
        known, cache = self._known, self.cache
        if known is None or cache.length >= cache.capacity:
            return None
        if self._program is None:
            known.steps += 1
            if self._form not in known.programs:
                if known.steps <= UNRECORDED:
                    return None
                return self._record(known, tokens)
            self._program = known.programs[self._form]
            if self._program is None:
                self._known = None
                return None
            self._kept = self._of_run()
        self._start.fill_(cache.length)
        logits = _run(self._program, [tokens, self._start, *self._kept])
        cache.length += 1
        return logits

    def _record(self, known: _Known, tokens: Tensor) -> Tensor | None:
        """Runs a step and makes a program of it, which has to give the same logits."""
        from ..program.recorded import repeated  # which imports more of torch than most uses need

        self._start.fill_(self.cache.length)
        kept = self._of_run()
        inputs = [tokens, self._start, *kept]
        recorder = _Recorder(inputs)
        known.programs[self._form] = None
        try:
            with recorder.watching():
                logits = self._step(tokens, kept)
            program = repeated(recorder.recording([logits]), inputs)
        except CaptureError:
            return None
        # Both write the same keys and values at the same position.
        if not torch.equal(_run(program, inputs), logits):
            return None
        known.programs[self._form] = program
        self.cache.length += 1
        return logits

    def _of_run(self) -> list[Tensor]:
        """The tensors of this run: tables of angles, the padding, the cache."""
        found = []
        for table in self.model.tables:
            table.reserve(self.cache.capacity)
            found += [table.cos, table.sin]
        if self.padding is not None:
            places = torch.arange(self.cache.capacity, device="cpu")
            found += [self.padding, (places >= self.padding[:, None])[:, None, None]]
        return found + [tensor for layer in self.cache.layers for tensor in layer.tensors()]

    def _step(self, tokens: Tensor, kept: list[Tensor]) -> Tensor:
        """`FusedModel.step` of one token, at a position that is a tensor."""
        model, start = self.model, self._start
        count = 2 * len(model.tables)
        place, mask = start, None
        if self.padding is not None:
            padding, mask = kept[count : count + 2]
            place = start - padding
        hidden = model.embedded(tokens, 0, None) if model.positions is None else None
        if hidden is None:
            hidden = model.embedded(tokens, 0, place[:, None].expand(tokens.shape))
        angles = [rows.index_select(0, place) for rows in kept[:count]]
        if self.padding is not None:
            angles = [rows[:, None] for rows in angles]
        for index, layer in enumerate(model.layers):
            table = model.rotary[index]
            cos, sin = (None, None) if table is None else angles[2 * table : 2 * table + 2]
            hidden = layer.step(hidden, self.cache.layers[index], start, cos, sin, mask)
        return model.logits(hidden)


class _Recorder(Recorder):  # type: ignore[no-untyped-call]
    """A recorder of steps that write to their cache, which is theirs to keep."""

    def _refuse_write(self, func: Any, value: Any) -> None:
        pass


def _run(program: Program, inputs: list[Tensor]) -> Tensor:
    (logits,), _ = program(inputs, is_unseen=is_unseen())
    return logits


def _known(model: FusedModel) -> _Known:
    """What is known of a model, from scratch where values were written since."""
    renewals = 0 if model.standing is None else model.standing.renewals
    known = _KNOWN.get(model)
    if known is None or known.renewals != renewals:
        _KNOWN[model] = known = _Known(renewals)
    return known
