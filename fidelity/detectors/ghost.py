"""A share of a neighbouring frame: the error of frame t against golden[t + k] − golden[t], in luma, by least squares.

What the frame's own picture explains (an offset, contrast, blur) is taken out first. Chance is what the same share is
with the neighbour's difference moved to every other place of the frame, by the cross-spectrum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist, median
from typing import TYPE_CHECKING

from fidelity.detectors.course import Course, Finding, luma
from fidelity.detectors.null import ALPHA, excess
from fidelity.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

REACH = 4
"""Frames to each side whose ghost is looked for."""
STILL = 0.5
"""Grey levels RMS by which a neighbour must differ, beside contrast and blur, for a share of it to be told."""
FLOOR = 0.01
"""Grey levels RMS of a ghost under which nothing is of interest."""
HEAVY = 1.25
"""Real errors have heavier tails than normal ones, as in the blind detector."""
EXPLAINS = 0.25
"""Share of the squared error, beside contrast and detail, that a ghost must explain. Measured: honest chunks of a
trained video decoder, which move a little in time, up to 0.15."""
ANOTHER = 0.75
"""Share from which on the frame is no ghost but the other frame itself."""


@dataclass(frozen=True)
class Share:
    """Of each frame, (T,): the share of its neighbour at `other`, and how far chance moves it."""

    other: str
    share: Tensor
    error: Tensor
    least: Tensor
    """The share that would explain EXPLAINS."""
    explained: Tensor
    """Share of the squared error that the ghost explains; −1 where the neighbour is still or is none."""
    size: Tensor
    """Grey levels RMS by which the neighbour differs."""


def ghost(course: Course, items: int = 1) -> Finding:
    """The largest share of another frame in one item, beyond chance; not measured where nothing moves."""
    frames = len(course.rms)
    if frames < 2:
        return Finding(0.0, profile=[None], details={"note": "one frame alone has no other to show"})
    shares = list(_shares(course))
    known = [each for each in shares if bool((each.explained >= 0).any())]
    if not known:
        most = max(float(each.size.max()) for each in shares)
        moved = f"the golden is still: frames within {REACH} of each other differ by {most:.2g} grey levels at most"
        return Finding(None, reason=f"{moved}, {STILL:g} needed to tell a ghost", profile=[None] * frames)
    looks = items * len(known) * frames
    quantile = HEAVY * NormalDist().inv_cdf(1 - ALPHA / looks)
    explained = torch.stack([each.explained for each in known])
    best, which = explained.max(0)
    share, error, least = (torch.stack([getattr(each, n) for each in known]) for n in ("share", "error", "least"))
    needed = torch.maximum(quantile * error, least)
    seen = [frame for frame in range(frames) if float(best[frame]) >= 0]
    here = {frame: int(which[frame]) for frame in seen}
    told = {f: (float(share[k, f].clamp_min(0)), float(needed[k, f])) for f, k in here.items()}
    value = {frame: excess(*each) for frame, each in told.items()}
    frame = max(seen, key=lambda f: (value[f], told[f][0] / told[f][1]))
    # of any of them: that of the one that is hardest to tell
    limits = [float((needed + 1.645 * error)[:, f][explained[:, f] >= 0].max()) for f in seen]
    at = known[here[frame]]
    details = {
        "effect": told[frame][0],
        "critical": told[frame][1],
        "explained": float(best[frame].clamp_min(0)),
        "levels": told[frame][0] * float(at.size[frame]),
        "looks": looks,
        "not_measured": [f for f in range(frames) if f not in here],
        "worst_detection_limit": max(limits),
        "diagnosis": ["ghost" if told[frame][0] < ANOTHER else "misaligned"],
    }
    return Finding(
        value[frame],
        frame,
        median(limits),
        where={"shows": _named(at.other, frame)},
        profile=[told[f][0] if f in told else None for f in range(frames)],
        details=details,
    )


def _named(other: str, frame: int) -> str:
    return "both neighbours" if other == "both" else f"frame {frame + int(other)}"


# ---------------------------------------------------------------- least squares


def _shares(course: Course) -> Iterator[Share]:
    """The share of each neighbour, and of both at once (a blur in time), one after the other alone."""
    golden = luma(course.golden)
    basis = _own(golden)
    error = _without(luma(course.error), basis)
    spectrum = torch.fft.fft2(error)
    frames = len(golden)
    steps = [step for k in range(1, min(REACH, frames - 1) + 1) for step in (k, -k)]
    for step in steps:
        there = torch.zeros(frames, dtype=torch.bool)
        there[max(0, -step) : frames - max(0, step)] = True
        yield _share(f"{step:+d}", golden.roll(-step, 0) - golden, there, error, spectrum, basis)
    if frames > 2:
        there = torch.ones(frames, dtype=torch.bool)
        there[[0, -1]] = False
        both = golden.roll(1, 0) + golden.roll(-1, 0) - 2 * golden
        yield _share("both", both, there, error, spectrum, basis)


def _share(other: str, change: Tensor, there: Tensor, error: Tensor, spectrum: Tensor, basis: Tensor) -> Share:
    change = _without(change, basis)
    power = change.square().sum((1, 2))
    size = change.square().mean((1, 2)).sqrt()
    share = (error * change).sum((1, 2)) / power.clamp_min(1e-9)
    # over all places, the mean square of what the rest of the error has in common with the moved difference
    moved = torch.fft.fft2(change)
    cross = (spectrum - share[:, None, None] * moved).abs().square() * moved.abs().square()
    places = moved.shape[-1] * moved.shape[-2]
    chance = cross.sum((1, 2)).sqrt() / places / power.clamp_min(1e-9)
    total = error.square().sum((1, 2)).clamp_min(1e-9)
    explained = (share.clamp_min(0).square() * power / total).clamp_max(1)
    left = (total - share.square() * power).clamp_min(0) / power.clamp_min(1e-9)
    measurable = there & (size >= STILL)
    return Share(
        other,
        share,
        (chance.square() + (FLOOR / size.clamp_min(1e-9)).square()).sqrt(),
        (left * EXPLAINS / (1 - EXPLAINS)).sqrt(),
        torch.where(measurable, explained, -1.0),
        torch.where(there, size, 0.0),
    )


def _own(golden: Tensor) -> Tensor:
    """What a frame does to itself, as orthonormal columns (T, h·w, 4): contrast, and detail of three sizes."""
    scales = [golden]
    for _ in range(3):
        soft = torch.nn.functional.avg_pool2d(scales[-1][:, None], 3, 1, 1, count_include_pad=False)
        scales.append(soft[:, 0])
    columns = [golden, *(fine - soft for fine, soft in pairwise(scales))]
    return torch.linalg.qr(torch.stack(list(map(_centred, columns)), dim=-1).flatten(1, 2)).Q


def _centred(images: Tensor) -> Tensor:
    return images - images.mean((-1, -2), keepdim=True)


def _without(images: Tensor, basis: Tensor) -> Tensor:
    """The images without an offset and without what the basis explains."""
    flat = _centred(images).flatten(1)[..., None]
    return (flat - basis @ (basis.mT @ flat))[..., 0].view_as(images)
