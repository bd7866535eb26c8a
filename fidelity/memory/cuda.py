"""Peaks of CUDA's caching allocator by stage: allocated and reserved apart.

The counters know only one peak since the last reset, so they are read and reset at each border between stages, and the
whole's peak is the largest of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from fidelity.lazy import torch
from fidelity.memory.running import running
from fidelity.records import MemoryTrace, Stage

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
    reserved: int = 0
    _stage: list[str] = field(default_factory=list)

    def start(self, weights: int) -> None:
        """Begin with an empty cache, so that reserved memory is this decode's own. `weights` are the module's bytes."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        self.held_by_others = torch.cuda.memory_allocated(self.device) - weights
        torch.cuda.reset_peak_memory_stats(self.device)

    def read(self) -> None:
        """Book the peak since the last reading to the innermost stage."""
        torch.cuda.synchronize(self.device)
        if self._stage:
            peak = torch.cuda.max_memory_allocated(self.device) - self.held_by_others
            self.allocated.setdefault(self._stage[-1], []).append(peak)
        self.reserved = max(self.reserved, torch.cuda.max_memory_reserved(self.device))
        torch.cuda.reset_peak_memory_stats(self.device)

    def span(self, name: str) -> AbstractContextManager[Any]:
        """A stage; a module is none."""
        return nullcontext() if name.startswith("module:") else self.stage(name)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Everything within belongs to this stage, but for the stages inside it."""
        self.read()
        self._stage.append(name)
        try:
            yield
        finally:
            self.read()
            self._stage.pop()


def trace(
    decode: Callable[[], T],
    *,
    module: nn.Module,
    weights: int,
    device: str,
    decoder: nn.Module | None,
    convert: Callable[[T], Any] | None,
) -> tuple[T, MemoryTrace]:
    """Run a decode on a CUDA device and measure its peaks by stage."""
    meter = Meter(device)
    meter.start(weights)
    with meter.stage("assemble"), running(module, decoder, meter.span):
        result = decode()
    if convert is not None:
        with meter.stage("convert"):
            convert(result)
    peaks = dict(meter.allocated)
    peaks["decode"] = [max(peak for name in ("assemble", "tile") for peak in peaks.get(name, [0]))]
    if len(peaks.get("tile", [])) < 2:
        peaks.pop("assemble", None)
    return result, MemoryTrace(
        allocated_peak_bytes=max(max(found) for found in peaks.values()),
        reserved_peak_bytes=meter.reserved,
        weights_bytes=weights,
        method=METHOD,
        stages=_stages(peaks),
    )


def peak(build: Callable[[], T], device: str) -> tuple[T, int | None, str | None]:
    """Load a model: what it returns, and its peak on the device."""
    meter = Meter(device)
    meter.start(0)
    with meter.stage("load"):
        result = build()
    return result, max(meter.allocated["load"]), None


def _stages(peaks: dict[str, list[int]]) -> tuple[Stage, ...]:
    order = ("decode", "tile", "assemble", "convert")
    calls = {name: len(peaks.get(name, ())) if name == "tile" else 1 for name in order}
    return tuple(Stage(name, max(peaks[name]), calls[name]) for name in order if peaks.get(name))  # type: ignore[arg-type]
