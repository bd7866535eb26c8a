"""Doctored decodes: a golden, and candidates that must fail or must not, each named for the designed outcome.

The grid is that of tiles of 128 px. Amplitudes are in grey levels (127.5 to the unit of [-1, 1]).
"""

from __future__ import annotations

import math

import msgspec
import torch

from fidelity.records import DecodePlan, Measurement, TileAxis, TileGrid, Tiling
from fidelity.registry import DETECTORS

RANGE = (-1.0, 1.0)
SIZE = 256


def grid(overlap: float = 0.0, size: tuple[int, int] = (SIZE, SIZE), tile: int = 16) -> TileGrid:
    """The tile grid of diffusers' AutoencoderKL, eight pixels to the latent."""
    step, band = int(tile * (1 - overlap)) * 8, int(tile * 8 * overlap)
    rows, cols = (TileAxis(tuple(range(0, length, step)), band, tile * 8, length) for length in size)
    return TileGrid(rows, cols)


def measure(name: str, candidate: torch.Tensor, golden: torch.Tensor, tiles: TileGrid, tile: int = 16) -> Measurement:
    overlap = tiles.cols.band / tiles.cols.tile
    plan = DecodePlan(tiling=Tiling(tile, overlap))
    receipts = {"tiling": {"requested": True, "engaged": True, "grid": msgspec.to_builtins(tiles)}}
    return DETECTORS.get(name)(candidate, golden, plan=plan, receipts=receipts, data_range=RANGE)


def golden(seed: int = 0, size: tuple[int, int] = (SIZE, SIZE), batch: int = 1) -> torch.Tensor:
    """A picture with flat, textured and dark parts, inside [-1, 1]."""
    generator = torch.Generator().manual_seed(seed)
    height, width = size
    rough = torch.randn(batch, 3, height, width, generator=generator)
    smooth = torch.nn.functional.interpolate(
        torch.randn(batch, 3, 5, 5, generator=generator), size=size, mode="bicubic", align_corners=True
    )
    textured = torch.nn.functional.interpolate(
        torch.rand(batch, 1, 4, 4, generator=generator), size=size, mode="bilinear", align_corners=True
    )
    return (0.5 * smooth + 0.5 * textured.square() * torch.nn.functional.avg_pool2d(rough, 3, 1, 1)).clamp(-0.98, 0.98)


def noise(picture: torch.Tensor, amount: float = 0.3, seed: int = 1) -> torch.Tensor:
    """Honest error: rougher where the picture is rough, correlated over a few pixels. `amount`: levels RMS."""
    white = torch.randn(picture.shape, generator=torch.Generator().manual_seed(seed))
    soft = torch.nn.functional.avg_pool2d(white, 3, 1, 1)
    detail = (picture - torch.nn.functional.avg_pool2d(picture, 9, 1, 4)).abs().mean(1, keepdim=True)
    error = soft * (1 + 8 * torch.nn.functional.avg_pool2d(detail, 9, 1, 4))
    return picture + error * (amount / 127.5 / error.square().mean().sqrt())


def line(picture: torch.Tensor, amplitude: float, x: int = 128) -> torch.Tensor:
    out = picture.clone()
    out[..., x] += amplitude / 127.5
    return out


def tile_weight(tiles: TileGrid, row: int, column: int) -> torch.Tensor:
    """The blend weight of one tile, (H, W)."""

    def along(axis: TileAxis, index: int) -> torch.Tensor:
        position = torch.arange(axis.size, dtype=torch.float32)

        def shown(start: int) -> torch.Tensor:
            return ((position - start) / axis.band).clamp(0, 1) if axis.band else (position >= start).float()

        here = shown(axis.starts[index]) if index else torch.ones(axis.size)
        return here - (shown(axis.starts[index + 1]) if index + 1 < len(axis.starts) else 0)

    return along(tiles.rows, row)[:, None] * along(tiles.cols, column)[None, :]


def offset(picture: torch.Tensor, tiles: TileGrid, amplitude: float, tile=(1, 0), channels=(0, 1, 2)) -> torch.Tensor:
    """One tile lighter, hard or under its blend ramp."""
    out = picture.clone()
    out[:, list(channels)] += amplitude / 127.5 * tile_weight(tiles, *tile)
    return out


def hue(picture: torch.Tensor, tiles: TileGrid, amplitude: float, tile=(1, 0)) -> torch.Tensor:
    """One tile redder and as much less blue."""
    return offset(offset(picture, tiles, amplitude, tile, (0,)), tiles, -amplitude, tile, (2,))


def gain(picture: torch.Tensor, tiles: TileGrid, factor: float, tile=(0, 1)) -> torch.Tensor:
    """One tile with more contrast about its own mean."""
    weight = tile_weight(tiles, *tile)
    mean = (picture * weight).sum((-1, -2), keepdim=True) / weight.sum()
    return picture + (factor - 1) * (picture - mean) * weight


def band(picture: torch.Tensor, tiles: TileGrid, amplitude: float, seed: int = 7) -> torch.Tensor:
    """Error in the first vertical blend band only."""
    start, width = tiles.cols.edges[0], tiles.cols.band
    out = picture.clone()
    rough = torch.randn(out[..., start : start + width].shape, generator=torch.Generator().manual_seed(seed))
    out[..., start : start + width] += amplitude / 127.5 * rough
    return out


def corner(picture: torch.Tensor, tiles: TileGrid, amplitude: float) -> torch.Tensor:
    """An offset where the first four tiles meet."""
    y, x, width = tiles.rows.edges[0], tiles.cols.edges[0], tiles.cols.band
    out = picture.clone()
    out[..., y : y + width, x : x + width] += amplitude / 127.5
    return out


# ---------------------------------------------------------------- what must not fail


def lighter(picture: torch.Tensor) -> torch.Tensor:
    """All of it lighter by three levels."""
    return picture + 3 / 127.5


def vignette(picture: torch.Tensor) -> torch.Tensor:
    """Darker towards the corners, by six levels, smoothly."""
    height, width = picture.shape[-2:]
    y = torch.linspace(-1, 1, height)[:, None]
    x = torch.linspace(-1, 1, width)[None, :]
    return picture - 3 / 127.5 * (x * x + y * y)


def contrast(picture: torch.Tensor) -> torch.Tensor:
    """Two per cent more contrast everywhere."""
    return picture * 1.02


def curve(picture: torch.Tensor) -> torch.Tensor:
    """A tone curve, the same everywhere."""
    return picture + 0.02 * torch.cos(picture * math.pi / 2)


MUST_NOT_FAIL = {
    "equal": lambda picture: picture.clone(),
    "fp16_like_noise": lambda picture: noise(picture, 0.03),
    "bf16_like_noise": lambda picture: noise(picture, 0.3),
    "strong_noise": lambda picture: noise(picture, 3.0),
    "lighter_everywhere": lambda picture: noise(lighter(picture)),
    "vignette": lambda picture: noise(vignette(picture)),
    "contrast_everywhere": lambda picture: noise(contrast(picture)),
    "tone_curve_everywhere": lambda picture: noise(curve(picture)),
    "blurred": lambda picture: torch.nn.functional.avg_pool2d(picture, 3, 1, 1, count_include_pad=False),
    "bf16_cast": lambda picture: picture.bfloat16().float(),
    "fp16_cast": lambda picture: picture.half().float(),
    "eight_bits": lambda picture: (picture * 127.5).round() / 127.5,
}
