"""AutoencoderKLCogVideoX: a causal 3-D autoencoder that decodes two latent frames a call and hands a cache on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fidelity.errors import ModelError
from fidelity.lazy import torch
from fidelity.models.base import whole, wholes
from fidelity.models.overlap import OverlapFamily
from fidelity.records import Geometry
from fidelity.registry import FAMILIES

BATCH = 2
"""`num_latent_frames_batch_size`: the class warns that another number gives poor results, as it is trained on this."""


class CogVideoXFamily(OverlapFamily):
    """Two latent frames a call, three in the first if they are odd in number: GroupNorm sees these and no others, so
    the reference is decoded like that as well. An even number of latent frames has no frame that stands alone."""

    name = "AutoencoderKLCogVideoX"
    summary = "KL autoencoder of CogVideoX: causal convolutions, two latent frames a call with a cache"
    temporal_controls = f"streams by {BATCH} frames"
    sample_tiles = ("tile_sample_min_height", "tile_sample_min_width")
    latent_tiles = ("tile_latent_min_height", "tile_latent_min_width")
    overlaps = ("tile_overlap_factor_height", "tile_overlap_factor_width")
    defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 3,
        "out_channels": 3,
        "block_out_channels": (128, 256, 256, 512),
        "latent_channels": 16,
        "temporal_compression_ratio": 4,
        "scaling_factor": 1.15258426,
        "force_upcast": True,
        "use_post_quant_conv": False,
    }

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """f doubles with every block but the last, f_t with as many of them as its ratio takes."""
        spatial = 2 ** (len(wholes(config, "block_out_channels")) - 1)
        temporal = int(config["temporal_compression_ratio"])
        if temporal < 1 or temporal & (temporal - 1) or temporal > spatial:
            raise ModelError(f"temporal_compression_ratio is {temporal}, expected a power of two up to {spatial}")
        channels, colours = whole(config, "latent_channels"), whole(config, "out_channels")
        if config["use_post_quant_conv"] and channels != colours:
            raise ModelError(f"use_post_quant_conv makes a convolution of {colours} channels, latents have {channels}: "
                             "no decode passes")  # fmt: skip
        return Geometry(
            spatial=spatial,
            temporal=temporal,
            latent_channels=channels,
            sample_channels=colours,
            video=True,
            frames="odd",
        )

    def landmarks(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        full = {**self.defaults, **config}
        widths, channels = wholes(full, "block_out_channels"), whole(full, "latent_channels")
        return {
            "encoder.conv_in.conv.weight": (widths[0], whole(full, "in_channels"), 3, 3, 3),
            "decoder.conv_in.conv.weight": (widths[-1], channels, 3, 3, 3),
            "decoder.conv_out.conv.weight": (whole(full, "out_channels"), widths[0], 3, 3, 3),
        }

    def call_frames(self, frames: int) -> tuple[int, ...]:
        first = min(frames, BATCH + frames % BATCH)
        return (first, *(BATCH,) * ((frames - first) // BATCH))

    def decode_alone(self, module: Any, latents: torch.Tensor) -> torch.Tensor:
        cache, parts = None, []
        for part in latents.split(self.call_frames(latents.shape[2]), dim=2):
            fed = part if module.post_quant_conv is None else module.post_quant_conv(part)
            sample, cache = module.decoder(fed, conv_cache=cache)
            parts.append(sample)
        return torch.cat(parts, dim=2)


FAMILIES.add(CogVideoXFamily.name, CogVideoXFamily())
