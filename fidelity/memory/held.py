"""What was alive at one instant, and over a whole decode by kind: sums that are those of the allocations themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from fidelity.memory.events import Allocation, Call, Recording
from fidelity.memory.running import Running
from fidelity.records import Holding, MemoryKind, Peak, Span, StageName

HELD = 12
"""Holdings that are listed of an instant."""


def holdings(
    recording: Recording,
    seen: Running,
    living: Iterable[Allocation],
    kinds: dict[int, MemoryKind],
    weights: Sequence[int],
) -> tuple[Holding, ...]:
    """What was alive, the largest first, alike ones together; the first HELD. `weights`: sizes of the storages that
    were resident when the decode began."""
    alike: dict[tuple[str, str, str, int], list[Allocation]] = {}
    for one in living:
        key = (kinds[id(one)], made_by(one.call), module_of(one.call), one.bytes)
        alike.setdefault(key, []).append(one)
    groups = sorted(alike.items(), key=lambda group: (-group[0][3] * len(group[1]), group[0]))
    found = []
    known = tensors(recording, seen, [ones[0] for _, ones in groups[:HELD]])
    for (kind, what, module, size), ones in groups[:HELD]:
        shape, dtype = known.get(id(ones[0]), ((), ""))
        found.append(Holding(size * len(ones), kind, what, module, shape, dtype, len(ones)))  # type: ignore[arg-type]
    if weights and sum(weights):
        found.append(Holding(sum(weights), "weights", "resident", count=len(weights)))
    return tuple(sorted(found, key=lambda holding: -holding.bytes)[:HELD])


def tensors(
    recording: Recording, seen: Running, wanted: Iterable[Allocation]
) -> dict[int, tuple[tuple[int, ...], str]]:
    """Shape and dtype of those allocations that a tensor fills which some module, or the decode, was given or gave."""
    at = {one.pointer: one for one in wanted}
    found: dict[int, tuple[tuple[int, ...], str]] = {}
    calls = [*zip(recording.modules, seen.given, seen.gave)]
    calls += [(whole, (), seen.sample) for whole in recording.calls.get("fidelity:decode", ())]
    for call, given, gave in calls:
        for instant, tensors_ in ((call.start, given), (call.stop, gave)):
            for tensor in tensors_:
                one = at.get(tensor.pointer)
                if one is None or id(one) in found or one.bytes != tensor.bytes:
                    continue
                if one.born < instant and (one.gone is None or instant <= one.gone):
                    found[id(one)] = tensor.shape, tensor.dtype
    return found


def by_kind(living: Iterable[Allocation], kinds: dict[int, MemoryKind], weights: int) -> dict[str, int]:
    """Bytes of what was alive, by kind, the weights that were resident from the start included; only kinds there."""
    found: Counter[str] = Counter({"weights": weights} if weights else {})
    for one in living:
        found[kinds[id(one)]] += one.bytes
    return dict(sorted(found.items()))


def peak(recording: Recording, seen: Running, kinds: dict[int, MemoryKind], weights: Sequence[int]) -> Peak:
    """The first instant at which most was alive. Raises ValueError where nothing was recorded."""
    instant = recording.alive.index(max(recording.alive))
    living, left = recording.at(instant), sum(weights) - recording.departed(instant)
    number = recording.changes[instant][0]
    call = recording.allocations[number].call if number >= 0 else None  # a birth, but where weights left all the time
    return Peak(
        bytes=recording.alive[instant] + sum(weights),
        stage=stage_of(call, several=_several(recording)),
        module=module_of(call),
        operator=made_by(call),
        held=holdings(recording, seen, living, kinds, weights if left == sum(weights) else [left]),
        by_kind=by_kind(living, kinds, left),
    )


def layers(
    recording: Recording, kinds: dict[int, MemoryKind], weights: int, shares: Sequence[tuple[int, int]]
) -> dict[str, tuple[int, ...]]:
    """Of each share's worst instant, the bytes by kind: their sum is what was alive then."""
    now: Counter[str] = Counter({"weights": weights} if weights else {})
    rows: list[dict[str, int]] = []
    for start, stop in shares:
        worst: dict[str, int] = {}
        most: int | None = None
        for instant in range(start, stop):
            number, change = recording.changes[instant]
            if change:
                now[kinds[id(recording.allocations[number])] if number >= 0 else "weights"] += change
            if most is None or recording.alive[instant] > most:
                worst, most = dict(now), recording.alive[instant]
        rows.append(worst)
    names = sorted({name for row in rows for name, size in row.items() if size})
    return {name: tuple(row.get(name, 0) for row in rows) for name in names}


def spans(recording: Recording, shares: Sequence[tuple[int, int]]) -> tuple[Span, ...]:
    """Which stage ran at each share's worst instant, neighbours of one and the same call together."""
    several = _several(recording)
    ran = _stages(recording)
    found: list[Span] = []
    last: Call | None = None
    for share, (start, stop) in enumerate(shares):
        worst = max(range(start, stop), key=lambda instant: recording.alive[instant])
        call = ran[worst]
        name = stage_of(call, several=several)
        if found and found[-1].name == name and call is last:
            found[-1] = Span(name, found[-1].start, share + 1)
        else:
            found.append(Span(name, share, share + 1))
        last = call
    return tuple(found)


def _stages(recording: Recording) -> list[Call | None]:
    """By instant, the innermost stage that ran."""
    ran: list[Call | None] = [None] * len(recording.alive)
    stages = [call for calls in recording.calls.values() for call in calls if call.kind == "stage"]
    for call in sorted(stages, key=_depth):
        ran[call.start : call.stop] = [call] * (call.stop - call.start)
    return ran


def _depth(call: Call) -> int:
    return 0 if call.parent is None else 1 + _depth(call.parent)


def _several(recording: Recording) -> bool:
    return len(recording.calls.get("fidelity:tile", ())) > 1


def stage_of(call: Call | None, *, several: bool) -> StageName:
    """The stage of a call in the words of the records: with `several` tiles, what lies outside of them assembles."""
    name = call.stage.name if call is not None and call.stage is not None else "decode"
    if name in ("onload", "convert"):
        return name  # type: ignore[return-value]
    if name == "offload":
        return "onload"
    return ("tile" if name == "tile" else "assemble") if several else "decode"


def module_of(call: Call | None) -> str:
    return call.module.name if call is not None and call.module is not None else ""


def made_by(call: Call | None) -> str:
    return call.operator.name if call is not None and call.operator is not None else ""
