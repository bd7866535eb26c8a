"""AutoencoderKLQwenImage21: Wan 2.2's residual autoencoder for single pictures, with alpha as a fourth channel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from fidelity.lazy import torch
from fidelity.models.base import whole, wholes
from fidelity.models.wan import WanFamily
from fidelity.records import Geometry
from fidelity.registry import FAMILIES

MEAN = (0.5126, 0.7721, -0.0631, 1.3506, -0.7855, -2.1025, -0.3458, 1.3722, 1.8873, -1.7177, -0.6510, 0.2732,
        0.7562, -0.6163, -1.0277, 3.8363, 2.0210, 0.0472, 0.9320, 2.0087, 2.4954, -0.1391, -1.4249, 1.8464,
        -0.5236, 1.2826, 3.7046, -1.3035, 2.7286, -1.4518, -1.9036, -1.9955, -0.0342, -1.0265, -0.7636, 3.0555,
        0.0746, -3.0751, -0.1076, 1.7376, -1.0914, -1.9435, -0.2784, -1.3680, 0.4809, -0.4433, 0.3764, 0.5729,
        -2.0595, 1.0960, -1.3260, -2.0211, -5.0179, 0.5275, 4.0162, 1.8505, 0.3026, 1.9373, 1.4937, 0.2632,
        0.5547, -1.7121, -0.1562, 0.0304)  # fmt: skip
STD = (3.2001, 3.2936, 3.4321, 3.0091, 3.1061, 4.0379, 4.0705, 3.7910, 3.0785, 3.6500, 3.9308, 3.0904,
        2.8778, 3.7675, 3.7320, 5.0756, 3.2864, 4.0397, 3.1317, 4.0443, 2.9249, 3.9454, 3.0988, 4.2489,
        3.4896, 3.8513, 3.9323, 3.4719, 3.7498, 4.2830, 3.5694, 4.2467, 3.9037, 3.2947, 5.0770, 3.5075,
        3.2700, 3.4767, 2.8063, 5.1125, 3.5327, 4.7833, 3.1286, 4.1819, 3.8527, 3.8312, 3.5605, 4.3875,
        3.9624, 4.0168, 3.5643, 4.0550, 5.5614, 4.2963, 4.4080, 3.4959, 3.8747, 3.7608, 3.5735, 3.1490,
        3.7662, 3.6746, 3.4563, 3.8161)  # fmt: skip


class QwenImage21Family(WanFamily):
    """The class takes (B, C, 1, H, W) and refuses more frames, as its convolutions are 2-D: here they are pictures.

    Its temporal compression is a key of the config that no decode uses.
    """

    name = "AutoencoderKLQwenImage21"
    summary = "KL autoencoder of Qwen-Image 2.1: 2-D convolutions, RMS norm, RGBA"
    temporal_controls = "none"
    defaults: ClassVar[Mapping[str, Any]] = {
        "z_dim": 64,
        "in_channels": 4,
        "out_channels": 4,
        "base_dim": 96,
        "decoder_base_dim": 144,
        "dim_mult": (1, 2, 4, 8, 8),
        "temperal_downsample": (False, True, True, True),
        "latents_mean": MEAN,
        "latents_std": STD,
        "patch_size": None,
        "scale_factor_spatial": 16,
        "scale_factor_temporal": 8,
    }

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        return msgspec.structs.replace(super().geometry(config), temporal=1, video=False)

    def landmarks(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        full = {**self.defaults, **config}
        width, channels = whole(full, "base_dim"), whole(full, "z_dim")
        own = width if full["decoder_base_dim"] is None else whole(full, "decoder_base_dim")
        return {
            "encoder.conv_in.weight": (width, whole(full, "in_channels"), 3, 3),
            "post_quant_conv.weight": (channels, channels, 1, 1),
            "decoder.conv_out.weight": (whole(full, "out_channels"), own * wholes(full, "dim_mult")[0], 3, 3),
        }

    def encode(self, module: Any, image: torch.Tensor) -> torch.Tensor:
        """As the pipeline does: one frame, opaque where the model has alpha and the image has not."""
        missing = module.config.in_channels // (module.config.patch_size or 1) ** 2 - image.shape[1]
        opaque = torch.ones_like(image[:, :1]).expand(-1, missing, -1, -1)
        return super().encode(module, torch.cat([image, opaque], dim=1).unsqueeze(2)).squeeze(2)

    def decode(self, module: Any, latents: torch.Tensor) -> torch.Tensor:
        return super().decode(module, latents.unsqueeze(2)).squeeze(2)

    def decode_alone(self, module: Any, latents: torch.Tensor) -> torch.Tensor:
        return self.call(module.decoder, module.post_quant_conv(latents.unsqueeze(2)), first=True)

    def finish(self, module: Any, sample: torch.Tensor) -> torch.Tensor:
        return super().finish(module, sample).squeeze(2)


FAMILIES.add(QwenImage21Family.name, QwenImage21Family())
