"""The memory of a split weight, to who asks for it."""

from __future__ import annotations

from typing import Any


class WeightStorage:
    """A storage of torch that can be asked but not written.

    It is that of the upper half, or of the float32 values that stand for both halves: what is
    written there, which torch counts as no write, would be no weight.
    """

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def __getattr__(self, name: str) -> Any:
        if (name.endswith("_") and not name.endswith("__")) or name == "byteswap":
            _refuse(name)
        return getattr(self._storage, name)

    def __setitem__(self, index: Any, value: Any) -> None:
        _refuse("__setitem__")

    def __getitem__(self, index: Any) -> Any:
        return self._storage[index]

    def __len__(self) -> int:
        return len(self._storage)

    def __eq__(self, other: Any) -> bool:
        return bool(self._cdata == getattr(other, "_cdata", None))

    def __hash__(self) -> int:
        return hash(self._cdata)

    def __repr__(self) -> str:
        return repr(self._storage)


def _refuse(name: str) -> None:
    raise RuntimeError(
        f"{name}: expected no write to the storage of a split weight, which is half of it; write "
        "to the parameter under torch.no_grad(), as in p.fill_(0), or to p.data; "
        "p.share_memory_() shares it"
    )
