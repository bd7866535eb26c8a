"""Order and place: images, channels, tiles and frames that stand where another belongs, and pictures that moved."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from statistics import median
from typing import TYPE_CHECKING, Any

from fidelity.detectors.grid import layout
from fidelity.lazy import torch
from fidelity.records import DecodePlan, Receipts
from fidelity.registry import cuts
from fidelity.signal import Pair

if TYPE_CHECKING:
    from torch import Tensor

Cause = tuple[str, str]
THUMB = 32
STANDS_OUT = 1.5
"""How many times the usual error of a tile one must have to be looked into."""
GHOST, HAUNTED = 0.01, 0.8
"""Least share of another item that is called a ghost, and of the squared error that it must explain."""
REACH = 2
"""Pixels by which a single tile is tried to be moved."""
IN_TIME = 4
"""Frames to each side among which one is looked for that a frame shows instead of its own."""


def shape_sentence(candidate: tuple[int, ...], golden: tuple[int, ...]) -> str:
    """What the shapes give away."""
    words = f"the sample has shape {candidate}, the golden {golden}"
    if len(candidate) != len(golden):
        return f"{words}: another number of dimensions"
    ratios = {c / g for c, g in zip(candidate[-2:], golden[-2:])}
    if len(ratios) == 1 and ratios != {1.0}:
        return f"{words}: {ratios.pop():g} times the size"
    if candidate[0] != golden[0]:
        return f"{words}: {candidate[0]} images for {golden[0]}"
    if len(candidate) == 5 and candidate[2] != golden[2]:
        return f"{words}: {candidate[2] - golden[2]:+d} frames"
    return words


# ---------------------------------------------------------------- order


def batch_order(pair: Pair, matches: float, least: float) -> Iterator[Cause]:
    """An item of the batch that is like another golden and not like its own."""
    if pair.batch < 2:
        return
    size = pair.batch
    own, other = (_thumbs(side).reshape(size, -1) for side in (pair.candidate, pair.golden))
    distance = _levels(pair, (own[:, None] - other[None]).square().mean(-1).sqrt())
    best = distance.argmin(1).tolist()
    wrong = [i for i in range(size) if best[i] != i and _better(distance[i, best[i]], distance[i, i], matches, least)]
    if not wrong:
        return
    first = wrong[0]
    seen = f"image {first} shows what image {best[first]} should ({distance[first, best[first]]:.2f} levels off"
    kind = "items are in another order" if sorted(best) == list(range(size)) else "an item is repeated"
    yield "order", f"{kind}: {seen}, against {distance[first, first]:.2f} for its own; order seen {best})"


def batch_ghost(pair: Pair, least: float) -> Iterator[Cause]:
    """An item of the batch that holds a share of another: its error is a share of the difference between the two."""
    if pair.batch < 2 or len(pair.good) < pair.count:
        return
    size = pair.batch
    own, other = (_thumbs(side).reshape(size, -1) for side in (pair.candidate, pair.golden))
    error = own - other
    apart = other[None] - other[:, None]  # [i, j]: from item i to item j
    power = apart.square().mean(-1).clamp_min(1e-12)
    share = (error[:, None] * apart).mean(-1) / power
    explained = share.square() * power / error.square().mean(-1, keepdim=True).clamp_min(1e-12)
    explained[(share < GHOST) | (_levels(pair, error.square().mean(-1, keepdim=True).sqrt()) < least)] = 0
    value, at = explained.flatten().max(0)
    if float(value) > HAUNTED:
        item, source = divmod(int(at), size)
        seen = f"image {item} holds {share[item, source]:.0%} of image {source}"
        yield "ghost", f"{seen}, which explains {float(value):.0%} of its squared error"


def channel_order(pair: Pair, matches: float, least: float) -> Iterator[Cause]:
    """The channels of three in another order."""
    if pair.candidate.shape[1] != 3:
        return
    own, other = _thumbs(pair.candidate), _thumbs(pair.golden)
    errors = {p: float(_levels(pair, (own - other[:, list(p)]).square().mean().sqrt())) for p in permutations(range(3))}
    best = min(errors, key=lambda p: errors[p])
    if best != (0, 1, 2) and _better(errors[best], errors[0, 1, 2], matches, least):
        names = "".join("RGB"[i] for i in best)
        yield (
            "order",
            f"channels are in the order {names}: that leaves {errors[best]:.2f} of {errors[0, 1, 2]:.2f} levels",
        )


# ---------------------------------------------------------------- place


def moved(pair: Pair, matches: float, least: float) -> Iterator[Cause]:
    """The whole picture mirrored, transposed, or moved by whole pixels."""
    candidate, golden = pair.candidate.mean(1), pair.golden.mean(1)
    before = float(_levels(pair, (candidate - golden).square().mean().sqrt()))
    if before < least:
        return
    mirrors = {"left to right": golden.flip(-1), "upside down": golden.flip(-2), "by half a turn": golden.flip(-1, -2)}
    if golden.shape[-1] == golden.shape[-2]:
        mirrors["across its diagonal"] = golden.mT
    for words, mirrored in mirrors.items():
        after = float(_levels(pair, (candidate - mirrored).square().mean().sqrt()))
        if _better(after, before, matches, least):
            yield "geometry", f"the picture is turned {words}: that leaves {after:.2f} of {before:.2f} levels"
            return
    down, right = _correlate(candidate, golden)
    if (down, right) == (0, 0):
        return
    here, there = _shifted(candidate, golden, down, right)
    after = float(_levels(pair, (here - there).square().mean().sqrt()))
    if _better(after, before, matches, least):
        by = f"{right:+d} px in x and {down:+d} px in y"
        yield "misaligned", f"the picture is moved by {by}: that leaves {after:.2f} of {before:.2f} levels"


def _correlate(candidate: Tensor, golden: Tensor) -> tuple[int, int]:
    """The whole-pixel shift (down, right) of the candidate, by phase correlation over all images together."""
    height, width = golden.shape[-2:]
    window = torch.hann_window(height)[:, None] * torch.hann_window(width)[None, :]
    spectra = [torch.fft.rfft2((side - side.mean((-1, -2), keepdim=True)) * window) for side in (candidate, golden)]
    cross = spectra[0] * spectra[1].conj()
    peak = torch.fft.irfft2(cross / cross.abs().clamp_min(1e-9), s=(height, width)).sum(0).flatten().argmax().item()
    down, right = divmod(int(peak), width)
    return down - height if down > height // 2 else down, right - width if right > width // 2 else right


def _shifted(candidate: Tensor, golden: Tensor, down: int, right: int) -> tuple[Tensor, Tensor]:
    """The parts of both that show the same, if the candidate is moved by (down, right)."""
    height, width = golden.shape[-2:]
    here = candidate[..., max(0, down) : height + min(0, down), max(0, right) : width + min(0, right)]
    there = golden[..., max(0, -down) : height + min(0, -down), max(0, -right) : width + min(0, -right)]
    return here, there


def tiles(pair: Pair, plan: DecodePlan, receipts: Receipts, matches: float, least: float) -> Iterator[Cause]:
    """One tile moved by a pixel or two, or showing what another tile should."""
    if "tiling" not in cuts(plan):
        return
    grid = layout(pair.candidate, plan, receipts)
    if isinstance(grid, str):
        return
    boxes = [((r, c), rows, cols) for r, rows in enumerate(grid.spans("y")) for c, cols in enumerate(grid.spans("x"))]
    candidate, golden = pair.candidate.mean(1), pair.golden.mean(1)

    def error(a: Tensor, b: Tensor) -> float:
        return float(_levels(pair, (a - b).square().mean().sqrt()))

    def own_error(box: Any) -> float:
        part = (..., slice(*box[1]), slice(*box[2]))
        return error(candidate[part], golden[part])

    usual = median(map(own_error, boxes))
    boxes_amiss = [box for box in boxes if own_error(box) > STANDS_OUT * usual]
    for tile, (top, bottom), (left, right) in boxes_amiss:
        here, own = candidate[..., top:bottom, left:right], golden[..., top:bottom, left:right]
        before = error(here, own)
        if before < least or min(bottom - top, right - left) <= 4 * REACH:
            continue
        inner = here[..., REACH:-REACH, REACH:-REACH]
        height, width = own.shape[-2:]
        tried = {
            (dy, dx): error(inner, own[..., REACH - dy : height - REACH - dy, REACH - dx : width - REACH - dx])
            for dy in range(-REACH, REACH + 1)
            for dx in range(-REACH, REACH + 1)
        }
        best = min(tried, key=lambda shift: tried[shift])
        if best != (0, 0) and _better(tried[best], tried[0, 0], matches, least):
            what = f"tile {tile} is moved by {best[1]:+d} px in x and {best[0]:+d} px in y"
            yield "misaligned", f"{what}: that leaves {tried[best]:.2f} of {tried[0, 0]:.2f} levels"
            return
        for other, rows, cols in boxes:
            if other == tile or (rows[1] - rows[0], cols[1] - cols[0]) != (bottom - top, right - left):
                continue
            after = error(here, golden[..., slice(*rows), slice(*cols)])
            if _better(after, before, matches, least):
                what = f"tile {tile} shows what tile {other} should"
                yield "geometry", f"{what}: that leaves {after:.2f} of {before:.2f} levels"
                return


# ---------------------------------------------------------------- frames


def frame_shift(pair: Pair, matches: float, least: float) -> Iterator[Cause]:
    """Frames from some frame on that are others nearby in time, or have a share of them."""
    size, frames = pair.batch, pair.frames
    own, other = (_thumbs(side).reshape(size, frames, -1) for side in (pair.candidate, pair.golden))
    same = _levels(pair, (own - other).square().mean(-1).sqrt())
    best, by = torch.full_like(same, float("inf")), torch.zeros(same.shape, dtype=torch.int64)
    for step in _near(frames):
        there = _levels(pair, (own - other.roll(-step, 1)).square().mean(-1).sqrt())
        nearer = _has(frames, step) & (there < best)
        best, by = torch.where(nearer, there, best), torch.where(nearer, step, by)
    wrong = ((best < same * matches) & (same > least)).nonzero().tolist()
    if not wrong:
        yield from _ghost(own, other, same, least)
        return
    # the shift of most of them tells; the first frame that has it tells where
    steps = [int(by[item, frame]) for item, frame in wrong]
    step = max(set(steps), key=lambda each: (steps.count(each), -abs(each)))
    item, frame = wrong[steps.index(step)]
    words = f"{abs(step)} frames {'later' if step > 0 else 'earlier'}" if abs(step) > 1 else _beside(step)
    seen = f"image {item}, frame {frame} is the frame {words} ({steps.count(step)} frames so)"
    yield "misaligned", f"{seen}: that leaves {best[item, frame]:.2f} of {same[item, frame]:.2f} levels"


def _beside(step: int) -> str:
    return "later" if step > 0 else "earlier"


def _near(frames: int) -> list[int]:
    """Steps to the frames nearby, the nearest first."""
    return [step for k in range(1, min(IN_TIME, frames - 1) + 1) for step in (k, -k)]


def _has(frames: int, step: int) -> Tensor:
    """Which frames have one that many later."""
    at = torch.arange(frames) + step
    return (at >= 0) & (at < frames)


def _ghost(own: Tensor, other: Tensor, same: Tensor, least: float) -> Iterator[Cause]:
    """A frame's error that is a share of the difference to a frame nearby."""
    worst: tuple[float, str] = (0.0, "")
    for step in _near(own.shape[1]):
        neighbour = other.roll(-step, 1) - other
        error = own - other
        power = neighbour.square().mean(-1)
        share = (error * neighbour).mean(-1) / power.clamp_min(1e-12)
        explained = share.square() * power / error.square().mean(-1).clamp_min(1e-12)
        explained[~_has(own.shape[1], step).expand_as(same) | (same < least) | (share < 0.02)] = 0
        value, at = explained.flatten().max(0)
        if float(value) > max(0.5, worst[0]):
            item, frame = divmod(int(at), own.shape[1])
            seen = f"image {item}, frame {frame} holds {share[item, frame]:.0%} of frame {frame + step}"
            worst = float(value), f"{seen}, which explains {float(value):.0%} of its squared error"
    if worst[0]:
        yield "ghost", worst[1]


# ---------------------------------------------------------------- shared


def _thumbs(side: Tensor) -> Tensor:
    """Small versions, so that grain does not hide what is shown: (N, C, 32, 32) at most."""
    return torch.nn.functional.adaptive_avg_pool2d(side, (min(THUMB, side.shape[-2]), min(THUMB, side.shape[-1])))


def _levels(pair: Pair, error: Tensor) -> Tensor:
    low, high = pair.data_range
    return error * (255 / (high - low))


def _better(after: Tensor | float, before: Tensor | float, matches: float, least: float) -> bool:
    return float(before) > least and float(after) < float(before) * matches
