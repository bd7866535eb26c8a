"""AutoencoderKLHunyuanImageRefiner: HunyuanImage 2.1's refiner's, a video autoencoder for single pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from fidelity.models.hunyuan_video15 import HunyuanVideo15Family
from fidelity.records import Geometry, ReferencePolicy, Tiling
from fidelity.registry import FAMILIES


class HunyuanImageRefinerFamily(HunyuanVideo15Family):
    """HunyuanVideo 1.5's, but that a block that halves time keeps the frames and folds channels instead.

    The pipeline divides by scaling_factor, then regroups 64 channels of T / 2 frames into 32 of T (without the first).
    """

    name = "AutoencoderKLHunyuanImageRefiner"
    summary = "KL autoencoder of HunyuanImage 2.1's refiner: causal convolutions and attention, RMS norm"
    reference: ClassVar[ReferencePolicy] = "full"
    latent_tiles: ClassVar[tuple[str, ...]] = ()
    """It derives them from those of the sample."""

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """As many frames as latent frames, whatever temporal_compression_ratio says."""
        return msgspec.structs.replace(super().geometry(config), temporal=1)

    def set_tiling(self, module: Any, geometry: Geometry, tiling: Tiling) -> None:
        """Strides are arguments of `enable_tiling` that nothing reads; they are set to what the overlap makes them."""
        super().set_tiling(module, geometry, tiling)
        stride = int(tiling.tile * (1 - tiling.overlap)) * geometry.spatial
        module.tile_sample_stride_height = module.tile_sample_stride_width = stride

    def tiling_attributes(self) -> tuple[str, ...]:
        return (*super().tiling_attributes(), "tile_sample_stride_height", "tile_sample_stride_width")


FAMILIES.add(HunyuanImageRefinerFamily.name, HunyuanImageRefinerFamily())
