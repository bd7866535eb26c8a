"""Seams without being told: a grid found in the difference of a decoder that hides how it tiles, and seams that show in
the picture itself, without a golden."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from fidelity.detectors.grid import Layout
from fidelity.detectors.null import ALPHA, excess
from fidelity.detectors.seams import GREY, located, measure
from fidelity.detectors.steps import steps
from fidelity.lazy import np, torch
from fidelity.records import DecodePlan, Measurement, Receipts
from fidelity.registry import detector
from fidelity.signal import GREY_LEVELS, DataRange, Pair

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

SMALLEST_PITCH = 24
"""Pixels: nearer lines are the decoder's own upsampling, which the golden has too."""
OWN = 16
"""Pixels: the error of a decoder repeats with its upsampling, of 8 or 16; that part of the profile is taken out."""
LEAST_SPREAD = 0.05
"""Of the logarithm of a step over its usual size: evenly strong noise is no reason to call a twentieth more a seam."""
HEAVY = 1.25
"""Profiles of real errors have heavier tails than normal ones: 2.5 % of clean decodes passed the plain quantile."""
SMALLEST = 2 * SMALLEST_PITCH + OWN
"""Pixels below which an axis has no room for a grid."""
EDGE = 2
"""Pixels at the picture's edge that are no line."""
NEIGHBOURS = 12
"""Pixels to each side that give a position's usual step."""
FLOOR = 0.01
"""Grey levels under which a step is of no interest."""


@detector("periodic", unit=GREY, better="lower", diagnosis=("periodic",))
def periodic(
    candidate: Tensor, golden: Tensor, *, plan: DecodePlan, receipts: Receipts, data_range: DataRange
) -> Measurement:
    """The step along a grid of unknown pitch and phase, found blind in the difference; 0 where there is none.

    Tensors (B, C, [T,] H, W), fp32. `where`: image, axis ("x": vertical lines), pitch, phase (position of the first
    line). At least two lines make a grid. Raises EvaluationError if the samples do not fit.
    """
    pair = Pair(candidate, golden, data_range)
    if max(candidate.shape[-2:]) < SMALLEST:
        reason = f"smaller than two tiles of {SMALLEST_PITCH} px"
        return pair.summarise([None] * pair.count, "lower", reason=reason)
    if not pair.good:
        return pair.summarise([None] * pair.count, "lower")
    difference = pair.grey(pair.good)
    fields = {"x": difference, "y": difference.transpose(-1, -2)}
    profiles = {axis: profile(field) for axis, field in fields.items() if field.shape[-1] >= SMALLEST}
    found = dict(zip(pair.good, (find(profiles, image) for image in range(len(difference)))))
    return located(pair, found)


@dataclass(frozen=True)
class Grid:
    """The strongest grid of one image; `value` in grey levels, 0 if chance explains it."""

    value: float
    limit: float
    where: dict[str, Any]
    details: dict[str, Any]


def profile(difference: Tensor) -> tuple[Tensor, Tensor]:
    """Of (N, C, H, W) in grey levels: RMS step between neighbours at every column, and what is usual near it. (N, W)"""
    jump = difference[..., 1:] - difference[..., :-1]
    here = torch.nn.functional.pad(jump.square().mean((1, 2)).sqrt(), (1, 0))
    padded = torch.nn.functional.pad(here[:, None, 1:], (NEIGHBOURS + 1, NEIGHBOURS), mode="reflect")[:, 0]
    usual = padded.unfold(-1, 2 * NEIGHBOURS + 1, 1).median(-1).values
    return here, usual


def find(profiles: dict[str, tuple[Tensor, Tensor]], image: int) -> Grid:
    """The pitch and phase whose lines stand out most, over both axes."""
    candidates = []
    tests = sum(_tests(here.shape[-1]) for here, _ in profiles.values())
    quantile = HEAVY * NormalDist().inv_cdf(1 - ALPHA / max(1, tests))
    for axis, (here, usual) in profiles.items():
        size = here.shape[-1]
        ratio = ((here[image] + FLOOR) / (usual[image] + FLOOR)).log()
        ratio = _without_own(ratio)
        spread = max(float(ratio[OWN : size - OWN].std()), LEAST_SPREAD)
        score, pitch, phase = _fold(ratio / spread)
        lines = list(range(phase, size, pitch))
        effect = float(here[image, lines].square().mean().sqrt())
        level = float(usual[image, lines].square().mean().sqrt())
        # what a grid of that many lines must reach on average to leave chance behind
        critical = (level + FLOOR) * math.exp(quantile * spread / math.sqrt(len(lines)))
        value = excess(effect, critical) if score > quantile else 0.0
        candidates.append((value, score, axis, pitch, phase, effect, critical))
    value, score, axis, pitch, phase, effect, critical = max(candidates)
    p_value = min(1.0, tests * (1 - NormalDist().cdf(score)))
    details = {"score": score, "needed": quantile, "effect": effect, "critical": critical, "p_value": p_value}
    return Grid(value, critical, {"axis": axis, "pitch": pitch, "phase": phase}, details)


def _tests(size: int) -> int:
    return sum(range(SMALLEST_PITCH, max(SMALLEST_PITCH, size // 2) + 1))


def _without_own(ratio: Tensor) -> Tensor:
    """Take out what repeats with the decoder's own upsampling (a median, so that a seam is not part of it)."""
    size = ratio.shape[0]
    own = torch.stack([ratio[phase::OWN].median() for phase in range(OWN)])
    return ratio - own.repeat(size // OWN + 1)[:size]


def _fold(score: Tensor) -> tuple[float, int, int]:
    """The largest sum over lines, per root of their number: (score, pitch, position of the first line)."""
    values = score.numpy().copy()
    values[:EDGE] = 0
    size = len(values)
    best = (-math.inf, SMALLEST_PITCH, SMALLEST_PITCH)
    for pitch in range(SMALLEST_PITCH, size // 2 + 1):
        lines = -(-size // pitch)
        folded = np.zeros(lines * pitch, dtype=values.dtype)
        folded[:size] = values
        count = np.full(pitch, lines)
        count[size - (lines - 1) * pitch :] -= 1
        count[:EDGE] -= 1
        total = np.where(count < 2, -math.inf, folded.reshape(lines, pitch).sum(0) / np.sqrt(np.maximum(count, 1)))
        at = int(total.argmax())
        if total[at] > best[0]:
            best = float(total[at]), pitch, at if at >= EDGE else at + pitch
    return best


@detector("visibility", unit=GREY, better="lower", needs="tiling", diagnosis=("seam",))
def visibility(
    candidate: Tensor, golden: Tensor, *, plan: DecodePlan, receipts: Receipts, data_range: DataRange
) -> Measurement:
    """The largest step that shows in the candidate itself at the tile grid, without looking at the golden.

    Tensors (B, C, [T,] H, W), fp32. Its detection limit is that of an eye: the picture's own edges hide a seam. Raises
    EvaluationError if the samples do not fit.
    """
    pair = Pair(candidate, golden, data_range)

    def look(pair: Pair, images: Sequence[int], tiles: Layout) -> Any:
        return steps(pair.unit(pair.candidate, images) * GREY_LEVELS, tiles)

    return measure(pair, plan, receipts, look)
