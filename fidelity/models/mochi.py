"""AutoencoderKLMochi: the autoencoder of Mochi 1: f_t = 6, causal convolutions, GroupNorm by frame."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from fidelity.errors import IllegalTiling
from fidelity.lazy import torch
from fidelity.models.base import whole, wholes
from fidelity.models.strided import StridedFamily
from fidelity.records import Chunk, Geometry, Temporal
from fidelity.registry import FAMILIES


class MochiFamily(StridedFamily):
    """Chunks hand the convolutions' last frames on, as the class documents `use_framewise_decoding`.

    In 0.42.1 its convolutions pad by repeating, and then read no cache; after `_enable_framewise_decoding` they read
    it, but pad no longer in space, and no decode passes. So there is no cache to stream with.
    """

    name = "AutoencoderKLMochi"
    summary = "KL autoencoder of Mochi 1: causal convolutions, GroupNorm by frame"
    temporal_controls = "frames a call"
    carries = True
    streams = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 15,
        "out_channels": 3,
        "encoder_block_out_channels": (64, 128, 256, 384),
        "decoder_block_out_channels": (128, 256, 512, 768),
        "latent_channels": 12,
        "temporal_expansions": (1, 2, 3),
        "spatial_expansions": (2, 2, 2),
        "latents_mean": (-0.06730895953510081, -0.038011381506090416, -0.07477820912866141, -0.05565264470995561,
                         0.012767231469026969, -0.04703542746246419, 0.043896967884726704, -0.09346305707025976,
                         -0.09918314763016893, -0.008729793427399178, -0.011931556316503654, -0.0321993391887285),
        "latents_std": (0.9263795028493863, 0.9248894543193766, 0.9393059390890617, 0.959253732819592,
                        0.8244560132752793, 0.917259975397747, 0.9294154431013696, 1.3720942357788521,
                        0.881393668867029, 0.9168315692124348, 0.9185249279345552, 0.9274757570805041),
        "scaling_factor": 1.0,
    }  # fmt: skip

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """The products of the expansions; the first f_t − 1 frames are dropped, which gives a causal decoder's law."""
        return Geometry(
            spatial=math.prod(wholes(config, "spatial_expansions")),
            temporal=math.prod(wholes(config, "temporal_expansions")),
            latent_channels=whole(config, "latent_channels"),
            sample_channels=whole(config, "out_channels"),
            video=True,
        )

    def landmarks(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        full = {**self.defaults, **config}
        own, channels = wholes(full, "decoder_block_out_channels"), whole(full, "latent_channels")
        return {
            "encoder.proj_in.weight": (wholes(full, "encoder_block_out_channels")[0], whole(full, "in_channels")),
            "decoder.conv_in.weight": (own[-1], channels, 1, 1, 1),
            "decoder.proj_out.weight": (whole(full, "out_channels"), own[0]),
        }

    def middle(self, module: Any) -> Any:
        return module.decoder.block_in

    def chunks(self, geometry: Geometry, frames: int, temporal: Temporal) -> tuple[Chunk, ...]:
        return carried(self.name, frames, temporal)

    def set_temporal(self, module: Any, geometry: Geometry, temporal: Temporal) -> None:
        module.use_framewise_decoding = True
        module.num_latent_frames_batch_size = temporal.tile

    def segments(self, module: Any, latents: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
        """`size` latent frames a decoder call, with the cache that the one before left; the very first f_t − 1 sample
        frames go, as the class has it. Not exact in 0.42.1: convolutions that pad by repeating leave an empty cache."""
        cache, surplus = None, module.temporal_compression_ratio - 1 if module.drop_last_temporal_frames else 0
        for number, part in enumerate(latents.split(size, dim=2)):
            sample, cache = module.decoder(part, conv_cache=cache)
            yield sample if number else sample[:, :, surplus:]

    def temporal_attributes(self) -> tuple[str, ...]:
        return ("use_framewise_decoding", "num_latent_frames_batch_size")


def carried(name: str, frames: int, temporal: Temporal, first: int = 0) -> tuple[Chunk, ...]:
    """`tile` latent frames after another, behind `first` ones that go alone. Raises IllegalTiling for an overlap."""
    if temporal.tile < 1 or temporal.overlap:
        asked = f"{name} cannot cut latent frames by {temporal.tile} with overlap {temporal.overlap:g}"
        nearest = f"nearest legal: tile {max(1, temporal.tile)}, overlap 0"
        raise IllegalTiling(f"{asked}: its chunks follow one another; {nearest}")
    head = (Chunk(0, first),) if first else ()
    return head + tuple(
        Chunk(start, min(start + temporal.tile, frames)) for start in range(first, frames, temporal.tile)
    )


FAMILIES.add(MochiFamily.name, MochiFamily())
