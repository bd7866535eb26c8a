"""What each allocation of a decode is for: one rule a kind, by where it was made and how long it lived.

The rules, the first that holds deciding (docs/design/memory-trace.md):

| kind          | an allocation is of it if it was                                                             |
|---------------|----------------------------------------------------------------------------------------------|
| `staging`     | made while weights were brought in or sent away, and gone when that was done                 |
| `weights`     | made then, and still there; and what was resident when the decode began                      |
| `copies`      | made by the conversion, and not by an operator for itself alone                              |
| `output`      | the storage of the sample                                                                    |
| `workspace`   | made within an operator, as Python calls it, and gone when it returned                       |
| `tiles`       | given back by one of several calls of the decoder; or made between them, outside of a module |
| `activations` | all else                                                                                     |
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from fidelity.memory.events import Allocation, Call, Recording
from fidelity.memory.running import Given
from fidelity.records import MemoryKind

MOVES = ("onload", "offload")


def classify(
    recording: Recording, results: Iterable[Iterable[Given]], sample: Iterable[Given], sample_at: int
) -> list[MemoryKind]:
    """The kind of each allocation. `results`: what each call of the decoder gave, in order; `sample`: what the decode
    gave, alive at instant `sample_at`."""
    living = {one.pointer: one for one in recording.allocations if one.born < sample_at <= _end(one)}
    output = {id(living[given.pointer]) for given in sample if given.pointer in living}
    calls = recording.calls.get("fidelity:tile", [])
    kept = _kept(recording, calls, results) if len(calls) > 1 else set()
    return [_kind(one, output, kept, several=len(calls) > 1) for one in recording.allocations]


def _kind(one: Allocation, output: set[int], kept: set[int], *, several: bool) -> MemoryKind:
    call = one.call
    stage = call.stage.name if call is not None and call.stage is not None else "decode"
    if stage in MOVES and call is not None and call.stage is not None:
        return "staging" if _end(one) < call.stage.stop else "weights"
    if id(one) in output:
        return "output"
    if call is not None and call.operator is not None and _end(one) < call.operator.stop:
        return "workspace"
    if stage == "convert":
        return "copies"
    between = several and stage == "decode" and (call is None or call.module is None)
    return "tiles" if between or id(one) in kept else "activations"


def _kept(recording: Recording, calls: list[Call], results: Iterable[Iterable[Given]]) -> set[int]:
    """Of each call of the decoder, what it gave of its own: alive when it returned."""
    ends = [call.stop for call in calls]
    given = [{each.pointer for each in gave} for gave in results]
    found = set()
    for one in recording.allocations:
        number = bisect_right(ends, one.born)  # the first call to return after its birth
        if number < len(given) and one.pointer in given[number] and ends[number] <= _end(one):
            found.add(id(one))
    return found


def _end(one: Allocation) -> float:
    return float("inf") if one.gone is None else one.gone
