"""The tone of each chunk of a video: what blending spreads over a band, so that no single frame steps.

The mean error of each frame is explained at once by a drift in time and by every chunk's own offset under its blend
weight. What is left, and how it hangs together from frame to frame, says how far chance moves such an offset.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

from fidelity.detectors.course import Course
from fidelity.detectors.null import ALPHA, excess, student
from fidelity.detectors.tone import ramps
from fidelity.lazy import torch
from fidelity.records import TileAxis

if TYPE_CHECKING:
    from torch import Tensor

FREEDOM = 4
"""Frames that must be left over by the fit for it to say anything."""
HEAVY = 1.25
"""Real errors have heavier tails than normal ones, as in the blind detector."""
FLOOR = 0.01
"""Grey levels: the least noise of a frame's mean."""
MOST = 0.9
"""The largest correlation from one frame to the next that is allowed for."""


@dataclass(frozen=True)
class ChunkTone:
    """How far the tone of the chunk that begins at `frame` is from that of the chunk before, grey levels."""

    frame: int
    value: float
    effect: float
    critical: float
    limit: float


def chunk_tones(course: Course, axis: TileAxis, looks: int) -> list[ChunkTone]:
    """The tone of every chunk but the first against the one before; none where the frames are too few to tell."""
    mean = course.error.mean((2, 3)).double()
    frames, chunks = axis.size, len(axis.starts)
    time = torch.linspace(-1, 1, frames, dtype=torch.float64)[:, None]
    design = torch.cat([torch.ones_like(time), time, ramps(axis, 1)[:, 1:]], dim=1)
    freedom = frames - design.shape[1]
    if freedom < FREEDOM or int(torch.linalg.matrix_rank(design)) < design.shape[1]:
        return []
    inverse = torch.linalg.inv(design.mT @ design)
    solution = inverse @ (design.mT @ mean)
    residual = mean - design @ solution
    variance = residual.square().sum(0) / freedom * _together(residual) + FLOOR**2
    # each chunk less the one before: the first one's offset is the constant, so nought
    differ = torch.eye(chunks - 1, dtype=torch.float64) - torch.diag(torch.ones(chunks - 2, dtype=torch.float64), -1)
    offsets = differ @ solution[2:]
    factors = (differ @ inverse[2:, 2:] @ differ.mT).diagonal()
    errors = HEAVY * (factors * variance.mean()).sqrt()
    quantile = student(NormalDist().inv_cdf(1 - ALPHA / (2 * looks)), freedom)
    effects = offsets.square().mean(1).sqrt()
    return [
        ChunkTone(frame, excess(effect, quantile * error), effect, quantile * error, (quantile + 1.645) * error)
        for frame, effect, error in zip(axis.edges, effects.tolist(), errors.tolist())
    ]


def _together(residual: Tensor) -> float:
    """By how much errors that hang together from frame to frame raise the variance of a mean; at least 1."""
    power = float(residual.square().sum())
    along = float((residual[1:] * residual[:-1]).sum()) / power if power > 0 else 0.0
    along = min(max(along, 0.0), MOST)
    return (1 + along) / (1 - along)
