"""Who holds memory over the course of a decode: each allocation and its release, in order, and the peaks of its stages.

The ledger knows nothing of tensors or devices: bytes come, bytes go, and the largest sum alive at one instant is kept,
for the whole and for every span that is open. The order of events is kept too: an allocator can be replayed over it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class Holding:
    """One allocation: how many bytes, for what, and in which module (dotted path; empty: the autoencoder itself)."""

    bytes: int
    what: str
    """An operator, `weights`, or what a kernel needs for itself."""
    module: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    stage: str = ""
    """The innermost span in which it was made."""


Log = list[tuple[int, "Holding | None"]]
"""What was booked: the holding's number and the holding, None where it is released."""


@dataclass(frozen=True)
class Script:
    """What a stretch of a decode books, so that it can be booked again.

    `events`: its own holdings are numbered from 0 in the order in which they come, those of before ~0, ~1 …
    `foreign`: the bytes of those of before."""

    events: tuple[tuple[int, Holding | None], ...]
    foreign: tuple[int, ...] = ()

    @cached_property
    def changes(self) -> tuple[tuple[int, int], ...]:
        """(number, bytes; negative where it is released); what has no bytes is left out."""
        sizes = dict(enumerate(each.bytes for _, each in self.events if each is not None))
        sizes |= {~index: size for index, size in enumerate(self.foreign)}
        all_ = ((own, each.bytes if each is not None else -sizes[own]) for own, each in self.events)
        return tuple((own, change) for own, change in all_ if change)

    @cached_property
    def rise(self) -> int:
        """By how much what is alive rises at most."""
        return max(accumulate((change for _, change in self.changes), initial=0))

    @cached_property
    def stays(self) -> dict[int, Holding]:
        """Its own holdings that are not released, by number."""
        gone = {own for own, each in self.events if each is None}
        return {own: each for own, each in self.events if each is not None and own not in gone}


@dataclass
class Span:
    """A named stretch of the decode and the most that was alive during it."""

    name: str
    peak: int


@dataclass
class Ledger:
    """Bytes alive now and at the worst instant, and the events that led there."""

    alive: int = 0
    peak: int = 0
    at_peak: tuple[Holding, ...] = ()
    """What was alive at the worst instant."""
    stage_at_peak: str = ""
    largest: Holding = field(default_factory=lambda: Holding(0, "nothing"))
    """The largest tensor that any operator made; workspace and weights are no tensors of the decode."""
    events: list[tuple[int, int]] = field(default_factory=list)
    """(number of the holding, bytes; negative where it is released), in order."""
    closed: list[Span] = field(default_factory=list)
    _held: dict[int, Holding] = field(default_factory=dict)
    _open: list[Span] = field(default_factory=list)
    _logs: list[Log] = field(default_factory=list)
    _count: int = 0

    @property
    def stage(self) -> str:
        """The innermost span that is open."""
        return self._open[-1].name if self._open else ""

    def hold(self, holding: Holding) -> int:
        """Book an allocation; the number it returns releases it."""
        number = self._book(holding)
        self._raise()
        return number

    def release(self, number: int) -> None:
        """Book its end. Raises KeyError for a number that holds nothing."""
        holding = self._held.pop(number)
        self.alive -= holding.bytes
        self._note(number, -holding.bytes, None)

    def made(self, holding: Holding) -> int:
        """Book a tensor that an operator made."""
        if holding.bytes > self.largest.bytes:
            self.largest = holding
        return self.hold(holding)

    def passing(self, *holdings: Holding) -> None:
        """Book what a kernel allocates for itself: all of it alive at once, and gone when the operator ends."""
        numbers = [self._book(holding) for holding in holdings if holding.bytes]
        self._raise()
        for number in reversed(numbers):
            self.release(number)

    @contextmanager
    def span(self, name: str) -> Iterator[Span]:
        """A stretch with a peak of its own, what was alive at its start included."""
        span = Span(name, self.alive)
        self._open.append(span)
        try:
            yield span
        finally:
            self._open = [other for other in self._open if other is not span]
            self.closed.append(span)

    @contextmanager
    def recording(self) -> Iterator[Log]:
        """Keep what is booked meanwhile."""
        log: Log = []
        self._logs.append(log)
        try:
            yield log
        finally:
            self._logs = [other for other in self._logs if other is not log]

    def bytes_of(self, number: int) -> int:
        """Bytes of a holding that is alive. Raises KeyError."""
        return self._held[number].bytes

    def play(self, script: Script, foreign: Sequence[int] = ()) -> dict[int, int]:
        """Book a script again; `foreign` are the numbers of its holdings of before. Returns the numbers of those that
        stay, by their number in the script."""
        first = self._count + 1
        if self._logs or self.alive + script.rise > self.peak:  # every instant may be the worst
            for own, holding in script.events:
                if holding is not None:
                    self.hold(holding)
                else:
                    self.release(first + own if own >= 0 else foreign[~own])
            return {own: first + own for own in script.stays}
        self._count += sum(holding is not None for _, holding in script.events)
        for span in self._open:
            span.peak = max(span.peak, self.alive + script.rise)
        self.events.extend((first + own if own >= 0 else foreign[~own], change) for own, change in script.changes)
        self.alive += sum(change for _, change in script.changes)
        for own, _ in script.events:
            if own < 0:
                del self._held[foreign[~own]]
        self._held.update((first + own, holding) for own, holding in script.stays.items())
        return {own: first + own for own in script.stays}

    def _book(self, holding: Holding) -> int:
        self._count += 1
        self._held[self._count] = holding
        self.alive += holding.bytes
        self._note(self._count, holding.bytes, holding)
        return self._count

    def _note(self, number: int, change: int, holding: Holding | None) -> None:
        if change:
            self.events.append((number, change))
        for log in self._logs:
            log.append((number, holding))

    def _raise(self) -> None:
        """Raise the peaks to what is alive."""
        for span in self._open:
            span.peak = max(span.peak, self.alive)
        if self.alive > self.peak:
            self.peak = self.alive
            self.at_peak = tuple(self._held.values())
            self.stage_at_peak = self.stage
