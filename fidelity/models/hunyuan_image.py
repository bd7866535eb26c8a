"""AutoencoderKLHunyuanImage: HunyuanImage 2.1's autoencoder of pictures, f=32 with 64 channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fidelity.errors import ModelError
from fidelity.models.base import whole, wholes
from fidelity.models.overlap import OverlapFamily
from fidelity.records import Geometry
from fidelity.registry import FAMILIES


class HunyuanImageFamily(OverlapFamily):
    """Tiles by a share of the tile, as AutoencoderKL."""

    name = "AutoencoderKLHunyuanImage"
    summary = "KL autoencoder of HunyuanImage 2.1: f=32, GroupNorm decoder, attention in the middle"
    defaults: ClassVar[Mapping[str, Any]] = {"scaling_factor": None}
    """The class has no others: a config must have every key."""

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """The ratio is a key of the config; its blocks must be able to give it."""
        spatial, blocks = whole(config, "spatial_compression_ratio"), len(wholes(config, "block_out_channels"))
        if spatial & (spatial - 1) or spatial > 2 ** (blocks - 1):
            raise ModelError(f"spatial_compression_ratio is {spatial}: {blocks} blocks give a power of two up to "
                             f"{2 ** (blocks - 1)}")  # fmt: skip
        return Geometry(
            spatial=spatial,
            latent_channels=whole(config, "latent_channels"),
            sample_channels=whole(config, "out_channels"),
        )

    def landmarks(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        widths, channels = wholes(config, "block_out_channels"), whole(config, "latent_channels")
        return {
            "encoder.conv_in.weight": (widths[0], whole(config, "in_channels"), 3, 3),
            "decoder.conv_in.weight": (widths[-1], channels, 3, 3),
            "decoder.conv_out.weight": (whole(config, "out_channels"), widths[0], 3, 3),
        }


FAMILIES.add(HunyuanImageFamily.name, HunyuanImageFamily())
