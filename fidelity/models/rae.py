"""AutoencoderRAE: a representation autoencoder; a vision transformer's tokens are the latents, of one size alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from math import isqrt
from typing import TYPE_CHECKING, Any, ClassVar

from fidelity.errors import ModelError
from fidelity.models.base import FamilyBase, whole
from fidelity.records import Geometry, Scaling
from fidelity.registry import FAMILIES

if TYPE_CHECKING:
    from torch import nn


class RAEFamily(FamilyBase):
    """It does not tile. `decode` itself takes latents as the denoiser gives them: mean, spread and factor are undone
    inside, so there is no scaling left to do. Images are in [0, 1]. Building one needs `transformers`."""

    name = "AutoencoderRAE"
    summary = "representation autoencoder: tokens of DINOv2, SigLIP2 or MAE as latents, a transformer as decoder"
    data_range = (0.0, 1.0)
    lacks = frozenset({"tiling"})
    ignored = ("decoder.decoder_pos_embed",)
    defaults: ClassVar[Mapping[str, Any]] = {
        "encoder_hidden_size": 768,
        "encoder_patch_size": 14,
        "encoder_input_size": 224,
        "decoder_hidden_size": 512,
        "decoder_intermediate_size": 2048,
        "patch_size": 16,
        "num_channels": 3,
    }

    def absent(self) -> str | None:
        """Its encoder is a class of `transformers`, which diffusers does not require."""
        if importlib.util.find_spec("transformers") is None:
            return f"{self.name} needs transformers, which is not installed: pip install transformers"
        return super().absent()

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """A token decodes to one patch. The grid of tokens is fixed: other sizes are resized to it in silence."""
        side, patch = whole(config, "encoder_input_size"), whole(config, "encoder_patch_size")
        if side % patch:
            raise ModelError(f"encoder_input_size is {side}, no multiple of encoder_patch_size {patch}")
        return Geometry(
            spatial=whole(config, "patch_size"),
            latent_channels=whole(config, "encoder_hidden_size"),
            sample_channels=whole(config, "num_channels"),
            size=(side // patch, side // patch),
        )

    def scaling(self, config: Mapping[str, Any], geometry: Geometry) -> Scaling:
        return Scaling()

    def landmarks(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        full = {**self.defaults, **config}
        width, pixels = whole(full, "decoder_hidden_size"), whole(full, "patch_size") ** 2 * whole(full, "num_channels")
        return {
            "decoder.decoder_embed.weight": (width, whole(full, "encoder_hidden_size")),
            "decoder.decoder_pred.weight": (pixels, width),
        }

    def call_shape(self, geometry: Geometry, shape: tuple[int, ...], named: Mapping[str, Any]) -> tuple[int, ...]:
        """The decoder takes tokens (B, h·w, C)."""
        batch, tokens, channels = shape
        return (batch, channels, isqrt(tokens), isqrt(tokens))

    def middle(self, module: Any) -> nn.Module:
        return module.decoder.decoder_layers[len(module.decoder.decoder_layers) // 2]


FAMILIES.add(RAEFamily.name, RAEFamily())
