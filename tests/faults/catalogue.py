"""All faults, and those that no image autoencoder can have."""

from __future__ import annotations

from tests.faults import blend, offload, precision, scale, slicing, state, tiling
from tests.faults.record import NotApplicable

FAULTS = (
    *blend.FAULTS,
    *tiling.FAULTS,
    *slicing.FAULTS,
    *precision.FAULTS,
    *scale.FAULTS,
    *offload.FAULTS,
    *state.FAULTS,
)
_VIDEO = "needs a video autoencoder, and none is supported yet: an image has no frames"
NOT_APPLICABLE = (
    NotApplicable("causal cache not cleared", "26", _VIDEO),
    NotApplicable("number of chunks floored to zero", "27", _VIDEO),
    NotApplicable("temporal blend in the wrong unit", "28", _VIDEO),
    NotApplicable("wrong frame dropped at each joint", "29", _VIDEO),
    NotApplicable("first-chunk rule not applied", "30", _VIDEO),
    NotApplicable("hooks copy a mutable temporal cache", "32", _VIDEO),
)
