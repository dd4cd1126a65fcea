"""torch's native caching allocator for CUDA, step by step, under any of its settings.

A model of c10/cuda/CUDACachingAllocator.cpp of torch 2.10 to 2.13: which segments it asks the
driver for, which block serves a request, when blocks are split, merged and given back. Addresses
are numbers. `tests/memory/test_stock.py` compares it with what torch itself reserved.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MiB = 1 << 20
SMALL = MiB
SMALL_SEGMENT = 2 * MiB
LARGE_SEGMENT = 20 * MiB
OWN_SEGMENT = 10 * MiB
ROUND_LARGE = 2 * MiB
LEAST = 512
NO_SPLIT_LIMIT = 1 << 62


@dataclass(frozen=True)
class Settings:
    """What PYTORCH_ALLOC_CONF can say that changes where blocks lie.

    limit: bytes that the device has for this process; None: no end.
    """

    is_expandable: bool = False
    max_split_size: int = NO_SPLIT_LIMIT
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: int = 0
    limit: int | None = None

    @staticmethod
    def parse(text: str, limit: int | None = None) -> Settings:
        """Settings from a text as in PYTORCH_ALLOC_CONF.

        Raises:
            ValueError: it has a setting that is not modelled.
        """
        found: dict[str, Any] = {}
        for entry in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = entry.partition(":")
            if name not in _READ:
                raise ValueError(
                    f"expected settings out of {', '.join(_READ)}, as in "
                    f"max_split_size_mb:128, got {entry!r}"
                )
            field, read, wanted = _READ[name]
            try:
                found[field] = read(value)
            except (ValueError, KeyError) as error:
                raise ValueError(f"{name} cannot be {value!r}; expected {wanted}") from error
        return Settings(**found, limit=limit)


def _checked(read: Callable[[str], Any], is_right: Callable[[Any], bool]) -> Callable[[str], Any]:
    def read_checked(text: str) -> Any:
        value = read(text)
        if not is_right(value):
            raise ValueError(text)
        return value

    return read_checked


def _integer(text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError(text)
    return int(text)


# Of each setting: the field, how torch reads it, and what it expects.
_READ: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "expandable_segments": (
        "is_expandable",
        {"True": True, "False": False}.__getitem__,
        "True or False",
    ),
    "max_split_size_mb": (
        "max_split_size",
        lambda text: _checked(_integer, lambda value: 20 <= value < 1 << 64)(text) * MiB,
        "an integer of at least 20",
    ),
    "garbage_collection_threshold": (
        "garbage_collection_threshold",
        _checked(float, lambda value: 0 < value < 1),
        "a number above 0 and below 1",
    ),
    "roundup_power2_divisions": (
        "roundup_power2_divisions",
        _checked(_integer, lambda value: value > 0 and value & (value - 1) == 0),
        "a power of 2 (lists of sizes are not modelled)",
    ),
}


class OutOfMemory(Exception):
    """The allocator cannot serve a request."""


@dataclass
class Calls:
    """How often the driver was called."""

    allocate: int = 0
    release: int = 0
    create: int = 0
    map: int = 0
    unmap: int = 0
    grant: int = 0

    def total(self) -> int:
        return sum(vars(self).values())


class Block:
    """A range of addresses; its neighbours in the same segment are linked."""

    __slots__ = (
        "address",
        "base",
        "is_held",
        "is_mapped",
        "next",
        "pool",
        "previous",
        "since",
        "size",
    )

    def __init__(self, pool: _Pool, address: int, size: int, base: int) -> None:
        self.pool, self.address, self.size, self.base = pool, address, size, base
        self.previous: Block | None = None
        self.next: Block | None = None
        self.is_held = False
        self.is_mapped = True
        self.since = 0

    def is_split(self) -> bool:
        return self.previous is not None or self.next is not None


class _Pool:
    """Cached blocks of one queue, small or large ones."""

    def __init__(self, is_small: bool) -> None:
        self.is_small = is_small
        self.page = SMALL_SEGMENT if is_small else LARGE_SEGMENT
        self.free: list[tuple[int, int]] = []
        self.unmapped: list[int] = []
        self.at: dict[int, Block] = {}
        self.asked = 0

    def insert(self, block: Block) -> None:
        insort(self.free, (block.size, block.address))
        self.at[block.address] = block
        block.since = self.asked

    def remove(self, block: Block) -> None:
        key = (block.size, block.address)
        del self.free[bisect_left(self.free, key)]
        del self.at[block.address]

    def insert_unmapped(self, block: Block) -> None:
        insort(self.unmapped, block.address)
        self.at[block.address] = block

    def remove_unmapped(self, block: Block) -> None:
        del self.unmapped[bisect_left(self.unmapped, block.address)]
        del self.at[block.address]

    def drop(self, block: Block) -> None:
        if block.is_mapped:
            self.remove(block)
        else:
            self.remove_unmapped(block)


class StockAllocator:
    """Serves requests as torch does.

    reserved: bytes taken from the device.
    calls: of its driver.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.reserved = 0
        self.calls = Calls()
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._lowest = 1 << 62
        limit = self.settings.limit or 1 << 44
        self._range = limit + limit // 8

    def allocate(self, size: int, queue: int = 0) -> Block:
        """Serve a request.

        Raises:
            OutOfMemory: also after all cached blocks were given back.
        """
        size = self.rounded(size)
        pool = self._pool(queue, size <= SMALL)
        block = self._cached(pool, size)
        if block is None:
            self._collect_garbage()
            block = self._new(pool, size)
            if block is None and self._release_some(pool, size):
                block = self._new(pool, size)
            if block is None:
                self.empty_cache()
                block = self._new(pool, size)
            if block is None:
                raise OutOfMemory(size)
        if self._should_split(block, size):
            block = self._split(block, size)
        block.is_held = True
        return block

    def free(self, block: Block) -> None:
        """Take a block back, and join it with its free neighbours."""
        block.is_held = False
        self._merge(block, block.previous)
        self._merge(block, block.next)
        block.pool.insert(block)

    def empty_cache(self) -> None:
        """Give the device back what holds no block."""
        for pool in self._pools.values():
            expandable = []
            for _, address in [*pool.free]:
                block = pool.at[address]
                if self.settings.is_expandable:
                    expandable.append(block)
                elif not block.is_split():
                    self._release(block)
            for block in expandable:
                self._unmap(block)

    def rounded(self, size: int) -> int:
        """The size of the block that serves a request."""
        if size < LEAST:
            return LEAST
        divisions = self.settings.roundup_power2_divisions
        if divisions > 1 and size > LEAST * divisions:
            power = 1 << (size.bit_length() - 1)
            if size == power:
                return size
            step = power // divisions
            return power + -(-(size - power) // step) * step
        return -(-size // LEAST) * LEAST

    def _pool(self, queue: int, is_small: bool) -> _Pool:
        key = (queue, is_small)
        if key not in self._pools:
            self._pools[key] = _Pool(is_small)
        return self._pools[key]

    def _cached(self, pool: _Pool, size: int) -> Block | None:
        pool.asked += 1
        place = bisect_left(pool.free, (size, 0))
        if place == len(pool.free):
            return None
        block = pool.at[pool.free[place][1]]
        if self.settings.is_expandable:
            # The part that can grow counts with what it can grow by.
            while place + 1 < len(pool.free):
                other = pool.at[pool.free[place + 1][1]]
                if _growing(other) >= _growing(block):
                    break
                block, place = other, place + 1
        most = self.settings.max_split_size
        if size < most <= block.size:
            return None
        if size >= most and block.size >= size + LARGE_SEGMENT:
            return None
        pool.remove(block)
        return block

    def _new(self, pool: _Pool, size: int) -> Block | None:
        if self.settings.is_expandable:
            return self._expand(pool, size)
        if size <= SMALL:
            bytes_ = SMALL_SEGMENT
        elif size < OWN_SEGMENT:
            bytes_ = LARGE_SEGMENT
        else:
            bytes_ = -(-size // ROUND_LARGE) * ROUND_LARGE
        if not self._has_room(bytes_):
            return None
        self.reserved += bytes_
        self.calls.allocate += 1
        return Block(pool, self._addresses(bytes_), bytes_, 0)

    def _has_room(self, size: int) -> bool:
        return self.settings.limit is None or self.reserved + size <= self.settings.limit

    def _addresses(self, size: int) -> int:
        """Where a segment lies. CUDA's go downwards, which decides between blocks of one size."""
        self._lowest -= -(-size // ROUND_LARGE) * ROUND_LARGE
        return self._lowest

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        self.reserved -= block.size
        self.calls.release += 1

    def _release_some(self, pool: _Pool, size: int) -> bool:
        """With a limit on splitting: give back as many unsplit blocks as needed, no more."""
        most = self.settings.max_split_size
        if most == NO_SPLIT_LIMIT:
            return False
        wanted = max(size, most)
        place = bisect_left(pool.free, (wanted, 0))
        if place < len(pool.free):
            self._release(pool.at[pool.free[place][1]])
            return True
        released = 0
        for held, address in reversed([*pool.free]):
            if released >= wanted or held < most:
                break
            block = pool.at[address]
            if not block.is_split():
                released += held
                self._release(block)
        return released >= wanted

    def _collect_garbage(self) -> None:
        threshold, limit = self.settings.garbage_collection_threshold, self.settings.limit
        if not threshold or limit is None or self.reserved <= int(threshold * limit):
            return
        wanted = self.reserved - int(threshold * limit)
        old = [
            (pool.asked - pool.at[address].since, pool.at[address])
            for (_, is_small), pool in self._pools.items()
            if not is_small
            for _, address in pool.free
            if not pool.at[address].is_split()
        ]
        total, reclaimed, has_freed = sum(age for age, _ in old), 0, True
        while old and reclaimed < wanted and has_freed:
            least = total / len(old)
            freed = [(age, block) for age, block in old if age >= least]
            old = [(age, block) for age, block in old if age < least]
            has_freed = bool(freed)
            for age, block in freed:
                total -= age
                reclaimed += block.size
                self._release(block)

    def _should_split(self, block: Block, size: int) -> bool:
        rest = block.size - size
        if block.pool.is_small or self.settings.is_expandable:
            return rest >= LEAST
        return size < self.settings.max_split_size and rest > SMALL

    def _split(self, block: Block, size: int) -> Block:
        first = Block(block.pool, block.address, size, block.base)
        first.previous, first.next = block.previous, block
        if first.previous is not None:
            first.previous.next = first
        block.previous = first
        block.address += size
        block.size -= size
        block.pool.insert(block)
        return first

    def _merge(self, block: Block, other: Block | None) -> None:
        if other is None or other.is_held or other.is_mapped != block.is_mapped:
            return
        other.pool.drop(other)
        if other is block.previous:
            block.address = other.address
            block.previous = other.previous
            if block.previous is not None:
                block.previous.next = block
        else:
            block.next = other.next
            if block.next is not None:
                block.next.previous = block
        block.size += other.size

    def _expand(self, pool: _Pool, size: int) -> Block | None:
        block = self._expandable(pool, size)
        if not block.is_mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            assert following is not None
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following
        pool.remove(block)
        return block

    def _expandable(self, pool: _Pool, size: int) -> Block:
        """The first range with room, from a free block in front of it."""
        for address in pool.unmapped:
            block = pool.at[address]
            if block.previous is not None and not block.previous.is_held:
                block = block.previous
            room, each = 0, block
            while each is not None and not each.is_held and room < size:
                room += each.size
                each = each.next  # type: ignore[assignment]
            if room >= size:
                return block
        whole = -(-max(self._range, size) // pool.page) * pool.page
        address = self._addresses(whole)
        block = Block(pool, address, whole, address)
        block.is_mapped = False
        pool.insert_unmapped(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        pool = block.pool
        mapped = -(-size // pool.page) * pool.page
        if not self._has_room(mapped):
            return False
        pool.remove_unmapped(block)
        block.is_mapped = True
        if mapped < block.size:
            rest = Block(pool, block.address + mapped, block.size - mapped, block.base)
            rest.is_mapped = False
            rest.previous, rest.next = block, block.next
            if rest.next is not None:
                rest.next.previous = rest
            block.next, block.size = rest, mapped
            pool.insert_unmapped(rest)
        self._merge(block, block.previous)
        self._merge(block, block.next)
        pool.insert(block)
        self.reserved += mapped
        self.calls.create += mapped // pool.page
        self.calls.map += mapped // pool.page
        self.calls.grant += 1
        return True

    def _unmap(self, block: Block) -> None:
        """Give back the whole pages in a free block."""
        pool, page = block.pool, block.pool.page
        first = block.base + -(-(block.address - block.base) // page) * page
        last = block.base + (block.address + block.size - block.base) // page * page
        if first >= last:
            return
        pool.remove(block)
        end = block.address + block.size
        if first > block.address:
            self._beside(block, block.address, first - block.address, is_before=True)
        if last < end:
            self._beside(block, last, end - last, is_before=False)
        block.address, block.size, block.is_mapped = first, last - first, False
        self._merge(block, block.previous)
        self._merge(block, block.next)
        pool.insert_unmapped(block)
        self.reserved -= last - first
        self.calls.unmap += (last - first) // page
        self.calls.release += (last - first) // page

    def _beside(self, block: Block, address: int, size: int, is_before: bool) -> None:
        piece = Block(block.pool, address, size, block.base)
        if is_before:
            piece.previous, piece.next = block.previous, block
            if piece.previous is not None:
                piece.previous.next = piece
            block.previous = piece
        else:
            piece.previous, piece.next = block, block.next
            if piece.next is not None:
                piece.next.previous = piece
            block.next = piece
        block.pool.insert(piece)


def _growing(block: Block) -> int:
    following = block.next
    grows = following is not None and not following.is_mapped
    return block.size + (following.size if grows and following is not None else 0)
