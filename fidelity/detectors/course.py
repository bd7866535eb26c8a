"""What a video's error does from frame to frame, an item of the batch at a time: shared by the temporal detectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fidelity.lazy import torch
from fidelity.records import Measurement
from fidelity.signal import GREY_LEVELS, Pair

if TYPE_CHECKING:
    from torch import Tensor

THUMB = 64
"""Pixels along a side of the small frames in which tones and ghosts are looked for, at most."""
CELLS = 8
"""Cells along a side of a frame whose tone is followed, at most."""
REGIONS = 2
"""Regions along a side of a frame that are looked at by themselves: a joint may show in one tile alone."""
LUMA = (0.2126, 0.7152, 0.0722)


@dataclass(frozen=True)
class Course:
    """One item's error in time, in grey levels. T frames; regions run row by row."""

    rms: Tensor
    """(T,): RMS error of each frame."""
    rough: Tensor
    """(T, REGIONS²): mean squared step of a pixel's error from the frame before; 0 at the first."""
    error: Tensor
    """(T, C, h, w): the error, averaged down to THUMB."""
    golden: Tensor
    """(T, C, h, w): the golden, the same."""
    height: int
    width: int

    @property
    def cells(self) -> Tensor:
        """(T, C, CELLS, CELLS) at most: the error's tone."""
        return torch.nn.functional.adaptive_avg_pool2d(self.error, _at_most(CELLS, self.error))


@dataclass(frozen=True)
class Finding:
    """What one item shows: `value` in the detector's unit, at `frame`; None was not measured, and `reason` says why."""

    value: float | None
    frame: int = 0
    limit: float | None = None
    reason: str | None = None
    where: dict[str, Any] = field(default_factory=dict)
    profile: Sequence[float | None] = ()
    """One number a frame, for a plot."""
    details: dict[str, Any] = field(default_factory=dict)


def unmeasurable(pair: Pair) -> str | None:
    """Why this pair has no frames to compare, or None."""
    if pair.sources[0].ndim != 5:
        return f"the sample has shape {tuple(pair.sources[0].shape)}: a picture has no frames, (B, C, T, H, W) expected"
    return None


def courses(pair: Pair) -> dict[int, Course]:
    """The course of every item whose frames are all finite, once for each pair."""
    return pair.recall_both("course", lambda: {item: _course(pair, item) for item in _finite(pair)})


def _finite(pair: Pair) -> list[int]:
    good = set(pair.good)
    return [item for item in range(pair.batch) if good >= {*_images(pair, item)}]


def _images(pair: Pair, item: int) -> range:
    return range(item * pair.frames, (item + 1) * pair.frames)


def _course(pair: Pair, item: int) -> Course:
    """A frame at a time: a long video's error is never held as a whole."""
    rms, rough, errors, goldens = [], [], [], []
    before: Tensor | None = None
    for image in _images(pair, item):
        error = pair.grey([image])
        step = torch.zeros_like(error) if before is None else error - before
        rough.append(torch.nn.functional.adaptive_avg_pool2d(step.square_().mean(1), REGIONS).flatten())
        rms.append(error.square().mean().sqrt())
        errors.append(torch.nn.functional.adaptive_avg_pool2d(error, _at_most(THUMB, error)))
        golden = pair.unit(pair.golden, [image]).mul_(GREY_LEVELS)
        goldens.append(torch.nn.functional.adaptive_avg_pool2d(golden, _at_most(THUMB, golden)))
        before = error
    size = pair.candidate.shape[-2:]
    return Course(torch.stack(rms), torch.stack(rough), torch.cat(errors), torch.cat(goldens), *size)


def _at_most(cells: int, images: Tensor) -> tuple[int, int]:
    return min(cells, images.shape[-2]), min(cells, images.shape[-1])


def luma(images: Tensor) -> Tensor:
    """Rec. 709 luma of (T, C, h, w), (T, h, w); the mean of the channels where they are not three."""
    weights = torch.tensor(LUMA) if images.shape[1] == 3 else torch.full((images.shape[1],), 1 / images.shape[1])
    return torch.einsum("tchw,c->thw", images, weights)


def told(pair: Pair, found: dict[int, Finding], reason: str | None = None) -> Measurement:
    """The Measurement of one finding an item. `details` are the worst item's, with every item's `profile`."""
    per_image = tuple(found[item].value if item in found else None for item in range(pair.batch))
    item, value = Measurement.worst(per_image, "lower")
    worst = found.get(item)
    profile = [list(found[i].profile) if i in found else None for i in range(pair.batch)]
    if value is None or worst is None:
        why = reason or (worst.reason if worst else None) or pair.unusable() or "the result is not finite"
        return Measurement(per_image=per_image, where={"image": item}, reason=why, details={"profile": profile})
    limits = [each.limit for each in found.values() if each.limit is not None]
    return Measurement(
        value=value,
        per_image=per_image,
        where={"image": item, "frame": worst.frame, **worst.where},
        exact=pair.exact,
        detection_limit=max(limits) if limits else None,
        details={**worst.details, "profile": profile},
    )
