"""AsymmetricAutoencoderKL: Stable Diffusion's autoencoder with a larger decoder, which can keep pixels of an image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fidelity.errors import ModelError
from fidelity.models.base import FamilyBase, whole, wholes
from fidelity.records import Geometry
from fidelity.registry import FAMILIES


class AsymmetricFamily(FamilyBase):
    """It neither tiles nor slices. Decoded here without image and mask, as every pipeline but inpainting does."""

    name = "AsymmetricAutoencoderKL"
    summary = "KL autoencoder with a larger decoder, for inpainting; neither tiles nor slices"
    lacks = frozenset({"slicing", "tiling"})
    defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 3,
        "out_channels": 3,
        "down_block_out_channels": (64,),
        "up_block_out_channels": (64,),
        "latent_channels": 4,
        "scaling_factor": 0.18215,
    }

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """f doubles with every block but the last, in encoder and decoder alike."""
        downs, ups = (len(wholes(config, f"{way}_block_out_channels")) for way in ("down", "up"))
        if downs != ups:
            raise ModelError(f"down_block_out_channels has {downs} blocks, up_block_out_channels {ups}: the sample "
                             "would be of another size")  # fmt: skip
        return Geometry(
            spatial=2 ** (ups - 1),
            latent_channels=whole(config, "latent_channels"),
            sample_channels=whole(config, "out_channels"),
        )

    def landmarks(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        full = {**self.defaults, **config}
        down, up = wholes(full, "down_block_out_channels"), wholes(full, "up_block_out_channels")
        return {
            "encoder.conv_in.weight": (down[0], whole(full, "in_channels"), 3, 3),
            "decoder.conv_in.weight": (up[-1], whole(full, "latent_channels"), 3, 3),
            "decoder.conv_out.weight": (whole(full, "out_channels"), up[0], 3, 3),
        }


FAMILIES.add(AsymmetricFamily.name, AsymmetricFamily())
