"""A recording read: its figures, its stages, what was held when, and what an offload moved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fidelity.memory import held, kinds, sums
from fidelity.memory.events import Call, Recording
from fidelity.memory.running import Running
from fidelity.records import MemoryTrace, Stage, StageName, Transfers
from fidelity.residency import Move

CPU_METHOD = "allocator events of the torch profiler + resident weights"
TIMELINE_SHARES = 128
EACH = 1024
"""Calls of a stage whose own peaks are kept."""
LEAST_CALLS, NOTED = 3, 0.02
"""From how many calls on, and from which part of the peak, what they leave behind is told."""
NO_EVENTS = "the profiler reported no allocator events"


@dataclass
class Traced:
    """A recording, and what is needed to read it."""

    recording: Recording
    seen: Running
    weights: Sequence[int]
    """Sizes of the storages that were resident when the decode began."""

    def memory(self) -> MemoryTrace:
        """The trace: figures where both ways of counting agree, else the reason."""
        weights, recording = sum(self.weights), self.recording
        reason = self.doubt()
        if reason is not None:
            return MemoryTrace(weights_bytes=weights, reason=reason)
        shares = recording.shares(TIMELINE_SHARES)
        of = self.kinds()
        return MemoryTrace(
            allocated_peak_bytes=weights + max(recording.alive),
            weights_bytes=weights,
            method=CPU_METHOD,
            stages=tuple(self.stages()),
            timeline=tuple(weights + max(recording.alive[start:stop]) for start, stop in shares),
            layers=held.layers(recording, of, weights, shares),
            spans=held.spans(recording, shares),
            peak=held.peak(recording, self.seen, of, self.weights),
            transfers=transfers(self.seen.moves, self._moved(shares)),
            kept=self.kept(of),
            refused=len(recording.refused),
        )

    def doubt(self) -> str | None:
        """Why the recording gives no figure, or None."""
        if self.recording.reason is not None or not self.recording.allocations:
            return self.recording.reason or NO_EVENTS
        return sums.disagreement(self.recording.alive, self.recording.totals)

    def kinds(self) -> dict[int, Any]:
        decode = self.recording.calls.get("fidelity:decode", ())
        found = kinds.classify(self.recording, self.seen.results, self.seen.sample, decode[0].stop if decode else 0)
        return {id(one): kind for one, kind in zip(self.recording.allocations, found)}

    def kept(self, of: dict[int, Any]) -> tuple[int, ...]:
        """Activations alive when each of several calls of the decoder had returned."""
        calls = self.recording.calls.get("fidelity:tile", [])
        if len(calls) < 2:
            return ()
        ones = (one for one in self.recording.allocations if of[id(one)] == "activations")
        alive = sums.line(((one.born, one.gone, one.bytes) for one in ones), len(self.recording.alive))
        return tuple(alive[call.stop - 1] if call.stop else 0 for call in calls[:EACH])

    def stages(self) -> Iterator[Stage]:
        """Each stage that ran, with the peaks of its calls."""
        calls = self.recording.calls
        (whole,) = calls["fidelity:decode"]
        tiles, moves = calls.get("fidelity:tile", []), calls.get("fidelity:onload", [])
        yield self._stage("decode", [(whole.start, whole.stop)])
        if moves:
            seconds = sum(move.seconds for move in self.seen.moves if move.direction == "in")
            yield self._stage("onload", [(call.start, call.stop) for call in moves], len(moves), seconds)
        if tiles:
            yield self._stage("tile", [(call.start, call.stop) for call in tiles], len(tiles))
        if len(tiles) > 1:
            borders = [whole.start, *(border for call in tiles for border in (call.start, call.stop)), whole.stop]
            yield self._stage("assemble", list(zip(borders[::2], borders[1::2])))
        for call in calls.get("fidelity:convert", []):
            yield self._stage("convert", [(call.start, call.stop)])

    def _stage(
        self, name: StageName, stretches: Sequence[tuple[int, int]], calls: int = 1, seconds: float | None = None
    ) -> Stage:
        weights = sum(self.weights)
        peaks = [weights + self.recording.peak(start, stop) for start, stop in stretches]
        each = tuple(peaks[:EACH]) if len(peaks) > 1 else ()
        return Stage(name, max(peaks), calls, each=each, seconds=seconds)

    def _moves(self) -> list[Call]:
        calls = self.recording.calls
        moves = [*calls.get("fidelity:onload", []), *calls.get("fidelity:offload", [])]
        return sorted(moves, key=lambda call: call.start)

    def _moved(self, shares: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """Bytes of weights on the execution device: the most in each share."""
        moves = self.seen.moves
        if not moves:
            return ()
        steps = [(call.start if move.direction == "in" else call.stop, move.after)
                 for call, move in zip(self._moves(), moves)]  # fmt: skip
        found, now, number = [], moves[0].before, 0
        for _, stop in shares:
            most, last = now, stop == len(self.recording.alive)
            while number < len(steps) and (steps[number][0] < stop or last):
                now = steps[number][1]
                most, number = max(most, now), number + 1
            found.append(most)
        return tuple(found)


def findings(memory: MemoryTrace) -> tuple[str, ...]:
    """A line where each call of the decoder left more than the one before: a tile that is held costs all the rest.

    The first call is let alone: a causal decoder's caches are made in it.
    """
    kept = memory.kept[1:]
    if len(kept) < LEAST_CALLS or not memory.allocated_peak_bytes or any(b <= a for a, b in pairwise(kept)):
        return ()
    grown = kept[-1] - kept[0]
    if grown < memory.allocated_peak_bytes * NOTED:
        return ()
    said = f"{grown / 2**20:.1f} MiB more after the last of {len(memory.kept)} than after the second"
    return (f"each call of the decoder leaves activations behind beside what it gives: {said}",)


def transfers(moves: Sequence[Move], resident: tuple[int, ...] = ()) -> Transfers | None:
    """What an offload moved; None where no hook of one was called."""
    if not moves:
        return None
    came, left = ([move for move in moves if move.direction == way] for way in ("in", "out"))
    return Transfers(
        onloads=len(came),
        offloads=len(left),
        bytes_in=sum(move.bytes for move in came),
        bytes_out=sum(move.bytes for move in left),
        seconds=sum(move.seconds for move in moves),
        resident=resident,
    )
