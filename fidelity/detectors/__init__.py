"""Detectors: pure functions `f(candidate, golden, *, plan, receipts, data_range)` that also say where.

Importing this registers them.
"""

from __future__ import annotations

from fidelity.detectors import blind, latents, temporal
from fidelity.detectors.cause import causes
from fidelity.detectors.seams import seam_family

__all__ = ["blind", "causes", "latents", "seam_family", "temporal"]
