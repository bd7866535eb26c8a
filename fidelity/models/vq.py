"""VQModel: Kandinsky's MoVQ, aMUSEd and Paella; each latent pixel is replaced by the nearest vector of a codebook."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fidelity.models.base import FamilyBase, whole, wholes
from fidelity.records import Geometry
from fidelity.registry import FAMILIES


class VQFamily(FamilyBase):
    """It neither tiles nor slices. `decode` quantizes first: in half precision a latent may fall to another vector."""

    name = "VQModel"
    summary = "vector-quantized autoencoder of Kandinsky and aMUSEd: a codebook before the decoder"
    lacks = frozenset({"slicing", "tiling", "group_offload"})
    defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 3,
        "out_channels": 3,
        "block_out_channels": (64,),
        "latent_channels": 3,
        "num_vq_embeddings": 256,
        "vq_embed_dim": None,
        "scaling_factor": 0.18215,
        "force_upcast": False,
    }

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """f doubles with every block but the last; the decoder takes vectors of the codebook's length."""
        own = "latent_channels" if config["vq_embed_dim"] is None else "vq_embed_dim"
        return Geometry(
            spatial=2 ** (len(wholes(config, "block_out_channels")) - 1),
            latent_channels=whole(config, own),
            sample_channels=whole(config, "out_channels"),
        )

    def landmarks(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        full = {**self.defaults, **config}
        widths, channels = wholes(full, "block_out_channels"), whole(full, "latent_channels")
        length = self.geometry(full).latent_channels
        return {
            "encoder.conv_in.weight": (widths[0], whole(full, "in_channels"), 3, 3),
            "quantize.embedding.weight": (whole(full, "num_vq_embeddings"), length),
            "post_quant_conv.weight": (channels, length, 1, 1),
            "decoder.conv_out.weight": (whole(full, "out_channels"), widths[0], 3, 3),
        }


FAMILIES.add(VQFamily.name, VQFamily())
