"""The tiling law of classes that know a tile's size and the share of it that overlaps, `tile_overlap_factor`.

Source: diffusers `AutoencoderKL.tiled_decode` and its kin (0.42.1): tiles start every `int(tile · (1 − overlap))`
latent pixels, each is blended over `int(tile · f · overlap)` sample pixels, and shows the rest of its own.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from fidelity.errors import IllegalTiling
from fidelity.models.base import FamilyBase
from fidelity.records import Geometry, TileAxis, TileGrid, Tiling


class OverlapFamily(FamilyBase):
    """Square tiles. A class whose attributes have other names says so in `sample_tiles`, `latent_tiles`, `overlaps`."""

    tile_controls = "tile, overlap share"
    sample_tiles: ClassVar[tuple[str, ...]] = ("tile_sample_min_size",)
    """Attributes that hold a tile's side in sample pixels."""
    latent_tiles: ClassVar[tuple[str, ...]] = ("tile_latent_min_size",)
    """The same in latent pixels."""
    overlaps: ClassVar[tuple[str, ...]] = ("tile_overlap_factor",)

    def will_tile(self, latent_size: tuple[int, int], tiling: Tiling) -> bool:
        """`_decode` tiles when either side is larger than the tile."""
        return max(latent_size) > tiling.tile

    def tile_grid(self, geometry: Geometry, latent_size: tuple[int, int], tiling: Tiling) -> TileGrid:
        """The tiles of `tiled_decode`; one tile where the class decodes at once.

        Raises IllegalTiling where step and crop disagree: each tile then shows more rows than the next one is away,
        so the picture drifts tile by tile and comes out too large.
        """
        step, band = law(self.name, geometry.spatial, tiling)
        tiles = self.will_tile(latent_size, tiling)
        rows, cols = (_axis(size, geometry.spatial, tiling.tile, step if tiles else size, band) for size in latent_size)
        return TileGrid(rows=rows, cols=cols)

    def set_tiling(self, module: Any, geometry: Geometry, tiling: Tiling) -> None:
        """Set every attribute: `enable_tiling` takes no sizes, or not all, and the sample's must match the latents'."""
        module.use_tiling = True
        for name in self.latent_tiles:
            setattr(module, name, tiling.tile)
        for name in self.sample_tiles:
            setattr(module, name, tiling.tile * geometry.spatial)
        for name in self.overlaps:
            setattr(module, name, tiling.overlap)

    def tiling_attributes(self) -> tuple[str, ...]:
        return ("use_tiling", *self.latent_tiles, *self.sample_tiles, *self.overlaps)


# ---------------------------------------------------------------- the arithmetic


def _steps(spatial: int, tile: int, overlap: float) -> tuple[int, int]:
    """Step in latent pixels and blend extent in sample pixels, in the very float arithmetic of `tiled_decode`."""
    return int(tile * (1 - overlap)), int(tile * spatial * overlap)


def _is_legal(spatial: int, tile: int, overlap: float) -> bool:
    step, band = _steps(spatial, tile, overlap)
    return step >= 1 and step * spatial == tile * spatial - band


def law(name: str, spatial: int, tiling: Tiling) -> tuple[int, int]:
    """Step and blend extent of a legal tiling. Raises IllegalTiling with what was measured and the nearest legal."""
    tile, overlap = tiling.tile, tiling.overlap
    asked = f"{name} cannot tile by {tile} with overlap {overlap:g}"
    if tile < 1:
        raise IllegalTiling(f"{asked}: a tile has at least 1 latent pixel; choose 1 or more")
    if not (math.isfinite(overlap) and 0 <= overlap < 1):
        raise IllegalTiling(f"{asked}: an overlap is a share of the tile, at least 0 and below 1")
    if _is_legal(spatial, tile, overlap):
        return _steps(spatial, tile, overlap)
    step, band = _steps(spatial, tile, overlap)
    wrong = (
        f"the step of {tile} × (1 − {overlap:g}) = {tile * (1 - overlap):g} latent pixels is below 1"
        if step < 1
        else f"tiles start {step * spatial} sample pixels apart ({step} × {spatial}) but each shows "
        f"{tile * spatial - band}, as {tile} × (1 − {overlap:g}) = {tile * (1 - overlap):g} is not whole"
    )
    raise IllegalTiling(f"{asked}: {wrong}; nearest legal: {_nearest(spatial, tile, overlap)}")


def _nearest(spatial: int, tile: int, overlap: float) -> str:
    shares = [k / tile for k in range(tile) if _is_legal(spatial, tile, k / tile)]
    share = min(shares, key=lambda value: abs(value - overlap))
    advice = f"overlap {share!r} with this tile"
    tiles = [t for t in range(max(1, tile // 2), 2 * tile + 32) if _is_legal(spatial, t, overlap)]
    if tiles:
        advice += f", or tile {min(tiles, key=lambda t: abs(t - tile))} with this overlap"
    return advice


def _axis(size: int, spatial: int, tile: int, step: int, band: int) -> TileAxis:
    starts = tuple(start * spatial for start in range(0, size, step))
    return TileAxis(starts=starts, band=band, tile=tile * spatial, size=size * spatial)
