"""Error that gathers where tiles are blended: along the bands, and where four tiles meet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from fidelity.detectors.grid import Layout
from fidelity.detectors.null import Tail, excess, tail
from fidelity.lazy import torch
from fidelity.records import TileAxis

if TYPE_CHECKING:
    from torch import Tensor

FLOOR = 0.01
"""Grey levels under which error is of no interest."""

Box = tuple[int, int, int, int]
"""top, bottom, left, right, in pixels, the second of each pair excluded."""


@dataclass(frozen=True)
class Gathered:
    """The worst place of one image: `value` is the excess of its error over what like places show, in grey levels."""

    value: float
    limit: float
    where: dict[str, Any]
    details: dict[str, Any]


@dataclass(frozen=True)
class Places:
    """Boxes to look at, boxes like them without blending, and which of these belong to each of those."""

    looks: list[Box]
    controls: list[Box]
    near: list[list[int]]

    @cached_property
    def shared(self) -> float:
        """Over how many controls a pixel of theirs counts, on average."""
        ends = sorted(set(self.controls))
        cover = torch.zeros(max(box[1] for box in ends), max(box[3] for box in ends))
        for top, bottom, left, right in ends:
            cover[top:bottom, left:right] += 1
        return float(cover.sum() / (cover > 0).sum())


class Energy:
    """Mean squared difference over any box, from the integral image of (N, C, H, W) in grey levels."""

    def __init__(self, difference: Tensor):
        squares = difference.square().mean(1).double()
        self.sums = torch.nn.functional.pad(squares, (1, 0, 1, 0)).cumsum_(1).cumsum_(2)

    def mean(self, boxes: Sequence[Box]) -> Tensor:
        """(N, boxes), at least FLOOR²."""
        top, bottom, left, right = torch.tensor(boxes).T
        sums = self.sums
        total = sums[:, bottom, right] - sums[:, top, right] - sums[:, bottom, left] + sums[:, top, left]
        return (total / ((bottom - top) * (right - left))).clamp_min(0) + FLOOR**2


@lru_cache(maxsize=64)
def band_places(layout: Layout) -> Places:
    """Each band within one span of tiles, and the boxes of its width and phase in that span that touch no band."""
    looks: list[Box] = []
    controls: list[Box] = []
    near: list[list[int]] = []
    for axis, across in (("x", "y"), ("y", "x")):
        along = layout.axis(axis)
        ranges = _bands(along)
        if not ranges:
            continue
        step = layout.period
        width = ranges[0][1] - ranges[0][0]
        free = [p for p in range(ranges[0][0] % step, along.size - width + 1, step)
                if all(p + width <= start or p >= stop for start, stop in ranges)]  # fmt: skip
        for span in layout.spans(across):
            first = len(controls)
            controls += [_box(axis, (p, p + width), span) for p in free]
            for band in ranges:
                looks.append(_box(axis, band, span))
                near.append(list(range(first, len(controls))))
    return Places(looks, controls, near)


@lru_cache(maxsize=64)
def corner_places(layout: Layout) -> Places:
    """Where bands (or borders without one: one latent to each side) cross, and boxes of that size along them."""
    sides = {axis: _bands(layout.axis(axis)) or _borders(layout.axis(axis), layout.period) for axis in "xy"}
    looks: list[Box] = []
    controls: list[Box] = []
    near: list[list[int]] = []
    for rows in sides["y"]:
        for cols in sides["x"]:
            mine = [_box("x", free, rows) for free in _free(sides["x"], cols, layout, "x")]
            mine += [_box("x", cols, free) for free in _free(sides["y"], rows, layout, "y")]
            near.append(list(range(len(controls), len(controls) + len(mine))))
            looks.append(_box("x", cols, rows))
            controls += mine
    return Places(looks, controls, near)


def _free(taken: Sequence[tuple[int, int]], like: tuple[int, int], layout: Layout, axis: str) -> list[tuple[int, int]]:
    """Ranges as long as `like` and of its phase that touch none of `taken`, half a length apart."""
    width = like[1] - like[0]
    step = max(layout.period, width // 2 // layout.period * layout.period)
    first = like[0] % layout.period
    size = layout.axis(axis).size
    return [(p, p + width) for p in range(first, size - width + 1, step)
            if all(p + width <= start or p >= stop for start, stop in taken)]  # fmt: skip


def _bands(axis: TileAxis) -> list[tuple[int, int]]:
    return [(start, min(start + axis.band, axis.size)) for start in axis.edges] if axis.band else []


def _borders(axis: TileAxis, period: int) -> list[tuple[int, int]]:
    return [(max(0, start - period), min(start + period, axis.size)) for start in axis.edges]


def _box(axis: str, along: tuple[int, int], across: tuple[int, int]) -> Box:
    return (*across, *along) if axis == "x" else (*along, *across)


def gathered(difference: Tensor, layout: Layout, places: Places) -> list[Gathered] | str:
    """Compare the error in each box with that of its like controls. (N, C, H, W) in grey levels.

    Each box is set against the root mean square of its own controls; how far a single control strays from the others of
    its group is the null.
    """
    looks, near = places.looks, places.near
    if not looks or any(len(group) < 3 for group in near):
        return "no places like these without blending: error in them cannot be compared with error elsewhere"
    energy = Energy(difference)
    here, there = energy.mean(looks), energy.mean(places.controls)
    groups = [list(group) for group in {tuple(group) for group in near}]
    found = []
    for image in range(len(difference)):
        ratios = [ratio for group in groups for ratio in _leave_one_out(there[image, group])]
        null = tail(ratios, len(looks) * len(difference), places.shared)
        if null is None:
            return "too few places without blending: no error level to compare with"
        found.append(_worst(here[image], [float(there[image, group].mean()) for group in near], null, looks, layout))
    return found


def _leave_one_out(energies: Tensor) -> list[float]:
    """Each control's error over the root mean square of the others of its group."""
    others = (energies.sum() - energies) / (len(energies) - 1)
    return (energies / others).sqrt().tolist()


def _worst(here: Tensor, elsewhere: Sequence[float], null: Tail, looks: Sequence[Box], layout: Layout) -> Gathered:
    effects = here.sqrt().tolist()
    criticals = [null.critical * math.sqrt(level) for level in elsewhere]
    values = [excess(effect, critical) for effect, critical in zip(effects, criticals)]
    index = max(range(len(looks)), key=lambda i: (values[i], effects[i] / criticals[i]))
    top, bottom, left, right = looks[index]
    y, x = (top + bottom) // 2, (left + right) // 2
    details = {"effect": effects[index], "critical": criticals[index], "elsewhere": math.sqrt(elsewhere[index]),
               "p_value": null.p_value(effects[index] / criticals[index] * null.critical), "looks": len(looks),
               "controls": null.controls, "worst_detection_limit": max(criticals)}  # fmt: skip
    where = {"x": x, "y": y, "box": [top, bottom, left, right], "tile": layout.tile_at(y, x)}
    return Gathered(values[index], sorted(criticals)[len(criticals) // 2], where, details)
