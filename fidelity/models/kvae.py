"""AutoencoderKLKVAE: Kandinsky's KVAE of pictures; its norms are modulated by the latents at every scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from fidelity.models.base import whole, wholes
from fidelity.models.overlap import OverlapFamily
from fidelity.records import Geometry
from fidelity.registry import FAMILIES

if TYPE_CHECKING:
    from torch import nn


class KVAEFamily(OverlapFamily):
    """Tiles by a share of the tile, as AutoencoderKL. The config has no scaling."""

    name = "AutoencoderKLKVAE"
    summary = "KL autoencoder of Kandinsky (KVAE 2D): norms modulated by the latents, no attention"
    scratch = frozenset({"last_z_shape"})
    defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 3,
        "channels": 128,
        "z_channels": 16,
        "double_z": True,
        "ch_mult": (1, 2, 4, 8),
    }

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """f doubles with every level but the last; the sample has as many channels as the picture that went in."""
        return Geometry(
            spatial=2 ** (len(wholes(config, "ch_mult")) - 1),
            latent_channels=whole(config, "z_channels"),
            sample_channels=whole(config, "in_channels"),
        )

    def landmarks(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        full = {**self.defaults, **config}
        width, times, colours = whole(full, "channels"), wholes(full, "ch_mult"), whole(full, "in_channels")
        return {
            "encoder.conv_in.weight": (width, colours, 3, 3),
            "decoder.conv_in.weight": (width * times[-1], whole(full, "z_channels"), 3, 3),
            "decoder.conv_out.weight": (colours, width * times[0], 3, 3),
        }

    def middle(self, module: Any) -> nn.Module:
        return module.decoder.mid.block_2


FAMILIES.add(KVAEFamily.name, KVAEFamily())
