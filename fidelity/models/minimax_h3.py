"""AutoencoderKLMiniMaxH3: a causal encoder and a transformer as decoder, trained on tiles and on clips of 17 frames."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from typing import Any, ClassVar

from fidelity.errors import ModelError
from fidelity.lazy import torch
from fidelity.models.base import FamilyBase, whole, wholes
from fidelity.models.strided import stride
from fidelity.records import Geometry, ReferencePolicy, TileAxis, TileGrid, Tiling
from fidelity.registry import FAMILIES

TILE, OVERLAP = 256, 64
"""Sample pixels of the tiles that the class cuts unless told otherwise, and by how much they overlap at least."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""ImageNet's, by which its frames are normalised (`MiniMaxH3`'s pixel_mean and pixel_std)."""


class MiniMaxH3Family(FamilyBase):
    """The reference is decoded in the tiles of 256 pixels that the class is trained on: untiled it is worse.

    Latents are cut into clips, each decoded with the two frames after it, and clips are blended over what they share.
    The overlap of tiles is the least: they are moved apart no further than that they end with the picture.
    """

    name = "AutoencoderKLMiniMaxH3"
    summary = "KL autoencoder of MiniMax H3: a transformer decodes clips of 17 frames in tiles of 256 pixels"
    tile_controls = "tile, least overlap"
    temporal_controls = "clips of its training"
    data_range = (0.0, 1.0)
    reference: ClassVar[ReferencePolicy] = "native_tile"
    tokens: int = 5
    """Latent frames of a clip."""
    dropped: int = 3
    """Latent frames that the encoder drops at the end."""
    least_frames = fewest_frames = 7  # of two, none is decoded
    defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 24,
        "block_out_channels": (128, 256, 256, 512, 512, 1024),
        "spatial_downsample_factors": (2, 2, 2, 2, 1, 1),
        "temporal_downsample_factors": (1, 2, 2, 1, 1, 1),
        "decoder_num_attention_heads": 32,
        "decoder_attention_head_dim": 64,
        "clip_length": 17,
        "token_drop": 3,
        "latents_mean": (0.0,) * 24,
        "latents_std": (1.0,) * 24,
    }

    def of(self, config: Mapping[str, Any]) -> MiniMaxH3Family:
        own, geometry = copy(self), self.geometry(config)
        own.tokens = math.ceil(geometry.clip / geometry.temporal)
        own.dropped = config["token_drop"]
        return own

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """The products of the factors; 17 frames a clip, of which the first latent frame holds one."""
        spatial, temporal = (
            math.prod(wholes(config, f"{axis}_downsample_factors")) for axis in ("spatial", "temporal")
        )
        clip, dropped = whole(config, "clip_length"), config["token_drop"]
        if not isinstance(dropped, int) or not 0 <= dropped < math.ceil(clip / temporal):
            raise ModelError(f"token_drop is {dropped!r}, expected less than the {math.ceil(clip / temporal)} latent "
                             "frames of a clip")  # fmt: skip
        return Geometry(
            spatial=spatial,
            temporal=temporal,
            latent_channels=whole(config, "latent_channels"),
            sample_channels=whole(config, "out_channels"),
            video=True,
            frames="clips",
            clip=clip,
        )

    def landmarks(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        full = {**self.defaults, **config}
        channels = whole(full, "latent_channels")
        width = whole(full, "decoder_num_attention_heads") * whole(full, "decoder_attention_head_dim")
        return {
            "encoder.conv_in.weight": (wholes(full, "block_out_channels")[0], whole(full, "in_channels"), 3, 3, 3),
            "post_quant_conv.weight": (channels, channels, 1, 1, 1),
            "decoder.proj_in.weight": (width, channels),
        }

    def middle(self, module: Any) -> Any:
        """The residual stream and the rotary embedding stay in fp32 by design: a projection tells the dtype."""
        return module.decoder.transformer_blocks[len(module.decoder.transformer_blocks) // 2].attn.to_q

    def encode(self, module: Any, image: torch.Tensor) -> torch.Tensor:
        mean, std = (_channels(each, image) for each in (MEAN, STD))
        return super().encode(module, (image - mean) / std)

    def decode(self, module: Any, latents: torch.Tensor) -> torch.Tensor:
        return _shown(super().decode(module, latents))

    # -------------------------------------------------------- clips

    def fits(self, frames: int) -> bool:
        """The encoder gives whole clips and the two frames after them; others are filled up by repeating the last."""
        return frames > self.shared and frames % self.tokens == self.shared

    @property
    def shared(self) -> int:
        """Latent frames that a clip is decoded with beside its own."""
        return -self.dropped % self.tokens

    def call_frames(self, frames: int) -> tuple[int, ...]:
        clips = -(-(frames + self.dropped) // self.tokens) - bool(self.dropped)
        return (self.tokens + self.shared,) * clips

    def decode_alone(self, module: Any, latents: torch.Tensor) -> torch.Tensor:
        """The clips one after another, as they are before they are blended; of the last, the frames that were asked."""
        ratio, pad = module.temporal_compression_ratio, module.frame_pre_padding
        calls = self.call_frames(latents.shape[2])
        more = self.tokens * (len(calls) - 1) + self.tokens + self.shared - latents.shape[2]
        filled = torch.cat([latents, latents[:, :, -1:].expand(-1, -1, more, -1, -1)], dim=2)
        clips = []
        for number, length in enumerate(calls):
            start = number * self.tokens
            clip = module.decoder(module.post_quant_conv(filled[:, :, start : start + length]))
            own, ahead = clip[:, :, pad : self.tokens * ratio], clip[:, :, self.tokens * ratio + pad :]
            clips.append(torch.cat([own, ahead], dim=2))
        asked = self._frames(module, latents.shape[2]) - sum(module.config.clip_length for _ in calls[1:])
        return torch.cat([*clips[:-1], clips[-1][:, :, :asked]], dim=2)

    def finish(self, module: Any, sample: torch.Tensor) -> torch.Tensor:
        """Clips blended over the frames that they share, and ImageNet's normalisation undone."""
        length, overlap = module.config.clip_length, module.frame_overlap
        clips = list(sample.split(length + overlap, dim=2))
        for number in range(1, len(clips)):
            clips[number] = _mixed(clips[number - 1], clips[number], overlap, -3)
        return _shown(torch.cat([*(clip[:, :, :length] for clip in clips[:-1]), clips[-1]], dim=2))

    def _frames(self, module: Any, frames: int) -> int:
        return Geometry(1, 1, module.temporal_compression_ratio, frames="clips",
                        clip=module.config.clip_length).sample_frames(frames)  # fmt: skip

    # -------------------------------------------------------- tiles

    def native_tiling(self, geometry: Geometry) -> Tiling:
        return Tiling(TILE // geometry.spatial, OVERLAP / TILE)

    def will_tile(self, latent_size: tuple[int, int], tiling: Tiling) -> bool:
        return max(latent_size) > tiling.tile

    def tile_grid(self, geometry: Geometry, latent_size: tuple[int, int], tiling: Tiling) -> TileGrid:
        """`_split_tiles`: the fewest tiles that overlap enough, the slack shared out. Raises IllegalTiling where the
        overlap is no whole latent pixel."""
        least = tiling.tile - stride(self.name, tiling)
        return TileGrid(*(_axis(size, geometry.spatial, tiling.tile, least) for size in latent_size))

    def set_tiling(self, module: Any, geometry: Geometry, tiling: Tiling) -> None:
        tile, least = tiling.tile * geometry.spatial, (tiling.tile - stride(self.name, tiling)) * geometry.spatial
        module.use_tiling = True
        module.tile_sample_min_height = module.tile_sample_min_width = tile
        module.tile_sample_min_overlap_height = module.tile_sample_min_overlap_width = least

    def tiling_attributes(self) -> tuple[str, ...]:
        sides = ("height", "width")
        return ("use_tiling", *(f"tile_sample_min_{side}" for side in sides),
                *(f"tile_sample_min_overlap_{side}" for side in sides))  # fmt: skip

    def assemble(self, tiles: list[list[torch.Tensor]], grid: TileGrid) -> torch.Tensor:
        """Each tile blended into the one above and the one on its left, which are blended themselves: over what they
        share, which differs from edge to edge, by weights that are rounded to the sample's dtype."""
        rows, cols = grid.rows, grid.cols
        done: list[list[torch.Tensor]] = []
        for i, row in enumerate(tiles):
            line: list[torch.Tensor] = []
            for j, tile in enumerate(row):
                if i:
                    tile = _mixed(done[i - 1][j], tile, rows.starts[i - 1] + rows.tile - rows.starts[i], -2)
                if j:
                    tile = _mixed(line[j - 1], tile, cols.starts[j - 1] + cols.tile - cols.starts[j], -1)
                line.append(tile)
            done.append(line)
        heights, widths = (
            [end - at for at, end in zip(axis.starts, (*axis.edges, axis.size))] for axis in (rows, cols)
        )
        return torch.cat(
            [
                torch.cat([tile[..., :high, :wide] for tile, wide in zip(line, widths)], dim=-1)
                for line, high in zip(done, heights)
            ],
            dim=-2,
        )


def _axis(size: int, f: int, tile: int, least: int) -> TileAxis:
    count = 1 if size <= tile else -(-(size - least) // (tile - least))
    slack = tile * count - least * (count - 1) - size if count > 1 else 0
    overlaps = [least + slack // (count - 1) + (edge < slack % (count - 1)) for edge in range(count - 1)]
    starts = tuple(edge * tile - sum(overlaps[:edge]) for edge in range(count))
    return TileAxis(tuple(at * f for at in starts), max(overlaps, default=0) * f, tile * f, size * f)


def _mixed(before: torch.Tensor, after: torch.Tensor, extent: int, dim: int) -> torch.Tensor:
    """`after`, its first pixels along `dim` mixed with the last of `before`."""
    extent = min(before.shape[dim], after.shape[dim], extent)
    if not extent:
        return after
    late = (torch.arange(extent, dtype=after.dtype, device=after.device) / extent).reshape(-1, *(1,) * (-1 - dim))
    head = before.narrow(dim, before.shape[dim] - extent, extent) * (1 - late) + after.narrow(dim, 0, extent) * late
    return torch.cat([head, after.narrow(dim, extent, after.shape[dim] - extent)], dim=dim)


def _channels(values: tuple[float, ...], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, device=like.device).view(1, -1, 1, 1, 1)


def _shown(sample: torch.Tensor) -> torch.Tensor:
    """In [0, 1] as the pipeline does it, in fp32, but for the clamp."""
    return (sample.float() * _channels(STD, sample) + _channels(MEAN, sample)).to(sample.dtype)


FAMILIES.add(MiniMaxH3Family.name, MiniMaxH3Family())
