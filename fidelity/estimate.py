"""Roughly how long a suite takes, from its pixels: nothing is loaded, so it may be wrong by half."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from fidelity.errors import IllegalTiling
from fidelity.records import Case, Model

if TYPE_CHECKING:
    from fidelity.suite import Suite

SECONDS_PER_MEGAPIXEL = {"fp32": 3.2, "bf16": 1.5, "fp16": 3.8}
"""Of one decode of `reference-kl` on one core, fp16 emulated. Two images of 256² take 0.42, 0.20, 0.50 s."""
DECODES_PER_CASE = 3.5
"""The warm-up, the judged and the traced decode, and a share of the plain decodes before and after."""
LOADING_SECONDS = 8.0
"""Importing torch and diffusers, loading weights and LPIPS: once."""
REFERENCE_CHANNELS = (32, 32, 64, 112)
"""Of `reference-kl`, whose speed was measured."""


def time_estimate(suite: Suite, jobs: int = 1) -> float:
    """Seconds that a run takes: pixels decoded, tiles' overlap included, at the speed of one core for each job."""
    return LOADING_SECONDS + sum(seconds(suite, case) for case in suite.judged) / jobs


def seconds(suite: Suite, case: Case) -> float:
    """Seconds that one case takes on one core."""
    model, shape = suite.models[case.model], suite.shapes[case.model, case.latents]
    frames = shape[2] * model.geometry.temporal if len(shape) == 5 else 1
    pixels = shape[0] * frames * shape[-2] * shape[-1] * model.geometry.spatial**2
    speed = SECONDS_PER_MEGAPIXEL["fp32" if case.plan.force_upcast else case.plan.dtype]
    return DECODES_PER_CASE * speed * pixels / 1e6 * _overlap_factor(case, model, shape) * _weight(model)


def _overlap_factor(case: Case, model: Model, shape: tuple[int, ...]) -> float:
    """Pixels decoded in tiles over pixels of the picture."""
    if case.plan.tiling is None:
        return 1.0
    try:
        grid = model.family.tile_grid(model.geometry, (shape[-2], shape[-1]), case.plan.tiling)
    except IllegalTiling:
        return 1.0
    factor = 1.0
    for axis in (grid.rows, grid.cols):
        factor *= sum(min(axis.tile, axis.size - start) for start in axis.starts) / axis.size
    return factor


def _weight(model: Model) -> float:
    """Work per pixel against the model whose speed was measured; 1 where a config does not tell its channels."""
    channels = model.config.get("block_out_channels")
    return _work(channels) / _work(REFERENCE_CHANNELS) if channels else 1.0


def _work(channels: Iterable[int]) -> float:
    """Convolutions cost the square of their channels, and a quarter at each lower resolution."""
    return sum(count**2 / 4**level for level, count in enumerate(channels))
