"""AutoencoderKLHunyuanVideo15: a causal 3-D autoencoder with attention over all frames, of HunyuanVideo 1.5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fidelity.errors import ModelError
from fidelity.models.base import whole, wholes
from fidelity.models.overlap import OverlapFamily
from fidelity.records import Geometry, ReferencePolicy
from fidelity.registry import FAMILIES


class HunyuanVideo15Family(OverlapFamily):
    """All frames at once. Its attention mask fits a batch of one only, so the reference decodes one item at a time."""

    name = "AutoencoderKLHunyuanVideo15"
    summary = "KL autoencoder of HunyuanVideo 1.5: causal convolutions and attention, RMS norm"
    reference: ClassVar[ReferencePolicy] = "sliced"
    sample_tiles = ("tile_sample_min_height", "tile_sample_min_width")
    latent_tiles: ClassVar[tuple[str, ...]] = ("tile_latent_min_height", "tile_latent_min_width")
    defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 32,
        "block_out_channels": (128, 256, 512, 1024, 1024),
        "spatial_compression_ratio": 16,
        "temporal_compression_ratio": 4,
        "scaling_factor": 1.03682,
    }

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """The ratios are keys of the config; its blocks must be able to give them, its channels to be folded."""
        spatial, temporal = (whole(config, f"{axis}_compression_ratio") for axis in ("spatial", "temporal"))
        widths, channels = wholes(config, "block_out_channels"), whole(config, "latent_channels")
        for name, ratio, most in (("spatial", spatial, 2 ** (len(widths) - 1)), ("temporal", temporal, spatial)):
            if ratio & (ratio - 1) or ratio > most:
                raise ModelError(f"{name}_compression_ratio is {ratio}, expected a power of two up to {most}")
        if widths[-1] % (2 * channels):
            raise ModelError(f"the last of block_out_channels is {widths[-1]}, no multiple of {2 * channels}, "
                             "twice the latent_channels that its shortcuts repeat")  # fmt: skip
        return Geometry(
            spatial=spatial,
            temporal=temporal,
            latent_channels=channels,
            sample_channels=whole(config, "out_channels"),
            video=True,
        )

    def landmarks(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        full = {**self.defaults, **config}
        widths, channels = wholes(full, "block_out_channels"), whole(full, "latent_channels")
        return {
            "encoder.conv_in.conv.weight": (widths[0], whole(full, "in_channels"), 3, 3, 3),
            "decoder.conv_in.conv.weight": (widths[-1], channels, 3, 3, 3),
            "decoder.conv_out.conv.weight": (whole(full, "out_channels"), widths[0], 3, 3, 3),
        }


FAMILIES.add(HunyuanVideo15Family.name, HunyuanVideo15Family())
