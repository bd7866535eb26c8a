"""All faults of the list, and further kinds."""

from __future__ import annotations

from tests.faults import blend, offload, precision, scale, slicing, state, temporal, tiling
from tests.faults.record import NotApplicable

FAULTS = (
    *blend.FAULTS,
    *tiling.FAULTS,
    *slicing.FAULTS,
    *precision.FAULTS,
    *scale.FAULTS,
    *offload.FAULTS,
    *state.FAULTS,
    *temporal.FAULTS,
)
NOT_APPLICABLE: tuple[NotApplicable, ...] = ()
"""Faults of the list that cannot be injected here, each with its reason."""
