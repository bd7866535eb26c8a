"""Peak memory of a decode: measured by allocator events on the CPU, and by the caching allocator's counters on CUDA."""

from __future__ import annotations

from fidelity.memory.allocator import resident_peak, trace

__all__ = ["resident_peak", "trace"]
