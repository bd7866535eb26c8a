"""Brightness that jumps: the mean luma of the error from frame to frame, without knowing where chunks meet.

A jump is measured against what the error's own scatter over the frame can do to its mean, and not against the other
jumps of the video: a picture that flickers in every frame would then be its own excuse.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

from fidelity.detectors.course import Course, Finding, luma
from fidelity.detectors.null import ALPHA, excess, student
from fidelity.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

CELLS = 4
"""Cells along a side: what the error does over a quarter of the frame counts as one."""
HEAVY = 1.25
"""Real errors have heavier tails than normal ones, as in the blind detector."""
FLOOR = 0.01
"""Grey levels: the least standard error of a frame's mean luma."""
SHORTEST = 3
"""Frames: the shortest period that is told from flicker in every frame."""


@dataclass(frozen=True)
class Rhythm:
    """Jumps at every `period`th frame from frame `phase` on: their RMS beyond chance, in grey levels."""

    value: float
    period: int
    phase: int
    effect: float
    critical: float
    score: float
    """How far the energy of the jumps is above the usual, by what it varies with their number."""


def flicker(course: Course, items: int = 1) -> Finding:
    """The largest jump of mean luma of one item's error, alone or in a rhythm, beyond what scatter explains."""
    seen = luma(course.error)
    level = seen.mean((1, 2)).double()
    profile = level.tolist()
    if len(level) < 2:
        return Finding(0.0, profile=profile, details={"note": "one frame alone cannot flicker"})
    jumps = level.diff()
    cells = torch.nn.functional.adaptive_avg_pool2d(seen, (min(CELLS, seen.shape[1]), min(CELLS, seen.shape[2])))
    count = cells[0].numel()
    if count < 2:
        return Finding(None, reason="the frames are one cell: no scatter to compare with", profile=profile)
    scatter = cells.flatten(1).diff(dim=0).var(1).median().item()
    error = HEAVY * math.sqrt(scatter / count + FLOOR**2)
    quantile = student(NormalDist().inv_cdf(1 - ALPHA / (2 * items * len(jumps))), count - 1)
    critical = quantile * error
    at = int(jumps.abs().argmax())
    effect = float(jumps[at].abs())
    details = {"kind": "jump", "effect": effect, "critical": critical, "looks": len(jumps), "scatter": error}
    value, frame = excess(effect, critical), at + 1
    rhythm = _rhythm(jumps.square(), error**2, items)
    if rhythm is not None and rhythm.value > 0:
        details |= {"period": rhythm.period, "phase": rhythm.phase, "rhythm": rhythm.effect}
        if rhythm.value > value:
            value, frame = rhythm.value, rhythm.phase
            details |= {"kind": "rhythm", "effect": rhythm.effect, "critical": rhythm.critical}
    return Finding(value, frame, critical + 1.645 * error, profile=profile, details=details)


def _rhythm(squares: Tensor, variance: float, items: int) -> Rhythm | None:
    """The period and phase whose jumps, of (T − 1) squared ones, stand out most from all others."""
    size = len(squares) + 1
    tries = [(period, phase) for period in range(SHORTEST, size // 2 + 1) for phase in range(1, period + 1)]
    tries = [(period, phase) for period, phase in tries if phase + period < size]
    quantile = HEAVY * NormalDist().inv_cdf(1 - ALPHA / max(1, items * len(tries)))
    found = [_fold(squares, variance, quantile, period, phase) for period, phase in tries]
    return max(found, key=lambda each: each.score, default=None)


def _fold(squares: Tensor, variance: float, quantile: float, period: int, phase: int) -> Rhythm:
    lines = squares[phase - 1 :: period]
    others = squares.clone()
    others[phase - 1 :: period] = float("nan")
    usual = float(others.nanmedian()) / 0.455  # the median of a squared normal number
    # mean of n squared normal numbers (Wilson and Hilferty)
    spread = 2 / (9 * len(lines))
    critical = math.sqrt(max(variance, usual) * (1 - spread + quantile * math.sqrt(spread)) ** 3)
    effect = math.sqrt(float(lines.mean()))
    # largest for the period itself: twice as many lines, half of them empty, score less, and so do half as many
    score = (effect**2 - float(squares.median()) / 0.455) * math.sqrt(len(lines))
    return Rhythm(excess(effect, critical), period, phase, effect, critical, score)
