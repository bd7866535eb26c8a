"""Why a decode is red, in words: what its pixels show, where its error lies, and what its receipts tell.

A decode that left its oracle is compared with that: no honest error is in the difference, so that everything in it is
the fault's. Any other is compared with its golden.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fidelity import frames
from fidelity.detectors.cause import causes
from fidelity.detectors.grid import Layout, layout
from fidelity.lazy import torch
from fidelity.records import DecodePlan, Measurement, Reason, Receipts, TileAxis
from fidelity.registry import DETECTORS, cuts
from fidelity.signal import DataRange, fold, levels

if TYPE_CHECKING:
    from torch import Tensor

Named = Iterator[Reason]

CONFINED = 0.9
"""Share of the squared error that lies in a place, for the error to be that place's."""
BY_TILE = 0.5
"""Share of the squared error that a gain and an offset of each tile explain, for it to be the tiles' tone."""
BETTER = 0.5
"""What a gain and an offset of each tile must leave of what one for all leaves."""
WIDE, SURE = 0.4, 0.995
"""Share of the picture from which on a place must hold this share of the error; a tone that explains that is sure."""
COLOURED = 4.0
"""How many times the error's grey part its coloured part must be for it to be a hue."""
STRANGE = 0.3
"""Error in a tile, as a share of the picture's spread there, from which on it shows something else."""
LEAST = 0.02
"""Grey levels RMS of error under which nothing is looked for in it."""
STEP = 0.1
"""Grey levels of a step at the grid, against the oracle, that is called a seam."""
BLUR, BLUR_TILED = 0.04, 0.12
"""Share of fine detail lost. Measured: honest plain decodes 0.002 at most, honest tiles 0.09; three tenths of a 3×3
mean 0.09 and more."""
WHOLE = ("order", "misaligned", "geometry", "double_normalised", "truncation", "clipping", "non_finite", "ghost")
"""Causes that explain the picture as a whole: no place in it is looked for beside them."""


def reasons(
    candidate: Tensor,
    golden: Tensor,
    expected: Tensor | None,
    *,
    plan: DecodePlan,
    receipts: Receipts,
    data_range: DataRange,
    measurements: dict[str, Measurement],
) -> list[Reason]:
    """What a red decode shows, surest first; empty where nothing is recognised.

    Samples (B, C, [T,] H, W), fp32, of one shape. `expected`: the oracle's, if the candidate left it.
    """
    found = _caused(candidate, golden, plan, receipts, data_range)
    found += _unasked_tiles(plan, receipts, golden.shape[0])
    if expected is not None and not _explains(found):
        found = _caused(candidate, expected, plan, receipts, data_range)
    if _explains(found):
        return found
    tiles = layout(candidate, plan, receipts)
    if expected is not None and isinstance(tiles, Layout) and bool(candidate.isfinite().all()):
        placed = list(_placed(candidate, expected, tiles, plan, receipts, data_range))
        # one gain and offset for the whole picture stands only where the error is no tile's
        found = placed or found
    if expected is not None:
        told = frames.placed(candidate, expected, plan, receipts, data_range)
        found = [told, *found] if told is not None else found
    return found + list(_blurred(measurements, BLUR_TILED if "tiling" in cuts(plan) else BLUR))


def _caused(
    candidate: Tensor, other: Tensor, plan: DecodePlan, receipts: Receipts, data_range: DataRange
) -> list[Reason]:
    seen = causes(candidate, other, plan=plan, receipts=receipts, data_range=data_range)
    return [Reason("cause", said, diagnosis=(name,)) for name, said in seen]


def _explains(found: list[Reason]) -> bool:
    return any(name in WHOLE for each in found for name in each.diagnosis)


def _unasked_tiles(plan: DecodePlan, receipts: Receipts, batch: int) -> Named:
    """Decoder calls that nobody asked for."""
    seen = receipts.get("decoder", {})
    calls, shapes = seen.get("calls", 0), seen.get("shapes", [])
    wanted = batch if plan.slicing else 1
    if not cuts(plan) and calls > batch and shapes and len(shapes[0]) == 4:
        sizes = ", ".join("×".join(map(str, shape[-2:])) for shape in shapes[:4])
        said = f"the decoder was called {calls} times, {wanted} expected, on {sizes}: it tiled although not asked to"
        yield Reason("decoder", said, calls, wanted, diagnosis=("geometry",))


def _blurred(measurements: dict[str, Measurement], limit: float) -> Named:
    """Detail that is lost without a seam: tiles of their own statistics lose some too, and are named for that."""
    lost, seam = measurements.get("detail_loss"), measurements.get("tile_seam")
    if seam is not None and seam.value:
        return
    if lost is not None and lost.value is not None and lost.value > limit:
        said = f"{lost.value:.0%} of the golden's fine detail is lost: soft, as a preview or an enlarged decode"
        yield Reason("cause", said, lost.value, limit, "share", ("blur",))


# ---------------------------------------------------------------- where the error lies


def _placed(
    candidate: Tensor, expected: Tensor, tiles: Layout, plan: DecodePlan, receipts: Receipts, data_range: DataRange
) -> Named:
    """Error of the tiles' own: at the place where it is gathered, or in the tone of each. A frame is a picture."""
    candidate, expected = fold(candidate), fold(expected)
    error = (candidate - expected) * levels(data_range)
    squares = error.square().sum((0, 1)).double()
    total = float(squares.sum())
    if (total / error.numel()) ** 0.5 < 1e-4:
        return
    places = _places(tiles)
    # a place that covers much of the picture holds much of any error: it is the last to be blamed
    told = _confined(squares, {name: mask for name, mask in places.items() if not _is_wide(mask)})
    if told is not None:
        yield told
        return
    if (total / error.numel()) ** 0.5 < LEAST:
        return
    picture = expected * levels(data_range)
    told = (
        _tone(error, picture, tiles)
        or _strange(squares, picture, tiles, 1 - _whole(error, picture))
        or _after_first(squares, tiles)
    )
    gathered = _confined(squares, places)
    if told is not None:
        yield told
        if gathered is not None and (told.measured or 1.0) < SURE:
            yield gathered
        return
    step = DETECTORS.get("tile_step")(candidate, expected, plan=plan, receipts=receipts, data_range=data_range)
    if step.value is not None and step.value > STEP and _whole(error, picture) < CONFINED:
        said = f"against the oracle the tile grid shows a step of {step.value:.3g} grey levels"
        yield Reason("cause", said, step.value, STEP, "grey levels", ("seam",))
    if gathered is not None:
        yield gathered


def _is_wide(mask: Tensor) -> bool:
    return float(mask.double().mean()) > WIDE


def _confined(squares: Tensor, places: dict[str, Tensor]) -> Reason | None:
    """The smallest of these places that holds nearly all of the error."""
    for name, mask in places.items():
        share = float(squares[mask].sum() / squares.sum())
        if share >= (SURE if _is_wide(mask) else CONFINED):
            y, x = divmod(int(squares.argmax()), squares.shape[1])
            said = f"{share:.0%} of the error against the oracle lies {PLACES[name]}, the most at x {x} y {y}"
            return Reason("cause", said, share, CONFINED, "share", (name,))
    return None


PLACES = {
    "corner": "where four tiles are blended",
    "seam": "within a pixel of the tile borders",
    "band": "in the bands where tiles are blended",
}


def _places(tiles: Layout) -> dict[str, Tensor]:
    """Masks (H, W) of the places to which an error may be confined, the smallest first."""
    rows, cols = (_within(axis, _bands(axis)) for axis in (tiles.grid.rows, tiles.grid.cols))
    down, across = (
        _within(axis, [(start - 1, start + 1) for start in axis.edges]) for axis in (tiles.grid.rows, tiles.grid.cols)
    )
    return {
        "corner": rows[:, None] & cols[None, :],
        "seam": down[:, None] | across[None, :],
        "band": rows[:, None] | cols[None, :],
    }


def _bands(axis: TileAxis) -> list[tuple[int, int]]:
    return [(start, start + axis.band) for start in axis.edges] if axis.band else []


def _within(axis: TileAxis, ranges: list[tuple[int, int]]) -> Tensor:
    mask = torch.zeros(axis.size, dtype=torch.bool)
    for start, stop in ranges:
        mask[max(0, start) : stop] = True
    return mask


# ---------------------------------------------------------------- tone of each tile


def _tone(error: Tensor, picture: Tensor, tiles: Layout) -> Reason | None:
    """A gain and an offset of each tile that explain the error, where one for all tiles does not."""
    whole = _whole(error, picture)
    left, offsets = 0.0, []
    for rows, cols in _boxes(tiles):
        part, guide = error[..., rows, cols], picture[..., rows, cols]
        offset, rest = _affine(part, guide)
        left += rest
        offsets.append(offset)
    explained = 1 - left / float(error.double().square().sum())
    if explained < BY_TILE or 1 - explained > BETTER * (1 - whole):
        return None
    grey = error.mean(1, keepdim=True)
    hue = error.shape[1] == 3 and float((error - grey).square().sum()) > COLOURED * 3 * float(grey.square().sum())
    moved = torch.stack(offsets)  # tiles × channels
    tones = moved.abs().amax(1) if hue else moved.mean(1)
    said = (
        f"a gain and an offset of each tile explain {explained:.0%} of the error against the oracle, one for all "
        f"{whole:.0%}: each tile has its own {'hue' if hue else 'tone'} (grey levels "
        f"{', '.join(format(value, '+.2f') for value in tones.tolist())})"
    )
    return Reason("cause", said, explained, BY_TILE, "share", ("chroma" if hue else "tone_drift",))


def _strange(squares: Tensor, picture: Tensor, tiles: Layout, unexplained: float) -> Reason | None:
    """One row or column of tiles that shows something else, or all of them; not by a gain and offset of the whole."""
    total = float(squares.sum())
    for axis, word in (("y", "row"), ("x", "column")):
        for number, (start, stop) in enumerate(tiles.spans(axis)):
            stop = min(tiles.axis(axis).size, stop + tiles.axis(axis).band)
            part = squares[start:stop] if axis == "y" else squares[:, start:stop]
            spread = float((picture[..., start:stop, :] if axis == "y" else picture[..., start:stop]).std())
            share = float(part.sum()) / total
            level = (float(part.mean()) / (picture.shape[0] * picture.shape[1])) ** 0.5
            if share >= CONFINED and level > STRANGE * spread:
                said = (
                    f"{share:.0%} of the error against the oracle lies in {word} {number} of the tiles, {level:.1f} "
                    f"levels where the picture spreads by {spread:.1f}: it shows something else"
                )
                return Reason("cause", said, share, CONFINED, "share", ("geometry",))
    level, spread = (total / (picture.numel())) ** 0.5, float(picture.std())
    if level > STRANGE * spread and unexplained > 0.5:
        said = f"error against the oracle is {level:.1f} levels where the picture spreads by {spread:.1f}"
        return Reason("cause", f"{said}: tiles show something else", level, STRANGE * spread, diagnosis=("geometry",))
    return None


def _after_first(squares: Tensor, tiles: Layout) -> Reason | None:
    """The first tile is as it should be and no other is: something of the first serves all."""
    (rows, cols), *others = _boxes(tiles)
    if float(squares[rows, cols].sum()) or not all(float(squares[box].mean()) for box in others):
        return None
    said = "the first tile equals the oracle's and no other does: statistics or a cache of the first serve all"
    return Reason("cause", said, diagnosis=("tone_drift",))


def _boxes(tiles: Layout) -> list[tuple[slice, slice]]:
    return [(slice(*rows), slice(*cols)) for rows in tiles.spans("y") for cols in tiles.spans("x")]


def _whole(error: Tensor, picture: Tensor) -> float:
    """Share of the squared error that one gain and offset a channel explain."""
    _, left = _affine(error, picture)
    return 1 - left / max(float(error.double().square().sum()), 1e-12)


def _affine(error: Tensor, picture: Tensor) -> tuple[Tensor, float]:
    """Least squares error = offset + gain · (picture − mean), a channel at a time: offsets, and the squares left."""
    y, x = (each.transpose(0, 1).flatten(1).double() for each in (error, picture))
    offset = y.mean(1, keepdim=True)
    x = x - x.mean(1, keepdim=True)
    gain = (x * (y - offset)).sum(1, keepdim=True) / x.square().sum(1, keepdim=True).clamp_min(1e-9)
    return offset[:, 0], float((y - offset - gain * x).square().sum())


# ---------------------------------------------------------------- memory


def saves_memory(plan: DecodePlan, shape: tuple[int, ...]) -> bool:
    """Whether this plan must need less than a plain decode of latents of this shape: slices, or tiles of at most half
    the picture. Options that are not diffusers' own promise nothing."""
    if any(plan.options.values()) or plan.temporal is not None:
        return False
    if plan.slicing and shape[0] > 1:
        return True
    if plan.tiling is None:
        return False
    height, width = shape[-2:]
    return 2 * min(plan.tiling.tile, height) * min(plan.tiling.tile, width) <= height * width
