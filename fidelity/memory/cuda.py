"""Peaks of CUDA's caching allocator by stage: allocated and reserved apart.

The counters know only one peak since the last reset, so they are read and reset at each border between stages, and the
whole's peak is the largest of them. The allocator's events, which the profiler records as it does those of the CPU,
tell who held what; the two are held against one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from fidelity.lazy import torch
from fidelity.memory import interruption, profiler
from fidelity.memory.events import Recording
from fidelity.memory.kinds import MOVES
from fidelity.memory.running import Running, described, running
from fidelity.memory.traced import Traced, transfers
from fidelity.records import MemoryTrace, Stage, StageName

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")
METHOD = "torch.cuda peak counters, read and reset at each stage"


@dataclass
class Meter:
    """The peaks of each stage, in bytes above what others held on the device when the meter started."""

    device: str
    held_by_others: int = 0
    allocated: dict[str, list[int]] = field(default_factory=dict)
    """By stage, the peak of each of its calls, in the order in which they ended."""
    reserved: int = 0
    _open: list[tuple[str, list[int]]] = field(default_factory=list)

    def start(self, weights: int) -> None:
        """Begin with an empty cache, so that reserved memory is this decode's own. `weights` are the module's bytes."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        self.held_by_others = torch.cuda.memory_allocated(self.device) - weights
        torch.cuda.reset_peak_memory_stats(self.device)

    def read(self) -> None:
        """Book the peak since the last reading to the innermost stage."""
        torch.cuda.synchronize(self.device)
        if self._open:
            self._open[-1][1].append(torch.cuda.max_memory_allocated(self.device) - self.held_by_others)
        self.reserved = max(self.reserved, torch.cuda.max_memory_reserved(self.device))
        torch.cuda.reset_peak_memory_stats(self.device)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Everything within belongs to this stage, but for the stages inside it. A move of weights counts for the stage
        that it is in as well."""
        self.read()
        self._open.append((name, []))
        try:
            yield
        finally:
            self.read()
            peak = max(self._open.pop()[1])
            self.allocated.setdefault(name, []).append(peak)
            if name in MOVES and self._open:
                self._open[-1][1].append(peak)

    @property
    def peak(self) -> int:
        """The largest of them all."""
        return max(max(found) for found in self.allocated.values())


def trace(
    decode: Callable[[], T],
    *,
    module: nn.Module,
    weights: Sequence[int],
    device: str,
    decoder: nn.Module | None,
    convert: Callable[[T], Any] | None,
) -> tuple[T, MemoryTrace]:
    """Run a decode on a CUDA device and measure it; as `allocator.trace`, which says what `decode` and the rest are.

    The counters give the peaks, allocated and reserved. Who held what is read from the caching allocator's events, as
    the profiler records them, where these come to the very same peak; else `reason` says that they do not.
    """
    meter = Meter(device)
    meter.start(sum(weights))

    @contextmanager
    def span(name: str) -> Iterator[None]:
        with nullcontext() if name.startswith("module:") else meter.stage(name), profiler.span(f"fidelity:{name}"):
            yield

    recording, seen = Recording(device="cuda"), Running()
    try:
        with profiler.record(operators=True, device="cuda") as recording, running(module, decoder, span) as seen:
            with meter.stage("assemble"), profiler.span("fidelity:decode"):
                result = decode()
            seen.sample = described(result)
            if convert is not None:
                seen.stages.append("convert")
                with span("convert"):
                    convert(result)
    except Exception as error:
        interruption.tell(error, recording, seen, weights)
        raise
    return result, joined(meter, Traced(recording, seen, weights), sum(weights))


def joined(meter: Meter, traced: Traced, weights: int) -> MemoryTrace:
    """The counters' figures, with what the events tell beside them if both come to the same peak."""
    counted = MemoryTrace(
        allocated_peak_bytes=meter.peak,
        reserved_peak_bytes=meter.reserved,
        weights_bytes=weights,
        method=METHOD,
        stages=_stages(meter.allocated),
        transfers=transfers(traced.seen.moves),
        refused=len(traced.recording.refused),
    )
    told = traced.memory()
    if told.allocated_peak_bytes == meter.peak:
        return replace(told, reserved_peak_bytes=meter.reserved, method=METHOD)
    found = told.reason or f"the events' peak is {told.allocated_peak_bytes} bytes, the counters' {meter.peak}"
    return replace(counted, reason=f"who held what is not told: {found}")


def peak(build: Callable[[], T], device: str) -> tuple[T, int]:
    """Load a model: what it returns, and its peak on the device."""
    meter = Meter(device)
    meter.start(0)
    with meter.stage("load"):
        result = build()
    return result, meter.peak


def _stages(found: dict[str, list[int]]) -> tuple[Stage, ...]:
    """The stages of the records, of the meter's own."""
    peaks = {**found, "decode": [max(peak for name in ("assemble", "tile") for peak in found.get(name, [0]))]}
    if len(peaks.get("tile", ())) < 2:
        peaks.pop("assemble", None)
    calls = {name: len(each) if name in ("tile", "onload") else 1 for name, each in peaks.items()}
    order: tuple[StageName, ...] = ("decode", "onload", "tile", "assemble", "convert")
    return tuple(
        Stage(name, max(peaks[name]), calls[name], each=tuple(peaks[name]) if calls[name] > 1 else ())
        for name in order
        if peaks.get(name)
    )
