"""peak = constant + k · pixels, stage by stage: straight lines through a few predictions, and how well they hold.

Each stage of a decode grows by a line of its own: a tile's peak by the tiles that wait beside it, their assembly by all
of them and the output. The peak is the largest of the stages', so that which line it follows may change with the size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct

Size = tuple[int, int]


class Line(Struct, frozen=True):
    """What a stage needs of a picture of so many pixels (height × width)."""

    constant_bytes: int
    """What does not grow with the picture: weights, and of a tiled decode a tile at work."""
    bytes_per_pixel: float

    def peak(self, pixels: int) -> float:
        return self.constant_bytes + self.bytes_per_pixel * pixels

    def pixels(self, budget: int) -> float:
        """How many fit into a budget of bytes; below 0 where the constant alone does not."""
        left = budget - self.constant_bytes
        if self.bytes_per_pixel > 0:
            return left / self.bytes_per_pixel
        return float("inf") if left >= 0 else -1.0


class Law(Struct, frozen=True):
    """The lines of least squares through peaks over the pixels of one picture."""

    constant_bytes: int
    """Of the stage that holds the peak of the largest size that it was fitted to."""
    bytes_per_pixel: float
    fitted: dict[str, int]
    """The peaks that it was fitted to, by size."""
    largest_error: float
    """The largest deviation of a fitted peak from the law, as a share of that peak."""
    stages: dict[str, Line] = {}
    """The line of each stage; the law is the largest of them."""

    def peak(self, height: int, width: int) -> int:
        """The law's peak of a picture, in bytes."""
        return round(max(line.peak(height * width) for line in self.stages.values()))

    def pixels(self, budget: int) -> int:
        """How many pixels fit into a budget of bytes; 0 where the constants alone do not."""
        most = min(line.pixels(budget) for line in self.stages.values())
        return int(min(max(0.0, most), 2**62))

    def rows(self) -> Iterator[tuple[str, int, int, float]]:
        """Size, fitted peak, the law's, and by what share of the former that is above it."""
        for size, peak in self.fitted.items():
            height, width = map(int, size.split("x"))
            found = self.peak(height, width)
            yield size, peak, found, found / peak - 1


def fit(peaks: Mapping[Size, int]) -> Law:
    """The law of peaks by (height, width), of at least two numbers of pixels. Raises ValueError for fewer."""
    return fit_stages({size: {"decode": peak} for size, peak in peaks.items()})


def fit_stages(peaks: Mapping[Size, Mapping[str, int]]) -> Law:
    """The law of each stage's peak by (height, width). Raises ValueError for fewer than two numbers of pixels."""
    sizes = sorted(peaks, key=lambda size: size[0] * size[1])
    names = [name for name in peaks[sizes[-1]] if all(name in stages for stages in peaks.values())]
    lines = {name: _line({size: stages[name] for size, stages in peaks.items()}) for name in names}
    pixels = sizes[-1][0] * sizes[-1][1]
    leads = max(lines.values(), key=lambda line: line.peak(pixels))
    fitted = {f"{height}x{width}": max(peaks[height, width].values()) for height, width in peaks}
    law = Law(leads.constant_bytes, leads.bytes_per_pixel, fitted, 0.0, lines)
    worst = max(abs(share) for *_, share in law.rows())
    return Law(leads.constant_bytes, leads.bytes_per_pixel, fitted, worst, lines)


def _line(peaks: Mapping[Size, int]) -> Line:
    points = [(height * width, peak) for (height, width), peak in peaks.items()]
    if len({pixels for pixels, _ in points}) < 2:
        raise ValueError(f"a line needs two sizes, got {sorted(peaks)}")
    mean_x, mean_y = (sum(axis) / len(points) for axis in zip(*points))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return Line(round(mean_y - slope * mean_x), slope)
