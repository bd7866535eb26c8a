"""ConsistencyDecoderVAE: OpenAI's decoder for Stable Diffusion, a small diffusion model in two noisy steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from fidelity.errors import ModelError
from fidelity.lazy import torch
from fidelity.models.base import whole, wholes
from fidelity.models.overlap import OverlapFamily
from fidelity.records import Geometry
from fidelity.registry import FAMILIES

if TYPE_CHECKING:
    from torch import nn

SEED, STEPS, CHANNELS = 0, 2, 4
"""Of the noise; steps by default; latent channels of the mean and spread that the class has as constants."""


class ConsistencyFamily(OverlapFamily):
    """It has AutoencoderKL's attributes for tiles and for slices. What it decodes depends on a generator: here every
    item has one of its own, all of the same seed, so that an item alone is decoded as in a batch."""

    name = "ConsistencyDecoderVAE"
    summary = "consistency decoder for Stable Diffusion: a UNet, called twice, from seeded noise"
    lacks = frozenset({"group_offload"})
    defaults: ClassVar[Mapping[str, Any]] = {
        "scaling_factor": 0.18215,
        "latent_channels": 4,
        "encoder_block_out_channels": (128, 256, 512, 512),
        "encoder_in_channels": 3,
        "encoder_out_channels": 4,
        "decoder_block_out_channels": (320, 640, 1024, 1024),
        "decoder_in_channels": 7,
        "decoder_out_channels": 6,
    }

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """f doubles with every block of the encoder but the last; the latents are enlarged by it before the UNet."""
        channels = whole(config, "latent_channels")
        if channels != CHANNELS:
            raise ModelError(f"latent_channels is {channels}: the class normalises {CHANNELS} channels, by constants")
        return Geometry(spatial=2 ** (len(wholes(config, "encoder_block_out_channels")) - 1), latent_channels=channels)

    def landmarks(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        full = {**self.defaults, **config}
        inner, outer = wholes(full, "encoder_block_out_channels"), wholes(full, "decoder_block_out_channels")
        return {
            "encoder.conv_in.weight": (inner[0], whole(full, "encoder_in_channels"), 3, 3),
            "decoder_unet.conv_in.weight": (outer[0], whole(full, "decoder_in_channels"), 3, 3),
            "decoder_unet.conv_out.weight": (whole(full, "decoder_out_channels"), outer[0], 3, 3),
        }

    def decode(self, module: Any, latents: torch.Tensor) -> torch.Tensor:
        noise = [torch.Generator("cpu").manual_seed(SEED) for _ in latents]
        return module.decode(latents, generator=noise).sample

    def decoder(self, module: Any) -> nn.Module:
        return module.decoder_unet

    def middle(self, module: Any) -> nn.Module:
        return module.decoder_unet.mid_block

    def call_frames(self, frames: int) -> tuple[int, ...]:
        """The UNet is called once a step."""
        return (frames,) * STEPS

    def call_shape(self, geometry: Geometry, shape: tuple[int, ...], named: Mapping[str, Any]) -> tuple[int, ...]:
        """The UNet takes the noisy picture and the latents, enlarged, in one tensor."""
        return (shape[0], geometry.latent_channels, *(side // geometry.spatial for side in shape[-2:]))


FAMILIES.add(ConsistencyFamily.name, ConsistencyFamily())
