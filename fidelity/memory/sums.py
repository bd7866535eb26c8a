"""The largest sum alive at one instant, found twice, so that a peak is no figure of one way of counting.

Once from each allocation's birth and death, once from the total that the allocator kept by itself. It is never the sum
of stages' own peaks, which may be far apart in time.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate


def line(intervals: Iterable[tuple[int, int | None, int]], instants: int) -> list[int]:
    """Bytes alive from each of so many instants on, of (born, gone, bytes): from `born` on, no longer at `gone`, which
    is None where it never goes. Its largest value is the largest simultaneous sum."""
    changes = [0] * instants
    for born, gone, size in intervals:
        changes[born] += size
        if gone is not None:
            changes[gone] -= size
    return list(accumulate(changes))


def disagreement(lives: list[int], totals: list[int]) -> str | None:
    """Why two countings are not of one and the same memory, or None: by instant, the bytes alive by `line`, and what
    the allocator itself counted."""
    if lives == totals:
        return None
    instant = next(index for index, (alive, total) in enumerate(zip(lives, totals)) if alive != total)
    return (
        f"at event {instant} of {len(totals)}: {lives[instant]} bytes by the allocations' own lifetimes, "
        f"{totals[instant]} by the allocator's running total (peaks: {max(lives)}, {max(totals)}); memory that is "
        "counted in two ways has no figure"
    )
