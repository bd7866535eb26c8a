"""Metamorphic checks: two decodes that must give the same, so that neither a golden nor its limits are needed.

    @check("batch_order", diagnosis=("order",))
    def batch_order(runner, latents, plan):
        "A batch in another order gives the same items in that order."
        return runner.decode(latents.flip(0), plan).flip(0), runner.decode(latents, plan)

A check gets a Subject in the runner's place: one instance, decoded again and again without being compared, restored or
replaced in between, so that what sticks to it is there to be found. Every decode still proves that its options ran.
One kind of check a file; importing the package registers them all.
"""

from __future__ import annotations

from fidelity.checks import api, encodes, geometry, options, outputs, state, sweeps, units
from fidelity.checks.judge import COUNTED, LIMIT, NAME, in_grey_levels, limit, measure, shape_reason, told
from fidelity.checks.subject import Subject

__all__ = [
    "COUNTED", "LIMIT", "NAME", "Subject", "api", "encodes", "geometry", "in_grey_levels", "limit", "measure",
    "options", "outputs", "shape_reason", "state", "sweeps", "told", "units",
]  # fmt: skip
