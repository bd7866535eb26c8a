"""Videos: FAULTS.md 26 to 30 and 32.

HunyuanVideo's `_temporal_tiled_decode` is taken apart, so that a fault replaces a line; Wan's cache is spoiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from diffusers import AutoencoderKLHunyuanVideo, AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanResample
from diffusers.models.autoencoders.vae import DecoderOutput
from torch import Tensor

from tests.faults.record import Fault
from tests.faults.upstream import method

CUT = ("temporal_tile=4,temporal_overlap=0.5", "bf16,temporal_tile=4,temporal_overlap=0.5")
ABUTTING = ("temporal_tile=3,temporal_overlap=0.0", "slicing,temporal_tile=3,temporal_overlap=0.0")
LONG = ("temporal_tile=4,temporal_overlap=0.25", "bf16,temporal_tile=4,temporal_overlap=0.25")
STREAMED = ("fp32", "bf16", "tile=6,overlap=0.5")


class Chunker:
    """`_temporal_tiled_decode` in steps, without spatial tiles. `i` counts chunks."""

    def __init__(self, vae: Any, frames: int, **amounts: Any):
        self.vae, self.frames = vae, frames
        for name, value in amounts.items():
            setattr(self, name, value)
        ratio = vae.temporal_compression_ratio
        self.tile = vae.tile_sample_min_num_frames // ratio
        self.stride = vae.tile_sample_stride_num_frames // ratio

    def extent(self) -> int:
        return self.vae.tile_sample_min_num_frames - self.vae.tile_sample_stride_num_frames

    def starts(self) -> list[int]:
        return list(range(0, self.frames, self.stride))

    def chunk(self, z: Tensor, i: int) -> Tensor:
        start = self.starts()[i]
        return self.vae.decoder(self.vae.post_quant_conv(z[:, :, start : start + self.tile + 1]))

    def drop(self, decoded: Tensor, i: int) -> Tensor:
        return decoded[:, :, 1:] if i else decoded

    def blend(self, before: Tensor, after: Tensor) -> Tensor:
        return self.vae.blend_t(before, after, self.extent())

    def join(self, row: list[Tensor], shown: int) -> Tensor:
        return torch.cat([tile[:, :, : shown + (i == 0)] for i, tile in enumerate(row)], dim=2)

    def __call__(self, z: Tensor) -> Tensor:
        row = [self.drop(self.chunk(z, i), i) for i in range(len(self.starts()))]
        for i in range(1, len(row)):
            row[i] = self.blend(row[i - 1], row[i])
        whole = (self.frames - 1) * self.vae.temporal_compression_ratio + 1
        return self.join(row, self.vae.tile_sample_stride_num_frames)[:, :, :whole]


def chunker(kind: type[Chunker]) -> Callable[..., Any]:
    """Injects a Chunker in place of `_temporal_tiled_decode`."""

    @contextmanager
    def inject(**amounts: Any) -> Iterator[None]:
        def decode(vae: Any, z: Tensor, return_dict: bool = True) -> Any:
            sample = kind(vae, z.shape[2], **amounts)(z)
            return DecoderOutput(sample=sample) if return_dict else (sample,)

        with patch.object(AutoencoderKLHunyuanVideo, "_temporal_tiled_decode", decode):
            yield

    return inject


class Floored(Chunker):
    """#9569: the number of chunks is a floored quotient, and what is left of the video goes."""

    def starts(self) -> list[int]:
        return super().starts()[: max(1, self.frames // self.tile)]


class LatentExtent(Chunker):
    """The blend's length in latent frames, used on sample frames."""

    def extent(self) -> int:
        return super().extent() // self.vae.temporal_compression_ratio


class Unblended(Chunker):
    def blend(self, before: Tensor, after: Tensor) -> Tensor:
        return after


class BackwardRamp(Chunker):
    def blend(self, before: Tensor, after: Tensor) -> Tensor:
        extent = min(before.shape[2], after.shape[2], self.extent())
        for x in range(extent):
            late = 1 - x / extent
            after[:, :, x] = before[:, :, -extent + x] * (1 - late) + after[:, :, x] * late
        return after


class NeighbourHead(Chunker):
    """Blended with the first frames of the chunk before in place of its last: a ghost of what was."""

    def blend(self, before: Tensor, after: Tensor) -> Tensor:
        return super().blend(before[:, :, : self.extent()], after)


class LastDropped(Chunker):
    """At each joint the last frame goes in place of the first: the count is right, the content late by one."""

    def drop(self, decoded: Tensor, i: int) -> Tensor:
        return decoded[:, :, :-1] if i else decoded


class NothingDropped(Chunker):
    """No frame goes at the joints, and the end of the video is cut to the right count."""

    def drop(self, decoded: Tensor, i: int) -> Tensor:
        return decoded


class Dimmed(Chunker):
    """Every second chunk is lighter, as by statistics of its own: brightness that jumps at each chunk."""

    by: float

    def chunk(self, z: Tensor, i: int) -> Tensor:
        return super().chunk(z, i) + (self.by / 127.5 if i % 2 else 0.0)


class Frozen(Chunker):
    """The last frames of the video stand still."""

    def __call__(self, z: Tensor) -> Tensor:
        sample = super().__call__(z)
        sample[:, :, -4:] = sample[:, :, -5:-4]
        return sample


@method("clear_cache", AutoencoderKLWan)
def never_cleared(original: Any, vae: Any) -> None:
    """#9524: the cache of one decode is there for the next."""
    if not hasattr(vae, "_feat_map"):
        original(vae)
    vae._conv_idx, vae._enc_conv_idx = [0], [0]


@contextmanager
def first_frames_of_another() -> Iterator[None]:
    """The first convolution's cache outlives a decode: of the clip, the item or the tile before."""
    left: list[Tensor] = []
    clear, decode = AutoencoderKLWan.clear_cache, AutoencoderKLWan._decode

    def clear_cache(vae: Any) -> None:
        clear(vae)
        if left and getattr(vae, "_wanted", None) == (left[0].shape[0], *left[0].shape[-2:]):
            vae._feat_map[0] = left[0]

    def _decode(vae: Any, z: Tensor, return_dict: bool = True) -> Any:
        vae.__dict__["_wanted"] = (z.shape[0], *z.shape[-2:])
        try:
            return decode(vae, z, return_dict=return_dict)
        finally:
            left[:] = [vae.post_quant_conv(z)[:, :, -2:]]
            del vae.__dict__["_wanted"]

    with ExitStack() as stack:
        stack.enter_context(patch.object(AutoencoderKLWan, "clear_cache", clear_cache))
        stack.enter_context(patch.object(AutoencoderKLWan, "_decode", _decode))
        yield


@method("forward", WanResample)
def first_frame_doubled(original: Any, part: Any, x: Tensor, feat_cache: Any = None, feat_idx: Any = None) -> Tensor:
    """The first chunk upsampled in time like the others: 4T frames in place of 4(T − 1) + 1."""
    if part.mode == "upsample3d" and feat_cache is not None and feat_cache[feat_idx[0]] is None:
        feat_cache[feat_idx[0]] = "Rep"
    return original(part, x, feat_cache, feat_idx)


@contextmanager
def cache_copied() -> Iterator[None]:
    """#12523: hooks that move arguments to the device hand on copies of the lists among them."""
    with patch.object(AutoencoderKLWan, "_skip_keys", None):
        yield


PAN, FILM = ("cat-pan",), ("film",)
VIDEO = "reference-video"
FAULTS = (
    Fault("causal cache not cleared", "26", never_cleared, ("state_leak", "nondeterministic", "crash"),
          STREAMED, FILM, model="small-wan"),
    Fault("causal cache of another clip", "26", first_frames_of_another,
          ("state_leak", "nondeterministic", "not_as_specified"), ("fp32", "fp32,slicing", "bf16,slicing"), FILM,
          model="small-wan"),
    Fault("number of chunks floored", "27", chunker(Floored), ("geometry",), LONG, ("cat-pan-5",), model=VIDEO),
    Fault("temporal blend in latent frames", "28", chunker(LatentExtent), ("temporal_seam", "ghost"), CUT, PAN,
          model=VIDEO),
    Fault("temporal blend missing", "28", chunker(Unblended), ("temporal_seam", "ghost"), (*CUT, *LONG), PAN,
          model=VIDEO),
    Fault("temporal blend reversed", "28+", chunker(BackwardRamp), ("temporal_seam", "ghost"), CUT, PAN, model=VIDEO),
    Fault("temporal blend with the neighbour's head", "28+", chunker(NeighbourHead), ("ghost", "temporal_seam"), LONG,
          PAN, model=VIDEO),
    Fault("wrong frame dropped at each joint", "29", chunker(LastDropped), ("misaligned",), ABUTTING, PAN, model=VIDEO),
    Fault("no frame dropped at the joints", "29+", chunker(NothingDropped), ("misaligned",), ABUTTING, PAN,
          model=VIDEO),
    Fault("chunks of another brightness", "28+", chunker(Dimmed), ("temporal_seam", "tone_drift"),
          (*CUT[:1], *ABUTTING[:1]), PAN, {"by": (2.0, 6.0)}, VIDEO),
    Fault("last frames frozen", "29+", chunker(Frozen), ("misaligned", "ghost"), (*CUT[:1], *ABUTTING[:1]), PAN,
          model=VIDEO),
    Fault("first-chunk rule not applied", "30", first_frame_doubled, ("geometry",), STREAMED, FILM, model="small-wan"),
    Fault("hooks copy the temporal cache", "32", cache_copied, ("geometry", "crash"),
          ("fp32,group_block", "bf16,group_block", "bf16,slicing,group_block"), FILM, model="small-wan"),
)  # fmt: skip
