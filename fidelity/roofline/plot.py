"""The roofline as a picture: both axes logarithmic, the roof, and each part under it. SVG, without scripts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from fidelity.roofline.roof import Part, Roofline

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 460, 64, 200, 34, 52
MOST = 20
"""Parts that are drawn, those with the most FLOPs."""
WHOLE = "#222"
COLOURS = ("#3b6fb6", "#c1592f", "#4a8f4f", "#8a5aa8", "#b03a5b", "#2f8f8f", "#a07d1c", "#6b6b6b")


class Axes:
    """From FLOP per byte and GFLOP/s to points of the picture."""

    def __init__(self, found: Roofline, points: list[tuple[str, float, float, bool]]):
        xs = [found.ridge / 10, found.ridge * 10, *(x for _, x, _, _ in points)]
        ys = [found.compute.value, found.compute.value / 100, *(y for _, _, y, _ in points)]
        self.x0, self.x1 = math.floor(math.log10(min(xs))), math.ceil(math.log10(max(xs)))
        self.y0, self.y1 = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys) * 1.2))

    def x(self, value: float) -> float:
        return LEFT + (math.log10(value) - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (math.log10(value) - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)


def svg(found: Roofline) -> str:
    """The picture as text. Parts without FLOPs have no place on it; filled dots are reached, open ones allowed."""
    drawn = sorted(found.parts, key=lambda one: -one.flops)[:MOST]
    shown = [one for one in found.parts if any(one is each for each in drawn)]
    points = [point for one in (*shown, found.whole) for point in _point(one)]
    axes = Axes(found, points)
    title = f"{found.model}, {found.plan.id}, latents {'×'.join(map(str, found.latents))}, {found.device}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
            'font-size="12" fill="#222">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
            f'<text x="{LEFT}" y="18" font-size="13">{escape(title)}</text>',
            *_grid(axes),
            *_roof(found, axes),
            *_points(points, axes),
            "</svg>",
            "",
        ]
    )


def _point(one: Part) -> Iterator[tuple[str, float, float, bool]]:
    """Name, FLOP per byte, GFLOP/s, and whether that was reached."""
    if one.intensity and one.ceiling:
        yield one.name, one.intensity, one.achieved or one.ceiling, one.achieved is not None


def _grid(axes: Axes) -> Iterator[str]:
    left, right, top, bottom = LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM
    for power in range(axes.x0, axes.x1 + 1):
        x = axes.x(10.0**power)
        yield f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" stroke="#ddd"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{10.0**power:,g}</text>'
    for power in range(axes.y0, axes.y1 + 1):
        y = axes.y(10.0**power)
        yield f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#ddd"/>'
        yield f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:,g}</text>'
    yield f'<text x="{(left + right) / 2}" y="{HEIGHT - 14}" text-anchor="middle">FLOP per byte</text>'
    yield f'<text transform="translate(16 {(top + bottom) / 2}) rotate(-90)" text-anchor="middle">GFLOP/s</text>'


def _roof(found: Roofline, axes: Axes) -> Iterator[str]:
    flow, top = found.bandwidth.value, found.compute.value
    first = max(10.0**axes.x0, 10.0**axes.y0 / flow)
    path = [(first, first * flow), (found.ridge, top), (10.0**axes.x1, top)]
    dots = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in path)
    yield f'<polyline points="{dots}" fill="none" stroke="#222" stroke-width="2"/>'
    end = axes.x(10.0**axes.x1) - 4
    yield f'<text x="{end:.1f}" y="{axes.y(top) - 12:.1f}" text-anchor="end">{top:,.4g} GFLOP/s</text>'
    middle = math.sqrt(first * found.ridge)
    yield (f'<text x="{axes.x(middle) - 8:.1f}" y="{axes.y(middle * flow) - 6:.1f}" text-anchor="end">'
           f"{flow:,.4g} GB/s</text>")  # fmt: skip


def _points(points: list[tuple[str, float, float, bool]], axes: Axes) -> Iterator[str]:
    for index, (name, x, y, reached) in enumerate(points):
        colour = COLOURS[index % len(COLOURS)] if index < len(points) - 1 else WHOLE
        fill = colour if reached else "#fff"
        row = TOP + 12 + 17 * index
        at = WIDTH - RIGHT + 18
        style = f'fill="{fill}" stroke="{colour}" stroke-width="2"'
        yield f'<circle cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="5" {style}/>'
        yield f'<circle cx="{at}" cy="{row - 4}" r="4" {style}/>'
        yield f'<text x="{at + 10}" y="{row}">{escape(name)}</text>'
