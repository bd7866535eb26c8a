"""AutoencoderKLLTX2Video: the video autoencoder of LTX-2, whose up blocks each double in space, in time, or in both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fidelity.errors import ModelError
from fidelity.models.base import whole
from fidelity.models.ltx_video import LTXVideoFamily, flags
from fidelity.registry import FAMILIES

KINDS = {"spatiotemporal": (True, True), "spatial": (True, False), "temporal": (False, True)}


class LTX2VideoFamily(LTXVideoFamily):
    """Tiles, chunks and scaling are LTX-Video's."""

    name = "AutoencoderKLLTX2Video"
    summary = "KL autoencoder of LTX-2: f32, RMS norm, mirrored borders"
    defaults: ClassVar[Mapping[str, Any]] = {
        **LTXVideoFamily.defaults,
        "block_out_channels": (256, 512, 1024, 2048),
        "decoder_block_out_channels": (256, 512, 1024),
        "spatio_temporal_scaling": (True, True, True, True),
        "decoder_spatio_temporal_scaling": (True, True, True),
        "upsample_type": ("spatiotemporal", "spatiotemporal", "spatiotemporal"),
        "upsample_factor": (2, 2, 2),
    }

    def strides(self, config: Mapping[str, Any]) -> list[tuple[bool, bool]]:
        """The class reads its flags from the last block of the decoder back, its types from the first on."""
        doubles, kinds = flags(config, "decoder_spatio_temporal_scaling")[::-1], config["upsample_type"]
        if len(kinds) != len(doubles) or not set(kinds) <= set(KINDS):
            raise ModelError(f"upsample_type is {kinds!r}, expected {len(doubles)} of {', '.join(KINDS)}")
        return [KINDS[kind] if double else (False, False) for kind, double in zip(kinds, doubles)]

    def landmarks(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Its encoder begins as wide as the latents are, whatever its first block is."""
        marks = super().landmarks(config)
        first = "encoder.conv_in.conv.weight"
        return {**marks, first: (whole({**self.defaults, **config}, "latent_channels"), *marks[first][1:])}


FAMILIES.add(LTX2VideoFamily.name, LTX2VideoFamily())
