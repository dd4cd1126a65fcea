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
    """Programs pack every weight that they can, whatever was timed; call it with False for none."""
    from packing import packing

    set_to = packing(monkeypatch)
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
