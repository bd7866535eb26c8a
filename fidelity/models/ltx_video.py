"""AutoencoderKLLTXVideo: LTX-Video's f32 autoencoder; its later decoders denoise, told how noisy the latents are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from fidelity.errors import ModelError
from fidelity.lazy import torch
from fidelity.models.base import _first, whole, wholes
from fidelity.models.strided import FramewiseFamily
from fidelity.records import Geometry
from fidelity.registry import FAMILIES

TIMESTEP = 0.05
"""`decode_timestep` of the published examples of timestep-conditioned decoders (diffusers' docs of LTX-Video)."""


class LTXVideoFamily(FramewiseFamily):
    """Chunks in time as the class documents them; in 0.42.1 it drops the wrong frame of each.

    The latents' mean and std are buffers among the weights (`latents_mean`, `latents_std`), so a config has only the
    factor.
    """

    name = "AutoencoderKLLTXVideo"
    summary = "KL autoencoder of LTX-Video: f32, RMS norm, the last denoising step in the decoder"
    defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 128,
        "block_out_channels": (128, 256, 512, 512),
        "decoder_block_out_channels": (128, 256, 512, 512),
        "spatio_temporal_scaling": (True, True, True, False),
        "decoder_spatio_temporal_scaling": (True, True, True, False),
        "upsample_factor": (1, 1, 1, 1),
        "patch_size": 4,
        "patch_size_t": 1,
        "scaling_factor": 1.0,
        "spatial_compression_ratio": None,
        "temporal_compression_ratio": None,
    }

    def strides(self, config: Mapping[str, Any]) -> list[tuple[bool, bool]]:
        """Of each up block of the decoder, whether it doubles in space and in time."""
        return [(each, each) for each in flags(config, "decoder_spatio_temporal_scaling")]

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """What the decoder's blocks and its patches give; the ratios that the class cuts tiles by must be the same."""
        strides, encoder = self.strides(config), sum(flags(config, "spatio_temporal_scaling"))
        sizes = {}
        for axis, key, doublings in zip(("spatial", "temporal"), ("patch_size", "patch_size_t"), zip(*strides)):
            patch, ratio = whole(config, key), f"{axis}_compression_ratio"
            sizes[axis] = patch * 2 ** sum(doublings)
            assumed = patch * 2**encoder if config[ratio] is None else whole(config, ratio)
            if assumed != sizes[axis]:
                raise ModelError(f"{ratio} is {assumed}, but the decoder's blocks and patch give {sizes[axis]}: tiles "
                                 "would be cut in the wrong unit")  # fmt: skip
        return Geometry(
            spatial=sizes["spatial"],
            temporal=sizes["temporal"],
            latent_channels=whole(config, "latent_channels"),
            sample_channels=whole(config, "out_channels"),
            video=True,
        )

    def landmarks(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        full = {**self.defaults, **config}
        patch, channels = whole(full, "patch_size") ** 2, whole(full, "latent_channels")
        widths, own = wholes(full, "block_out_channels"), wholes(full, "decoder_block_out_channels")
        last = own[0] // wholes(full, "upsample_factor")[0]
        return {
            "encoder.conv_in.conv.weight": (widths[0], whole(full, "in_channels") * patch, 3, 3, 3),
            "decoder.conv_in.conv.weight": (own[-1], channels, 3, 3, 3),
            "decoder.conv_out.conv.weight": (whole(full, "out_channels") * patch, last, 3, 3, 3),
        }

    def decode(self, module: Any, latents: torch.Tensor) -> torch.Tensor:
        """As the pipeline does, a timestep for each item where the decoder takes one.

        What noise the decoder injects of its own is drawn from a fixed seed, anew in each call.
        """
        timestep = None
        if module.config.timestep_conditioning:
            timestep = torch.full((latents.shape[0],), TIMESTEP, device=latents.device, dtype=latents.dtype)
        with seeded_noise(latents):
            return _first(module.decode(latents, timestep), ("sample",))


def flags(config: Mapping[str, Any], key: str) -> list[bool]:
    """A list of true and false. Raises ModelError."""
    value = config[key]
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(each, bool) for each in value):
        raise ModelError(f"{key} is {value!r}, expected a list of true and false")
    return list(value)


@contextmanager
def seeded_noise(latents: torch.Tensor) -> Iterator[None]:
    """The generators that a decode draws from by default, seeded for its time, then as they were."""
    devices = [latents.device] if latents.device.type == "cuda" and torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        yield


FAMILIES.add(LTXVideoFamily.name, LTXVideoFamily())
