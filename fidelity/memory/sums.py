"""The largest sum alive at one instant, found twice, so that a peak is no figure of one way of counting.

Once from each allocation's birth and death, once from the total that the allocator kept by itself. It is never the sum
of stages' own peaks, which may be far apart in time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate


def simultaneous(intervals: Iterable[tuple[int, int | None, int]]) -> int:
    """The largest sum of bytes alive at once, of (born, gone, bytes): alive from `born` on, no longer at `gone`.

    None: it is never gone. At one and the same instant what goes makes room before what comes.
    """
    changes = [(born, size) for born, _, size in intervals]
    changes += [(gone, -size) for _, gone, size in intervals if gone is not None]
    changes.sort()  # of one instant, releases first: they are negative
    return max(accumulate((size for _, size in changes), initial=0))


def disagreement(intervals: Sequence[tuple[int, int | None, int]], totals: list[int]) -> str | None:
    """Why the two countings are not of one and the same memory, or None. `totals`: by instant, what was counted."""
    changes = [0] * len(totals)
    for born, gone, size in intervals:
        changes[born] += size
        if gone is not None:
            changes[gone] -= size
    lives = list(accumulate(changes))
    if lives == totals:
        return None
    instant = next(index for index, (alive, total) in enumerate(zip(lives, totals)) if alive != total)
    return (
        f"at event {instant} of {len(totals)}: {lives[instant]} bytes by the allocations' own lifetimes, "
        f"{totals[instant]} by the allocator's running total (peaks: {max(lives)}, {max(totals)}); memory that is "
        "counted in two ways has no figure"
    )
