"""Offset and gain of each tile: what GroupNorm statistics of its own give it, and blending hides.

The difference, averaged over cells of whole latents, is explained at once by what is no fault of tiles (a smooth field
of second order, and a tone curve of the golden) and by each tile's offset and gain under its blend weights. What is
left shows, at shifted grids, how far chance alone moves such a coefficient.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, median
from typing import TYPE_CHECKING, Any

from fidelity.detectors.grid import Layout
from fidelity.detectors.null import ALPHA, excess, student
from fidelity.lazy import torch
from fidelity.records import TileAxis, TileGrid

if TYPE_CHECKING:
    from torch import Tensor

CELLS = 32
"""Cells along the longer side, at most: a cell is a whole number of latents."""
SHIFTS = 24
"""Shifted grids from which the null is taken."""
FLOOR = 0.01
"""Grey levels: the least standard error of a tile's tone."""
_RIDGE = 1e-6


@dataclass(frozen=True)
class Tone:
    """The worst tile of one image: `value` is the excess of its offset or gain over chance, in grey levels."""

    value: float
    limit: float
    """The smallest offset that would have been significant on a tile of the middling kind (one-sided 95 %)."""
    where: dict[str, Any]
    details: dict[str, Any]


def cell_size(grid: TileGrid, period: int, channels: int) -> int:
    """Pixels along a cell: whole latents, at most CELLS to the longer side, more where the tiles are many."""
    latents = max(1, -(-max(grid.rows.size, grid.cols.size) // (CELLS * period)))
    while latents > 1 and grid.rows.size * grid.cols.size < 4 * parameters(grid, channels) * (latents * period) ** 2:
        latents -= 1
    return latents * period


def parameters(grid: TileGrid, channels: int) -> int:
    """How many coefficients the fit has: two a tile, a smooth field, a tone curve."""
    return 2 * grid.count + 6 + 2 * channels


def _pool(images: Tensor, cell: int) -> Tensor:
    """Means over cells, those at the far edges over what there is."""
    return torch.nn.functional.avg_pool2d(images, cell, ceil_mode=True).double()


def tones(difference: Tensor, golden: Tensor, layout: Layout, gained: Tensor | None = None) -> list[Tone] | str:
    """The worst tile tone of each image. `difference` and `golden`: (N, C, H, W) in grey levels.

    A tone curve that is the same everywhere may mix all of the golden's channels; a tile's gain is that of its own
    channel of `gained` (default: the golden).
    """
    cell = cell_size(layout.grid, layout.period, difference.shape[1])
    height, width = (-(-size // cell) for size in difference.shape[-2:])
    if min(height, width) < 4:
        return f"fewer than four cells of {cell} px: a tile's tone cannot be told from a gradient"
    if height * width < 2 * parameters(layout.grid, difference.shape[1]):
        return (
            f"{layout.grid.count} tiles in {height * width} cells of {cell} px: too small to have a tone of their own"
        )
    cells, curve = _pool(difference, cell), _pool(golden, cell)
    guide = curve if gained is None else _pool(gained, cell)
    weights = tile_weights(layout.grid, cell)
    tiles = weights.shape[1]
    flat = cells.flatten(2)
    common = _common(curve.flatten(2), height, width)
    fit = _fit(flat, guide.flatten(2), weights, common)
    inflation = _inflation(fit.residual, _shifted(layout.grid, cell, height, width))
    looks = 2 * tiles * flat.shape[0] * flat.shape[1]
    quantile = student(NormalDist().inv_cdf(1 - ALPHA / (2 * looks)), SHIFTS)
    return [_worst(fit, inflation, image, quantile, layout, looks) for image in range(flat.shape[0])]


# ---------------------------------------------------------------- the model of the difference


@dataclass(frozen=True)
class _Fit:
    offset: Tensor
    """(N, C, K): each tile's offset from the mean of the others, where it shows most, grey levels."""
    gain: Tensor
    """(N, C, K): each tile's gain from the mean of the others, times the golden's spread in the tile, grey levels."""
    offset_error: Tensor
    gain_error: Tensor
    """Standard errors if the cells' errors were independent, same shapes."""
    residual: Tensor
    """(N, C, cells): what nothing explains."""


def _common(curve: Tensor, height: int, width: int) -> Tensor:
    """What no tile is to blame for: a smooth field, and a tone curve of all channels. (N, 1, cells, 6 + 2·C)"""
    tone = (curve - curve.mean(-1, keepdim=True)) / 64
    smooth = _smooth(height, width).expand(len(curve), -1, -1)
    return torch.cat([smooth, tone.mT, tone.mT**2], dim=-1)[:, None]


def _fit(cells: Tensor, guide: Tensor, weights: Tensor, common: Tensor) -> _Fit:
    n, c, count = cells.shape
    tiles = weights.shape[1]
    share = weights / weights.sum(0)
    means = guide @ share
    spread = ((guide**2 @ share) - means**2).clamp_min(0).sqrt()
    contrast = (guide[..., None] - means[:, :, None, :]) * weights
    common = common.expand(-1, c, -1, -1)
    centre = torch.eye(tiles, dtype=torch.float64) - 1 / tiles
    design = torch.cat([common, (weights @ centre).expand(n, c, -1, -1), contrast @ centre / 64], dim=-1)
    gram = design.mT @ design
    ridge = _RIDGE * count * torch.eye(design.shape[-1], dtype=torch.float64)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram + ridge))
    solution = inverse @ (design.mT @ cells[..., None])
    residual = cells - (design @ solution)[..., 0]
    freedom = max(1, count - design.shape[-1])
    # White's estimate: error is rougher where the picture is, and a tile of rough error is no seam
    noise = residual.square() * (count / freedom)
    covariance = inverse @ (design.mT @ (noise[..., None] * design)) @ inverse
    at = common.shape[-1]
    others = tiles / (tiles - 1)  # from the mean of all to the mean of the others

    def part(start: int) -> tuple[Tensor, Tensor]:
        """Coefficients of the tiles from `start` on, brought back from the centred basis, and their errors."""
        block = centre @ covariance[..., start : start + tiles, start : start + tiles] @ centre
        error = block.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
        return (centre @ solution[..., start : start + tiles, :])[..., 0] * others, error * others

    (offset, offset_error), (gain, gain_error) = part(at), part(at + tiles)
    shows = weights.amax(0)
    return _Fit(offset * shows, gain * spread / 64, offset_error * shows, gain_error * spread / 64, residual)


def _smooth(height: int, width: int) -> Tensor:
    """A field of second order over the cells: (cells, 6)."""
    y = torch.linspace(-1, 1, height, dtype=torch.float64)[:, None].expand(height, width)
    x = torch.linspace(-1, 1, width, dtype=torch.float64)[None, :].expand(height, width)
    return torch.stack((torch.ones_like(x), x, y, x * x, x * y, y * y), dim=-1).flatten(0, 1)


@lru_cache(maxsize=256)
def tile_weights(grid: TileGrid, cell: int) -> Tensor:
    """Share of each tile in each cell, (cells, tiles): ramps over the blend bands; they add up to 1."""
    rows, cols = ramps(grid.rows, cell), ramps(grid.cols, cell)
    return torch.einsum("ya,xb->yxab", rows, cols).reshape(len(rows) * len(cols), -1)


def ramps(axis: TileAxis, cell: int) -> Tensor:
    """Each tile's blend weight along one axis, averaged over cells: (cells, tiles). The ramp is diffusers' i / band, of
    a band that is no longer than the tile itself: a last tile may be shorter."""
    position = torch.arange(axis.size, dtype=torch.float64)[:, None]
    starts = torch.tensor(axis.starts, dtype=torch.float64)
    bands = (axis.size - starts).clamp_max(max(axis.band, 1))
    shown = ((position - starts) / bands).clamp(0, 1) if axis.band else (position >= starts).double()
    shown[:, 0] = 1
    weights = shown - torch.nn.functional.pad(shown[:, 1:], (0, 1))
    return torch.nn.functional.avg_pool1d(weights.mT[None], cell, ceil_mode=True)[0].mT


# ---------------------------------------------------------------- the null


@lru_cache(maxsize=16)
def _shifted(grid: TileGrid, cell: int, height: int, width: int) -> Tensor:
    """Contrasts that read the tiles' offsets at shifted grids: (cells, M)."""
    chance = random.Random(0)
    smooth = _smooth(height, width)
    readers = []
    for _ in range(SHIFTS):
        shifted = TileGrid(_shift(grid.rows, cell, chance), _shift(grid.cols, cell, chance))
        weights = tile_weights(shifted, cell)
        tiles = weights.shape[1]
        centre = torch.eye(tiles, dtype=torch.float64) - 1 / tiles
        design = torch.cat([smooth, weights @ centre], dim=1)
        ridge = _RIDGE * len(design) * torch.eye(design.shape[1], dtype=torch.float64)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(design.mT @ design + ridge))
        readers.append((inverse @ design.mT)[6:].T @ centre)
    whole = torch.cat(readers, dim=1)
    # the residual has nothing left of what the real grid can explain, so neither may what reads it
    explained = torch.linalg.qr(torch.cat([smooth, tile_weights(grid, cell)[:, 1:]], dim=1)).Q
    return whole - explained @ (explained.mT @ whole)


def _shift(axis: TileAxis, cell: int, chance: random.Random) -> TileAxis:
    """The same tiles begun elsewhere by whole cells. An axis with one tile stays."""
    if len(axis.starts) == 1:
        return axis
    stride = axis.starts[1]
    by = cell * chance.randrange(1, max(2, stride // cell))
    starts = {0, *(start + by for start in axis.starts if 0 < start + by < axis.size - cell)}
    return TileAxis(tuple(sorted(starts)), axis.band, axis.tile, axis.size)


def _inflation(residual: Tensor, readers: Tensor) -> Tensor:
    """How much further than independent errors the residual moves offsets at shifted grids: (N, C), at least 1."""
    errors = (residual.square() @ readers.square()).sqrt().clamp_min(1e-12)
    return ((residual @ readers) / errors).square().mean(-1).sqrt().clamp_min(1)


# ---------------------------------------------------------------- the verdict on one image


@dataclass(frozen=True)
class _Look:
    value: float
    effect: float
    critical: float
    limit: float
    kind: str
    channel: int
    tile: int


def _looks(fit: _Fit, inflation: Tensor, image: int, quantile: float) -> Iterator[_Look]:
    for kind, effects, errors in (("offset", fit.offset, fit.offset_error), ("gain", fit.gain, fit.gain_error)):
        for channel in range(effects.shape[1]):
            scale = float(inflation[image, channel])
            for tile, (effect, error) in enumerate(
                zip(effects[image, channel].tolist(), errors[image, channel].tolist())
            ):
                noise = max(error * scale, FLOOR)
                critical = quantile * noise
                yield _Look(excess(effect, critical), effect, critical, critical + 1.645 * noise, kind, channel, tile)


def _worst(fit: _Fit, inflation: Tensor, image: int, quantile: float, layout: Layout, count: int) -> Tone:
    looks = list(_looks(fit, inflation, image, quantile))
    worst = max(looks, key=lambda look: (look.value, abs(look.effect) / look.critical))
    columns = len(layout.grid.cols.starts)
    row, column = divmod(worst.tile, columns)
    (top, bottom), (left, right) = layout.spans("y")[row], layout.spans("x")[column]
    where = {"x": (left + right) // 2, "y": (top + bottom) // 2, "tile": [row, column], "channel": worst.channel}
    details = {"kind": worst.kind, "effect": worst.effect, "critical": worst.critical, "looks": count,
               "p_value": _p_value(worst, quantile), "inflation": float(inflation[image, worst.channel])}  # fmt: skip
    tiles: Sequence[float] = fit.offset[image, worst.channel].tolist()
    details["offsets"] = [round(offset, 3) for offset in tiles]
    limits = [look.limit for look in looks if look.kind == "offset"]
    details["worst_detection_limit"] = max(limits)
    return Tone(worst.value, median(limits), where, details)


def _p_value(look: _Look, quantile: float) -> float:
    return 2 * (1 - NormalDist().cdf(abs(look.effect) / look.critical * quantile))
