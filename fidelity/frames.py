"""Where in time a decode left its oracle: in the frames where chunks meet, or in the tone of whole chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fidelity.detectors.joints import Joints, joints
from fidelity.records import DecodePlan, Reason, Receipts, TileAxis
from fidelity.registry import cuts
from fidelity.signal import DataRange, levels

if TYPE_CHECKING:
    from torch import Tensor

LEAST = 0.02
"""Grey levels RMS of error under which nothing is looked for in it."""
CONFINED, WIDE, SURE = 0.9, 0.4, 0.995
"""Share of the squared error that lies in some frames, for the error to be theirs; and which share it must be where
they are more than that part of the video."""
BY_CHUNK = 0.5
"""Share of the squared error that one offset a chunk explains, for it to be the chunks' tone."""


def placed(
    candidate: Tensor, expected: Tensor, plan: DecodePlan, receipts: Receipts, data_range: DataRange
) -> Reason | None:
    """What the difference of (B, C, T, H, W), fp32, shows along T; None where it shows nothing or nothing was cut."""
    axis = _axis(plan, receipts, candidate)
    if axis is None or not bool(candidate.isfinite().all()):
        return None
    error = (candidate - expected).double() * levels(data_range)
    by_frame = error.square().mean((0, 1, 3, 4))
    total = float(by_frame.sum())
    if (total / len(by_frame)) ** 0.5 < LEAST:
        return None
    bands = [range(start, min(start + max(axis.band, 1), axis.size)) for start in axis.edges]
    frames = sorted({frame for band in bands for frame in band})
    share = float(by_frame[frames].sum()) / total
    if share >= (SURE if len(frames) > WIDE * axis.size else CONFINED):
        worst = max(bands, key=lambda band: float(by_frame[list(band)].sum()))
        size = float(by_frame[list(worst)].mean()) ** 0.5
        said = (f"{share:.0%} of the error against the oracle lies where chunks meet, {size:.3g} grey levels RMS in "
                f"frames {worst.start} to {worst.stop - 1}: the blend in time is wrong")  # fmt: skip
        return Reason("place", said, size, LEAST, "grey levels", ("temporal_seam",))
    return _tone(error, axis, total)


def _tone(error: Tensor, axis: TileAxis, total: float) -> Reason | None:
    """One offset for each chunk of each item, where that is most of the error."""
    spans = list(zip(axis.starts, (*axis.edges, axis.size)))
    offsets = [error[:, :, first:last].mean((1, 2, 3, 4)) for first, last in spans]
    explained = sum(float(offset.square().mean()) * (last - first) for offset, (first, last) in zip(offsets, spans))
    if explained < BY_CHUNK * total:
        return None
    sizes = [float(offset[offset.abs().argmax()]) for offset in offsets]
    chunk = max(range(len(sizes)), key=lambda index: abs(sizes[index]))
    first, last = spans[chunk]
    said = (f"chunk {chunk}, frames {first} to {last - 1}, is off by {sizes[chunk]:+.3g} grey levels as a whole: "
            "chunks differ in tone")  # fmt: skip
    return Reason("place", said, abs(sizes[chunk]), LEAST, "grey levels", ("tone_drift",))


def _axis(plan: DecodePlan, receipts: Receipts, sample: Tensor) -> TileAxis | None:
    """The chunks of the receipts, if they fit the plan and the sample."""
    if "temporal" not in cuts(plan) or sample.ndim != 5:
        return None
    found = joints(sample.shape[2], plan, receipts)
    return found.axis if isinstance(found, Joints) else None
