"""Detectors: pure functions `f(candidate, golden, *, plan, receipts, data_range)` that also say where.

Importing this registers them.
"""

from __future__ import annotations
