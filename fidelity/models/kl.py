"""AutoencoderKL: Stable Diffusion 1, 2, XL and 3, FLUX.1 and their kin."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from fidelity.errors import IllegalTiling
from fidelity.models.base import FamilyBase, whole, wholes
from fidelity.records import Geometry, TileAxis, TileGrid, Tiling
from fidelity.registry import FAMILIES

OLD_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
"""Names in weight files of old diffusers (Stable Diffusion 1's among them), which `from_pretrained` still maps."""


class KLFamily(FamilyBase):
    """Tiles by a share of the tile (`tile_overlap_factor`), blended linearly, cropped tile by tile."""

    name = "AutoencoderKL"
    summary = "KL autoencoder of Stable Diffusion and FLUX.1: GroupNorm decoder, attention in the middle"
    defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 3,
        "out_channels": 3,
        "block_out_channels": (64,),
        "latent_channels": 4,
        "scaling_factor": 0.18215,
        "force_upcast": True,
    }

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """f doubles with every block but the last."""
        return Geometry(
            spatial=2 ** (len(wholes(config, "block_out_channels")) - 1),
            latent_channels=whole(config, "latent_channels"),
            sample_channels=whole(config, "out_channels"),
        )

    def landmarks(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        full = {**self.defaults, **config}
        widths, channels = wholes(full, "block_out_channels"), whole(full, "latent_channels")
        return {
            "encoder.conv_in.weight": (widths[0], whole(full, "in_channels"), 3, 3),
            "encoder.conv_out.weight": (2 * channels, widths[-1], 3, 3),
            "decoder.conv_in.weight": (widths[-1], channels, 3, 3),
            "decoder.conv_out.weight": (whole(full, "out_channels"), widths[0], 3, 3),
        }

    def rename(self, key: str) -> str:
        match = re.fullmatch(r"(.+\.attentions\.\d+\.)(query|key|value|proj_attn)(\.weight|\.bias)", key)
        return f"{match[1]}{OLD_ATTENTION[match[2]]}{match[3]}" if match else key

    def will_tile(self, latent_size: tuple[int, int], tiling: Tiling) -> bool:
        """`_decode` tiles when either side is larger than the tile."""
        return max(latent_size) > tiling.tile

    def tile_grid(self, geometry: Geometry, latent_size: tuple[int, int], tiling: Tiling) -> TileGrid:
        """The tiles of `tiled_decode` (diffusers 0.42.1); one tile where the class decodes at once.

        Raises IllegalTiling where step and crop disagree: each tile then shows more rows than the next one is away,
        so the picture drifts tile by tile and comes out too large.
        """
        step, band = _law(self.name, geometry.spatial, tiling)
        tiles = self.will_tile(latent_size, tiling)
        rows, cols = (_axis(size, geometry.spatial, tiling.tile, step if tiles else size, band) for size in latent_size)
        return TileGrid(rows=rows, cols=cols)

    def set_tiling(self, module: Any, geometry: Geometry, tiling: Tiling) -> None:
        """Set all four: `enable_tiling` takes no sizes here, and the sample's tile must match the latents'."""
        module.use_tiling = True
        module.tile_latent_min_size = tiling.tile
        module.tile_sample_min_size = tiling.tile * geometry.spatial
        module.tile_overlap_factor = tiling.overlap

    def tiling_attributes(self) -> tuple[str, ...]:
        return ("use_tiling", "tile_latent_min_size", "tile_sample_min_size", "tile_overlap_factor")


FAMILIES.add(KLFamily.name, KLFamily())


# ---------------------------------------------------------------- the tiling law of `tile_overlap_factor`


def _steps(spatial: int, tile: int, overlap: float) -> tuple[int, int]:
    """Step in latent pixels and blend extent in sample pixels, in the very float arithmetic of `tiled_decode`."""
    return int(tile * (1 - overlap)), int(tile * spatial * overlap)


def _is_legal(spatial: int, tile: int, overlap: float) -> bool:
    step, band = _steps(spatial, tile, overlap)
    return step >= 1 and step * spatial == tile * spatial - band


def _law(name: str, spatial: int, tiling: Tiling) -> tuple[int, int]:
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
