"""The videos' models that ship: `reference-video`, the trained picture model unrolled in time, and `small-wan`.

`reference-video` is a real AutoencoderKLHunyuanVideo whose weights are those of `reference-kl`: each 3×3 kernel becomes
the last tap of a 3×3×3 kernel, so that every latent frame decodes to the picture that it is, and the convolutions after
the two temporal upsamplings average two taps, so that the frames in between are interpolated. It has what matters here:
real pictures, a temporal receptive field, and GroupNorm statistics over all frames of a chunk.

`small-wan` is an AutoencoderKLWan of 400,000 seeded weights: no pictures, but the class's real cache and streaming.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fidelity.lazy import torch
from fidelity.models.hunyuan_video import HunyuanVideoFamily
from fidelity.models.reference import reference_kl
from fidelity.models.wan import WanFamily
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
SMALL_WAN: Mapping[str, Any] = {
    "_class_name": "AutoencoderKLWan",
    "base_dim": 16,
    "z_dim": 4,
    "dim_mult": [1, 1, 1, 1],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
    "latents_mean": [0.0] * 4,
    "latents_std": [1.0] * 4,
}


class UnrolledFamily(HunyuanVideoFamily):
    """HunyuanVideo's class with weights that were trained under AutoencoderKL's padding."""

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


def load_small_wan() -> Any:
    return seeded(WanFamily().build(SMALL_WAN), seed=20260117)


def seeded(module: Any, seed: int) -> Any:
    """Fill a module with the same weights on every machine: normal with the gain of its fan-in, biases 0, norms 1.

    Normal by inverse distribution in fp64 on a grid of 2⁻¹², as torch.randn's bits differ between CPUs.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(module.named_parameters()):
            if name.endswith("bias"):
                weight.zero_()
                continue
            if weight[0].numel() == 1:  # a norm's gain
                weight.fill_(1.0)
                continue
            uniform = torch.rand(weight.shape, generator=generator, dtype=torch.float64) + 2.0**-54
            normal = torch.special.ndtri(uniform).mul(4096).round().div(4096)
            weight.copy_(normal / weight[0].numel() ** 0.5)
    return module


reference_video = replace(
    UnrolledFamily().describe("reference-video", UNROLLED, load_reference_video),
    summary="reference-kl unrolled in time as an AutoencoderKLHunyuanVideo: f=8, f_t=4, 4 channels, real pictures",
)
small_wan = replace(
    WanFamily().describe("small-wan", SMALL_WAN, load_small_wan),
    summary="small AutoencoderKLWan of seeded weights: streaming and its cache, no pictures",
)
MODELS.add(reference_video.name, reference_video)
MODELS.add(small_wan.name, small_wan)
