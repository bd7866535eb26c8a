"""What lived when a traced decode raised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fidelity.memory import held
from fidelity.memory.events import Recording
from fidelity.memory.running import Running
from fidelity.memory.traced import NO_EVENTS, Traced
from fidelity.records import Holding, MemoryTrace, StageName


@dataclass(frozen=True)
class Interrupted:
    """What lived when a traced decode raised. `trace` is that of the decode so far; its stages end there."""

    stage: StageName
    module: str
    """Dotted path of the module that ran; empty: the autoencoder itself, or what runs around it."""
    operator: str
    """Which asked for what the allocator refused; empty where it was something else that raised."""
    alive_bytes: int | None
    """Allocated at that instant, resident weights included; None where `reason` says why."""
    held: tuple[Holding, ...]
    trace: MemoryTrace
    reason: str | None = None


def interrupted(error: BaseException) -> Interrupted | None:
    """What lived when `error` left a traced decode; None if it left none, or one that has no figure of its own."""
    return getattr(error, "_fidelity_memory", None)


def tell(error: BaseException, recording: Recording, seen: Running, weights: Sequence[int]) -> None:
    """Have what a recorded decode raised carry what lived then: when an allocation was refused, if that is what ended
    it, else at the end."""
    error._fidelity_memory = _lived(recording, seen, weights)  # type: ignore[attr-defined]


def _lived(recording: Recording, seen: Running, weights: Sequence[int]) -> Interrupted:
    traced = Traced(recording, seen, weights)
    memory = traced.memory()
    stage: Any = seen.stages[-1] if seen.stages else "decode"
    stage, module, operator = "onload" if stage == "offload" else stage, "".join(seen.modules[-1:]), ""
    refused = [one for one in recording.refused if not any(kept.born >= one[0] for kept in recording.allocations)]
    instant = len(recording.alive) - 1
    if refused:
        before, call = refused[-1]
        instant, operator = before - 1, held.made_by(call)
    if memory.reason not in (None, NO_EVENTS):
        return Interrupted(stage, module, operator, None, (), memory, memory.reason)
    living = recording.at(instant)
    return Interrupted(
        stage=stage,
        module=module,
        operator=operator,
        alive_bytes=sum(weights) + (recording.alive[instant] if instant >= 0 else 0),
        held=held.holdings(recording, seen, living, traced.kinds(), weights),
        trace=memory,
    )
