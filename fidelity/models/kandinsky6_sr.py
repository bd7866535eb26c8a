"""Kandinsky6SRVAE: the causal autoencoder of Kandinsky 6's super-resolution; it streams by segments with a cache."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any, ClassVar

from fidelity.errors import ModelError
from fidelity.lazy import torch
from fidelity.models.base import FamilyBase, whole, wholes
from fidelity.records import Geometry
from fidelity.registry import FAMILIES

SEGMENT = 16
"""Frames that the class decodes in one call, beside the first."""


class Kandinsky6SRFamily(FamilyBase):
    """It neither slices nor tiles; its segments are exact, as norms look at one pixel and convolutions back in time."""

    name = "Kandinsky6SRVAE"
    summary = "KL autoencoder of Kandinsky 6's super-resolution: causal convolutions, RMS norm, streams by segment"
    temporal_controls = f"streams by {SEGMENT} frames"
    lacks = frozenset({"slicing", "tiling"})
    segment: int = 4
    """Latent frames of a segment."""
    defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 64,
        "encoder_block_out_channels": (16, 128, 256, 512, 1024),
        "decoder_block_out_channels": (16, 256, 512, 1024, 2048),
        "temporal_compression_ratio": 4,
        "temporal_compression_start_level": 1,
        "scaling_factor": 0.910344004631042,
    }

    def of(self, config: Mapping[str, Any]) -> Kandinsky6SRFamily:
        own = copy(self)
        own.segment = SEGMENT // whole(config, "temporal_compression_ratio")
        return own

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """f doubles with every level but the last, f_t with those from temporal_compression_start_level on."""
        widths = wholes(config, "encoder_block_out_channels")
        temporal, start = whole(config, "temporal_compression_ratio"), config["temporal_compression_start_level"]
        halvings = len(widths) - 1
        if temporal & (temporal - 1) or SEGMENT % temporal or not 0 <= start <= halvings - (temporal.bit_length() - 1):
            raise ModelError(f"temporal_compression_ratio is {temporal} from level {start} on, but {halvings} levels "
                             f"halve and {SEGMENT} frames are a segment")  # fmt: skip
        if len(wholes(config, "decoder_block_out_channels")) != len(widths):
            raise ModelError("encoder_block_out_channels and decoder_block_out_channels differ in length")
        return Geometry(
            spatial=2**halvings,
            temporal=temporal,
            latent_channels=whole(config, "latent_channels"),
            sample_channels=whole(config, "out_channels"),
            video=True,
        )

    def landmarks(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        full = {**self.defaults, **config}
        down, up = wholes(full, "encoder_block_out_channels"), wholes(full, "decoder_block_out_channels")
        return {
            "encoder.conv_in.conv.weight": (down[0], whole(full, "in_channels"), 3, 3, 3),
            "decoder.conv_in.conv.weight": (up[-1], whole(full, "latent_channels"), 3, 3, 3),
            "decoder.conv_out.conv.weight": (whole(full, "out_channels"), up[0], 3, 3, 3),
        }

    def middle(self, module: Any) -> Any:
        return module.decoder.mid.block_1

    def call_frames(self, frames: int) -> tuple[int, ...]:
        """The first frame goes with the first segment."""
        lengths = [min(self.segment, frames - start) for start in range(1, frames, self.segment)] or [0]
        return (1 + lengths[0], *lengths[1:])

    def decode_alone(self, module: Any, latents: torch.Tensor) -> torch.Tensor:
        """All frames in one call: what segments must give. In half precision the last bit depends on how many frames a
        kernel sees, so there it streams."""
        once = (latents.shape[2],) if latents.dtype == torch.float32 else self.call_frames(latents.shape[2])
        cache = module.decoder.make_cache()
        return torch.cat([module.decoder(part, cache) for part in latents.split(once, dim=2)], dim=2)


FAMILIES.add(Kandinsky6SRFamily.name, Kandinsky6SRFamily())
