"""Peaks of CUDA's caching allocator by stage: allocated and reserved apart.

The counters know only one peak since the last reset, so they are read and reset at each border between stages, and the
whole's peak is the largest of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fidelity.lazy import torch


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
