"""Why a decode is red, in words: what its pixels show, where its error lies, and what its receipts tell.

A decode that left its oracle is compared with that: no honest error is in the difference, so that everything in it is
the fault's. Any other is compared with its golden.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fidelity.detectors.cause import causes
from fidelity.detectors.grid import Layout, layout
from fidelity.lazy import torch
from fidelity.records import DecodePlan, Measurement, Reason, Receipts, TileAxis
from fidelity.registry import DETECTORS
from fidelity.signal import DataRange, levels

if TYPE_CHECKING:
    from torch import Tensor

Named = Iterator[Reason]

CONFINED = 0.9
"""Share of the squared error that lies in a place, for the error to be that place's."""
GLOBAL = 0.9
"""Share of the squared error that one gain and offset explain, for it not to be the tiles'."""
BY_TILE = 0.5
"""Share that a gain and an offset of each tile explain, for it to be the tiles' tone."""
LEAST = 0.02
"""Grey levels RMS of error under which nothing is looked for in it."""
STEP = 0.1
"""Grey levels of a step at the grid, against the oracle, that is called a seam."""
BLUR = 0.08
"""Share of fine detail lost. Measured: honest decodes 0.02 at most, a third of a 3×3 mean 0.15 and more."""
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
    against = golden if expected is None else expected
    found = [
        Reason("cause", said, diagnosis=(name,))
        for name, said in causes(candidate, against, plan=plan, receipts=receipts, data_range=data_range)
    ]
    found += _unasked_tiles(plan, receipts, golden.shape[0])
    if any(name in WHOLE for each in found for name in each.diagnosis):
        return found
    tiles = layout(candidate, plan, receipts)
    if expected is not None and isinstance(tiles, Layout) and bool(candidate.isfinite().all()):
        placed = list(_placed(candidate, expected, tiles, plan, receipts, data_range))
        # one gain and offset for the whole picture stands only where the error is no tile's
        return placed or found
    return found + list(_blurred(measurements))


def _unasked_tiles(plan: DecodePlan, receipts: Receipts, batch: int) -> Named:
    """Decoder calls that nobody asked for."""
    seen = receipts.get("decoder", {})
    calls, shapes = seen.get("calls", 0), seen.get("shapes", [])
    wanted = batch if plan.slicing else 1
    if plan.tiling is None and plan.temporal is None and calls > batch and shapes and len(shapes[0]) == 4:
        sizes = ", ".join("×".join(map(str, shape[-2:])) for shape in shapes[:4])
        said = f"the decoder was called {calls} times, {wanted} expected, on {sizes}: it tiled although not asked to"
        yield Reason("decoder", said, calls, wanted, diagnosis=("geometry",))


def _blurred(measurements: dict[str, Measurement]) -> Named:
    lost = measurements.get("detail_loss")
    if lost is not None and lost.value is not None and lost.value > BLUR:
        said = f"{lost.value:.0%} of the golden's fine detail is lost: soft, as a preview or an enlarged decode"
        yield Reason("cause", said, lost.value, BLUR, "share", ("blur",))


# ---------------------------------------------------------------- where the error lies


def _placed(
    candidate: Tensor, expected: Tensor, tiles: Layout, plan: DecodePlan, receipts: Receipts, data_range: DataRange
) -> Named:
    """Error of the tiles' own: at the place where it is gathered, or in the tone of each."""
    error = (candidate - expected) * levels(data_range)
    squares = error.square().sum((0, 1)).double()
    total = float(squares.sum())
    if (total / error.numel()) ** 0.5 < 1e-4:
        return
    for name, mask in _places(tiles).items():
        share = float(squares[mask].sum()) / total
        if share >= CONFINED:
            y, x = divmod(int(squares.argmax()), squares.shape[1])
            said = f"{share:.0%} of the error against the oracle lies {PLACES[name]}, the most at x {x} y {y}"
            yield Reason("cause", said, share, CONFINED, "share", (name,))
            return
    if (total / error.numel()) ** 0.5 < LEAST:
        return
    tone = _tone(error, expected * levels(data_range), tiles)
    if tone is not None:
        yield tone
        return
    step = DETECTORS.get("tile_step")(candidate, expected, plan=plan, receipts=receipts, data_range=data_range)
    if step.value is not None and step.value > STEP and _whole(error, expected * levels(data_range)) < GLOBAL:
        said = f"against the oracle the tile grid shows a step of {step.value:.3g} grey levels"
        yield Reason("cause", said, step.value, STEP, "grey levels", ("seam",))


PLACES = {
    "corner": "where four tiles are blended",
    "seam": "within a pixel of the tile borders",
    "band": "in the bands where tiles are blended",
}


def _places(tiles: Layout) -> dict[str, Tensor]:
    """Masks (H, W) of the places to which an error may be confined, the smallest first."""
    rows, cols = (_within(axis, _bands(axis)) for axis in (tiles.grid.rows, tiles.grid.cols))
    lines = [_within(axis, [(start - 1, start + 1) for start in axis.edges]) for axis in (tiles.grid.rows, tiles.grid.cols)]
    return {
        "corner": rows[:, None] & cols[None, :],
        "seam": lines[0][:, None] | lines[1][None, :],
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
    if whole >= GLOBAL:
        return None
    boxes = [(slice(*rows), slice(*cols)) for rows in tiles.spans("y") for cols in tiles.spans("x")]
    left, offsets = 0.0, []
    for rows, cols in boxes:
        part, guide = error[..., rows, cols], picture[..., rows, cols]
        offset, rest = _affine(part, guide)
        left += rest
        offsets.append(offset)
    explained = 1 - left / float(error.double().square().sum())
    if explained < BY_TILE or 1 - explained > 0.7 * (1 - whole):
        return None
    means = torch.stack(offsets)  # tiles × channels
    grey = means.mean(1, keepdim=True)
    coloured = float((means - grey).square().sum()) > float(grey.square().sum())
    said = (
        f"a gain and an offset of each tile explain {explained:.0%} of the error against the oracle, one for all "
        f"{whole:.0%}: each tile has its own {'hue' if coloured else 'tone'} (grey levels "
        + ", ".join(f"{float(value):+.2f}" for value in (grey[:, 0] if not coloured else means.abs().amax(1)))
        + ")"
    )
    return Reason("cause", said, explained, BY_TILE, "share", ("chroma" if coloured and means.shape[1] == 3 else "tone_drift",))


def _whole(error: Tensor, picture: Tensor) -> float:
    """Share of the squared error that one gain and offset a channel explain."""
    _, left = _affine(error, picture)
    return 1 - left / max(float(error.double().square().sum()), 1e-12)


def _affine(error: Tensor, picture: Tensor) -> tuple[Tensor, float]:
    """Least squares error = offset + gain · (picture − mean), a channel at a time: offsets and what is left, squared."""
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
