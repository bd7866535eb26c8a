"""Every allocation of the CPU allocator during a block, and its release, from torch's profiler.

A tracker of tensors misses what kernels allocate for themselves: 384 MiB seen of a decode whose convolutions' workspace
made it 449, and whose resident peak rose by 450. The allocator's own events have both.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import tempfile
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

from fidelity.lazy import torch

_ONE_AT_A_TIME = threading.Lock()  # the profiler is one for the process, and so is file descriptor 2
_LOG_LINE = re.compile(rb"[A-Z]+:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \d+:\d+ \w+\.\w+:\d+\] ")


@dataclass
class Timeline:
    """Bytes alive over time, counted from zero at the start, and the named ranges in it (nanoseconds)."""

    times: list[int] = field(default_factory=list)
    alive: list[int] = field(default_factory=list)
    """Bytes alive from the instant of the same index on."""
    ranges: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def peak(self, start: int, end: int) -> int:
        """The most that was alive at one instant of [start, end], what was alive before included."""
        first, last = bisect_left(self.times, start), bisect_right(self.times, end)
        held = self.alive[first - 1] if first else 0
        return max([held, *self.alive[first:last]])

    def shares(self, count: int) -> list[int]:
        """The most that was alive in each of at most `count` equal shares of the events, in their order."""
        events = len(self.alive)
        borders = sorted({events * share // count for share in range(count + 1)})
        return [max(self.alive[start:end]) for start, end in pairwise(borders)]


@contextmanager
def record() -> Iterator[Timeline]:
    """Record the allocator's events of this thread. The Timeline is filled on exit; `span` adds ranges to it.

    Releases of what was allocated before are no events. The garbage collector rests meanwhile: when it runs depends on
    what the process did before, and the same decode must have the same peak.
    """
    timeline = Timeline()
    collects = gc.isenabled()
    with _ONE_AT_A_TIME, _memory_events_only():
        profile = torch.autograd.profiler.profile(profile_memory=True)
        with _quiet():
            profile.__enter__()
        gc.disable()
        try:
            yield timeline
        finally:
            if collects:
                gc.enable()
            with _quiet():
                profile.__exit__(None, None, None)
    recorded = profile.kineto_results
    _fill(timeline, recorded.events() if recorded is not None else [])


def span(name: str) -> Any:
    """A named range of the recording, as a context manager. Raises nothing outside of one."""
    return torch.autograd.profiler.record_function(name)


def _fill(timeline: Timeline, events: list[Any]) -> None:
    changes = []
    elsewhere = torch.cuda.is_initialized()  # else every event is the CPU's, and asking costs as much as the rest
    for event in events:
        name = event.name()
        if name == "[memory]":
            if not elsewhere or event.device_type() == torch.autograd.DeviceType.CPU:
                changes.append((event.start_ns(), event.nbytes()))
        elif name.startswith("fidelity:"):
            start = event.start_ns()
            timeline.ranges.setdefault(name, []).append((start, start + event.duration_ns()))
    changes.sort(key=lambda change: change[0])  # stable: events of one nanosecond keep their order
    alive = 0
    for when, change in changes:
        alive += change
        timeline.times.append(when)
        timeline.alive.append(alive)
    for spans in timeline.ranges.values():
        spans.sort()


@contextmanager
def _memory_events_only() -> Iterator[None]:
    """Record no operators: only our ranges beside the memory events, which makes tracing a tiled decode cheap.

    torch offers the choice below its Python profiler only. Where that has moved, everything is recorded, more slowly.
    """
    home = torch.autograd.profiler
    enable = getattr(home, "_enable_profiler", None)
    scope = getattr(getattr(torch._C._profiler, "RecordScope", None), "USER_SCOPE", None)
    if enable is None or scope is None:
        yield
        return
    home._enable_profiler = partial(enable, scopes={scope})
    try:
        yield
    finally:
        home._enable_profiler = enable


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the profiler's own C++ lines off file descriptor 2; whatever else was written there is passed on."""
    if sys.stderr is not None and not sys.stderr.closed:
        sys.stderr.flush()
    try:
        console = os.dup(2)
    except OSError:  # no file descriptor 2: nothing to keep quiet
        yield
        return
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(console, 2)
            caught.seek(0)
            for line in caught:
                if not _LOG_LINE.match(line):
                    os.write(console, line)
            os.close(console)
