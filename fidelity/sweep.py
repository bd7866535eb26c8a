"""Settings of tiles and sizes to sweep: where arithmetic goes wrong, then seeded random ones; and their shrinking.

Pure arithmetic: nothing is decoded here. Sizes are in latent pixels and latent frames.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from fidelity.errors import IllegalTiling
from fidelity.records import DecodePlan, Model, Temporal, Tiling

T = TypeVar("T")

OVERLAPS = (0.0, 0.25, 0.5, 0.75, 0.375)
LARGEST_TILE = 32
BATCHES = (1, 2, 3)
RANDOM = 16
SEED = 20260117
MOST_STEPS = 200
"""Decodes that shrinking may take."""


class Setting(Struct, frozen=True):
    """One decode of a sweep: the size of the latents, and how they are cut."""

    height: int
    width: int
    batch: int = 1
    frames: int = 1
    """Latent frames; 1 for pictures."""
    tiling: Tiling | None = None
    temporal: Temporal | None = None

    def __str__(self) -> str:
        """`latents 5×9, tile 4, overlap 0.25, batch 2, 3 frames`: what is 1 or off is left out."""
        parts = [f"latents {self.height}×{self.width}"]
        parts += [f"tile {self.tiling.tile}, overlap {self.tiling.overlap:g}"] if self.tiling else []
        parts += [f"batch {self.batch}"] if self.batch > 1 else []
        parts += [f"{self.frames} latent frames"] if self.frames > 1 else []
        if self.temporal:
            parts.append(f"chunks of {self.temporal.tile} frames, overlap {self.temporal.overlap:g}")
        return ", ".join(parts)

    @property
    def effort(self) -> tuple[float, ...]:
        """What makes a setting smaller than another: the values decoded, then the options it has, then anything."""
        pixels = self.batch * self.frames * self.height * self.width
        cuts = [(cut.tile, cut.overlap) if cut else (0, 0.0) for cut in (self.tiling, self.temporal)]
        options = sum(tile > 0 for tile, _ in cuts)
        return (pixels, options, *cuts[0], *cuts[1], abs(self.height - self.width), self.height, self.batch)

    def plan(self, base: DecodePlan) -> DecodePlan:
        return replace(base, tiling=self.tiling, temporal=self.temporal)


def settings(model: Model) -> list[Setting]:
    """Every setting to sweep that the model's class can represent, smallest first."""
    found = [*_untiled(model), *_tiled(model), *_chunked(model), *_random(model)]
    return sorted({each: None for each in found if is_legal(model, each)}, key=lambda each: each.effort)


def is_legal(model: Model, setting: Setting) -> bool:
    """Whether the class decodes this faithfully, by its own arithmetic."""
    family, geometry, size = model.family, model.geometry, (setting.height, setting.width)
    if geometry.size not in (None, size):
        return False
    try:
        if setting.tiling is not None:
            family.tile_grid(geometry, size, setting.tiling)
        if setting.temporal is not None:
            family.chunks(geometry, setting.frames, setting.temporal)
    except IllegalTiling:
        return False
    return True


def tilings(model: Model, each: int = 1) -> list[Tiling]:
    """The smallest legal tiles of each overlap, from 2 latent pixels on."""
    found: list[Tiling] = []
    for overlap in OVERLAPS:
        every = (Tiling(tile, overlap) for tile in range(2, LARGEST_TILE + 1))
        found += islice((tiling for tiling in every if _cuts(model, tiling)), each)
    return found


def _cuts(model: Model, tiling: Tiling) -> bool:
    """Whether the class decodes faithfully what is larger than this tile."""
    size = model.geometry.size or (LARGEST_TILE + 1, LARGEST_TILE + 1)
    return is_legal(model, Setting(*size, tiling=tiling))


def edges(tile: int, stride: int) -> list[int]:
    """Sizes about which cutting goes wrong: k · stride ± 1, one tile ± 1, and last tiles of a single pixel."""
    around = [1, stride, tile, 2 * stride, 3 * stride, tile + stride]
    return sorted({size + step for size in around for step in (-1, 0, 1) if size + step >= 1})


def stride_of(cut: Tiling | Temporal) -> int:
    """Latent pixels (frames) from one tile (chunk) to the next, of a legal one."""
    return max(1, round(cut.tile * (1 - cut.overlap)))


def shrink(setting: Setting, fails: Callable[[Setting], T | None], found: T) -> tuple[Setting, T]:
    """The smallest setting that still fails that single steps lead to, with what `fails` found of it."""
    steps, moving = MOST_STEPS, True
    while moving:
        moving = False
        for smaller in _smaller(setting):
            steps -= 1
            again = fails(smaller) if steps >= 0 else None
            if again is not None:
                setting, found, moving = smaller, again, True
                break
    return setting, found


def _smaller(setting: Setting) -> Iterator[Setting]:
    if setting.tiling is not None and setting.temporal is not None:
        yield replace(setting, temporal=None)
        yield replace(setting, tiling=None)
    if setting.tiling is not None or setting.temporal is not None:
        yield replace(setting, tiling=None, temporal=None)
    for field in ("batch", "frames", "height", "width"):
        value = getattr(setting, field)
        for smaller in dict.fromkeys((1, value // 2, value - 1)):
            if 1 <= smaller < value:
                yield replace(setting, **{field: smaller})


def _untiled(model: Model) -> Iterator[Setting]:
    """The full decode, whose shape everything else is held to: every batch and number of frames."""
    video, (height, width) = model.geometry.video, model.geometry.size or (3, 5)
    for frames in range(1, 10) if video else (1,):
        yield Setting(height, width, frames=frames)
    for batch in BATCHES:
        yield Setting(width, height, batch=batch, frames=3 if video else 1)


def _tiled(model: Model) -> Iterator[Setting]:
    batches, frames = cycle((1, 2, 1, 3, 1)), cycle((1, 2, 3) if model.geometry.video else (1,))
    for tiling in tilings(model):
        stride = stride_of(tiling)
        more = tiling.tile + stride  # two tiles, the last one whole
        for index, size in enumerate(edges(tiling.tile, stride)):
            thin = ((size, 1), (1, size), (size, size))[index % 3]
            for height, width in ((size, more), (more, size), thin):
                yield Setting(height, width, next(batches), next(frames), tiling)


def _chunked(model: Model) -> Iterator[Setting]:
    """Chunks of frames at the same edges, whole and within tiles."""
    if not model.geometry.video or not model.family.temporal_attributes():
        return
    some = next(iter(tilings(model)), None)
    for overlap in (0.0, 0.25, 0.5):
        for tile in range(2, 9):
            temporal = Temporal(tile, overlap)
            if not is_legal(model, Setting(2, 3, frames=2 * tile + 1, temporal=temporal)):
                continue
            for frames in edges(tile, stride_of(temporal)):
                yield Setting(2, 3, frames=frames, temporal=temporal)
                if some is not None and overlap == 0.25:
                    yield Setting(some.tile, some.tile + 1, frames=frames, tiling=some, temporal=temporal)
            break


def _random(model: Model) -> Iterator[Setting]:
    """Seeded, the same on every machine: sizes and tiles that nobody thought of."""
    drawn = random.Random(SEED)
    legal = [tiling for tiling in tilings(model, each=2) if tiling.tile <= 8] or tilings(model)
    for _ in range(RANDOM if legal else 0):
        tiling = drawn.choice(legal)
        height, width = (drawn.randint(1, 2 * tiling.tile + 3) for _ in range(2))
        frames = drawn.randint(1, 4) if model.geometry.video else 1
        yield Setting(height, width, drawn.choice(BATCHES), frames, tiling)
