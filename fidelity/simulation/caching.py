"""What CUDA's caching allocator reserves for a sequence of allocations: its segments, replayed block by block.

It asks the device for segments and never gives them back, hands out the smallest free block that fits, splits it, and
joins neighbours that are free; what is reserved above what is allocated is fragmentation. The rules and sizes are those
of c10/cuda/CUDACachingAllocator.cpp with its defaults (no expandable segments, no limit on splitting).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

UNIT = 512
SMALL = 1 << 20
SMALL_SEGMENT, LARGE_SEGMENT = 2 << 20, 20 << 20
BY_ITSELF, SEGMENT_UNIT = 10 << 20, 2 << 20


@dataclass
class Block:
    """A stretch of a segment, with its neighbours."""

    size: int
    small: bool
    order: int
    before: Block | None = None
    after: Block | None = None
    free: bool = True


@dataclass
class CachingAllocator:
    """Segments reserved so far, and the free blocks of both pools by size and age."""

    reserved: int = 0
    _pools: dict[bool, list[tuple[int, int]]] = field(default_factory=lambda: {True: [], False: []})
    _blocks: dict[int, Block] = field(default_factory=dict)
    _count: int = 0

    def allocate(self, size: int) -> Block:
        """The smallest free block of the size's pool that fits, else a new segment; split where enough is left over."""
        size = max(UNIT, -(-size // UNIT) * UNIT)
        small = size <= SMALL
        pool = self._pools[small]
        at = bisect_left(pool, (size, 0))
        block = self._take(pool[at][1]) if at < len(pool) else self._segment(size, small)
        left = block.size - size
        if left >= UNIT if small else left > SMALL:
            rest = self._new(left, small)
            block.size = size
            rest.before, rest.after, block.after = block, block.after, rest
            if rest.after is not None:
                rest.after.before = rest
            self._give(rest)
        block.free = False
        return block

    def release(self, block: Block) -> None:
        """Free a block and join it with its free neighbours."""
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._take(other.order)
                block.size += other.size
                if other is block.before:
                    block.before = other.before
                    if block.before is not None:
                        block.before.after = block
                else:
                    block.after = other.after
                    if block.after is not None:
                        block.after.before = block
        self._give(block)

    def _segment(self, size: int, small: bool) -> Block:
        whole = (
            SMALL_SEGMENT if small else LARGE_SEGMENT if size < BY_ITSELF else -(-size // SEGMENT_UNIT) * SEGMENT_UNIT
        )
        self.reserved += whole
        return self._new(whole, small)

    def _new(self, size: int, small: bool) -> Block:
        self._count += 1
        return Block(size, small, self._count)

    def _give(self, block: Block) -> None:
        block.free = True
        self._blocks[block.order] = block
        insort(self._pools[block.small], (block.size, block.order))

    def _take(self, order: int) -> Block:
        block = self._blocks.pop(order)
        pool = self._pools[block.small]
        pool.pop(bisect_left(pool, (block.size, order)))
        return block


def reserved_bytes(events: Iterable[tuple[int, int]]) -> int:
    """The reserved peak of a ledger's events: (number, bytes), negative bytes where that number is released."""
    allocator = CachingAllocator()
    held: dict[int, Block] = {}
    for number, size in events:
        if size < 0:
            allocator.release(held.pop(number))
        elif size > 0:
            held[number] = allocator.allocate(size)
    return allocator.reserved
