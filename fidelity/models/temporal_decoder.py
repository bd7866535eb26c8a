"""AutoencoderKLTemporalDecoder: Stable Video Diffusion's; an image encoder, and a decoder that looks along time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fidelity.lazy import torch
from fidelity.models.base import FamilyBase, whole, wholes
from fidelity.records import Geometry
from fidelity.registry import FAMILIES


class TemporalDecoderFamily(FamilyBase):
    """It neither tiles nor slices nor cuts in time. The class takes frames as a batch (B·T, C, H, W) and their number;
    here they are a video (B, C, T, H, W)."""

    name = "AutoencoderKLTemporalDecoder"
    summary = "KL autoencoder of Stable Video Diffusion: frames encoded one by one, decoded together"
    lacks = frozenset({"slicing", "tiling"})
    defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 3,
        "out_channels": 3,
        "block_out_channels": (64,),
        "latent_channels": 4,
        "scaling_factor": 0.18215,
        "force_upcast": True,
    }

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """f doubles with every block but the last; a frame of the latents is a frame of the sample."""
        return Geometry(
            spatial=2 ** (len(wholes(config, "block_out_channels")) - 1),
            latent_channels=whole(config, "latent_channels"),
            sample_channels=whole(config, "out_channels"),
            video=True,
            frames="every",
        )

    def landmarks(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        full = {**self.defaults, **config}
        widths, colours = wholes(full, "block_out_channels"), whole(full, "out_channels")
        return {
            "encoder.conv_in.weight": (widths[0], whole(full, "in_channels"), 3, 3),
            "decoder.conv_in.weight": (widths[-1], whole(full, "latent_channels"), 3, 3),
            "decoder.time_conv_out.weight": (colours, colours, 3, 1, 1),
        }

    def encode(self, module: Any, image: torch.Tensor) -> torch.Tensor:
        return _folded(image, lambda frames: super(TemporalDecoderFamily, self).encode(module, frames))

    def decode(self, module: Any, latents: torch.Tensor) -> torch.Tensor:
        return _folded(latents, lambda frames: module.decode(frames, num_frames=latents.shape[2]).sample)

    def call_shape(self, geometry: Geometry, shape: tuple[int, ...], named: Mapping[str, Any]) -> tuple[int, ...]:
        """The decoder takes the frames of all videos as one batch."""
        frames = named["num_frames"]
        return (shape[0] // frames, shape[1], frames, *shape[2:])


def _folded(video: torch.Tensor, function: Any) -> torch.Tensor:
    """What `function` gives of all frames (B·T, C, H, W), as a video again."""
    frames = function(video.transpose(1, 2).flatten(0, 1))
    return frames.unflatten(0, (video.shape[0], video.shape[2])).transpose(1, 2)


FAMILIES.add(TemporalDecoderFamily.name, TemporalDecoderFamily())
