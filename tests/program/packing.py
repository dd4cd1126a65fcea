"""Which weights programs pack, whatever was timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def packing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that sets whether programs pack every weight that they can, or none.

    Where oneDNN's order serves too, it is taken, or panels with `in_panels`; convolutions of our
    own with `own`. Layers that share an input are joined.
    """
    from oxytorch.program.passes import convolution_times, linear, own_convolutions, panels
    from oxytorch.program.passes import joined as joining

    def set_to(pays: bool, in_panels: bool = False, joined: bool = True, own: bool = False) -> None:
        wins = {
            (linear.panels_call, linear.packed_call): in_panels,
            joining.JOINED: joined,
            ("own", "plain"): own,
        }

        def first_win(key: Any, sizes: Any, gain: float = 1.0) -> int | None:
            for both in sizes:  # a way that fails is not taken when times are
                for run in both:
                    run()
            return 0 if wins.get(key[0], pays) else None

        def is_faster(x: Any, weight: Any, make: Any, than: Any, gain: float = 1) -> bool:
            for call in linear.products_of(x, weight, (make, than), 4):
                call()
            return wins.get((make, than), pays)

        def is_faster_convolution(
            layer: Any, way: str, than: str, *more: bool, gain: float = 1
        ) -> bool:
            ways = convolution_times.Ways(layer)
            for each in (way, than):
                getattr(ways, each)()
            return wins.get((way, than), pays)

        for module in (convolution_times, joining):
            monkeypatch.setattr(module, "first_win", first_win)
        for module in (linear, panels):
            monkeypatch.setattr(module, "is_faster", is_faster)
        for module in (convolution_times, own_convolutions):
            monkeypatch.setattr(module, "is_faster", is_faster_convolution)

    return set_to
