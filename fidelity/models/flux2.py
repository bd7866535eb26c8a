"""AutoencoderKLFlux2: FLUX.2's autoencoder, 32 channels; like AutoencoderKL but for how its latents are normalised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fidelity.errors import ModelError
from fidelity.models.base import whole, wholes
from fidelity.models.kl import KLFamily
from fidelity.records import Geometry
from fidelity.registry import FAMILIES


class Flux2Family(KLFamily):
    """Tiles as AutoencoderKL.

    The pipelines normalise latents packed by 2×2 with `bn`, a batch norm whose running mean and variance are weights:
    the config has no scaling, so the denoiser's units are those that the decoder takes.
    """

    name = "AutoencoderKLFlux2"
    summary = "KL autoencoder of FLUX.2: GroupNorm decoder, attention in the middle, statistics of the latents in `bn`"
    defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 3,
        "out_channels": 3,
        "block_out_channels": (128, 256, 512, 512),
        "decoder_block_out_channels": None,
        "latent_channels": 32,
        "patch_size": (2, 2),
    }

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """f doubles with every block but the last, in encoder and decoder alike."""
        geometry = super().geometry(config)
        widths = config["decoder_block_out_channels"]
        if widths is not None and 2 ** (len(wholes(config, "decoder_block_out_channels")) - 1) != geometry.spatial:
            raise ModelError(f"decoder_block_out_channels has {len(widths)} blocks, block_out_channels "
                             f"{len(config['block_out_channels'])}: the sample would be of another size")  # fmt: skip
        return geometry

    def landmarks(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        full = {**self.defaults, **config}
        own = wholes(full, "decoder_block_out_channels" if full["decoder_block_out_channels"] else "block_out_channels")
        rows, cols = wholes(full, "patch_size")
        channels = whole(full, "latent_channels")
        return {
            **super().landmarks(config),
            "decoder.conv_in.weight": (own[-1], channels, 3, 3),
            "decoder.conv_out.weight": (whole(full, "out_channels"), own[0], 3, 3),
            "bn.running_mean": (rows * cols * channels,),
        }


FAMILIES.add(Flux2Family.name, Flux2Family())
