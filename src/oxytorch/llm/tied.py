"""An output head that is packed while the embedding that shares its weight keeps it plain."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ..core.packed import PackedTensor
from ..graph.forward import Forward, with_parameters
from ..quantization.layers import PanelForward
from .weights import stored_form


class TiedHeadForward(PanelForward):
    """The forward of a packed head whose weight an embedding has too, as a plain parameter.

    The two are one weight to the user: what is written to one of them reaches the other.
    """

    def __init__(self, module: nn.Module, owner: nn.Module) -> None:
        super().__init__(module)
        self.owner = owner
        self.plain = owner._parameters["weight"]
        self.seen: tuple[Any, Any] | None = None
        self.marks: tuple[Any, ...] | None = None
        self.sums: tuple[tuple[float, float], tuple[float, float]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.renew()
        home = self._home()
        if home is not self.module:
            return type(self.module).forward(home, *args, **kwargs)
        return super().__call__(*args, **kwargs)

    def _home(self) -> nn.Module:
        # One weight has one gradient, which goes to the parameter of the embedding.
        if self.plain is None or not (torch.is_grad_enabled() and self.plain.requires_grad):
            return self.module
        parameters = {**self.module._parameters, "weight": self.plain}
        return with_parameters(self.module, parameters)  # type: ignore[no-any-return]

    def renew(self) -> None:
        """Brings head and embedding together after a write to one of them."""
        if is_dynamo_compiling():
            return
        head = self.module._parameters.get("weight")
        plain = self.plain
        if not isinstance(head, PackedTensor) or plain is None:
            return
        # Who holds plain values of the head may write to them unseen.
        is_packed = head.is_packed()
        if self.seen is not None and is_packed and self.marks == _marks(plain, head):
            return
        if self.seen is not None:
            found = _written(plain), _written(head)
            was_written = [now != then for now, then in zip(found, self.seen, strict=True)]
        else:
            now = [_sums(plain), _sums(head.values())] if self.sums is not None else []
            was_written = [a != b for a, b in zip(now, self.sums or (), strict=True)]
        with torch.no_grad():
            if was_written[:1] == [True]:
                head.copy_(plain)
            elif was_written[1:] == [True]:
                plain.copy_(head.values())
        head.is_packed()
        self.seen = _written(plain), _written(head)
        self.marks = _marks(plain, head)

    def __getstate__(self) -> dict[str, Any]:
        # A copy finds out at its first use whether it was written to before.
        self.renew()
        head: Any = self.module._parameters["weight"]
        sums = None
        if isinstance(head, PackedTensor) and self.plain is not None:
            sums = _sums(self.plain), _sums(head.values())
        return {**super().__getstate__(), "seen": None, "marks": None, "sums": sums}


def _marks(plain: Tensor, head: PackedTensor) -> tuple[Any, ...]:
    """What changes where one of the two was written to, or the head's plain values were read."""
    return _written(plain), id(head.cell), head.cell.clock._version


def _written(weight: Tensor) -> tuple[int, ...]:
    """What changes where a weight was written to."""
    if isinstance(weight, PackedTensor):
        weight.sync()
        stored: Any = stored_form(weight)
        return id(weight.cell), *_written(stored.packed)
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def _sums(values: Tensor) -> tuple[float, float]:
    wide = values.detach().double()
    return float(wide.sum()), float(wide.square().sum())


class TiedEmbeddingForward(Forward):
    """The forward of an embedding whose weight a packed head has too."""

    def __init__(self, module: nn.Module, head: TiedHeadForward) -> None:
        super().__init__(module)
        self.head = head

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.head.renew()
        return self.own(*args, **kwargs)


class TiedState:
    """Gives the state dictionary the plain weight that an embedding shares with a packed head."""

    def __init__(self, owner: nn.Module) -> None:
        self.owner = owner

    def __call__(
        self, module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any
    ) -> None:
        plain = self.owner._parameters["weight"]
        if plain is not None and prefix + "weight" in state:
            state[prefix + "weight"] = plain.detach()
