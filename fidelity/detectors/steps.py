"""Steps across the lines of a tile grid, against the same statistic at control positions of the same picture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from fidelity.detectors.grid import Layout, Lines
from fidelity.detectors.null import FEWEST, Tail, excess, tail
from fidelity.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

FLOOR = 0.01
"""Grey levels under which neither noise nor a step is of interest (fp32 on another CPU moves a decode by 0.005)."""
REACH = 3
"""Periods to each side from which the local noise of a line is taken."""
CLEAR = 2
"""Pixels around a line that are neither control nor local noise."""
KINDS = ("offset", "rough")
"""A step of one sign along the border, and one whose sign varies (missing context)."""


@dataclass(frozen=True)
class Profiles:
    """Steps at every position along one axis, (N, S, size): S spans of tiles across it; position p lies between
    pixels p − 1 and p. `effect` in grey levels by kind; `scale`: what noise would give there, from the neighbourhood.
    """

    axis: str
    lines: Lines
    spans: tuple[tuple[int, int], ...]
    effect: dict[str, Tensor]
    scale: dict[str, Tensor]

    @property
    def usable(self) -> int:
        """Positions that are near no line."""
        return sum(not self.lines.near(position, CLEAR) for position in range(1, self.lines.size))


@dataclass(frozen=True)
class Step:
    """The worst step of one image: `value` is its excess over what seamless positions show, in grey levels."""

    value: float
    limit: float
    """The smallest step that would have been significant at a line of the middling kind (one-sided 95 %)."""
    where: dict[str, Any]
    details: dict[str, Any]


def profiles(difference: Tensor, layout: Layout, axis: str) -> Profiles:
    """Step profiles of (N, C, H, W) in grey levels; `axis` "x": vertical lines."""
    across = "y" if axis == "x" else "x"
    field = difference if axis == "x" else difference.transpose(-1, -2)
    spans = tuple(layout.spans(across))
    jump = torch.nn.functional.pad(field[..., 1:] - field[..., :-1], (1, 0))
    lengths = torch.tensor([stop - start for start, stop in spans], dtype=jump.dtype)[None, :, None]
    means = torch.stack([jump[..., start:stop, :].mean(-2) for start, stop in spans], dim=2)
    squares = jump.square_().mean(1)
    energy = torch.stack([squares[:, start:stop].mean(1) for start, stop in spans], dim=1)
    lines = layout.lines(axis)
    local = _neighbourhood(energy, lines).add_(FLOOR**2).sqrt_()
    effect = {"offset": means.square_().mean(1).sqrt_(), "rough": energy.sqrt()}
    return Profiles(axis, lines, spans, effect, {"offset": local / lengths.sqrt(), "rough": local})


def _neighbourhood(energy: Tensor, lines: Lines) -> Tensor:
    """Mean energy around each position but not at it, lines left out; that of all the axis where too few are near."""
    reach = REACH * lines.period
    size = energy.shape[-1]
    usable = torch.tensor([float(p > 0 and not lines.near(p, CLEAR)) for p in range(size)], dtype=energy.dtype)
    ring = torch.ones(1, 1, 2 * reach + 1, dtype=energy.dtype)
    ring[..., reach - CLEAR : reach + CLEAR + 1] = 0
    total = torch.nn.functional.conv1d((energy * usable).reshape(-1, 1, size), ring, padding=reach)
    count = torch.nn.functional.conv1d(usable.view(1, 1, -1), ring, padding=reach)
    near = (total / count.clamp_min(1)).reshape(energy.shape)
    anywhere = (energy * usable).sum(-1, keepdim=True) / usable.sum().clamp_min(1)
    return torch.where(count[0] < FEWEST, anywhere, near)


def steps(difference: Tensor, layout: Layout) -> list[Step] | str:
    """The worst step of each image (N, C, H, W, grey levels), or the reason why none can be told from noise."""
    axes = [p for p in (profiles(difference, layout, "x"), profiles(difference, layout, "y")) if p.lines.positions]
    looks = sum(len(p.lines.positions) * len(p.spans) for p in axes) * len(KINDS) * len(difference)
    if not axes or any(each.usable < 2 * FEWEST for each in axes):
        return "lines lie too dense: there is no place without one to compare with"
    found = []
    for image in range(len(difference)):
        tails = {kind: _tail(axes, kind, image, looks) for kind in KINDS}
        if any(each is None for each in tails.values()):
            return "too few places of the grid's phase without a border: no noise level to compare with"
        found.append(_worst(list(_looks(axes, tails, image)), layout))  # type: ignore[arg-type]
    return found


def _tail(axes: Sequence[Profiles], kind: str, image: int, looks: int) -> Tail | None:
    ratios: list[float] = []
    for each in axes:
        controls = list(each.lines.controls(CLEAR, CLEAR))
        effect, scale = each.effect[kind][image][:, controls], each.scale[kind][image][:, controls]
        # the floor on both sides: where there is no error at all the ratio is that of plain noise, and not of silence
        floor = each.scale[kind][image][:, controls] * (FLOOR / each.scale["rough"][image][:, controls])
        ratios += ((effect.square() + floor.square()).sqrt() / scale).flatten().tolist()
    return tail(ratios, looks)


@dataclass(frozen=True)
class _Look:
    value: float
    limit: float
    effect: float
    critical: float
    kind: str
    axis: str
    position: int
    span: tuple[int, int]
    tail: Tail


def _looks(axes: Sequence[Profiles], tails: dict[str, Tail], image: int) -> Iterator[_Look]:
    for each in axes:
        for kind in KINDS:
            positions = list(each.lines.positions)
            effects = each.effect[kind][image][:, positions].tolist()
            scales = each.scale[kind][image][:, positions].tolist()
            found = tails[kind]
            for span, row, levels in zip(each.spans, effects, scales):
                for position, effect, scale in zip(positions, row, levels):
                    critical = found.critical * scale
                    # a step adds to noise of either sign: 95 % of the time it is not cancelled by more than this
                    limit = critical + 1.645 * scale * (1.0 if kind == "offset" else 0.0)
                    value = excess(effect, critical)
                    yield _Look(value, limit, effect, critical, kind, each.axis, position, span, found)


def _worst(looks: Sequence[_Look], layout: Layout) -> Step:
    worst = max(looks, key=lambda look: (look.value, look.effect / look.critical))
    places: dict[tuple[str, int, tuple[int, int]], float] = {}
    for look in looks:
        key = (look.axis, look.position, look.span)
        places[key] = min(places.get(key, math.inf), look.limit)
    middle = sum(worst.span) // 2
    x, y = (worst.position, middle) if worst.axis == "x" else (middle, worst.position)
    start = layout.axis(worst.axis).starts
    where = {"x": x, "y": y, "axis": worst.axis, "position": worst.position, "span": list(worst.span),
             "tile": layout.tile_at(y, x), "line": "border" if worst.position in start else "band end"}  # fmt: skip
    median_here = worst.critical / worst.tail.critical * worst.tail.median
    details = {
        "kind": worst.kind,
        "effect": worst.effect,
        "critical": worst.critical,
        "elsewhere": median_here,
        "p_value": worst.tail.p_value(worst.effect / worst.critical * worst.tail.critical),
        "looks": len(looks),
        "controls": worst.tail.controls,
    }
    details["worst_detection_limit"] = max(places.values())
    return Step(worst.value, median(places.values()), where, details)
