"""AutoencoderVidTok: the video tokenizer of Microsoft, causal or not, continuous (KL) or discrete (FSQ)."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any, ClassVar

from fidelity.errors import ModelError
from fidelity.lazy import torch
from fidelity.models.base import whole, wholes
from fidelity.models.overlap import OverlapFamily
from fidelity.records import Geometry
from fidelity.registry import FAMILIES

SEGMENT = 16
"""`num_sample_frames_batch_size`: frames of a call within a tile."""


class VidTokFamily(OverlapFamily):
    """All frames at once, but in tiles by segments: of a causal one the first frame alone, and in each but the last
    segment one frame ahead, whose sample goes. Norms look at one pixel, so segments give what all frames give."""

    name = "AutoencoderVidTok"
    summary = "VidTok, a video tokenizer: convolutions in space and time apart, layer norm, attention within a frame"
    temporal_controls = f"tiles stream by {SEGMENT} frames"
    sample_tiles = ("tile_sample_min_height", "tile_sample_min_width")
    latent_tiles = ("tile_latent_min_height", "tile_latent_min_width")
    overlaps = ("tile_overlap_factor_height", "tile_overlap_factor_width")
    scratch = frozenset({"causal_cache", "cache_offset", "is_first_chunk"})
    least_frames = SEGMENT // 4
    causal: bool = True
    segment: int = 4
    """Latent frames of a segment."""
    defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 3,
        "out_channels": 3,
        "ch": 128,
        "ch_mult": (1, 2, 4, 4),
        "z_channels": 4,
        "spatial_ds": None,
        "tempo_ds": None,
        "is_causal": True,
    }

    def of(self, config: Mapping[str, Any]) -> VidTokFamily:
        own = copy(self)
        own.causal, own.segment = bool(config["is_causal"]), SEGMENT // self.geometry(config).temporal
        return own

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """f doubles with each level of spatial_ds (all but the last), f_t with each of tempo_ds (two of these)."""
        levels = len(wholes(config, "ch_mult"))
        halvings = {"spatial_ds": levels - 1, "tempo_ds": 2}
        for key in halvings:
            if config[key] is not None:
                if not isinstance(config[key], (list, tuple)):
                    raise ModelError(f"{key} is {config[key]!r}, expected a list of levels")
                halvings[key] = len(config[key])
        if levels < 3:
            raise ModelError(f"ch_mult has {levels} levels: at least 3 are needed to halve time twice")
        return Geometry(
            spatial=2 ** halvings["spatial_ds"],
            temporal=2 ** halvings["tempo_ds"],
            latent_channels=whole(config, "z_channels"),
            sample_channels=whole(config, "out_channels"),
            video=True,
            frames="causal" if config["is_causal"] else "every",
        )

    def landmarks(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        full = {**self.defaults, **config}
        width, levels, kind = whole(full, "ch"), wholes(full, "ch_mult"), "conv." if full["is_causal"] else ""
        return {
            f"encoder.conv_in.{kind}weight": (width, whole(full, "in_channels"), 3, 3, 3),
            f"decoder.conv_in.{kind}weight": (width * levels[-1], whole(full, "z_channels"), 3, 3, 3),
            f"decoder.conv_out.{kind}weight": (whole(full, "out_channels"), width * levels[0], 3, 3, 3),
        }

    def middle(self, module: Any) -> Any:
        return module.decoder.mid.block_1

    def encode(self, module: Any, image: torch.Tensor) -> torch.Tensor:
        """As `forward` does: a causal one gets its first frame f_t − 1 times more."""
        if self.causal:
            ahead = image[:, :, :1].expand(-1, -1, module.temporal_compression_ratio - 1, -1, -1)
            image = torch.cat([ahead, image], dim=2)
        return super().encode(module, image)

    def fits(self, frames: int) -> bool:
        """One that is not causal drops the latent frames beyond a multiple of a segment, and takes no fewer."""
        return self.causal or frames % self.segment == 0

    def tile_frames(self, frames: int) -> tuple[int, ...]:
        """`build_chunk_start_end`: a last segment that is short goes with the one before."""
        ends = list(range(int(self.causal), frames, self.segment))
        if len(ends) > 1 and frames - ends[-1] < self.segment:
            ends.pop()
        starts = [0, *ends] if self.causal else ends
        stops = [*starts[1:], frames]
        return tuple(min(stop + self.causal, frames) - start for start, stop in zip(starts, stops))

    def decode_alone(self, module: Any, latents: torch.Tensor) -> torch.Tensor:
        """All frames in one call, from caches that are empty."""
        module._empty_causal_cached(module.decoder)
        module._set_first_chunk(True)
        return module.decoder(latents)

    def finish(self, module: Any, sample: torch.Tensor) -> torch.Tensor:
        """Of the first latent frame, a causal one shows the last frame only."""
        return sample[:, :, module.temporal_compression_ratio - 1 :] if self.causal else sample


FAMILIES.add(VidTokFamily.name, VidTokFamily())
