"""AutoencoderKLKVAEVideo: the causal video autoencoder K-VAE of Kandinsky; it streams by segments with a cache."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any, ClassVar

from fidelity.errors import ModelError
from fidelity.lazy import torch
from fidelity.models.base import whole, wholes
from fidelity.models.strided import StridedFamily
from fidelity.records import Geometry, Tiling
from fidelity.registry import FAMILIES

SEGMENT = 16
"""Frames that the class decodes in one call, beside the first."""


class KVAEVideoFamily(StridedFamily):
    """GroupNorm sees the frames of one segment, so the reference is decoded in segments as well.

    `enable_tiling` sets a flag that nothing reads: a plan that tiles asks for tiles by stride, and gets none.
    """

    name = "AutoencoderKLKVAEVideo"
    summary = "KL autoencoder K-VAE of Kandinsky, videos: causal convolutions, streams by segment with a cache"
    tile_controls = "a flag that nothing reads"
    temporal_controls = f"streams by {SEGMENT} frames"
    segment: int = 4
    """Latent frames of a segment."""
    defaults: ClassVar[Mapping[str, Any]] = {
        "ch": 128,
        "ch_mult": (1, 2, 4, 8),
        "in_channels": 3,
        "out_ch": 3,
        "z_channels": 16,
        "temporal_compress_times": 4,
    }

    def of(self, config: Mapping[str, Any]) -> KVAEVideoFamily:
        own = copy(self)
        own.segment = SEGMENT // whole(config, "temporal_compress_times")
        return own

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """f doubles with every level but the last, f_t with as many of them as its ratio takes."""
        spatial, temporal = 2 ** (len(wholes(config, "ch_mult")) - 1), whole(config, "temporal_compress_times")
        if temporal & (temporal - 1) or temporal > min(spatial, SEGMENT):
            raise ModelError(f"temporal_compress_times is {temporal}, expected a power of two up to "
                             f"{min(spatial, SEGMENT)}")  # fmt: skip
        return Geometry(
            spatial=spatial,
            temporal=temporal,
            latent_channels=whole(config, "z_channels"),
            sample_channels=whole(config, "out_ch"),
            video=True,
        )

    def landmarks(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        full = {**self.defaults, **config}
        width, levels = whole(full, "ch"), wholes(full, "ch_mult")
        return {
            "encoder.conv_in.conv.weight": (width, whole(full, "in_channels"), 3, 3, 3),
            "decoder.conv_in.conv.weight": (width * levels[-1], whole(full, "z_channels"), 3, 3, 3),
            "decoder.conv_out.conv.weight": (whole(full, "out_ch"), width * levels[0], 3, 3, 3),
        }

    def middle(self, module: Any) -> Any:
        return module.decoder.mid.block_1

    def set_tiling(self, module: Any, geometry: Geometry, tiling: Tiling) -> None:
        """All that there is to set."""
        module.enable_tiling()

    def tiling_attributes(self) -> tuple[str, ...]:
        return ("use_tiling",)

    def call_frames(self, frames: int) -> tuple[int, ...]:
        """The first frame goes with the first segment."""
        lengths = [min(self.segment, frames - start) for start in range(1, frames, self.segment)] or [0]
        return (1 + lengths[0], *lengths[1:])

    def decode_alone(self, module: Any, latents: torch.Tensor) -> torch.Tensor:
        """A segment of one latent frame would not be upsampled in time: it goes with the one before, so that the
        length is what it should be."""
        calls = list(self.call_frames(latents.shape[2]))
        if len(calls) > 1 and calls[-1] == 1:
            calls[-2:] = [calls[-2] + 1]
        cache = module._make_decoder_cache()
        parts = latents.split(calls, dim=2)
        return torch.cat([module.decoder(part, cache) for part in parts], dim=2)


FAMILIES.add(KVAEVideoFamily.name, KVAEVideoFamily())
