"""AutoencoderTiny: TAESD, TAESDXL, TAEF1 and their kin, preview decoders of convolutions alone: tiles cost little."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from fidelity.errors import IllegalTiling, ModelError
from fidelity.lazy import torch
from fidelity.models.base import FamilyBase, whole, wholes
from fidelity.records import Geometry, TileAxis, TileGrid, Tiling
from fidelity.registry import FAMILIES


class TinyFamily(FamilyBase):
    """Tiles are painted one over another, each by a ramp from 0 to 1 inclusive (`AutoencoderTiny._tiled_decode`)."""

    name = "AutoencoderTiny"
    summary = "TAESD and its kin: a distilled preview decoder, convolutions alone"
    tile_controls = "tile, overlap share"
    defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 4,
        "encoder_block_out_channels": (64, 64, 64, 64),
        "decoder_block_out_channels": (64, 64, 64, 64),
        "num_encoder_blocks": (1, 3, 3, 3),
        "num_decoder_blocks": (3, 3, 3, 1),
        "upsampling_scaling_factor": 2,
        "scaling_factor": 1.0,
        "shift_factor": 0.0,
        "force_upcast": False,
    }

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """The decoder upsamples after every stage but the last; the encoder halves before every one but the first."""
        ups, downs = len(wholes(config, "num_decoder_blocks")) - 1, len(wholes(config, "num_encoder_blocks")) - 1
        spatial = whole(config, "upsampling_scaling_factor") ** ups
        if spatial != 2**downs:
            raise ModelError(f"num_encoder_blocks halves {downs} times, but num_decoder_blocks and "
                             f"upsampling_scaling_factor enlarge by {spatial}")  # fmt: skip
        return Geometry(
            spatial=spatial,
            latent_channels=whole(config, "latent_channels"),
            sample_channels=whole(config, "out_channels"),
        )

    def landmarks(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        full = {**self.defaults, **config}
        channels = whole(full, "latent_channels")
        return {
            "encoder.layers.0.weight": (
                wholes(full, "encoder_block_out_channels")[0],
                whole(full, "in_channels"),
                3,
                3,
            ),
            "decoder.layers.0.weight": (wholes(full, "decoder_block_out_channels")[0], channels, 3, 3),
        }

    def will_tile(self, latent_size: tuple[int, int], tiling: Tiling) -> bool:
        """It has no threshold: where a tile holds the picture but its stride does not, the picture is cut."""
        return max(latent_size) > tiling.tile - int(tiling.tile * tiling.overlap)

    def tile_grid(self, geometry: Geometry, latent_size: tuple[int, int], tiling: Tiling) -> TileGrid:
        """Tiles every `tile − int(tile · overlap)` latent pixels; without an overlap they abut.

        Raises IllegalTiling where the overlap is there but below one latent pixel.
        """
        tile, overlap = tiling.tile, tiling.overlap
        asked = f"{self.name} cannot tile by {tile} with overlap {overlap:g}"
        if tile < 1:
            raise IllegalTiling(f"{asked}: a tile has at least 1 latent pixel; choose 1 or more")
        if not (math.isfinite(overlap) and 0 <= overlap < 1):
            raise IllegalTiling(f"{asked}: an overlap is a share of the tile, at least 0 and below 1")
        band = int(tile * overlap)
        if overlap and band < 1:
            shares = (k / tile for k in range(1, tile) if int(tile * (k / tile)) >= 1)
            raise IllegalTiling(f"{asked}: {tile * overlap:g} latent pixels are rounded down to none; nearest legal: "
                                f"overlap {next(shares, 0.0)!r} with this tile")  # fmt: skip
        f, step = geometry.spatial, tile - band
        return TileGrid(
            *(TileAxis(tuple(at * f for at in range(0, size, step)), band * f, tile * f, size * f)
              for size in latent_size)
        )  # fmt: skip

    def set_tiling(self, module: Any, geometry: Geometry, tiling: Tiling) -> None:
        module.use_tiling = True
        module.tile_latent_min_size = tiling.tile
        module.tile_sample_min_size = tiling.tile * geometry.spatial
        module.tile_overlap_factor = tiling.overlap

    def tiling_attributes(self) -> tuple[str, ...]:
        return ("use_tiling", "tile_latent_min_size", "tile_sample_min_size", "tile_overlap_factor")

    def assemble(self, tiles: list[list[torch.Tensor]], grid: TileGrid) -> torch.Tensor:
        """Row by row on one canvas, which holds fp32: a tile in half precision is mixed in and not rounded again."""
        first = tiles[0][0]
        canvas = first.new_zeros(*first.shape[:-2], grid.rows.size, grid.cols.size, dtype=torch.float32)
        for top, row in zip(grid.rows.starts, tiles):
            for left, tile in zip(grid.cols.starts, row):
                height, width = tile.shape[-2:]
                weight = _ramp(height, grid.rows.band, top)[:, None] * _ramp(width, grid.cols.band, left)
                below = canvas[..., top : top + height, left : left + width]
                below.copy_(weight * tile + (1 - weight) * below)
        return canvas

    def middle(self, module: Any) -> Any:
        """The block in the middle of those that have weights."""
        blocks = [layer for layer in module.decoder.layers if any(True for _ in layer.parameters())]
        return blocks[len(blocks) // 2]


def _ramp(length: int, band: int, start: int) -> torch.Tensor:
    """Weights of a tile along one axis: the first tile's are 1, a later one's rise over its band, if it has one."""
    return torch.ones(length) if not (start and band) else (torch.arange(float(length)) / (band - 1)).clamp(0, 1)


FAMILIES.add(TinyFamily.name, TinyFamily())
