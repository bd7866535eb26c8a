"""AutoencoderKLCosmos: the tokenizer of Cosmos 1.0: causal convolutions, normalised by frame, wavelets at both ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fidelity.errors import ModelError
from fidelity.models.base import whole, wholes
from fidelity.models.strided import FramewiseFamily
from fidelity.records import Geometry, Scaling
from fidelity.registry import FAMILIES


class CosmosFamily(FramewiseFamily):
    """Tiles and chunks as its attributes say; in 0.42.1 no decode reads them.

    The latents' mean and std have a value for each channel *and frame*, so a Scaling cannot hold them; the factor is
    the scheduler's `sigma_data`. What a config has of these is left out.
    """

    name = "AutoencoderKLCosmos"
    summary = "KL autoencoder of Cosmos 1.0: causal convolutions, GroupNorm by frame, wavelets"
    defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 16,
        "encoder_block_out_channels": (128, 256, 512, 512),
        "decode_block_out_channels": (256, 512, 512, 512),
        "patch_size": 4,
        "spatial_compression_ratio": 8,
        "temporal_compression_ratio": 8,
    }

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """The ratios are keys of the config; patches and the decoder's blocks must be able to give them."""
        patch, blocks = whole(config, "patch_size"), len(wholes(config, "decode_block_out_channels"))
        ratios = [whole(config, f"{axis}_compression_ratio") for axis in ("spatial", "temporal")]
        for name, ratio, given in zip(("spatial", "temporal"), ratios, _given(patch, blocks, *ratios)):
            if ratio != given:
                raise ModelError(f"{name}_compression_ratio is {ratio}, but patch {patch} and {blocks} blocks of the "
                                 f"decoder give {given}")  # fmt: skip
        return Geometry(
            spatial=ratios[0],
            temporal=ratios[1],
            latent_channels=whole(config, "latent_channels"),
            sample_channels=whole(config, "out_channels"),
            video=True,
        )

    def scaling(self, config: Mapping[str, Any], geometry: Geometry) -> Scaling:
        return Scaling()

    def landmarks(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        full = {**self.defaults, **config}
        patch, channels = whole(full, "patch_size") ** 3, whole(full, "latent_channels")
        own = wholes(full, "decode_block_out_channels")
        width = wholes(full, "encoder_block_out_channels")[0]
        return {
            "encoder.conv_in.conv_s.weight": (width, whole(full, "in_channels") * patch, 1, 3, 3),
            "decoder.conv_in.conv_s.weight": (own[-1], channels, 1, 3, 3),
            "decoder.conv_out.conv_s.weight": (whole(full, "out_channels") * patch, own[0], 1, 3, 3),
        }


def _given(patch: int, blocks: int, spatial: int, temporal: int) -> tuple[int, int]:
    """The compression that the decoder's blocks have when asked for this one (`CosmosDecoder3d`)."""
    wanted = [max(0, ratio.bit_length() - patch.bit_length()) for ratio in (spatial, temporal)]
    in_time = [0 < block < wanted[1] + 1 for block in range(blocks - 2)]
    in_space = [time or (block < wanted[0] and wanted[0] > wanted[1]) for block, time in enumerate(in_time)]
    return patch * 2 ** sum(in_space), patch * 2 ** sum(in_time)


FAMILIES.add(CosmosFamily.name, CosmosFamily())
