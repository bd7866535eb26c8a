"""Detectors: pure functions `f(candidate, golden, *, plan, receipts, data_range)` that also say where.

Importing this registers them.
"""

from __future__ import annotations

from fidelity.detectors.seams import seam_family

__all__ = ["seam_family"]
