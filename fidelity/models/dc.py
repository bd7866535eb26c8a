"""AutoencoderDC: the deep compression autoencoder of Sana, f=32 and more; linear attention over the whole picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fidelity.errors import ModelError
from fidelity.models.base import whole, wholes
from fidelity.models.strided import StridedFamily
from fidelity.records import Geometry, Tiling
from fidelity.registry import FAMILIES


class DCFamily(StridedFamily):
    """Tiles by tile and stride; the threshold is a pair of attributes of its own, in latent pixels."""

    name = "AutoencoderDC"
    summary = "deep compression autoencoder of Sana: residual sampling, linear attention over the whole picture"
    defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 3,
        "latent_channels": 32,
        "encoder_block_out_channels": (128, 256, 512, 512, 1024, 1024),
        "decoder_block_out_channels": (128, 256, 512, 512, 1024, 1024),
        "scaling_factor": 1.0,
    }

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """f doubles with every block but the last, in encoder and decoder alike."""
        blocks, own = (len(wholes(config, f"{part}_block_out_channels")) for part in ("encoder", "decoder"))
        if blocks != own:
            raise ModelError(f"encoder_block_out_channels has {blocks} blocks, decoder_block_out_channels {own}: the "
                             "sample would be of another size")  # fmt: skip
        return Geometry(
            spatial=2 ** (blocks - 1),
            latent_channels=whole(config, "latent_channels"),
            sample_channels=whole(config, "in_channels"),
        )

    def landmarks(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        full = {**self.defaults, **config}
        channels = whole(full, "latent_channels")
        return {
            "encoder.conv_out.weight": (channels, wholes(full, "encoder_block_out_channels")[-1], 3, 3),
            "decoder.conv_in.weight": (wholes(full, "decoder_block_out_channels")[-1], channels, 3, 3),
        }

    def set_tiling(self, module: Any, geometry: Any, tiling: Tiling) -> None:
        super().set_tiling(module, geometry, tiling)
        module.tile_latent_min_height = module.tile_latent_min_width = tiling.tile

    def tiling_attributes(self) -> tuple[str, ...]:
        return (*super().tiling_attributes(), "tile_latent_min_height", "tile_latent_min_width")

    def middle(self, module: Any) -> Any:
        return module.decoder.up_blocks[len(module.decoder.up_blocks) // 2]


FAMILIES.add(DCFamily.name, DCFamily())
