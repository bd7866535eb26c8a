"""Steps of the error in time where chunks of a video meet, against the same statistic at frames without a joint.

Two kinds of energy: of the tone (the error in coarse cells: a chunk that is lighter) and of the pixels (a chunk that
lacks context).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from fidelity.detectors.chunks import ChunkTone, chunk_tones
from fidelity.detectors.course import REGIONS, Course, Finding
from fidelity.detectors.null import FEWEST, Tail, excess, tail
from fidelity.lazy import torch
from fidelity.records import DecodePlan, Receipts, TileAxis

if TYPE_CHECKING:
    from torch import Tensor

FLOOR = 0.01
"""Grey levels under which neither noise nor a step is of interest."""
REACH = 8
"""Frames to each side, at least, from which the usual step is taken; three latent frames if they are more."""
SHARED = 2.0
"""The regions of one frame know as little as that many fewer: a frame that is noisier is so all over."""
MARGINS = (2, 1, 0)
"""Frames around a joint that are not compared with, in turn."""
CLEARLY = 1.25
"""How far above the phase's own steps a joint must be where those are too few to have a tail."""


@dataclass(frozen=True)
class Joints:
    """Where the chunks of one video meet, in sample frames. `period`: frames a latent frame."""

    axis: TileAxis
    period: int

    @cached_property
    def breaks(self) -> dict[int, str]:
        """First frames that may differ from the one before: of a chunk, and after a blend band."""
        starts, band = self.axis.edges, self.axis.band
        ends = (start + band for start in starts if band and start + band < self.axis.size)
        return dict(sorted({**dict.fromkeys(ends, "band end"), **dict.fromkeys(starts, "joint")}.items()))

    def clear(self, margin: int) -> list[int]:
        """Frames that are more than `margin` from a break; the first has none before it."""
        return [t for t in range(1, self.axis.size) if all(abs(t - at) > margin for at in self.breaks)]


def joints(frames: int, plan: DecodePlan, receipts: Receipts) -> Joints | str:
    """The joints of a video of that many frames, or the reason why there is nothing to look for."""
    chunked = next((each for each in receipts.values() if "starts" in (each.get("grid") or ())), None)
    if chunked is None:
        return "the receipts hold no grid of frames"
    built: Any = chunked["grid"]
    try:
        axis = msgspec.convert(built, TileAxis)
    except msgspec.ValidationError as error:
        return f"the grid of frames in the receipts cannot be read: {error}"
    if axis.size != frames:
        return f"the grid of frames is for {axis.size} frames, the sample has {frames}"
    if not axis.is_ordered:
        return f"the chunks start at {list(axis.starts)}: expected 0, ascending, below {axis.size}"
    if len(axis.starts) == 1:
        return "the video is one chunk: no two of them meet"
    return Joints(axis, int(chunked.get("period") or _period(axis, plan)))


def _period(axis: TileAxis, plan: DecodePlan) -> int:
    """Frames a latent frame of a receipt that does not say: from the plan's chunk, else the joints' own divisor."""
    if plan.temporal is not None and plan.temporal.tile > 0 and axis.tile % plan.temporal.tile == 0:
        return max(1, axis.tile // plan.temporal.tile)
    gaps = [later - start for start, later in zip(axis.edges, axis.edges[1:])]
    return min(max(1, math.gcd(axis.tile, *gaps)), 8)


# ---------------------------------------------------------------- the statistics


@dataclass(frozen=True)
class Series:
    """One kind of step from the frame before, at every frame, (T, R), grey levels, in R parts of the frame."""

    kind: str
    effect: Tensor

    @property
    def regions(self) -> int:
        return self.effect.shape[1]

    @property
    def shared(self) -> float:
        return SHARED if self.regions > 1 else 1.0


@dataclass(frozen=True)
class Null:
    """What frames without a joint show: the usual step at each frame, and the tail of the steps over it."""

    scale: Tensor
    tail: Tail
    critical: float
    phase: str


def frame_steps(course: Course, where: Joints, items: int = 1) -> Finding:
    """The worst step of one item's error at a joint or band end, beyond those at frames without; or why not."""
    series = list(_series(course))
    profile = [None, *(float(each) for each in series[0].effect[1:, 0])]
    about = {"joints": list(where.breaks)}
    if not bool(course.rms.any()):
        return Finding(0.0, where.axis.edges[0], profile=profile, details=about)
    looks = items * (len(where.breaks) * sum(each.regions for each in series) + len(where.axis.edges))
    looked = [(each, null) for each in series if (null := _null(each, where, looks)) is not None]
    if not {"tone", "rough"} <= {each.kind for each, _ in looked}:
        free = len(where.clear(0))
        reason = f"only {free} of {where.axis.size - 1} frames are no joint: no noise level to compare with"
        return Finding(None, profile=profile, reason=reason, details=about)
    found = [look for each, null in looked for look in _looks(each, null, where)]
    return _worst(found, chunk_tones(course, where.axis, looks), course, where, profile)


def _series(course: Course) -> Iterator[Series]:
    """Tone and pixels, of the frame as a whole and of its quarters."""
    steps = torch.nn.functional.pad(course.cells.diff(dim=0).square().mean(1), (0, 0, 0, 0, 1, 0))
    tone = torch.nn.functional.adaptive_avg_pool2d(steps, REGIONS).flatten(1)
    for kind, energy in (("tone", tone), ("rough", course.rough)):
        yield Series(kind, energy.mean(1, keepdim=True).sqrt())
        yield Series(kind, energy.sqrt())


def _null(series: Series, where: Joints, looks: int) -> Null | None:
    """From the joints' own phase within a latent, if enough frames of it are free; else from frames of any phase, and
    then nothing counts that the few of that phase reach as well.

    Frames next to a joint may suffer of it too, which would hide it: of the margins the one that shows most is taken.
    """
    found = [_margin(series, where, looks, "own", margin) for margin in MARGINS]
    if not any(found):
        found = [_margin(series, where, looks, "any", margin) for margin in MARGINS]
    at = list(where.breaks)
    return min(filter(None, found), key=lambda null: null.critical * float(null.scale[at].mean()), default=None)


def _margin(series: Series, where: Joints, looks: int, phase: str, margin: int) -> Null | None:
    """The null of frames that are this far from all joints; None if they are too few."""
    phases = {frame % where.period for frame in where.breaks}
    clear = where.clear(margin)
    own = [frame for frame in clear if frame % where.period in phases]
    chosen = own if phase == "own" else clear
    if len(chosen) * series.regions < FEWEST * series.shared:
        return None
    scale = _usual(series.effect, clear, max(REACH, 3 * where.period))
    found = tail(_ratios(series.effect, scale, chosen), looks, series.shared)
    if found is None:
        return None
    like = CLEARLY * max(_ratios(series.effect, scale, own), default=0.0) if phase == "any" else 0.0
    return Null(scale, found, max(found.critical, like), phase)


def _ratios(effect: Tensor, scale: Tensor, frames: Sequence[int]) -> list[float]:
    # the floor on both sides: where there is no error at all the ratio is that of plain noise, and not of silence
    return ((effect[frames].square() + FLOOR**2).sqrt() / scale[frames]).flatten().tolist()


def _usual(effect: Tensor, clear: Sequence[int], reach: int) -> Tensor:
    """RMS step at the clear frames around each frame but not at it, (T, R), at least FLOOR."""
    apart = (torch.arange(len(effect))[:, None] - torch.tensor(clear)).abs()
    near = (apart > 0) & (apart <= reach)
    near = torch.where(near.sum(1, keepdim=True) < 2, apart > 0, near).to(effect.dtype)
    return (near @ effect[clear].square() / near.sum(1, keepdim=True).clamp_min(1) + FLOOR**2).sqrt()


# ---------------------------------------------------------------- the verdict on one item


@dataclass(frozen=True)
class _Look:
    value: float
    limit: float
    effect: float
    usual: float
    frame: int
    region: int
    series: Series
    null: Null

    @property
    def critical(self) -> float:
        return self.null.critical * self.usual


def _looks(series: Series, null: Null, where: Joints) -> Iterator[_Look]:
    for frame in where.breaks:
        for region in range(series.regions):
            effect, usual = float(series.effect[frame, region]), float(null.scale[frame, region])
            critical = null.critical * usual
            # a chunk's offset adds to noise of either sign: 95 % of the time no more than this is cancelled
            limit = critical + 1.645 / 2 * usual
            yield _Look(excess(effect, critical), limit, effect, usual, frame, region, series, null)


def _worst(
    looks: Sequence[_Look], tones: Sequence[ChunkTone], course: Course, where: Joints, profile: Sequence[float | None]
) -> Finding:
    worst = max(looks, key=lambda look: (look.value, look.effect / look.critical))
    limits = {at: min(look.limit for look in looks if look.frame == at) for at in where.breaks}
    if where.axis.band and tones:  # what a blend spreads makes no step
        limits = {tone.frame: tone.limit for tone in tones}
    else:
        limits |= {tone.frame: min(limits[tone.frame], tone.limit) for tone in tones}
    details: dict[str, Any] = {
        "kind": worst.series.kind,
        "effect": worst.effect,
        "critical": worst.critical,
        "elsewhere": worst.usual,
        "looks": len(looks) + len(tones),
        "controls": worst.null.tail.controls,
        "phase": worst.null.phase,
        "joints": list(where.breaks),
        "worst_detection_limit": max(limits.values()),
    }
    value, frame = worst.value, worst.frame
    place: dict[str, Any] = _place(course, worst)
    blended = max(tones, key=lambda tone: tone.value, default=None)
    if blended is None:
        details["note"] = "chunks are too many for their own tone to be told: a blended one was not looked for"
    elif blended.value > value:
        value, frame, place = blended.value, blended.frame, {}
        details |= {"kind": "chunk tone", "effect": blended.effect, "critical": blended.critical}
    chunk = sum(frame >= start for start in where.axis.starts) - 1
    place = {"line": where.breaks[frame], "chunk": chunk, **place}
    return Finding(value, frame, median(limits.values()), where=place, profile=profile, details=details)


def _place(course: Course, look: _Look) -> dict[str, int]:
    """The pixel in the middle of the cell whose tone steps most, in the part of the frame that was looked at."""
    step = (course.cells[look.frame] - course.cells[look.frame - 1]).square().mean(0)
    rows, columns = step.shape
    if look.series.regions > 1:
        part = torch.zeros(REGIONS**2)
        part[look.region] = 1
        part = torch.nn.functional.interpolate(part.view(1, 1, REGIONS, REGIONS), size=(rows, columns))[0, 0]
        step = torch.where(part > 0, step, -1.0)
    y, x = divmod(int(step.argmax()), columns)
    return {"x": int((x + 0.5) * course.width / columns), "y": int((y + 0.5) * course.height / rows)}
