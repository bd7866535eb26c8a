"""peak = constant + k · pixels: a straight line through a few predictions, and how well it holds."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct


class Law(Struct, frozen=True):
    """The line of least squares through peaks over the pixels of one picture (height × width)."""

    constant_bytes: int
    """What does not grow with the picture: weights, and of a tiled decode its tiles."""
    bytes_per_pixel: float
    fitted: dict[str, int]
    """The peaks it was fitted to, by size."""
    largest_error: float
    """The largest deviation of a fitted peak from the line, as a share of that peak."""

    def peak(self, height: int, width: int) -> int:
        """The line's peak of a picture, in bytes."""
        return round(self.constant_bytes + self.bytes_per_pixel * height * width)

    def pixels(self, budget: int) -> int:
        """How many pixels fit into a budget of bytes; 0 where the constant alone does not."""
        return max(0, int((budget - self.constant_bytes) / self.bytes_per_pixel)) if self.bytes_per_pixel > 0 else 0


def fit(peaks: Mapping[tuple[int, int], int]) -> Law:
    """The law of peaks by (height, width), of at least two numbers of pixels. Raises ValueError for fewer."""
    points = [(height * width, peak) for (height, width), peak in peaks.items()]
    if len({pixels for pixels, _ in points}) < 2:
        raise ValueError(f"a line needs two sizes, got {sorted(peaks)}")
    mean_x, mean_y = (sum(axis) / len(points) for axis in zip(*points))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    constant = mean_y - slope * mean_x
    worst = max(abs(constant + slope * x - y) / y for x, y in points)
    sizes = {f"{height}x{width}": peak for (height, width), peak in peaks.items()}
    return Law(round(constant), slope, sizes, worst)
