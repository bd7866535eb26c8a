"""Metrics: pure functions `f(candidate, golden, *, data_range) -> Measurement`. Importing this registers them."""

from __future__ import annotations

from fidelity.metrics import color, numeric, perceptual, structural

__all__ = ["color", "numeric", "perceptual", "structural"]
