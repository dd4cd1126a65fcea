"""Packed weights whose stored values may be the user's times a scale: of linear layers and
convolutions."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .packed import PackedTensor


class ReorderedTensor(PackedTensor):
    """A weight in the order of one of oneDNN's kernels, or in panels.

    Subclasses say how to reorder values (`_pack`) and back (`_unpack`).

    scale: a factor per output channel, float32 [out_channels] (a folded normalization). The stored
    values are then values * scale, and restoring stays exact: one byte an element keeps by how
    many units in the last place the division misses the user's value.
    """

    @property
    def packed(self) -> Tensor:
        """What the kernel reads."""
        packed = self._current().packed
        assert packed is not None
        return packed

    @property
    def beside(self) -> Tensor | None:
        """The same values in another order, for inputs that `packed` is not meant for."""
        return self._current().beside

    def _current(self) -> _Stored:
        stored: _Stored = self.cell.stored
        if stored.packed is None:  # another thread took the plain values out since it was asked
            stored = self._stored(self.values(), stored.scale)
        return stored

    @property
    def scale(self) -> Tensor | None:
        stored: _Stored | None = self.cell.stored
        return None if stored is None else stored.scale

    def _pack(self, stored: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not say how to reorder values")

    def _pack_beside(self, stored: Tensor) -> Tensor | None:
        """What `beside` gives."""
        return None

    def _unpack(self, packed: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not say how to restore its values")

    def _taken_out(self) -> Tensor:
        plain = super()._taken_out()
        stored: _Stored | None = self.cell.stored
        if stored is not None and stored.packed is not None:
            with self.cell.lock:
                if self.cell.is_out:  # it is packed again at its next use
                    self.cell.stored = _Stored(None, None, stored.scale)
        return plain

    def nbytes_packed(self) -> int:
        """Bytes that the stored form takes, and the plain values where these are kept."""
        found = 0 if self.cell.plain is None else self.cell.plain.nbytes
        return found if self.cell.stored is None else found + self.cell.stored.nbytes()

    def fold(self, scale: Tensor | None) -> None:
        """Store the same values times another scale."""
        with self.cell.lock:
            values = self.values()
            self.cell.stored = self._stored(values, scale)
            self.cell.tick()

    def repack(self, values: Tensor) -> None:
        """Replace the stored values by `values`, a plain floating tensor of this shape."""
        self.cell.stored = self._stored(values.detach(), self.scale)

    def _stored(self, values: Tensor, scale: Tensor | None) -> _Stored:
        values = values.to(self.dtype).contiguous()
        if scale is None:
            return _Stored(self._pack(values), self._pack_beside(values))
        stored = (values.float() * self._column(scale)).to(self.dtype).contiguous()
        missed = self._divided(stored, scale)
        bits = _BITS[self.dtype]
        steps = values.view(bits).int() - missed.view(bits).int()
        steps = torch.where(values == missed, 0, steps)
        forms = self._pack(stored), self._pack_beside(stored)
        if bool((steps.abs() <= 127).all()) and bool(missed.isfinite().all()):
            return _Stored(*forms, scale, steps.to(torch.int8))
        return _Stored(*forms, scale, None, values.clone())

    def restore(self) -> Tensor:
        """Return the plain values, a new contiguous tensor of this shape and dtype."""
        own: _Stored = self.cell.stored
        if own.kept is not None:
            return own.kept.clone()
        stored = self._unpack(self.packed)
        if own.correction is None or own.scale is None:
            return stored
        bits = _BITS[self.dtype]
        return (self._divided(stored, own.scale).view(bits) + own.correction).view(self.dtype)

    def _column(self, scale: Tensor) -> Tensor:
        return scale.reshape(-1, *[1] * (self.dim() - 1))

    def _divided(self, stored: Tensor, scale: Tensor) -> Tensor:
        return (stored.float() / self._column(scale)).to(self.dtype).contiguous()


_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


_nbytes = torch.ops.mkldnn._nbytes.default


@dataclass(eq=False, slots=True)
class _Stored:
    """The stored form of a reordered weight: see `ReorderedTensor`.

    packed: None while the plain values are out.
    for_sizes: what `packed` holds for inputs of other sizes: itself, or in another order.
    """

    packed: Tensor | None
    beside: Tensor | None = None
    scale: Tensor | None = None
    correction: Tensor | None = None
    kept: Tensor | None = None
    for_sizes: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def nbytes(self) -> int:
        held = (self.packed, self.beside, self.correction, self.kept, self.scale)
        every = (*held, *(t for t in [*self.for_sizes.values()] if t is not self.packed))
        return sum(int(_nbytes(t)) if t.is_mkldnn else t.nbytes for t in every if t is not None)
