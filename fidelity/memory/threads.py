"""The CPU allocator's events of several threads at once: each thread records its own, and the clock puts them together.

The profiler of `memory.profiler` sees the thread that started it and no other: the allocator reports to the profiler
state of the thread that allocates, so that `profile_all_threads` records no memory at all, and two such profilers
running side by side cancel each other. torch's older profiler keeps its state by thread and has the same events.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from fidelity.lazy import torch

ABSENT = "this torch records no allocations by thread: only the resident peak of the process can be measured"


@dataclass
class Changes:
    """What one thread allocated (bytes above 0) and released (below), each with its instant in microseconds of a clock
    that all threads and processes of the machine share."""

    events: list[tuple[float, int]] = field(default_factory=list)
    marks: dict[str, float] = field(default_factory=dict)
    """The instants at which the ranges begin that are named `fidelity:…` (torch.autograd.profiler.record_function)."""
    reason: str | None = None
    """Why there are no events."""


@contextmanager
def record() -> Iterator[Changes]:
    """Record the allocations of this thread, and of no other; filled on exit. One recording a thread at a time.

    What helper threads of one operator allocate is not seen: give operators one thread each.
    """
    changes = Changes()
    begin = getattr(torch._C._autograd, "_enable_profiler_legacy", None)
    end = getattr(torch._C._autograd, "_disable_profiler_legacy", None)
    if begin is None or end is None:
        changes.reason = ABSENT
        yield changes
        return
    begin(_memory_only())
    try:
        yield changes
    finally:
        for event in (event for events in end() for event in events):
            if event.kind() == "memory_alloc":
                changes.events.append((event.start_us(), event.cpu_memory_usage()))
            elif event.kind() == "push" and event.name().startswith("fidelity:"):
                changes.marks.setdefault(event.name(), event.start_us())


def peak(recordings: Iterable[Changes]) -> int:
    """The largest sum alive at one instant of all recordings together, in bytes above what was alive before."""
    events = sorted((event for changes in recordings for event in changes.events), key=lambda event: event[0])
    return max(accumulate((change for _, change in events), initial=0))


def peaks_around(changes: Changes, mark: str) -> tuple[int, int]:
    """The largest sum alive before the mark's instant, and from it on. Raises KeyError for a mark that is not there."""
    events = sorted(changes.events, key=lambda event: event[0])
    alive = list(accumulate((change for _, change in events), initial=0))
    border = sum(when < changes.marks[mark] for when, _ in events)
    return max(alive[: border + 1]), max(alive[border:])


def _memory_only() -> Any:
    from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

    record_shapes, profile_memory, with_stack, with_flops, with_modules = False, True, False, False, False
    return ProfilerConfig(
        ProfilerState.CPU, record_shapes, profile_memory, with_stack, with_flops, with_modules, _ExperimentalConfig()
    )
