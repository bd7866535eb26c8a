"""AutoencoderKL: Stable Diffusion 1, 2, XL and 3, FLUX.1 and their kin."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from fidelity.models.base import whole, wholes
from fidelity.models.overlap import OverlapFamily
from fidelity.records import Geometry
from fidelity.registry import FAMILIES

OLD_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
"""Names in weight files of old diffusers (Stable Diffusion 1's among them), which `from_pretrained` still maps."""


class KLFamily(OverlapFamily):
    """Tiles by a share of the tile (`tile_overlap_factor`), blended linearly, cropped tile by tile."""

    name = "AutoencoderKL"
    summary = "KL autoencoder of Stable Diffusion and FLUX.1: GroupNorm decoder, attention in the middle"
    tiles_alike = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 3,
        "out_channels": 3,
        "block_out_channels": (64,),
        "latent_channels": 4,
        "scaling_factor": 0.18215,
        "force_upcast": True,
    }

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """f doubles with every block but the last."""
        return Geometry(
            spatial=2 ** (len(wholes(config, "block_out_channels")) - 1),
            latent_channels=whole(config, "latent_channels"),
            sample_channels=whole(config, "out_channels"),
        )

    def landmarks(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        full = {**self.defaults, **config}
        widths, channels = wholes(full, "block_out_channels"), whole(full, "latent_channels")
        return {
            "encoder.conv_in.weight": (widths[0], whole(full, "in_channels"), 3, 3),
            "encoder.conv_out.weight": (2 * channels, widths[-1], 3, 3),
            "decoder.conv_in.weight": (widths[-1], channels, 3, 3),
            "decoder.conv_out.weight": (whole(full, "out_channels"), widths[0], 3, 3),
        }

    def rename(self, key: str) -> str:
        match = re.fullmatch(r"(.+\.attentions\.\d+\.)(query|key|value|proj_attn)(\.weight|\.bias)", key)
        return f"{match[1]}{OLD_ATTENTION[match[2]]}{match[3]}" if match else key


FAMILIES.add(KLFamily.name, KLFamily())
