"""The videos' model that ships: `reference-video`, the trained picture model unrolled in time.

It is a real AutoencoderKLHunyuanVideo whose weights are those of `reference-kl`: each 3×3 kernel becomes
the last tap of a 3×3×3 kernel, so that every latent frame decodes to the picture that it is, and the convolutions after
the two temporal upsamplings average two taps, so that the frames in between are interpolated. It has what matters here:
real pictures, a temporal receptive field, and GroupNorm statistics over all frames of a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fidelity.lazy import torch
from fidelity.models.hunyuan_video import HunyuanVideoFamily
from fidelity.models.reference import reference_kl
from fidelity.registry import MODELS

NOW, BETWEEN = (0.0, 0.0, 1.0), (0.0, 0.5, 0.5)
"""Taps in time: only this frame, and the mean of this and the one before."""
UNROLLED: Mapping[str, Any] = {
    "_class_name": "AutoencoderKLHunyuanVideo",
    "down_block_types": ["HunyuanVideoDownBlock3D"] * 4,
    "up_block_types": ["HunyuanVideoUpBlock3D"] * 4,
    "spatial_compression_ratio": 8,
    "temporal_compression_ratio": 4,
    **{
        key: reference_kl.config[key]
        for key in ("in_channels", "out_channels", "latent_channels", "block_out_channels", "layers_per_block",
                    "act_fn", "norm_num_groups", "scaling_factor", "mid_block_add_attention")
    },
}  # fmt: skip


class UnrolledFamily(HunyuanVideoFamily):
    """HunyuanVideo's class with weights that were trained under AutoencoderKL's padding."""

    lacks = frozenset({"tiled_encode"})
    """Its pictures are mirrored on their way in, so tiles would start at the bottom right corner."""

    def encode(self, module: Any, image: torch.Tensor) -> torch.Tensor:
        """AutoencoderKL pads right and bottom before it halves, this class all round: mirrored, they take the same
        pixels; `unroll` mirrors the encoder's kernels to match."""
        return super().encode(module, image.flip(-2, -1)).flip(-2, -1)


def unroll(flat: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of a picture model (AutoencoderKL) in the names and shapes of the video model's state, `target`."""
    by_name = {key.replace(".conv.", "."): value for key, value in flat.items()}
    state = {}
    for key, wanted in target.items():
        value = by_name[key.replace(".conv.", ".").replace(".conv.", ".")]
        if wanted.ndim == 5:
            upsampled = key.startswith(("decoder.up_blocks.1.upsamplers", "decoder.up_blocks.2.upsamplers"))
            taps = (1.0,) if wanted.shape[2] == 1 else BETWEEN if upsampled else NOW
            value = value.unsqueeze(2) * torch.tensor(taps).view(1, 1, -1, 1, 1)
            value = value.flip(-2, -1) if key.startswith("encoder.") else value
        state[key] = value
    return state


def load_reference_video() -> Any:
    module = UnrolledFamily().build(UNROLLED)
    module.load_state_dict(unroll(reference_kl.load().state_dict(), module.state_dict()), strict=True)
    return module


reference_video = replace(
    UnrolledFamily().describe("reference-video", UNROLLED, load_reference_video),
    summary="reference-kl unrolled in time as an AutoencoderKLHunyuanVideo: f=8, f_t=4, 4 channels, real pictures",
)
MODELS.add(reference_video.name, reference_video)
