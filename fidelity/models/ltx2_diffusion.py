"""LTX2VideoDiffusionDecoderModel: LTX-2.5's decoder, which denoises pixels by attention; it has no encoder.

Its early stages see all latents; tiles are cut of what they give, and each tile draws noise of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from fidelity.errors import IllegalTiling, ModelError
from fidelity.lazy import torch
from fidelity.models.base import _first, whole
from fidelity.models.shapes import is_fake
from fidelity.models.strided import StridedFamily
from fidelity.records import Geometry, TileAxis, TileGrid, Tiling
from fidelity.registry import FAMILIES

ALL = 10**6
"""Frames of a tile that no video is longer than: chunks in time come only with tiles, and are not asked for here."""


class StagedGeometry(Geometry, frozen=True):
    """Sizes at the stage that is tiled: `cells` a latent pixel, `steps` a latent frame, `ghosts` behind the last.

    `least`: cells that the attention needs at least, so that a shorter last tile is merged into the one before.
    """

    cells: int = 1
    steps: int = 1
    ghosts: int = 0
    least: tuple[int, int] = (1, 1)


class LTX2DiffusionFamily(StridedFamily):
    """The latents' mean and std are buffers among the weights, as LTX-2's are."""

    name = "LTX2VideoDiffusionDecoderModel"
    summary = "diffusion decoder of LTX-2.5: neighbourhood attention, a step of denoising, no encoder"
    lacks = frozenset({"slicing"})
    tiles_itself = True
    encodes = False
    defaults: ClassVar[Mapping[str, Any]] = {
        "out_channels": 3,
        "latent_channels": 128,
        "patch_size": 4,
        "scaling_factor": 1.0,
        "decoder_stage_channels": (2048, 1024, 512, 512, 256),
        "decoder_stage_kernels": ((3, 7, 7), (3, 7, 7), (3, 5, 5), (3, 5, 5)),
        "decoder_upsample_strides": ((1, 2, 2), (2, 1, 1), (2, 2, 2), (2, 2, 2)),
        "decoder_stage5_kernel": (11, 11, 11),
        "spatial_compression_ratio": 32,
        "temporal_compression_ratio": 8,
    }

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """The product of the upsampling strides, times the patch in space; the config's ratios must be the same."""
        strides, patch = config["decoder_upsample_strides"], whole(config, "patch_size")
        early, last = strides[:-1], strides[-1]
        cells, steps = math.prod(each[1] for each in early), math.prod(each[0] for each in early)
        for axis, given in (("spatial", cells * last[1] * patch), ("temporal", steps * last[0])):
            if whole(config, f"{axis}_compression_ratio") != given:
                raise ModelError(f"{axis}_compression_ratio is {config[f'{axis}_compression_ratio']}, but the "
                                 f"upsamplings give {given}: tiles would be cut in the wrong unit")  # fmt: skip
        late, final = config["decoder_stage_kernels"][-1], config["decoder_stage5_kernel"]
        return StagedGeometry(
            spatial=cells * last[1] * patch,
            temporal=steps * last[0],
            latent_channels=whole(config, "latent_channels"),
            sample_channels=whole(config, "out_channels"),
            video=True,
            cells=cells,
            steps=steps,
            ghosts=config["decoder_stage_kernels"][0][0] // 2 * 2,
            least=(max(late[1], -(-final[1] // last[1])), max(late[2], -(-final[2] // last[2]))),
        )

    def landmarks(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        full = {**self.defaults, **config}
        widths, pixels = full["decoder_stage_channels"], whole(full, "out_channels") * whole(full, "patch_size") ** 2
        return {
            "decoder.conv_in.weight": (widths[0], whole(full, "latent_channels")),
            "decoder.conv_out.weight": (pixels, widths[-1]),
        }

    def encode(self, module: Any, image: torch.Tensor) -> torch.Tensor:
        raise ModelError(f"{self.name} has no encoder: its latents are those of AutoencoderKLLTX2Video")

    def decode(self, module: Any, latents: torch.Tensor) -> torch.Tensor:
        """As the pipeline does, with a generator of a fixed seed."""
        # a device that is not there has no generator, and shapes need none of it
        generator = torch.Generator("cpu" if is_fake(latents) else latents.device).manual_seed(0)
        return _first(module.decode(latents, generator=generator), ("sample",))

    def decoder(self, module: Any) -> Any:
        """The first block that sees a tile: the decoder itself is called by its stages."""
        return module.decoder.det_stages[-1][0]

    def middle(self, module: Any) -> Any:
        return module.decoder.upsamples[-1]

    def call_shape(self, geometry: Geometry, shape: tuple[int, ...], named: Mapping[str, Any]) -> tuple[int, ...]:
        """From (B, T, H, W, C) in cells, the ghosts behind the last frame among them."""
        assert isinstance(geometry, StagedGeometry)
        batch, steps, height, width, channels = shape
        frames = (steps + geometry.steps - 1) // geometry.steps - geometry.ghosts
        return (batch, channels, frames, height // geometry.cells, width // geometry.cells)

    def tile_grid(self, geometry: Geometry, latent_size: tuple[int, int], tiling: Tiling) -> TileGrid:
        """`_tile_intervals`: one tile along a side that it covers. Raises IllegalTiling also where a last tile is too
        short for the attention: the class merges it into the one before."""
        whole_grid = super().tile_grid(geometry, latent_size, tiling)
        grid = TileGrid(*(_covered(axis) for axis in (whole_grid.rows, whole_grid.cols)))
        assert isinstance(geometry, StagedGeometry)
        for size, axis, least in zip(latent_size, (grid.rows, grid.cols), geometry.least):
            left = (axis.size - axis.starts[-1]) // geometry.spatial
            if len(axis.starts) > 1 and left * geometry.cells < least:
                asked = f"{self.name} cannot cut {size} latent pixels by {tiling.tile} with overlap {tiling.overlap:g}"
                needs = f"its attention needs {least / geometry.cells:g}"
                raise IllegalTiling(f"{asked}: the last tile has {left}, {needs}; choose another overlap")
        return grid

    def set_tiling(self, module: Any, geometry: Geometry, tiling: Tiling) -> None:
        super().set_tiling(module, geometry, tiling)
        module.tile_sample_min_num_frames = module.tile_sample_stride_num_frames = ALL * geometry.temporal

    def tiling_attributes(self) -> tuple[str, ...]:
        return (*super().tiling_attributes(), "tile_sample_min_num_frames", "tile_sample_stride_num_frames")


def _covered(axis: TileAxis) -> TileAxis:
    return axis if axis.size > axis.tile else msgspec.structs.replace(axis, starts=(0,))


FAMILIES.add(LTX2DiffusionFamily.name, LTX2DiffusionFamily())
