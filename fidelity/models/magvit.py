"""AutoencoderKLMagvit: EasyAnimate's autoencoder; it always streams, and keeps its cache inside its convolutions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, ClassVar

from fidelity.errors import ModelError
from fidelity.lazy import torch
from fidelity.models.base import whole, wholes
from fidelity.models.mochi import carried
from fidelity.models.strided import StridedFamily
from fidelity.records import Chunk, Geometry, Temporal
from fidelity.registry import FAMILIES


class MagvitFamily(StridedFamily):
    """The first latent frame goes alone, the others one by one, or `num_latent_frames_batch_size` a call: it is exact
    where the decoder's norms are by frame (`spatial_group_norm`)."""

    name = "AutoencoderKLMagvit"
    summary = "KL autoencoder of EasyAnimate: causal convolutions, GroupNorm by frame, streams by frame"
    temporal_controls = "frames a call"
    carries = True
    streams = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 16,
        "block_out_channels": (128, 256, 512, 512),
        "up_block_types": ("SpatialUpBlock3D", *("SpatialTemporalUpBlock3D",) * 3),
        "scaling_factor": 0.7125,
    }

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """f doubles with every up block but the last, f_t with those of them that are temporal."""
        blocks, kinds = len(wholes(config, "block_out_channels")), config["up_block_types"]
        if not isinstance(kinds, (list, tuple)) or len(kinds) != blocks:
            raise ModelError(f"up_block_types is {kinds!r}, expected {blocks} names of blocks")
        return Geometry(
            spatial=2 ** (blocks - 1),
            temporal=2 ** sum(kind == "SpatialTemporalUpBlock3D" for kind in kinds[:-1]),
            latent_channels=whole(config, "latent_channels"),
            sample_channels=whole(config, "out_channels"),
            video=True,
        )

    def landmarks(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        full = {**self.defaults, **config}
        widths, channels = wholes(full, "block_out_channels"), whole(full, "latent_channels")
        return {
            "encoder.conv_in.weight": (widths[0], whole(full, "in_channels"), 3, 3, 3),
            "post_quant_conv.weight": (channels, channels, 1, 1, 1),
            "decoder.conv_out.weight": (whole(full, "out_channels"), widths[0], 3, 3, 3),
        }

    def tiling_attributes(self) -> tuple[str, ...]:
        """`enable_tiling` takes sizes in time as well, which nothing reads, and sets two flags that nothing reads."""
        return (
            *super().tiling_attributes(),
            "use_framewise_encoding",
            "use_framewise_decoding",
            "tile_sample_min_num_frames",
            "tile_sample_stride_num_frames",
        )

    def call_frames(self, frames: int) -> tuple[int, ...]:
        return (1,) * frames

    def chunks(self, geometry: Geometry, frames: int, temporal: Temporal) -> tuple[Chunk, ...]:
        return carried(self.name, frames, temporal, first=1)

    def set_temporal(self, module: Any, geometry: Geometry, temporal: Temporal) -> None:
        module.num_latent_frames_batch_size = temporal.tile

    def temporal_attributes(self) -> tuple[str, ...]:
        return ("num_latent_frames_batch_size",)

    def decode_alone(self, module: Any, latents: torch.Tensor) -> torch.Tensor:
        """What one item, or one tile, has when it is alone."""
        return torch.cat(list(self.segments(module, latents, 1)), dim=2)

    def segments(self, module: Any, latents: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
        """Frame by frame, from empty caches, which are emptied again."""
        module._clear_conv_cache()
        try:
            frames = iter(module.post_quant_conv(latents).split(1, dim=2))
            while part := [module.decoder(frame) for frame in islice(frames, size)]:
                yield torch.cat(part, dim=2)
        finally:
            module._clear_conv_cache()


FAMILIES.add(MagvitFamily.name, MagvitFamily())
