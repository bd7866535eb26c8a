"""Colour differences as people see them: CIEDE2000 in Lab (D65), on images clipped to the declared range.

Clipped, because a screen shows no more. Samples are taken for sRGB. Sharma, Wu, Dalal 2005.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from fidelity.lazy import torch
from fidelity.records import Measurement
from fidelity.registry import metric
from fidelity.signal import DataRange, Pair, top_share

if TYPE_CHECKING:
    from torch import Tensor

LUMA = (0.299, 0.587, 0.114)


@metric("delta_e_mean", unit="ΔE2000", better="lower")
def delta_e_mean(candidate: Tensor, golden: Tensor, *, data_range: DataRange) -> Measurement:
    """Mean CIEDE2000 colour difference; about 1 is just noticeable side by side."""
    return _delta_e(candidate, golden, data_range, lambda maps: maps.mean(1).tolist())


@metric("delta_e_p99", unit="ΔE2000", better="lower")
def delta_e_p99(candidate: Tensor, golden: Tensor, *, data_range: DataRange) -> Measurement:
    """The CIEDE2000 colour difference that one pixel in a hundred exceeds."""
    return _delta_e(candidate, golden, data_range, lambda maps: top_share(maps, 0.01))


@metric("luma_shift", unit="grey levels", better="lower")
def luma_shift(candidate: Tensor, golden: Tensor, *, data_range: DataRange) -> Measurement:
    """How far the mean luma (Rec. 601) moved, in grey levels, either way; `details.signed` keeps the sign."""
    pair = Pair(candidate, golden, data_range)
    signed: dict[int, float] = {}

    def shift(images: Sequence[int]) -> list[float]:
        means = pair.grey(images).mean((-1, -2))
        luma = (means @ torch.tensor(LUMA)).tolist() if means.shape[1] == 3 else means.mean(1).tolist()
        signed.update(zip(images, luma))
        return [abs(value) for value in luma]

    measured = pair.measure(shift, "lower")
    return msgspec.structs.replace(measured, details={**measured.details, "signed": tuple(signed.values())})


@metric("saturation_shift", unit="%", better="lower")
def saturation_shift(candidate: Tensor, golden: Tensor, *, data_range: DataRange) -> Measurement:
    """How far the mean chroma in Lab moved, in per cent of the golden's (of a chroma of 5 at least), either way."""

    def shift(pair: Pair, images: Sequence[int]) -> list[float]:
        own, other = (side[:, 1:].square().sum(1).sqrt().mean((-1, -2)) for side in pair.lab(images))
        return (100 * (own - other).abs() / other.clamp_min(5)).tolist()

    return _coloured(candidate, golden, data_range, shift)


def _delta_e(
    candidate: Tensor, golden: Tensor, data_range: DataRange, reduce: Callable[[Tensor], list[float]]
) -> Measurement:
    def difference(pair: Pair, images: Sequence[int]) -> list[float]:
        return reduce(pair.recall_both("delta_e", lambda: ciede2000(*pair.lab(images)).flatten(1)))

    return _coloured(candidate, golden, data_range, difference)


def _coloured(
    candidate: Tensor, golden: Tensor, data_range: DataRange, function: Callable[[Pair, Sequence[int]], list[float]]
) -> Measurement:
    pair = Pair(candidate, golden, data_range)
    if pair.candidate.shape[1] != 3:
        reason = f"{pair.candidate.shape[1]} channels have no colour: 3 expected"
        return pair.summarise([None] * pair.count, "lower", reason=reason)
    return pair.measure(lambda images: function(pair, images), "lower")


def ciede2000(first: Tensor, second: Tensor) -> Tensor:
    """CIEDE2000 between Lab images (N, 3, H, W): (N, H, W). As scikit-image's, within 1e-3."""
    l1, a1, b1 = first.unbind(1)
    l2, a2, b2 = second.unbind(1)
    c7 = ((a1.hypot(b1) + a2.hypot(b2)) / 2) ** 7
    g = 1.5 - 0.5 * (c7 / (c7 + 25.0**7)).sqrt()
    a1, a2 = a1 * g, a2 * g
    c1, c2 = a1.hypot(b1), a2.hypot(b2)
    h1, h2 = torch.atan2(b1, a1), torch.atan2(b2, a2)
    # chroma-weighted hue difference without its angle: |ΔH|² = Δa² + Δb² − ΔC²; the sign is that of the cross product
    dc = c2 - c1
    cross = a1 * b2 - a2 * b1
    dh = torch.sign(cross) * ((a1 - a2) ** 2 + (b1 - b2) ** 2 - dc**2).clamp_min(0).sqrt()
    mean_h = _mean_hue(h1, h2, (c1 * c2) == 0)
    l_mean, c_mean = (l1 + l2) / 2, (c1 + c2) / 2
    t = (
        1
        - 0.17 * (mean_h - math.radians(30)).cos()
        + 0.24 * (2 * mean_h).cos()
        + 0.32 * (3 * mean_h + math.radians(6)).cos()
        - 0.20 * (4 * mean_h - math.radians(63)).cos()
    )
    square = (l_mean - 50) ** 2
    s_l = 1 + 0.015 * square / (20 + square).sqrt()
    s_c = 1 + 0.045 * c_mean
    s_h = 1 + 0.015 * c_mean * t
    c7 = c_mean**7
    turn = math.radians(60) * torch.exp(-(((mean_h.rad2deg() - 275) / 25) ** 2))
    rotation = -2 * (c7 / (c7 + 25.0**7)).sqrt() * turn.sin()
    l_term, c_term, h_term = (l2 - l1) / s_l, dc / s_c, dh / s_h
    return (l_term**2 + c_term**2 + h_term**2 + rotation * c_term * h_term).clamp_min(0).sqrt()


def _mean_hue(h1: Tensor, h2: Tensor, grey: Tensor) -> Tensor:
    """Mean hue angle in [0, 2π), the shorter way round; the sum where either side is grey."""
    full = 2 * math.pi
    h1, h2 = h1 % full, h2 % full
    total = h1 + h2
    far = (h1 - h2).abs() > math.pi
    mean = torch.where(far, torch.where(total < full, total + full, total - full), total) / 2
    return torch.where(grey, total, mean)
