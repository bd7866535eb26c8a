"""AutoencoderKLWan: Wan 2.1 and 2.2 (patchified); a causal decoder that streams frame by frame with a cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, ClassVar

from fidelity.errors import ModelError
from fidelity.lazy import torch
from fidelity.models.base import whole, wholes
from fidelity.models.strided import StridedFamily
from fidelity.records import Geometry
from fidelity.registry import FAMILIES

MEAN = (-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
        0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921)  # fmt: skip
STD = (2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
       3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160)  # fmt: skip
"""What the class assumes for Wan 2.1's latents where a config does not say."""


class WanFamily(StridedFamily):
    """Tiles in space; in time it always streams, one latent frame a decoder call, which is exact."""

    name = "AutoencoderKLWan"
    summary = "KL autoencoder of Wan 2.1 and 2.2: causal convolutions, RMS norm, streams by frame"
    temporal_controls = "streams by frame"
    streams = True
    tiles_alike = True
    conv = "WanCausalConv3d"
    """The class of the convolutions that keep a cache, a place each."""
    defaults: ClassVar[Mapping[str, Any]] = {
        "z_dim": 16,
        "in_channels": 3,
        "out_channels": 3,
        "base_dim": 96,
        "decoder_base_dim": None,
        "dim_mult": (1, 2, 4, 4),
        "temperal_downsample": (False, True, True),
        "latents_mean": MEAN,
        "latents_std": STD,
        "patch_size": None,
        "scale_factor_spatial": 8,
        "scale_factor_temporal": 4,
    }

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """f doubles with every block but the last, times the patch; f_t with every temporal downsampling."""
        patch = 1 if config["patch_size"] is None else whole(config, "patch_size")
        halvings, temporal = compression(config)
        spatial = halvings * patch
        for key, derived in (("scale_factor_spatial", spatial), ("scale_factor_temporal", temporal)):
            if whole(config, key) != derived:
                raise ModelError(f"{key} is {config[key]}, but the blocks and patch give {derived}: tiles would be "
                                 "cut in the wrong unit")  # fmt: skip
        return Geometry(
            spatial=spatial,
            temporal=temporal,
            latent_channels=whole(config, "z_dim"),
            sample_channels=whole(config, "out_channels") // patch**2,
            video=True,
        )

    def landmarks(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        full = {**self.defaults, **config}
        width, channels = whole(full, "base_dim"), whole(full, "z_dim")
        own = width if full["decoder_base_dim"] is None else whole(full, "decoder_base_dim")
        return {
            "encoder.conv_in.weight": (width, whole(full, "in_channels"), 3, 3, 3),
            "post_quant_conv.weight": (channels, channels, 1, 1, 1),
            "decoder.conv_out.weight": (whole(full, "out_channels"), own * wholes(full, "dim_mult")[0], 3, 3, 3),
        }

    def call_frames(self, frames: int) -> tuple[int, ...]:
        return (1,) * frames

    def decode_alone(self, module: Any, latents: torch.Tensor) -> torch.Tensor:
        """All frames in one call, without the cache: what streaming must give. Patches are not yet taken apart.

        In half precision the last bit depends on how many frames a kernel sees (0.6 grey levels in emulated fp16), so
        there it streams, with a cache of its own.
        """
        x = module.post_quant_conv(latents)
        if latents.dtype == torch.float32:
            with _one_shot(module.decoder):
                return self.call(module.decoder, x, first=True)
        return torch.cat(list(self._streamed(module.decoder, x)), dim=2)

    def segments(self, module: Any, latents: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
        """`size` latent frames at a time, a decoder call each as the class has it; the 1×1×1 convolution before them
        sees all at once, as there."""
        frames = self._streamed(module.decoder, module.post_quant_conv(latents))
        while part := list(islice(frames, size)):
            yield self.finish(module, torch.cat(part, dim=2))

    def _streamed(self, decoder: Any, x: torch.Tensor) -> Iterator[torch.Tensor]:
        """What each latent frame gives, with a cache of its own that is carried from one to the next."""
        cache: list[Any] = [None] * sum(type(part).__name__ == self.conv for part in decoder.modules())
        for index, one in enumerate(x.split(1, dim=2)):
            yield self.call(decoder, one, first=not index, feat_cache=cache, feat_idx=[0])

    def call(self, decoder: Any, x: torch.Tensor, *, first: bool, **cache: Any) -> torch.Tensor:
        """The decoder on some frames, of which the first is the video's first or not."""
        return decoder(x, first_chunk=first, **cache)

    def finish(self, module: Any, sample: torch.Tensor) -> torch.Tensor:
        """Patches (B, C·p·p, T, H, W) to pixels, then the clamp to [-1, 1]."""
        patch = module.config.patch_size
        if patch is not None:
            batch, channels, frames, height, width = sample.shape
            apart = sample.reshape(batch, channels // patch**2, patch, patch, frames, height, width)
            whole_ = apart.permute(0, 1, 4, 5, 3, 6, 2)
            sample = whole_.reshape(batch, channels // patch**2, frames, height * patch, width * patch)
        return sample.clamp(-1.0, 1.0)


def compression(config: Mapping[str, Any]) -> tuple[int, int]:
    """In space and in time, of the blocks alone: all but the last halve, as `temperal_downsample` says in time as well.

    Raises ModelError.
    """
    halvings, blocks = config["temperal_downsample"], len(wholes(config, "dim_mult"))
    if not isinstance(halvings, (list, tuple)) or len(halvings) != blocks - 1:
        raise ModelError(f"temperal_downsample is {halvings!r}, expected {blocks - 1} of true or false")
    return 2 ** (blocks - 1), 2 ** sum(map(bool, halvings))


@contextmanager
def _one_shot(decoder: Any) -> Iterator[None]:
    """Upsampling in time for all frames at once: the class has it for its cache only."""
    changed = [part for part in decoder.modules() if getattr(part, "mode", None) == "upsample3d"]
    for part in changed:
        part.forward = partial(_upsample, part)
    try:
        yield
    finally:
        for part in changed:
            del part.forward


def _upsample(part: Any, x: torch.Tensor, feat_cache: None = None, feat_idx: Any = None) -> torch.Tensor:
    """The first frame stays one; each later one becomes two, by `time_conv` on what came before it."""
    first, later = x[:, :, :1], x[:, :, 1:]
    if later.shape[2]:
        batch, channels, frames, height, width = later.shape
        pairs = part.time_conv(later).reshape(batch, 2, channels, frames, height, width)
        later = pairs.permute(0, 2, 3, 1, 4, 5).reshape(batch, channels, 2 * frames, height, width)
    flat = torch.cat([first, later], dim=2).transpose(1, 2)
    done = part.resample(flat.flatten(0, 1))
    return done.unflatten(0, flat.shape[:2]).transpose(1, 2)


FAMILIES.add(WanFamily.name, WanFamily())
