"""A float32 master weight in two parts, and the float32 tensor that shows it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from ..ops.optimizer_step import formats
from . import sharding

as_plain = torch._C.DisableTorchFunctionSubclass


class plainly:
    """Tensors that are made inside have versions, and no gradients."""

    def __enter__(self) -> None:
        self._inference: Any = None
        if torch.is_inference_mode_enabled():
            self._inference = torch.inference_mode(False)
            self._inference.__enter__()
        self._is_recorded = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        self._functions = as_plain()
        self._functions.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._functions.__exit__(*error)
        torch._C._set_grad_enabled(self._is_recorded)
        if self._inference is not None:
            self._inference.__exit__(*error)


class MasterWeight:
    """A float32 weight as the upper and the low 16 bits of its values.

    upper: bfloat16; shares memory and version with the parameter, of a sharded one with its shard.
    low_bits: int16, placed as `upper`; zeros if None.

    Who writes both raises both versions by as much. Where `upper` was written alone, what was
    written is the weight, and the low bits are zero.
    """

    def __init__(self, parameter: Tensor, low_bits: Tensor | None = None) -> None:
        with plainly():
            self.upper = Tensor.detach(sharding.peek(parameter))
            self.low_bits = (
                torch.zeros_like(self.upper, dtype=torch.int16) if low_bits is None else low_bits
            )
        self.is_free = False  # whether the parameter has parted from it
        self.address = self.upper.data_ptr()
        self.begin()
        # The weight as others hold it, and the versions at which it was what is kept here.
        self._shown: weakref.ref[Tensor] | None = None
        self._shown_version = self._shown_from = 0

    def leave(self) -> None:
        """Parts from the parameter, which is given other memory: who holds the weight keeps it."""
        if self._shown is not None and self._shown() is not None:
            self.show()
        self.settle()
        with plainly():
            # Of a version of its own: steps of the parameter raise that of the other.
            self.upper = self.upper.data
        self.is_free = True
        self._continue()

    def enter(self, parameter: Tensor) -> None:
        """Becomes the weight of a parameter, whose memory is the upper part now."""
        with plainly():
            self.upper = Tensor.detach(sharding.peek(parameter))
        self.is_free = False
        self._continue()

    def _continue(self) -> None:
        """The values are what they were; the upper part has another version."""
        self.address = self.upper.data_ptr()
        self.begin()
        shown = self._shown() if self._shown is not None else None
        if shown is not None:
            self._note(shown)

    def begin(self) -> None:
        """Notes that both parts now belong to one weight."""
        self.lead = self.upper._version - self.low_bits._version

    def is_written(self) -> bool:
        """Whether the upper part was written alone."""
        return self.upper._version - self.low_bits._version != self.lead

    def settle(self) -> None:
        """Makes what was written to the upper part alone the weight."""
        if self.is_written():
            with plainly():
                self.low_bits.zero_()
            self.begin()

    def join(self) -> Tensor:
        """The float32 weight, a new tensor."""
        self.settle()
        with plainly():
            return formats.join(self.upper, self.low_bits)

    def set(self, weight: Tensor) -> None:
        """Makes the float32 tensor `weight` the weight, all bits of it."""
        with plainly():
            upper, low_bits = formats.split(weight)
            self.upper.copy_(upper)
            self.low_bits.copy_(low_bits)
        self.begin()

    def show(self) -> Tensor:
        """The float32 weight, the same tensor as long as anybody holds it.

        Writes to it reach this weight with `take`, at the latest when nobody holds it any more.
        """
        shown = self._shown() if self._shown is not None else None
        if shown is None:
            shown = self.join()
            with plainly():
                same = shown.detach()
            self._shown = weakref.ref(shown)
            weakref.finalize(shown, self._take, same).atexit = False
        elif not self._take(shown) and self.upper._version != self._shown_from:
            with plainly():
                shown.copy_(self.join())
        self._note(shown)
        return shown

    def take(self) -> None:
        """Brings what was written to the tensor of `show` to this weight."""
        shown = self._shown() if self._shown is not None else None
        if shown is not None and self._take(shown):
            self._note(shown)

    def _take(self, shown: Tensor) -> bool:
        is_written = shown._version != self._shown_version
        if is_written:
            self.set(shown)
        return is_written

    def _note(self, shown: Tensor) -> None:
        self._shown_version, self._shown_from = shown._version, self.upper._version
