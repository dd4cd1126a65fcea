"""The queue of what waits for a slot: clients take turns."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """First come, first served for each client; clients take turns, so that none waits for all
    requests of another."""

    def __init__(self) -> None:
        self._clients: OrderedDict[str, deque[Item]] = OrderedDict()

    def put(self, client: str, item: Item) -> None:
        """Adds an item behind the others of its client."""
        self._clients.setdefault(client, deque()).append(item)

    def pop(self) -> Item:
        """Takes the next one; raises IndexError where there is none."""
        if not self._clients:
            raise IndexError("nothing waits")
        client, items = self._clients.popitem(last=False)
        item = items.popleft()
        if items:
            self._clients[client] = items  # behind the others
        return item

    def remove(self, leaves: Callable[[Item], bool]) -> list[Item]:
        """Takes out those for which `leaves` is true."""
        gone = [item for item in self if leaves(item)]
        if gone:
            left = {id(item) for item in gone}
            kept = [
                (client, deque(item for item in items if id(item) not in left))
                for client, items in self._clients.items()
            ]
            self._clients = OrderedDict((client, items) for client, items in kept if items)
        return gone

    def __iter__(self) -> Iterator[Item]:
        for items in self._clients.values():
            yield from items

    def __len__(self) -> int:
        return sum(map(len, self._clients.values()))
