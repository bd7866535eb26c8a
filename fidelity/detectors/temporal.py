"""The temporal family: what a video's error does from frame to frame, where chunks meet and where they do not.

All work on candidate − golden in grey levels (255 = the declared range). The worst frame of the worst item decides;
`details.profile` has one number a frame and item. docs/design/temporal-detectors.md has the statistics and what they
catch.
"""

from __future__ import annotations

import math
from statistics import NormalDist, median
from typing import TYPE_CHECKING

from fidelity.detectors.course import Course, Finding, courses, told, unmeasurable
from fidelity.detectors.flicker import flicker
from fidelity.detectors.ghost import ghost
from fidelity.detectors.joints import frame_steps, joints
from fidelity.detectors.null import ALPHA, FEWEST, student
from fidelity.records import DecodePlan, Measurement, Receipts
from fidelity.registry import FRAMES, detector
from fidelity.signal import DataRange, Pair

if TYPE_CHECKING:
    from torch import Tensor

GREY = "grey levels"
FLOOR = 0.01
"""Grey levels under which the error of a frame is of no interest."""
LEAST_SPREAD = 0.05
"""Of the logarithm of a frame's error: evenly strong noise is no reason to call a twentieth more a fault."""


@detector("frame_rmse", unit=GREY, better="lower", needs=FRAMES)
def frame_rmse(
    candidate: Tensor, golden: Tensor, *, plan: DecodePlan, receipts: Receipts, data_range: DataRange
) -> Measurement:
    """RMS error of the worst frame; `details.profile` has that of each, `details.stand_out` those unlike the rest.

    Tensors (B, C, T, H, W), fp32. `where`: image, frame. Raises EvaluationError if the samples do not fit.
    """
    pair = Pair(candidate, golden, data_range)
    why = unmeasurable(pair)
    found = {} if why else {item: _levels(course, pair.count) for item, course in courses(pair).items()}
    return told(pair, found, why)


def _levels(course: Course, looks: int) -> Finding:
    """A frame stands out by the spread of the middle ones: bad frames are no excuse for each other."""
    profile = [float(each) for each in course.rms]
    frame = profile.index(max(profile))
    if len(profile) < FEWEST:
        note = f"{len(profile)} frames are too few to say which stand out"
        return Finding(profile[frame], frame, profile=profile, details={"note": note})
    logs = [math.log(max(each, FLOOR)) for each in profile]
    usual = median(logs)
    spread = 1.4826 * median(abs(each - usual) for each in logs)  # of normal numbers, their standard deviation
    quantile = student(NormalDist().inv_cdf(1 - ALPHA / looks), len(profile) - 1)
    critical = math.exp(usual + quantile * max(spread, LEAST_SPREAD))
    stand_out = [index for index, each in enumerate(profile) if each > critical]
    limit = math.sqrt(critical**2 - math.exp(usual) ** 2)  # what adds to a usual frame's error in quadrature
    return Finding(
        profile[frame], frame, limit, profile=profile, details={"critical": critical, "stand_out": stand_out}
    )


@detector("frame_step", unit=GREY, better="lower", needs="temporal", diagnosis=("temporal_seam",))
def frame_step(
    candidate: Tensor, golden: Tensor, *, plan: DecodePlan, receipts: Receipts, data_range: DataRange
) -> Measurement:
    """The largest step of the error where chunks of frames meet or a blend ends, beyond those at frames without.

    Tensors (B, C, T, H, W), fp32. `where`: image, frame, line ("joint" or "band end"), chunk, x, y. Raises
    EvaluationError if the samples do not fit.
    """
    pair = Pair(candidate, golden, data_range)
    where = unmeasurable(pair) or joints(pair.frames, plan, receipts)
    if isinstance(where, str):
        return told(pair, {}, where)
    return told(pair, {item: frame_steps(course, where, pair.batch) for item, course in courses(pair).items()})


@detector("frame_flicker", unit=GREY, better="lower", needs=FRAMES, diagnosis=("temporal_seam",))
def frame_flicker(
    candidate: Tensor, golden: Tensor, *, plan: DecodePlan, receipts: Receipts, data_range: DataRange
) -> Measurement:
    """The largest jump of the error's mean luma between frames, alone or at every so many of them, beyond chance.

    Tensors (B, C, T, H, W), fp32. `where`: image, frame; `details.period` and `phase` where jumps have a rhythm. Raises
    EvaluationError if the samples do not fit.
    """
    pair = Pair(candidate, golden, data_range)
    why = unmeasurable(pair)
    return told(pair, {} if why else {i: flicker(course, pair.batch) for i, course in courses(pair).items()}, why)


@detector("frame_ghost", unit="share", better="lower", needs=FRAMES)
def frame_ghost(
    candidate: Tensor, golden: Tensor, *, plan: DecodePlan, receipts: Receipts, data_range: DataRange
) -> Measurement:
    """The largest share of a frame nearby that a frame holds, 0 to 1, beyond chance; null where the golden is still.

    Tensors (B, C, T, H, W), fp32. `where`: image, frame, and which frame it `shows`; `details.levels`: how large that
    is, in grey levels RMS. Blamed on `ghost`, and on `misaligned` where it is the other frame as a whole. Raises
    EvaluationError if the samples do not fit.
    """
    pair = Pair(candidate, golden, data_range)
    why = unmeasurable(pair)
    return told(pair, {} if why else {i: ghost(course, pair.batch) for i, course in courses(pair).items()}, why)
