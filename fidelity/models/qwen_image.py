"""AutoencoderKLQwenImage: Wan 2.1's autoencoder as Qwen-Image trained it; pictures are videos of one frame."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fidelity.lazy import torch
from fidelity.models.base import whole, wholes
from fidelity.models.wan import MEAN, STD, WanFamily, compression
from fidelity.records import Geometry
from fidelity.registry import FAMILIES


class QwenImageFamily(WanFamily):
    """Streams and tiles as Wan does."""

    name = "AutoencoderKLQwenImage"
    summary = "KL autoencoder of Qwen-Image: causal convolutions, RMS norm, streams by frame"
    conv = "QwenImageCausalConv3d"
    defaults: ClassVar[Mapping[str, Any]] = {
        "z_dim": 16,
        "base_dim": 96,
        "dim_mult": (1, 2, 4, 4),
        "temperal_downsample": (False, True, True),
        "input_channels": 3,
        "latents_mean": MEAN,
        "latents_std": STD,
    }

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """f doubles with every block but the last, f_t with every temporal downsampling."""
        spatial, temporal = compression(config)
        return Geometry(
            spatial=spatial,
            temporal=temporal,
            latent_channels=whole(config, "z_dim"),
            sample_channels=whole(config, "input_channels"),
            video=True,
        )

    def landmarks(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        full = {**self.defaults, **config}
        width, channels, colours = (whole(full, key) for key in ("base_dim", "z_dim", "input_channels"))
        return {
            "encoder.conv_in.weight": (width, colours, 3, 3, 3),
            "post_quant_conv.weight": (channels, channels, 1, 1, 1),
            "decoder.conv_out.weight": (colours, width * wholes(full, "dim_mult")[0], 3, 3, 3),
        }

    def call(self, decoder: Any, x: torch.Tensor, *, first: bool, **cache: Any) -> torch.Tensor:
        return decoder(x, **cache)

    def finish(self, module: Any, sample: torch.Tensor) -> torch.Tensor:
        """The clamp to [-1, 1] that an untiled decode has; `tiled_decode` leaves it out (0.42.1)."""
        return sample.clamp(-1.0, 1.0)


FAMILIES.add(QwenImageFamily.name, QwenImageFamily())
