"""AutoencoderKLHunyuanVideo: a causal 3-D autoencoder with GroupNorm over all frames, cut in time by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fidelity.errors import ModelError
from fidelity.models.base import whole, wholes
from fidelity.models.strided import FramewiseFamily
from fidelity.records import Geometry
from fidelity.registry import FAMILIES


class HunyuanVideoFamily(FramewiseFamily):
    """Chunks of tile + 1 latent frames every `stride`; the frame that a later chunk has too many is dropped."""

    name = "AutoencoderKLHunyuanVideo"
    summary = "KL autoencoder of HunyuanVideo: causal convolutions, GroupNorm over all frames"
    tiles_alike = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 16,
        "block_out_channels": (128, 256, 512, 512),
        "scaling_factor": 0.476986,
        "spatial_compression_ratio": 8,
        "temporal_compression_ratio": 4,
    }

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """The ratios are keys of the config; its blocks must be able to give them."""
        spatial, temporal = (whole(config, f"{axis}_compression_ratio") for axis in ("spatial", "temporal"))
        blocks = len(wholes(config, "block_out_channels"))
        for name, ratio in (("spatial", spatial), ("temporal", temporal)):
            if ratio & (ratio - 1) or ratio > 2 ** (blocks - 1):
                raise ModelError(f"{name}_compression_ratio is {ratio}: {blocks} blocks give a power of two up to "
                                 f"{2 ** (blocks - 1)}")  # fmt: skip
        return Geometry(
            spatial=spatial,
            temporal=temporal,
            latent_channels=whole(config, "latent_channels"),
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

    def settle(self, module: Any) -> None:
        """By default the class cuts each video of more than 16 frames into chunks: a full decode does not."""
        module.use_framewise_decoding = module.use_framewise_encoding = False


FAMILIES.add(HunyuanVideoFamily.name, HunyuanVideoFamily())
