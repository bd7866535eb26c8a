"""Overlap and blend: FAULTS.md 1 to 6."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tests.faults.record import Fault
from tests.faults.upstream import Rows, Tiler, tiler

SHORT = ("face-short", "cat-short")
OVERLAPPED = ("tile=16,overlap=0.25", "tile=16,overlap=0.5", "bf16,tile=16,overlap=0.25", "tile=20,overlap=0.25")


class NominalLoop(Tiler):
    """#2660: loops to the nominal extent although the last tile is narrower."""

    def blend_v(self, a: Tensor, b: Tensor, blend_extent: int) -> Tensor:
        for y in range(blend_extent):
            b[:, :, y, :] = a[:, :, -blend_extent + y, :] * (1 - y / blend_extent) + b[:, :, y, :] * (y / blend_extent)
        return b

    def blend_h(self, a: Tensor, b: Tensor, blend_extent: int) -> Tensor:
        for x in range(blend_extent):
            b[:, :, :, x] = a[:, :, :, -blend_extent + x] * (1 - x / blend_extent) + b[:, :, :, x] * (x / blend_extent)
        return b


class NominalRamp(Tiler):
    """#3384: the loop is shortened; offset and ramp still use the nominal extent."""

    def blend_v(self, a: Tensor, b: Tensor, blend_extent: int) -> Tensor:
        for y in range(min(a.shape[2], b.shape[2], blend_extent)):
            b[:, :, y, :] = a[:, :, -blend_extent + y, :] * (1 - y / blend_extent) + b[:, :, y, :] * (y / blend_extent)
        return b

    def blend_h(self, a: Tensor, b: Tensor, blend_extent: int) -> Tensor:
        for x in range(min(a.shape[3], b.shape[3], blend_extent)):
            b[:, :, :, x] = a[:, :, :, -blend_extent + x] * (1 - x / blend_extent) + b[:, :, :, x] * (x / blend_extent)
        return b


class Ramp(Tiler):
    """Blends by `early` and `late`, the weights of a and b at y / extent."""

    def early(self, share: float) -> float:
        return 1 - share

    def late(self, share: float) -> float:
        return share

    def source(self, a: Tensor, extent: int, y: int) -> Tensor:
        return a[:, :, -extent + y, :]

    def blend_v(self, a: Tensor, b: Tensor, blend_extent: int) -> Tensor:
        blend_extent = min(a.shape[2], b.shape[2], blend_extent)
        for y in range(blend_extent):
            share = y / blend_extent
            b[:, :, y, :] = self.source(a, blend_extent, y) * self.early(share) + b[:, :, y, :] * self.late(share)
        return b

    def blend_h(self, a: Tensor, b: Tensor, blend_extent: int) -> Tensor:
        return self.blend_v(a.transpose(-1, -2), b.transpose(-1, -2), blend_extent).transpose(-1, -2)


class Reversed(Ramp):
    def early(self, share: float) -> float:
        return share

    def late(self, share: float) -> float:
        return 1 - share


class Unfinished(Ramp):
    """A ramp that never reaches 1."""

    reach = 0.5

    def early(self, share: float) -> float:
        return 1 - self.reach * share

    def late(self, share: float) -> float:
        return self.reach * share


class EqualPower(Ramp):
    """Weights for power, which do not add up to 1."""

    def early(self, share: float) -> float:
        return (1 - share) ** 0.5

    def late(self, share: float) -> float:
        return share**0.5


class HeadOfNeighbour(Ramp):
    """The blend takes the beginning of the neighbour instead of its end."""

    def source(self, a: Tensor, extent: int, y: int) -> Tensor:
        return a[:, :, y, :]


class LateByOne(Ramp):
    """The neighbour's end taken one pixel further in."""

    def source(self, a: Tensor, extent: int, y: int) -> Tensor:
        return a[:, :, max(-extent + y - self.by, -a.shape[2]), :]

    by = 1


class LatentUnits(Tiler):
    """The blend's extent in latent pixels where sample pixels are meant."""

    def extent(self) -> int:
        return int(self.vae.tile_latent_min_size * self.vae.tile_overlap_factor)


class NoBlend(Tiler):
    def mix(self, rows: Rows, i: int, j: int) -> Tensor:
        return rows[i][j]


class OneAxis(Tiler):
    """Rows are blended, columns are not."""

    def blend_h(self, a: Tensor, b: Tensor, blend_extent: int) -> Tensor:
        return b


class CornerUnblended(Tiler):
    """The tile above is taken before it was blended into its own left neighbour: four tiles meet on one axis only."""

    def mix(self, rows: Rows, i: int, j: int) -> Tensor:
        if not hasattr(self, "raw"):
            self.raw = [[tile.clone() for tile in row] for row in rows]
        tile = rows[i][j]
        if i > 0:
            tile = self.blend_v(self.raw[i - 1][j], tile, self.extent())
        if j > 0:
            tile = self.blend_h(rows[i][j - 1], tile, self.extent())
        return tile


class CornerOnOneAxis(Tiler):
    """Below the band of the tile above both axes are blended; within it only the rows are."""

    def mix(self, rows: Rows, i: int, j: int) -> Tensor:
        tile, extent = rows[i][j], self.extent()
        if i > 0:
            tile = self.blend_v(rows[i - 1][j], tile, extent)
        if j > 0:
            first = extent if i > 0 else 0
            tile[:, :, first:] = self.blend_h(rows[i][j - 1][:, :, first:], tile[:, :, first:], extent)
        return tile


class StrideIsTile(Tiler):
    """Overlap asked, none used."""

    def step(self) -> int:
        return self.vae.tile_latent_min_size

    def mix(self, rows: Rows, i: int, j: int) -> Tensor:
        return rows[i][j]

    def limit(self) -> int:
        return self.vae.tile_sample_min_size


class StrideIsTileCropped(Tiler):
    """Overlap asked, none used, and each tile still cropped to its stride."""

    def step(self) -> int:
        return self.vae.tile_latent_min_size


class Gap(Tiler):
    """The tile is smaller than the stride: what lies between is left black."""

    gap = 2

    def step(self) -> int:
        return super().step() + self.gap

    def limit(self) -> int:
        return self.step() * 8

    def mix(self, rows: Rows, i: int, j: int) -> Tensor:
        return rows[i][j]

    def __call__(self, z: Tensor) -> Tensor:
        canvas = torch.zeros(z.shape[0], 3, z.shape[2] * 8, z.shape[3] * 8, dtype=z.dtype)
        keep = Tiler.step(self) * 8
        for i, top in enumerate(self.starts(z.shape[2])):
            for j, left in enumerate(self.starts(z.shape[3])):
                part = self.tile(z, i, j)[:, :, :keep, :keep]
                canvas[:, :, top * 8 : top * 8 + part.shape[2], left * 8 : left * 8 + part.shape[3]] = part
        return canvas


class LastShifted(Tiler):
    """The last tile of each row lies a pixel off."""

    by = 1

    def crop(self, tile: Tensor, i: int, j: int) -> Tensor:
        return super().crop(tile.roll(self.by, -1) if j == self.last else tile, i, j)

    def __call__(self, z: Tensor) -> Tensor:
        self.last = len(self.starts(z.shape[3])) - 1
        return super().__call__(z)


class LastMovedBack(Tiler):
    """The last tile is cut a full tile from the border, but pasted where the short one would begin."""

    def cut(self, z: Tensor, i: int, j: int) -> Tensor:
        size, top, left = self.vae.tile_latent_min_size, self.starts(z.shape[2])[i], self.starts(z.shape[3])[j]
        height, width = min(size, z.shape[2] - top), min(size, z.shape[3] - left)
        left = max(0, left - self.by) if left + size > z.shape[3] else left
        return z[:, :, top : top + height, left : left + width]

    by = 1


class LastDropped(Tiler):
    """The number of tiles is floored: the picture ends early."""

    def starts(self, size: int) -> list[int]:
        return super().starts(size)[:-1] if size == self.width else super().starts(size)

    def __call__(self, z: Tensor) -> Tensor:
        self.width = z.shape[3]
        return super().__call__(z)


class LastBlack(LastDropped):
    """The number of tiles is floored: what they do not cover stays black (Allegro)."""

    def __call__(self, z: Tensor) -> Tensor:
        sample = super().__call__(z)
        canvas = torch.zeros(z.shape[0], 3, z.shape[2] * 8, z.shape[3] * 8, dtype=sample.dtype)
        canvas[:, :, : sample.shape[2], : sample.shape[3]] = sample[:, :, : canvas.shape[2], : canvas.shape[3]]
        return canvas


@contextmanager
def nothing() -> Iterator[None]:
    """Honest tiling at a size whose last tile is one latent high or wide: it is off by tens of grey levels."""
    yield


class LastRepeated(Tiler):
    """The last column of tiles shows the one before it."""

    def tile(self, z: Tensor, i: int, j: int) -> Tensor:
        own = super().tile(z, i, j)
        if j < len(self.starts(z.shape[3])) - 1 or j == 0:
            return own
        return super().tile(z, i, j - 1)[:, :, : own.shape[2], : own.shape[3]]


FAULTS = (
    Fault("blend loop over the nominal extent", "1", tiler(NominalLoop), ("crash",), OVERLAPPED[:3], SHORT),
    Fault("ramp of the nominal extent", "2", tiler(NominalRamp), ("seam", "band"), OVERLAPPED[:3], SHORT),
    Fault("blend weights reversed", "3", tiler(Reversed), ("seam", "band"), OVERLAPPED),
    Fault("blend extent in latent units", "3", tiler(LatentUnits), ("seam", "band"), OVERLAPPED),
    Fault("no blend at all", "3", tiler(NoBlend), ("seam", "band"), OVERLAPPED),
    Fault(
        "ramp never reaches 1", "3", tiler(Unfinished), ("seam", "band"), OVERLAPPED[:3], amounts={"reach": (0.5, 0.9)}
    ),
    Fault("ramp for power", "3+", tiler(EqualPower), ("seam", "band"), OVERLAPPED),
    Fault("blend with the neighbour's head", "3+", tiler(HeadOfNeighbour), ("seam", "band"), OVERLAPPED),
    Fault(
        "neighbour taken a pixel off",
        "3+",
        tiler(LateByOne),
        ("seam", "band", "misaligned"),
        OVERLAPPED[:3],
        amounts={"by": (1, 2)},
    ),
    Fault("columns not blended", "3+", tiler(OneAxis), ("seam", "band"), OVERLAPPED),
    Fault("corner before its own blend", "4", tiler(CornerUnblended), ("corner",), OVERLAPPED),
    Fault("corner blended on one axis", "4", tiler(CornerOnOneAxis), ("corner",), OVERLAPPED),
    Fault("stride equals tile", "5", tiler(StrideIsTile), ("geometry",), OVERLAPPED),
    Fault("stride equals tile, cropped", "5", tiler(StrideIsTileCropped), ("geometry",), OVERLAPPED[:3]),
    Fault("tile smaller than stride", "5", tiler(Gap), ("geometry",), OVERLAPPED[:2], amounts={"gap": (1, 2)}),
    Fault(
        "last tile shifted by pixels",
        "6",
        tiler(LastShifted),
        ("misaligned", "geometry", "seam"),
        OVERLAPPED[:3],
        amounts={"by": (1, 2)},
    ),
    Fault(
        "last tile cut off its place",
        "6",
        tiler(LastMovedBack),
        ("misaligned", "geometry", "seam"),
        OVERLAPPED[:3],
        SHORT,
        amounts={"by": (1, 4)},
    ),
    Fault("last tiles dropped", "6", tiler(LastDropped), ("geometry",), OVERLAPPED[:3]),
    Fault("last tiles left black", "6", tiler(LastBlack), ("geometry",), OVERLAPPED[:3]),
    Fault("last tiles repeated", "6", tiler(LastRepeated), ("geometry", "seam"), OVERLAPPED[:3]),
    Fault(
        "last tile of one latent",
        "6+",
        nothing,
        ("tone_drift", "chroma", "seam", "band"),
        ("tile=16,overlap=0.25", "tile=16,overlap=0.5", "bf16,tile=16,overlap=0.25"),
        ("eye-odd",),
    ),
)
