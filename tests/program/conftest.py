from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent)]


@pytest.fixture(autouse=True)
def packing_pays(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Programs pack every weight that they can, whatever was timed; call it with False for none.

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

    set_to(True)
    return set_to


@pytest.fixture
def everything_is_packed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Layers of any size are packed, whatever was timed, and no gradients are asked of them."""
    from oxytorch.program.passes import linear
    from oxytorch.rewriting import measure

    monkeypatch.setattr(measure, "TIMED", False)
    monkeypatch.setattr(linear, "SMALLEST", 0)
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from seen import Seen

    from oxytorch.program import backend

    found, own = Seen(), backend.CompiledGraph

    class Call(own):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            found.programs.append(self)

    monkeypatch.setattr(backend, "CompiledGraph", Call)
    say = backend._say_why

    def say_why(graph: Any, why: Exception) -> None:
        found.reasons.append(str(why))
        say(graph, why)

    monkeypatch.setattr(backend, "_say_why", say_why)
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()
