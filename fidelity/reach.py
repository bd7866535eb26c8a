"""How far a decoder looks, and what a tiling will cost for it: measured on a small decode, predicted for any grid.

Three things by decoding. How far does one latent pixel show? How far does one latent frame show, and to which side?
And what does a crop get wrong: near its cut edge (lost context, which falls with the distance), and everywhere in it
(statistics or attention over the crop instead of the picture, which fall with its area)? The last two are what a tile
gets wrong, so they predict the error of a tiled decode before it is made. How good that is: docs/design/reach.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from fidelity.errors import IllegalTiling, LatentsError, in_one_line
from fidelity.lazy import torch
from fidelity.records import ModelReach, Prediction, Reach, TileAxis, TileGrid, Tiling
from fidelity.runner import Runner
from fidelity.signal import levels

if TYPE_CHECKING:
    from torch import Tensor

LEAST, MOST, MOST_FRAMES, MOST_ITEMS = 12, 32, 5, 2
"""Latent pixels each way, latent frames and items of a probe: what is larger is cropped around its middle."""
CROP = 16
"""Latent pixels of the larger crops, two thirds of the probe where that is less; the smaller ones are half of that."""
EXACT = 1e-3
"""Grey levels: below this a change is rounding."""
PICTURES = "pictures have no frames"

Wanted = tuple[str, tuple[int, ...], Tiling]
"""A name of latents, their shape, and a tiling of them."""


# ---------------------------------------------------------------- measured


def measure(runner: Runner, model: str, latents: str, tensor: Tensor, wanted: Iterable[Wanted]) -> ModelReach:
    """Probe with `tensor` (the latents called `latents`) and predict what each wanted tiling costs."""
    try:
        found = probe(runner, tensor)
    except Exception as error:  # a decode may raise anything; its words are the reason
        return ModelReach(model, latents, None, reason=in_one_line(error))
    return ModelReach(model, latents, found, tuple(_predictions(runner, found, wanted)))


def probe(runner: Runner, latents: Tensor) -> Reach:
    """Decode the middle of latents (B, C, [T,] H, W), moved and cropped. Raises LatentsError if they are too small."""
    z = _small(latents)
    full = _decode(runner, z)
    pixel = _moved_pixel(runner, z, full)
    larger = min(CROP, 2 * min(z.shape[-2:]) // 3) // 4 * 4
    near, cut = _crops(runner, z, full, larger, 2), _crops(runner, z, full, larger // 2, 3)
    inmost = near[-max(1, len(near) // 4) :].mean().item()
    edge = (near - inmost).clamp_min(0)
    # far from its cut the smaller crop has more of its own statistics; what is left of lost context there is known
    half = max(1, len(cut) // 2)
    smaller = (cut - edge[: len(cut)]).clamp_min(0)[-half:].mean().item()
    before, after, reason = _moved_frame(runner, z, full)
    return Reach(
        pixel=pixel,
        edge=tuple(edge.sqrt().tolist()),
        tone=(math.sqrt(inmost), math.sqrt(smaller)),
        sizes=(larger, larger // 2),
        is_global=pixel[-1] > EXACT,
        before=before,
        after=after,
        frames_reason=reason,
    )


def _small(latents: Tensor) -> Tensor:
    """The middle of the latents, at most MOST pixels each way, the first frames and items."""
    height, width = latents.shape[-2:]
    if min(height, width) < LEAST:
        raise LatentsError(
            f"latents of {height}×{width} are too small to cut: {LEAST} latent pixels each way are needed"
        )
    top, left = (max(0, (size - MOST) // 2) for size in (height, width))
    cut = latents[:MOST_ITEMS, ..., top : top + MOST, left : left + MOST]
    return cut[:, :, :MOST_FRAMES] if cut.ndim == 5 else cut


def _decode(runner: Runner, latents: Tensor) -> Tensor:
    """The plain sample in grey levels, fp32 on the CPU."""
    with torch.no_grad():
        sample = runner.model.family.decode(runner.module, latents.to(runner.device)).float().cpu()
    return sample * levels(runner.model.data_range)


def _moved_pixel(runner: Runner, z: Tensor, full: Tensor) -> tuple[float, ...]:
    """Largest change at each distance, in latent pixels, from one latent pixel moved by one standard deviation."""
    f, (height, width) = runner.model.geometry.spatial, z.shape[-2:]
    moved = z.clone()
    moved[..., height // 2, width // 2] += z.std()
    change = (_decode(runner, moved) - full).abs().flatten(0, -3).amax(0)
    rows, cols = (torch.arange(size * f) // f - size // 2 for size in (height, width))
    distance = torch.maximum(rows.abs()[:, None], cols.abs()[None, :])
    return tuple(float(change[distance == d].max()) for d in range(min(height, width) // 2))


def _moved_frame(runner: Runner, z: Tensor, full: Tensor) -> tuple[tuple[float, ...], tuple[float, ...], str | None]:
    """Largest change at each distance in latent frames before and after one that moved by one standard deviation."""
    if z.ndim == 4:
        return (), (), PICTURES
    count, middle = z.shape[2], z.shape[2] // 2
    if count < 3:
        return (), (), f"{count} latent frames: at least 3 are needed to tell before from after"
    moved = z.clone()
    moved[:, :, middle] += z.std()
    change = (_decode(runner, moved) - full).abs().amax((0, 1, 3, 4))
    owners = _frames(full.shape[2], count)
    if owners is None:
        return (), (), f"{full.shape[2]} frames of {count} latent frames: which is whose is not known"
    by_frame = [max(float(c) for c, owner in zip(change, owners) if owner == frame) for frame in range(count)]
    return tuple(reversed(by_frame[: middle + 1])), tuple(by_frame[middle:]), None


def _frames(frames: int, latent_frames: int) -> list[int] | None:
    """The latent frame of each frame: all alike, or the first alone, as causal autoencoders have it."""
    if frames % latent_frames == 0:
        return [frame // (frames // latent_frames) for frame in range(frames)]
    if latent_frames > 1 and (frames - 1) % (latent_frames - 1) == 0:
        each = (frames - 1) // (latent_frames - 1)
        return [0, *(1 + frame // each for frame in range(frames - 1))]
    return None


def _crops(runner: Runner, z: Tensor, full: Tensor, side: int, count: int) -> Tensor:
    """Mean squared error of count × count crops, cut on all sides, by distance from the cut: (side / 2,) float64."""
    f = runner.model.geometry.spatial
    rows, cols = (_places(size - side, count) for size in z.shape[-2:])
    places = [(top, left) for top in rows for left in cols]
    inward = torch.arange(side * f) // f
    inward = torch.minimum(inward, inward.flip(0))
    distance = torch.minimum(inward[:, None], inward[None, :]).flatten()
    total = torch.zeros(side // 2, dtype=torch.float64)
    for top, left in places:
        error = _decode(runner, z[..., top : top + side, left : left + side])
        error -= full[..., top * f : (top + side) * f, left * f : (left + side) * f]
        total.index_add_(0, distance, error.double().square().flatten(0, -3).mean(0).flatten())
    return total / torch.bincount(distance) / len(places)


def _places(room: int, count: int) -> list[int]:
    """`count` places along an axis with room to move, none of them at the border, where nothing would be cut."""
    return sorted({min(max(1, room * (2 * number + 1) // (2 * count)), room - 1) for number in range(count)})


# ---------------------------------------------------------------- what follows


def radius(reach: Reach) -> int | None:
    """Latent pixels beyond which one latent pixel changes nothing; None if there is no such distance."""
    return None if reach.is_global else 1 + max(d for d, change in enumerate(reach.pixel) if change > EXACT)


def causal(reach: Reach) -> bool | None:
    """Whether a latent frame changes nothing before itself; None where that was not measured."""
    return max(reach.before[1:], default=0.0) <= EXACT if reach.before else None


def overlap(reach: Reach, error: float) -> int | None:
    """Latent pixels of overlap after which the error at a tile's inner edge is at most `error` grey levels RMS.

    Tiles lose the half of the overlap that lies nearer to their cut, where the blend weighs them less than half, so
    twice the distance is needed. None: it stays above at every distance (a tone shift that no overlap removes).
    """
    whole = [math.hypot(lost, reach.tone[0]) for lost in reach.edge]
    beyond = [distance for distance in range(len(whole)) if max(whole[distance:]) <= error]
    return 2 * beyond[0] if beyond else None


def tone(reach: Reach, area: float) -> float:
    """RMS grey levels by which the statistics of a tile of `area` latent pixels move it, by a power law through both
    crops: independent pixels would make it fall with the root of the area."""
    large, small = reach.tone
    if large <= EXACT:
        return 0.0
    (side, half) = reach.sizes
    power = min(1.0, max(0.0, math.log(max(small, large) / large) / math.log(side**2 / half**2)))
    return large * (area / side**2) ** -power


def predict(reach: Reach, grid: TileGrid, spatial: int) -> float:
    """RMSE in grey levels of a decode in these tiles, over the whole picture; `spatial` is the compression f.

    Lost context of the tiles that are blended at a pixel is taken to be independent, so that its squares add with the
    squares of the blend's weights. Their tone agrees as far as the tiles show the same: by the share that they overlap.
    """
    rows, cols = (list(_tiles(axis, spatial)) for axis in (grid.rows, grid.cols))
    if len(rows) == len(cols) == 1:
        return 0.0
    lost = torch.tensor([*reach.edge, 0.0], dtype=torch.float64).square()
    shared = max(axis.band / axis.tile for axis in (grid.rows, grid.cols))
    total, agreeing = torch.zeros(2, grid.rows.size, grid.cols.size, dtype=torch.float64)
    for top, high, weight_y, cut_y in rows:
        for left, wide, weight_x, cut_x in cols:
            distance = torch.minimum(cut_y[:, None], cut_x[None, :]).clamp_max(len(reach.edge))
            own, weight = tone(reach, high * wide / spatial**2), weight_y[:, None] * weight_x[None, :]
            place = slice(top, top + len(weight_y)), slice(left, left + len(weight_x))
            total[place] += weight.square() * (lost[distance] + (1 - shared) * own**2)
            agreeing[place] += weight * own
    return float((total + shared * agreeing.square()).mean().sqrt())


def _tiles(axis: TileAxis, spatial: int) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Of each tile along an axis: start, length, and where it shows its weight and latent pixels to its cut edge."""
    for number, start in enumerate(axis.starts):
        end = min(start + axis.tile, axis.size)
        following = axis.starts[number + 1] if number + 1 < len(axis.starts) else axis.size
        fade = min(axis.band, min(following + axis.tile, axis.size) - following)
        shown = min(end, following + fade) - start
        place = torch.arange(shown)
        weight = torch.ones(shown, dtype=torch.float64)
        if number and axis.band:
            ramp = min(axis.band, end - start)
            weight[:ramp] = torch.arange(ramp, dtype=torch.float64) / ramp
        if fade > 0 and following < axis.size:
            weight[following - start :] = 1 - torch.arange(shown - (following - start), dtype=torch.float64) / fade
        far = torch.full((shown,), axis.size)
        before = place // spatial if start else far
        after = (end - start - 1 - place) // spatial if end < axis.size else far
        yield start, end - start, weight, torch.minimum(before, after)


def _predictions(runner: Runner, found: Reach, wanted: Iterable[Wanted]) -> Iterator[Prediction]:
    model = runner.model
    for latents, shape, tiling in wanted:
        size: Sequence[int] = shape[-2:]
        try:
            grid = model.family.tile_grid(model.geometry, (size[0], size[1]), tiling)
        except IllegalTiling:
            continue  # such a case is judged for its geometry; there is no grid to predict for
        yield Prediction(latents, tiling.tile, tiling.overlap, predict(found, grid, model.geometry.spatial))


__all__ = ["causal", "measure", "overlap", "predict", "probe", "radius", "tone"]
