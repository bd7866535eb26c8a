"""Structural similarity on images mapped from the declared range to [0, 1], unclipped.

Unclipped, because a decode that leaves the range is worse than one that does not, and clipping would hide it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fidelity.lazy import torch
from fidelity.records import Measurement
from fidelity.registry import metric
from fidelity.signal import GREY_LEVELS, DataRange, Pair

if TYPE_CHECKING:
    from torch import Tensor

WINDOW, SIGMA, K1, K2 = 11, 1.5, 0.01, 0.03
SCALES = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)
DETAIL, LEAST_DETAIL = 5, 0.25
"""Pixels of the mean that leaves detail; grey levels of detail below which there is none to lose."""
FLAT = 1e-3
"""Grey levels under which neighbours are equal."""
_SMALLEST_MS = (WINDOW - 1) * 2 ** (len(SCALES) - 1) + 1


@metric("ssim", unit="", better="higher")
def ssim(candidate: Tensor, golden: Tensor, *, data_range: DataRange) -> Measurement:
    """SSIM of Wang et al. 2004: Gaussian window of 11 (sigma 1.5), no padding, mean over channels and places.

    Tensors (B, C, [T,] H, W), fp32; H and W of at least 11, else value None with the reason.
    """
    pair = Pair(candidate, golden, data_range)
    if min(candidate.shape[-2:]) < WINDOW:
        return pair.summarise([None] * pair.count, "higher", reason=f"smaller than the window of {WINDOW} px")

    return pair.measure(lambda images: _finest(pair, images)[0].tolist(), "higher")


@metric("ms_ssim", unit="", better="higher")
def ms_ssim(candidate: Tensor, golden: Tensor, *, data_range: DataRange) -> Measurement:
    """Multi-scale SSIM of Wang et al. 2003 over five scales; none below 161 px."""
    pair = Pair(candidate, golden, data_range)
    if min(candidate.shape[-2:]) < _SMALLEST_MS:
        reason = f"smaller than the {_SMALLEST_MS} px that {len(SCALES)} scales of an {WINDOW} px window need"
        return pair.summarise([None] * pair.count, "higher", reason=reason)

    def similarity(images: Sequence[int]) -> list[float]:
        x, y = pair.unit(pair.candidate, images), pair.unit(pair.golden, images)
        product = _finest(pair, images)[1].clamp_min(0) ** SCALES[0]
        for weight in SCALES[1:]:
            x, y = (torch.nn.functional.avg_pool2d(side, 2) for side in (x, y))
            whole, contrast = _ssim(x, *_moments(y))
            product = product * (contrast if weight != SCALES[-1] else whole).clamp_min(0) ** weight
        return product.tolist()

    return pair.measure(similarity, "higher")


@metric("detail_loss", unit="share", better="lower", diagnosis=("blur",))
def detail_loss(candidate: Tensor, golden: Tensor, *, data_range: DataRange) -> Measurement:
    """Share of the golden's fine detail that the candidate lacks, as a blurred or a preview decode does.

    1 − the slope of the candidate's detail on the golden's, where detail is what a 5×5 mean takes away: noise that is
    added changes nothing, sharpening makes it negative. 0 where the golden has less than a quarter level of detail.
    """
    pair = Pair(candidate, golden, data_range)
    if min(candidate.shape[-2:]) < DETAIL:
        return pair.summarise([None] * pair.count, "lower", reason=f"smaller than {DETAIL} px")

    def loss(images: Sequence[int]) -> list[float]:
        own, other = (_detail(pair.unit(side, images)) for side in (pair.candidate, pair.golden))
        power = other.square().mean((1, 2, 3))
        slope = (own * other).mean((1, 2, 3)) / power.clamp_min(1e-12)
        return torch.where(power.sqrt() * GREY_LEVELS < LEAST_DETAIL, torch.zeros_like(slope), 1 - slope).tolist()

    return pair.measure(loss, "lower")


@metric("banding", unit="share", better="lower")
def banding(candidate: Tensor, golden: Tensor, *, data_range: DataRange) -> Measurement:
    """Share of the golden's gentle slopes that are flat in the candidate: contours where there was a gradient.

    A slope is gentle where neighbours in x differ, and by less than a grey level. Rounding to whole levels gives about
    a half to one; a decode in floats 0.
    """
    pair = Pair(candidate, golden, data_range)
    if candidate.shape[-1] < 2:
        return pair.summarise([None] * pair.count, "lower", reason="one pixel wide")

    def share(images: Sequence[int]) -> list[float]:
        own, other = (_slopes(pair.unit(side, images)) for side in (pair.candidate, pair.golden))
        gentle = (other > FLAT) & (other < 1)
        flat = gentle & (own <= FLAT)
        return (flat.flatten(1).sum(1) / gentle.flatten(1).sum(1).clamp_min(1)).tolist()

    return pair.measure(share, "lower")


def _detail(images: Tensor) -> Tensor:
    inner = images[..., DETAIL // 2 : -(DETAIL // 2), DETAIL // 2 : -(DETAIL // 2)]
    return inner - _filter(images, [1 / DETAIL] * DETAIL)


def _slopes(images: Tensor) -> Tensor:
    return (images[..., 1:] - images[..., :-1]).abs() * GREY_LEVELS


def _finest(pair: Pair, images: Sequence[int]) -> tuple[Tensor, Tensor]:
    """`_ssim` at full size, once a pair; what is the golden's alone, once a golden."""

    def compare() -> tuple[Tensor, Tensor]:
        own = pair.recall("ssim", lambda: _moments(pair.unit(pair.golden, range(pair.count))))
        other = [moment if len(images) == pair.count else moment[list(images)] for moment in own]
        return _ssim(pair.unit(pair.candidate, images), *other)

    return pair.recall_both("ssim", compare)


def _moments(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return y, _blur(y), _blur(y * y)


def _ssim(x: Tensor, y: Tensor, mean_y: Tensor, square_y: Tensor) -> tuple[Tensor, Tensor]:
    """Per image: mean SSIM and mean contrast-structure term of (N, C, H, W) in [0, 1]."""
    mean_x = _blur(x)
    variances = _blur(x * x) + square_y - mean_x * mean_x - mean_y * mean_y
    covariance = _blur(x * y) - mean_x * mean_y
    c1, c2 = K1**2, K2**2
    contrast = (2 * covariance + c2) / (variances + c2)
    whole = (2 * mean_x * mean_y + c1) / (mean_x * mean_x + mean_y * mean_y + c1) * contrast
    return whole.flatten(1).mean(1), contrast.flatten(1).mean(1)


def _blur(images: Tensor) -> Tensor:
    weights = [math.exp(-((i - WINDOW // 2) ** 2) / (2 * SIGMA**2)) for i in range(WINDOW)]
    return _filter(images, [weight / sum(weights) for weight in weights])


def _filter(images: Tensor, weights: Sequence[float]) -> Tensor:
    """The same weights down and along, valid part only (sums of shifts: 25 times faster than conv2d at 512²)."""
    height, width = (size - len(weights) + 1 for size in images.shape[-2:])
    down = images[..., :height, :] * weights[0]
    for i, weight in enumerate(weights[1:], 1):
        down.add_(images[..., i : height + i, :], alpha=weight)
    along = down[..., :width] * weights[0]
    for i, weight in enumerate(weights[1:], 1):
        along.add_(down[..., i : width + i], alpha=weight)
    return along
