"""Tiling: FAULTS.md 7 to 11."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from tests.faults.record import TILED, Fault
from tests.faults.upstream import Rows, Tiler, method, plain_decode, tiler


def threshold(tiles: Callable[[Any, Tensor], bool]) -> Callable[..., Any]:
    """Injects another rule for when `_decode` tiles."""

    @method("_decode")
    def inject(original: Any, vae: Any, z: Tensor, return_dict: bool = True) -> Any:
        return vae.tiled_decode(z) if vae.use_tiling and tiles(vae, z) else plain_decode(vae, z)

    return inject


both_sides = threshold(lambda vae, z: min(z.shape[-2:]) > vae.tile_latent_min_size)
height_only = threshold(lambda vae, z: z.shape[-2] > vae.tile_latent_min_size)
width_only = threshold(lambda vae, z: z.shape[-1] > vae.tile_latent_min_size)
pixel_units = threshold(lambda vae, z: max(z.shape[-2:]) > vae.tile_sample_min_size)
stride = threshold(lambda vae, z: max(z.shape[-2:]) > vae.tile_latent_min_size * (1 - vae.tile_overlap_factor))


@method("_decode")
def unasked(original: Any, vae: Any, z: Tensor, return_dict: bool = True, tile: int = 16) -> Any:
    """A decode that tiles of its own accord when the picture is large."""
    if vae.use_tiling or max(z.shape[-2:]) <= tile:
        return original(vae, z, return_dict)
    kept = vae.tile_latent_min_size, vae.tile_sample_min_size
    try:
        vae.tile_latent_min_size, vae.tile_sample_min_size = tile, tile * 8
        return vae.tiled_decode(z)
    finally:
        vae.tile_latent_min_size, vae.tile_sample_min_size = kept


class HalfRatio(Tiler):
    """Crops by a compression of 4 where it is 8."""

    def limit(self) -> int:
        return super().limit() // 2


class DoubleRatio(Tiler):
    """Crops by a compression of 16 where it is 8: nothing is cropped."""

    def limit(self) -> int:
        return super().limit() * 2


class NoPostQuant(Tiler):
    """The tiled path lacks the post-quant convolution."""

    def decode(self, tile: Tensor) -> Tensor:
        return self.vae.decoder(tile)


class Clamped(Tiler):
    """One of the two paths clamps, the other does not."""

    def join(self, rows: Rows) -> Tensor:
        return super().join(rows).clamp(-1, 1)


class Scaled(Tiler):
    """Only the tiled path unscales once more."""

    def decode(self, tile: Tensor) -> Tensor:
        return super().decode(tile * self.gain)

    gain = 1.005


class SwappedChannels(Tiler):
    """Only the tiled path gives BGR."""

    def join(self, rows: Rows) -> Tensor:
        return super().join(rows).flip(1)


class Transposed(Tiler):
    """Tiles are joined column by column."""

    def crop(self, tile: Tensor, i: int, j: int) -> Tensor:
        return super().crop(tile, i, j).transpose(-1, -2)


class OneOffset(Tiler):
    """One tile is brighter."""

    def tile(self, z: Tensor, i: int, j: int) -> Tensor:
        own = super().tile(z, i, j)
        return own + self.levels / 127.5 if (i, j) == self.at else own

    levels, at = 2.0, (1, 1)


class OneGain(Tiler):
    """One tile has more contrast."""

    def tile(self, z: Tensor, i: int, j: int) -> Tensor:
        own = super().tile(z, i, j)
        return own * self.gain if (i, j) == self.at else own

    gain, at = 1.05, (1, 1)


class OwnMean(Tiler):
    """Each tile is brought to its own mean, in part."""

    def tile(self, z: Tensor, i: int, j: int) -> Tensor:
        own = super().tile(z, i, j)
        return own - self.share * own.mean((1, 2, 3), keepdim=True)

    share = 0.1


class OwnSpread(Tiler):
    """Each tile's contrast is normalised by its own spread."""

    def tile(self, z: Tensor, i: int, j: int) -> Tensor:
        own = super().tile(z, i, j)
        mean, spread = own.mean((1, 2, 3), keepdim=True), own.std((1, 2, 3), keepdim=True)
        return mean + (own - mean) * (0.5 / spread) ** self.share

    share = 0.2


class OneHue(Tiler):
    """One tile is redder and less blue."""

    def tile(self, z: Tensor, i: int, j: int) -> Tensor:
        own = super().tile(z, i, j)
        hue = torch.tensor([1.0, 0.0, -1.0], dtype=own.dtype).view(1, 3, 1, 1)
        return own + hue * (self.levels / 127.5) if (i, j) == self.at else own

    levels, at = 3.0, (1, 1)


class Reused(Tiler):
    """One output buffer for all tiles of a size: each shows the last one's content."""

    def decode(self, tile: Tensor) -> Tensor:
        own = super().decode(tile)
        buffers = self.__dict__.setdefault("buffers", {})
        return buffers.setdefault(own.shape, own).copy_(own)


class Canvas(Tiler):
    """Tiles are put together on a canvas of another dtype."""

    dtype = "float32"

    def join(self, rows: Rows) -> Tensor:
        return super().join([[tile.to(getattr(torch, self.dtype)) for tile in row] for row in rows])


class HalfBuffer(Canvas):
    """Tiles are kept in half precision until they are joined."""

    def join(self, rows: Rows) -> Tensor:
        return super().join(rows).to(rows[0][0].dtype)


class Broken(Tiler):
    """One tile overflows."""

    def tile(self, z: Tensor, i: int, j: int) -> Tensor:
        own = super().tile(z, i, j)
        return own / 0 if (i, j) == self.at else own

    at = (0, 1)


class Line(Tiler):
    """A line of a pixel at each tile's left border: a decoder's edge handling."""

    def join(self, rows: Rows) -> Tensor:
        for row in rows:
            for tile in row[1:]:
                tile[..., 0] += self.levels / 127.5
        return super().join(rows)

    levels = 1.0


@contextmanager
def frozen_statistics() -> Iterator[None]:
    """GroupNorm statistics of the first tile serve all (a tiler that shares statistics, and does it wrongly)."""
    from unittest.mock import patch

    kept: dict[int, tuple[Tensor, Tensor]] = {}
    tiling: list[bool] = []

    def forward(norm: Any, x: Tensor) -> Tensor:
        grouped = x.reshape(x.shape[0], norm.num_groups, -1)
        own = grouped.mean(-1, keepdim=True), grouped.var(-1, unbiased=False, keepdim=True)
        mean, variance = kept.setdefault(id(norm), own) if tiling else own
        normal = ((grouped - mean) / (variance + norm.eps).sqrt()).reshape(x.shape)
        shape = (1, -1, *(1,) * (x.ndim - 2))
        return normal * norm.weight.view(shape) + norm.bias.view(shape)

    original = AutoencoderKL.tiled_decode

    def tiled_decode(vae: Any, z: Tensor, return_dict: bool = True) -> Any:
        kept.clear()
        tiling.append(True)
        try:
            return original(vae, z, return_dict)
        finally:
            tiling.clear()

    with (
        patch.object(torch.nn.GroupNorm, "forward", forward),
        patch.object(AutoencoderKL, "tiled_decode", tiled_decode),
    ):
        yield


HALVES = ("bf16,tile=16,overlap=0.25", "fp16,tile=16,overlap=0.25")
FAULTS = (
    Fault("tiles only if both sides are large", "7", both_sides, ("not_engaged",), TILED[:3], ("wide", "tall")),
    Fault("threshold looks at the height only", "7", height_only, ("not_engaged",), TILED[:3], ("wide",)),
    Fault("threshold looks at the width only", "7", width_only, ("not_engaged",), TILED[:3], ("tall",)),
    Fault("threshold in sample pixels", "7", pixel_units, ("not_engaged",), TILED[:3]),
    Fault("threshold is the stride", "7", stride, ("geometry", "not_engaged"), TILED[:2], ("small",)),
    Fault(
        "tiles unasked", "7+", unasked, ("geometry", "seam", "periodic"), ("fp32", "bf16"), amounts={"tile": (12, 16)}
    ),
    Fault("half the compression", "8", tiler(HalfRatio), ("geometry",), TILED[:3]),
    Fault("double the compression", "8", tiler(DoubleRatio), ("geometry",), TILED[:3]),
    Fault("no post-quant convolution in tiles", "9", tiler(NoPostQuant), ("not_as_specified", "scale", "shift"), TILED),
    Fault("clamp in tiles only", "9", tiler(Clamped), ("clipping",), TILED),
    Fault("unscaled again in tiles only", "9", tiler(Scaled), ("scale",), TILED[:3], amounts={"gain": (1.005, 1.3)}),
    Fault("channels swapped in tiles only", "9", tiler(SwappedChannels), ("order",), TILED[:3]),
    Fault("one tile brighter", "10", tiler(OneOffset), ("tone_drift",), TILED[:3], amounts={"levels": (1.0, 2.0, 4.0)}),
    Fault(
        "one tile of other contrast", "10", tiler(OneGain), ("tone_drift",), TILED[:3], amounts={"gain": (1.03, 1.1)}
    ),
    Fault(
        "each tile to its own mean", "10", tiler(OwnMean), ("tone_drift",), TILED[:3], amounts={"share": (0.05, 0.2)}
    ),
    Fault(
        "each tile to its own spread", "10", tiler(OwnSpread), ("tone_drift",), TILED[:3], amounts={"share": (0.1, 0.3)}
    ),
    Fault("one tile of another hue", "10+", tiler(OneHue), ("chroma",), TILED[:3], amounts={"levels": (2.0, 4.0)}),
    Fault("frozen statistics", "10+", frozen_statistics, ("tone_drift",), TILED),
    Fault("output buffer reused", "11", tiler(Reused), ("geometry",), TILED[:3]),
    Fault("canvas of another dtype", "11", tiler(Canvas), ("dtype",), HALVES),
    Fault(
        "tiles kept in half precision",
        "11",
        tiler(HalfBuffer),
        ("dtype",),
        ("tile=16,overlap=0.25",),
        amounts={"dtype": ("float16", "bfloat16")},
    ),
    Fault("one tile not finite", "11+", tiler(Broken), ("non_finite",), TILED[:3]),
    Fault("tiles joined transposed", "6+", tiler(Transposed), ("geometry", "crash"), TILED[:2]),
    Fault("a line at each tile", "3+", tiler(Line), ("seam",), TILED[:3], amounts={"levels": (1.0, 4.0)}),
)
