"""The allocated peak of one decode by stage: what the decode and its weights really held at the worst instant.

Weights count where they are resident on the decode's device at the start, those that an offload keeps in main memory
included when that is where the decode runs. The latents handed in, and fp32 masters of cast weights, do not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from fidelity.lazy import torch
from fidelity.memory import cuda, held, kinds, profiler, sums
from fidelity.memory.events import Call, Recording
from fidelity.memory.resident import Resident, resident_peak
from fidelity.memory.running import Running, described, running
from fidelity.records import Holding, MemoryTrace, Stage, StageName, Transfers
from fidelity.residency import Move

if TYPE_CHECKING:
    from torch import Tensor, nn

T = TypeVar("T")

CPU_METHOD = "allocator events of the torch profiler + resident weights"
TIMELINE_SHARES = 128
EACH = 1024
"""Calls of a stage whose own peaks are kept."""
EMULATED = "emulated fp16: its temporaries are fp32, so it has no memory figure of its own"
NO_EVENTS = "the profiler reported no allocator events"


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


def trace(
    decode: Callable[[], T],
    *,
    module: nn.Module,
    device: str,
    decoder: nn.Module | None = None,
    convert: Callable[[T], Any] | None = None,
) -> tuple[T, MemoryTrace]:
    """Run a decode and measure its peak; `convert` then runs on its result as a stage of its own.

    `allocated_peak_bytes` is the largest sum alive at one instant of it all. Stages: `decode` (the whole of it), `tile`
    (the worst call of `decoder`, with everything that was alive beside it), `assemble` (outside of those calls, where
    there are several), `onload` (while an offload moved weights), `convert`. A decode that has no figure of its own has
    a reason instead. What the decode raises passes through, and `interrupted(error)` tells what lived then.
    """
    inside = decoder if decoder is not None else getattr(module, "decoder", None)
    weights = weights_sizes(module, device)
    if torch.device(device).type == "cuda":
        return cuda.trace(decode, module=module, weights=sum(weights), device=device, decoder=inside, convert=convert)
    if any(weight.dtype is torch.float16 for weight in module.parameters()):
        return decode(), MemoryTrace(weights_bytes=sum(weights), reason=EMULATED)
    recording, seen = Recording(), Running()
    try:
        with (
            profiler.record(operators=True) as recording,
            running(module, inside, lambda name: profiler.span(f"fidelity:{name}")) as seen,
        ):
            with profiler.span("fidelity:decode"):
                result = decode()
            seen.sample = described(result)
            if convert is not None:
                with profiler.span("fidelity:convert"):
                    seen.stages.append("convert")
                    convert(result)
    except Exception as error:
        error._fidelity_memory = _interrupted(recording, seen, weights)  # type: ignore[attr-defined]
        raise
    return result, Traced(recording, seen, weights).memory()


def load(build: Callable[[], T], device: str) -> tuple[T, Stage]:
    """Load a model and measure it as the stage `load`: the allocator's peak, and by how much the process grew."""
    start = time.perf_counter()
    with resident_peak("cpu") as resident:
        if torch.device(device).type == "cuda":
            result, peak, reason = cuda.peak(build, device)
        elif torch.autograd._profiler_enabled():
            result, peak, reason = build(), None, "a profiler was running already"
        else:
            with profiler.record() as recording:
                result = build()
            peak, reason = max(recording.alive, default=0), None
    seconds = time.perf_counter() - start
    return result, Stage(
        "load", peak, resident_bytes=resident.rise_bytes, seconds=seconds, reason=reason or resident.reason
    )


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


def _interrupted(recording: Recording, seen: Running, weights: Sequence[int]) -> Interrupted:
    """What lived when a decode raised: at the refusal of an allocation if that is what ended it, else at the end."""
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
        alive_bytes=sum(weights) + sum(one.bytes for one in living),
        held=held.holdings(recording, seen, living, traced.kinds(), weights),
        trace=memory,
    )


def resident_weights(module: nn.Module, device: str) -> int:
    """Bytes of weights and buffers that lie on the device, each storage once, an offload's own copies included."""
    return sum(weights_sizes(module, device))


def weights_sizes(module: nn.Module, device: str) -> list[int]:
    """The same by storage."""
    kind = torch.device(device).type
    storages = {}
    for tensor in _weights(module):
        if tensor.device.type == kind:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return list(storages.values())


def _weights(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
    for part in module.modules():
        hook = part.__dict__.get("_hf_hook")
        for one in getattr(hook, "hooks", (hook,)):  # accelerate: names in a dict or in files
            held = getattr(getattr(one, "weights_map", None), "dataset", None)
            if isinstance(held, dict):
                yield from held.values()
        registry = part.__dict__.get("_diffusers_hook")
        group_hook = registry.get_hook("group_offloading") if registry is not None else None
        if group_hook is not None:  # diffusers: pinned copies, where streams are used
            yield from getattr(group_hook.group, "cpu_param_dict", {}).values()


__all__ = [
    "EMULATED",
    "Interrupted",
    "Resident",
    "Traced",
    "interrupted",
    "load",
    "resident_peak",
    "resident_weights",
    "trace",
    "transfers",
]
