"""Predicted over measured peaks, as points and as the picture of docs/design/prediction.md."""

from __future__ import annotations

import math
from typing import NamedTuple


class Point(NamedTuple):
    """One decode: what was predicted and what was measured, in bytes."""

    group: str
    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def plot(points: list[Point]) -> str:
    """Predicted over measured, both in MiB on logarithmic axes, as SVG."""
    side, left, colours = 420, 60, ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d")
    low, high = (f(math.log10(p.measured / 2**20) for p in points) for f in (min, max))
    low, high = math.floor(low), math.ceil(high)

    def at(value: float) -> float:
        return side * (math.log10(value / 2**20) - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + side + 320} {side + 60}"',
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<g transform="translate({left},10)"><rect width="{side}" height="{side}" fill="none" stroke="#999"/>',
        f'<line x1="0" y1="{side}" x2="{side}" y2="0" stroke="#999"/>',
    ]
    for power in range(low, high + 1):
        x = side * (power - low) / (high - low)
        label = f"{10**power:,} MiB" if power < 3 else f"{10 ** (power - 3):,}k MiB"
        parts += [f'<text x="{x}" y="{side + 16}" text-anchor="middle">{label}</text>',
                  f'<text x="-6" y="{side - x + 4}" text-anchor="end">{label.removesuffix(" MiB")}</text>']  # fmt: skip
    for index, group in enumerate(dict.fromkeys(point.group for point in points)):
        colour = colours[index % len(colours)]
        mine = [point for point in points if point.group == group]
        worst = max(abs(point.error) for point in mine)
        parts += [f'<circle cx="{at(p.measured):.1f}" cy="{side - at(p.predicted):.1f}" r="3" fill="none" '
                  f'stroke="{colour}"><title>{p.name}: {p.error:+.2%}</title></circle>' for p in mine]  # fmt: skip
        parts.append(f'<text x="{side + 12}" y="{20 + 18 * index}" fill="{colour}">{group}: {worst:.2%} at most</text>')
    parts += [f'<text x="{side / 2}" y="{side + 38}" text-anchor="middle">measured peak</text>',
              f'<text transform="translate(-44,{side / 2}) rotate(-90)" text-anchor="middle">predicted peak</text>',
              "</g></svg>\n"]  # fmt: skip
    return "\n".join(parts)
