"""AutoencoderKLAllegro: a video autoencoder whose class decodes in cubes only, and one item at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from fidelity.errors import IllegalTiling, ModelError
from fidelity.lazy import torch
from fidelity.models.base import FamilyBase, whole, wholes
from fidelity.models.strided import stride
from fidelity.records import Chunk, Geometry, ReferencePolicy, Temporal, TileAxis, TileGrid, Tiling
from fidelity.registry import FAMILIES


class AllegroFamily(FamilyBase):
    """`kernel` and `stride` are a cube of frames, rows and columns of the sample; 0 stands here for all of them.

    The class counts its cubes by rounding down: what the last one does not reach stays 0, and along a side that is
    shorter than one there are none. Without tiling `decode` raises, so the reference is one cube that holds all.
    """

    name = "AutoencoderKLAllegro"
    summary = "KL autoencoder of Allegro: 2-D and 1-D convolutions, GroupNorm over all frames, cubes"
    tile_controls = "tile, stride"
    temporal_controls = "tile, stride"
    reference: ClassVar[ReferencePolicy] = "sliced"
    defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 3,
        "out_channels": 3,
        "block_out_channels": (128, 256, 512, 512),
        "temporal_upsample_blocks": (False, True, True, False),
        "latent_channels": 4,
        "temporal_compression_ratio": 4,
        "scaling_factor": 0.13,
        "force_upcast": True,
    }

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """f doubles with every block but the last, f_t with each of temporal_upsample_blocks."""
        blocks, doubles = len(wholes(config, "block_out_channels")), config["temporal_upsample_blocks"]
        temporal = int(config["temporal_compression_ratio"])
        if len(doubles) != blocks or temporal != 2 ** sum(map(bool, doubles)):
            raise ModelError(f"temporal_compression_ratio is {temporal}, but the temporal_upsample_blocks of {blocks} "
                             f"blocks are {list(doubles)}")  # fmt: skip
        return Geometry(
            spatial=2 ** (blocks - 1),
            temporal=temporal,
            latent_channels=whole(config, "latent_channels"),
            sample_channels=whole(config, "out_channels"),
            video=True,
            frames="every",
        )

    def landmarks(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        full = {**self.defaults, **config}
        widths, channels = wholes(full, "block_out_channels"), whole(full, "latent_channels")
        return {
            "encoder.conv_in.weight": (widths[0], whole(full, "in_channels"), 3, 3),
            "decoder.conv_in.weight": (widths[-1], channels, 3, 3),
            "decoder.conv_out.weight": (whole(full, "out_channels"), widths[0], 3, 3),
        }

    def settle(self, module: Any) -> None:
        module.use_tiling, module.kernel, module.stride = True, (0, 0, 0), (0, 0, 0)

    def encode(self, module: Any, image: torch.Tensor) -> torch.Tensor:
        with _filled(module, image.shape[2:]):
            return torch.cat([super(AllegroFamily, self).encode(module, item) for item in image.split(1)])

    def decode(self, module: Any, latents: torch.Tensor) -> torch.Tensor:
        """The class gives frames before channels."""
        f, f_t = module.spatial_compression_ratio, int(module.config.temporal_compression_ratio)
        with _filled(module, [size * each for size, each in zip(latents.shape[2:], (f_t, f, f))]):
            return super().decode(module, latents).transpose(1, 2)

    # -------------------------------------------------------- tiles

    def will_tile(self, latent_size: tuple[int, int], tiling: Tiling) -> bool:
        return max(latent_size) > tiling.tile

    def tile_grid(self, geometry: Geometry, latent_size: tuple[int, int], tiling: Tiling) -> TileGrid:
        """Cubes up to the end, which the class may not reach. Raises IllegalTiling where more than two overlap."""
        axes = [_starts(self.name, name, size, tiling) for name, size in zip(("height", "width"), latent_size)]
        f, band = geometry.spatial, (tiling.tile - stride(self.name, tiling)) * geometry.spatial
        return TileGrid(
            *(TileAxis(tuple(at * f for at in axis), band, tiling.tile * f, size * f)
              for axis, size in zip(axes, latent_size))
        )  # fmt: skip

    def set_tiling(self, module: Any, geometry: Geometry, tiling: Tiling) -> None:
        module.use_tiling = True
        tile, step = tiling.tile * geometry.spatial, stride(self.name, tiling) * geometry.spatial
        module.kernel, module.stride = (module.kernel[0], tile, tile), (module.stride[0], step, step)

    def tiling_attributes(self) -> tuple[str, ...]:
        return ("use_tiling", "kernel", "stride")

    def assemble(self, tiles: list[list[torch.Tensor]], grid: TileGrid) -> torch.Tensor:
        """The sum of all tiles, each weighed along its own sides; every product and sum is rounded to its dtype."""
        first = tiles[0][0]
        canvas = first.new_zeros(*first.shape[:-2], grid.rows.size, grid.cols.size)
        for i, (top, row) in enumerate(zip(grid.rows.starts, tiles)):
            for j, (left, tile) in enumerate(zip(grid.cols.starts, row)):
                for dim, number, axis in ((-2, i, grid.rows), (-1, j, grid.cols)):
                    _fade(tile, dim, axis.band, number > 0, number < len(axis.starts) - 1)
                canvas[..., top : top + tile.shape[-2], left : left + tile.shape[-1]] += tile
        return canvas

    # -------------------------------------------------------- chunks

    def temporal_attributes(self) -> tuple[str, ...]:
        return self.tiling_attributes()

    def set_temporal(self, module: Any, geometry: Geometry, temporal: Temporal) -> None:
        module.use_tiling = True
        tile, step = temporal.tile * geometry.temporal, stride(self.name, temporal) * geometry.temporal
        module.kernel, module.stride = (tile, *module.kernel[1:]), (step, *module.stride[1:])

    def chunks(self, geometry: Geometry, frames: int, temporal: Temporal) -> tuple[Chunk, ...]:
        """Cubes to the end of the video. Raises IllegalTiling as `tile_grid` does."""
        starts = _starts(self.name, "frames", frames, temporal)
        return tuple(Chunk(at, min(at + temporal.tile, frames)) for at in starts)

    def frame_axis(self, geometry: Geometry, frames: int, temporal: Temporal) -> TileAxis:
        f_t, band = geometry.temporal, temporal.tile - stride(self.name, temporal)
        starts = tuple(chunk.start * f_t for chunk in self.chunks(geometry, frames, temporal))
        return TileAxis(starts=starts, band=band * f_t, tile=temporal.tile * f_t, size=frames * f_t)

    def decode_alone(self, module: Any, latents: torch.Tensor) -> torch.Tensor:
        fed = module.post_quant_conv(latents.transpose(1, 2).flatten(0, 1))
        return module.decoder(fed.unflatten(0, (latents.shape[0], -1)).transpose(1, 2))


@contextmanager
def _filled(module: Any, sizes: Any) -> Iterator[None]:
    """Kernel and stride with the whole of the video where they are 0."""
    kernel, step = module.kernel, module.stride
    module.kernel = tuple(own or size for own, size in zip(kernel, sizes))
    module.stride = tuple(own or size for own, size in zip(step, sizes))
    try:
        yield
    finally:
        module.kernel, module.stride = kernel, step


def _starts(name: str, axis: str, size: int, cut: Tiling | Temporal) -> range:
    """Where cubes begin along an axis so that they reach its end. Raises IllegalTiling."""
    step, tile = stride(name, cut), cut.tile
    if 2 * step < tile:
        raise IllegalTiling(
            f"{name} cannot cut {axis} by {tile} with overlap {cut.overlap:g}: more than two cubes overlap, and their "
            f"weights do not sum to 1; nearest legal: overlap {tile // 2 / tile:g}"
        )
    return range(0, max(size - (tile - step), 1), step)


def _fade(tile: torch.Tensor, dim: int, band: int, rises: bool, falls: bool) -> None:
    """Weigh a tile's head and tail along `dim` in place."""
    ramp = torch.arange(band).float().to(tile.device) / max(band, 1)
    ramp = ramp.reshape(-1, *(1,) * (-1 - dim))
    if rises:
        head = tile.narrow(dim, 0, band)
        head.copy_(head * ramp)
    if falls:
        tail = tile.narrow(dim, tile.shape[dim] - band, band)
        tail.copy_(tail * (1 - ramp))


FAMILIES.add(AllegroFamily.name, AllegroFamily())
