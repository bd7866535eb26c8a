"""The tiling law of classes that know a tile's size and the stride between tiles, both in sample pixels, by axis.

Source: diffusers `AutoencoderKLHunyuanVideo.tiled_decode`, `AutoencoderKLWan.tiled_decode` and their kin (0.42.1).
"""

from __future__ import annotations

import math
from typing import Any

from fidelity.errors import IllegalTiling
from fidelity.models.base import FamilyBase
from fidelity.records import Chunk, Geometry, Temporal, TileAxis, TileGrid, Tiling


class StridedFamily(FamilyBase):
    """Tiles of `tile_sample_min_height` × `…_width` every `tile_sample_stride_height` × `…_width` sample pixels."""

    tile_controls = "tile, stride"

    def will_tile(self, latent_size: tuple[int, int], tiling: Tiling) -> bool:
        """`_decode` tiles when either side is larger than the tile."""
        return max(latent_size) > tiling.tile

    def tile_grid(self, geometry: Geometry, latent_size: tuple[int, int], tiling: Tiling) -> TileGrid:
        """One tile where the class decodes at once. Raises IllegalTiling where the stride is no whole latent pixel."""
        step = stride(self.name, tiling)
        tiles = self.will_tile(latent_size, tiling)
        rows, cols = (_axis(size, geometry.spatial, tiling.tile, step if tiles else size) for size in latent_size)
        return TileGrid(rows=rows, cols=cols)

    def set_tiling(self, module: Any, geometry: Geometry, tiling: Tiling) -> None:
        """Set all five: `enable_tiling(x)` keeps the old value wherever `x` is 0 or left out."""
        step = stride(self.name, tiling)
        module.use_tiling = True
        module.tile_sample_min_height = module.tile_sample_min_width = tiling.tile * geometry.spatial
        module.tile_sample_stride_height = module.tile_sample_stride_width = step * geometry.spatial

    def tiling_attributes(self) -> tuple[str, ...]:
        return (
            "use_tiling",
            "tile_sample_min_height",
            "tile_sample_min_width",
            "tile_sample_stride_height",
            "tile_sample_stride_width",
        )


class FramewiseFamily(StridedFamily):
    """In time, chunks of tile + 1 latent frames every `stride`: each but the first shows its second latent frame first.

    What the class decodes of a chunk's first latent frame is one sample frame, and that goes.
    """

    temporal_controls = "tile, stride"

    def chunks(self, geometry: Geometry, frames: int, temporal: Temporal) -> tuple[Chunk, ...]:
        """`_temporal_tiled_decode`: a chunk of one latent frame at the end of the video has nothing left to show."""
        step = stride(self.name, temporal)
        if frames <= temporal.tile:
            return (Chunk(0, frames),)
        return tuple(
            Chunk(start, min(start + temporal.tile + 1, frames), drop=1 if start else 0)
            for start in range(0, frames, step)
        )

    def set_temporal(self, module: Any, geometry: Geometry, temporal: Temporal) -> None:
        module.use_framewise_decoding = True
        module.tile_sample_min_num_frames = temporal.tile * geometry.temporal
        module.tile_sample_stride_num_frames = stride(self.name, temporal) * geometry.temporal

    def temporal_attributes(self) -> tuple[str, ...]:
        return ("use_framewise_decoding", "tile_sample_min_num_frames", "tile_sample_stride_num_frames")

    def tiling_attributes(self) -> tuple[str, ...]:
        """`enable_tiling` takes sizes in time as well."""
        return (*super().tiling_attributes(), "tile_sample_min_num_frames", "tile_sample_stride_num_frames")


def stride(name: str, tiling: Tiling | Temporal) -> int:
    """Latent pixels (or frames) from one tile to the next: tile · (1 − overlap).

    Raises IllegalTiling, with the nearest legal overlap, unless it is a whole number from 1 on.
    """
    tile, overlap = tiling.tile, tiling.overlap
    unit = "latent pixels" if isinstance(tiling, Tiling) else "latent frames"
    asked = f"{name} cannot cut {unit} by {tile} with overlap {overlap:g}"
    if tile < 1:
        raise IllegalTiling(f"{asked}: a tile has at least 1; choose 1 or more")
    if not (math.isfinite(overlap) and 0 <= overlap < 1):
        raise IllegalTiling(f"{asked}: an overlap is a share of the tile, at least 0 and below 1")
    exact = tile * (1 - overlap)
    step = round(exact)
    if step < 1 or abs(exact - step) > 1e-6:
        nearest = 1 - min(max(step, 1), tile) / tile
        raise IllegalTiling(f"{asked}: the stride of {exact:g} {unit} is not whole, or below 1; "
                            f"nearest legal: overlap {nearest:g} with this tile")  # fmt: skip
    return step


def _axis(size: int, spatial: int, tile: int, step: int) -> TileAxis:
    starts = tuple(start * spatial for start in range(0, size, step))
    return TileAxis(starts=starts, band=max(0, tile - step) * spatial, tile=tile * spatial, size=size * spatial)
