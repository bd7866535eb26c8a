"""Numeric differences in grey levels (255 = the declared range), on floats before any clipping or rounding.

All take tensors (B, C, [T,] H, W), fp32, on the CPU, and `data_range=(low, high)`, which is never inferred. The worst
image decides. Where a sample is not finite the difference is not measured (value None, with the reason); the share of
non-finite values always is. All raise EvaluationError if shape, dtype or range do not fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fidelity.lazy import torch
from fidelity.records import Measurement
from fidelity.registry import metric
from fidelity.signal import GREY_LEVELS, DataRange, Pair, top_share

if TYPE_CHECKING:
    from torch import Tensor


def _rmse(pair: Pair, images: Sequence[int]) -> list[float]:
    # the mean of squares in double: a million fp32 squares would lose a digit
    return pair.grey(images).flatten(1).square_().mean(1, dtype=torch.float64).sqrt_().tolist()


@metric("rmse", unit="grey levels", better="lower")
def rmse(candidate: Tensor, golden: Tensor, *, data_range: DataRange) -> Measurement:
    """Root of the mean squared difference, in grey levels."""
    pair = Pair(candidate, golden, data_range)
    return pair.measure(lambda images: _rmse(pair, images), "lower")


@metric("psnr", unit="dB", better="higher")
def psnr(candidate: Tensor, golden: Tensor, *, data_range: DataRange) -> Measurement:
    """Peak signal-to-noise ratio over the declared range, in dB; none (and `exact`) where the decode is bit-equal.

    If only some images of the batch are equal, the value is the worst of the others and `details.per_image` lists all.
    """
    pair = Pair(candidate, golden, data_range)
    if pair.unusable():
        return pair.measure(lambda images: [_decibel(e) or math.inf for e in _rmse(pair, images)], "higher")
    if pair.exact:
        return pair.summarise([None] * pair.count, "higher", reason="exact")
    values = [_decibel(error) for error in _rmse(pair, range(pair.count))]
    if None not in values:
        return pair.summarise(values, "higher")
    image, value = min(((i, v) for i, v in enumerate(values) if v is not None), key=lambda entry: entry[1])
    return Measurement(value=value, better="higher", where=pair.place(image), details={"per_image": tuple(values)})


def _decibel(error: float) -> float | None:
    return 20 * math.log10(GREY_LEVELS / error) if error > 0 else None


@metric("max_abs", unit="grey levels", better="lower")
def max_abs(candidate: Tensor, golden: Tensor, *, data_range: DataRange) -> Measurement:
    """The largest absolute difference, in grey levels, with its place (image, x, y, channel) and both values."""
    pair = Pair(candidate, golden, data_range)
    places: dict[int, int] = {}

    def largest(images: Sequence[int]) -> list[float]:
        values, at = pair.grey(images).abs_().flatten(1).max(1)
        places.update(zip(images, at.tolist()))
        return values.tolist()

    def where(image: int) -> dict[str, Any]:
        _, height, width = pair.candidate.shape[1:]
        channel, y, x = places[image] // (height * width), places[image] // width % height, places[image] % width
        at = (image, channel, y, x)
        return {"x": x, "y": y, "channel": channel, "candidate": float(pair.candidate[at]),
                "golden": float(pair.golden[at])}  # fmt: skip

    return pair.measure(largest, "lower", where=where)


@metric("p999_abs", unit="grey levels", better="lower")
def p999_abs(candidate: Tensor, golden: Tensor, *, data_range: DataRange) -> Measurement:
    """The absolute difference that one value in a thousand exceeds, in grey levels (no interpolation)."""
    pair = Pair(candidate, golden, data_range)

    def quantile(images: Sequence[int]) -> list[float]:
        return top_share(pair.grey(images).abs_().flatten(1), 0.001)

    return pair.measure(quantile, "lower")


@metric("nonfinite_share", unit="share", better="lower", diagnosis=("non_finite",))
def nonfinite_share(candidate: Tensor, golden: Tensor, *, data_range: DataRange) -> Measurement:
    """Share of the candidate's values that are NaN or infinite; always measured."""
    pair = Pair(candidate, golden, data_range)
    bad = torch.zeros(pair.count)
    for image, fine in enumerate(pair.candidate_ok):
        if not fine:
            bad[image] = (~torch.isfinite(pair.candidate[image])).double().mean()

    def where(image: int) -> dict[str, Any]:
        if pair.candidate_ok[image]:
            return {}
        channel, y, x = (~torch.isfinite(pair.candidate[image])).nonzero()[0].tolist()
        return {"x": x, "y": y, "channel": channel}

    return pair.summarise(bad.tolist(), "lower", where=where)


@metric("clipped_share", unit="share", better="lower", diagnosis=("clipping",))
def clipped_share(candidate: Tensor, golden: Tensor, *, data_range: DataRange) -> Measurement:
    """Share of the candidate's values outside the declared range: what a viewer loses. `details`: the golden's own."""
    pair = Pair(candidate, golden, data_range)

    def outside(side: Tensor, images: Sequence[int]) -> list[float]:
        low, high = data_range
        values = side[list(images)].flatten(1)
        return ((values < low) | (values > high)).double().mean(1).tolist()

    golden_good = [i for i, fine in enumerate(pair.golden_ok) if fine]
    own = max(outside(pair.golden, golden_good), default=None) if golden_good else None
    return pair.measure(lambda images: outside(pair.candidate, images), "lower", details={"golden": own})
