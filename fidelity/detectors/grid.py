"""The tile grid of a decode, as the detectors use it: checked against the sample, with its lines and its phase."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from fidelity.records import DecodePlan, Receipts, TileAxis, TileGrid

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Lines:
    """Where one axis may break: borders (a tile begins to show) and the far edges of the blend bands.

    `period`: pixels per latent. A decoder's own error depends on the place within a latent, so what is compared with a
    line lies a whole number of periods away.
    """

    positions: tuple[int, ...]
    period: int
    size: int

    def controls(self, margin: int = 2, edge: int = 2) -> tuple[int, ...]:
        """Positions of the lines' phase at which nothing can break: away from all lines and from the picture's edge."""
        phases = {position % self.period for position in self.positions}
        return tuple(p for p in range(edge, self.size - edge) if p % self.period in phases and not self.near(p, margin))

    def near(self, position: int, margin: int) -> bool:
        return any(abs(position - line) <= margin for line in self.positions)


@dataclass(frozen=True)
class Layout:
    """A grid that fits the sample: its axes, lines and spans of rows and columns that belong to one row of tiles."""

    grid: TileGrid
    period: int

    def lines(self, axis: str) -> Lines:
        along = self.axis(axis)
        return Lines(tuple(sorted(set(_breaks(along)))), self.period, along.size)

    def axis(self, axis: str) -> TileAxis:
        return self.grid.cols if axis == "x" else self.grid.rows

    def spans(self, axis: str) -> list[tuple[int, int]]:
        """First and last+1 pixel of each tile's own content along the axis."""
        along = self.axis(axis)
        return list(zip(along.starts, (*along.starts[1:], along.size)))

    def tile_at(self, y: int, x: int) -> list[int]:
        """Row and column of the tile that shows at a pixel."""
        return [_index(self.grid.rows.starts, y), _index(self.grid.cols.starts, x)]


def _breaks(axis: TileAxis) -> Iterator[int]:
    for start in axis.edges:
        yield start
        if axis.band and start + axis.band < axis.size:
            yield start + axis.band


def _index(starts: tuple[int, ...], position: int) -> int:
    return sum(position >= start for start in starts) - 1


def layout(sample: Tensor, plan: DecodePlan, receipts: Receipts) -> Layout | str:
    """The layout of the tiles of (B, C, [T,] H, W), or the reason why there is nothing to look for."""
    tiled = next((each for each in receipts.values() if "rows" in (each.get("grid") or ())), None)
    if tiled is None:
        return "the receipts hold no tile grid"
    built: Any = tiled["grid"]
    try:
        grid = msgspec.convert(built, TileGrid)
    except msgspec.ValidationError as error:
        return f"the tile grid in the receipts cannot be read: {error}"
    height, width = sample.shape[-2:]
    if (grid.rows.size, grid.cols.size) != (height, width):
        return f"the tile grid is for {grid.rows.size}×{grid.cols.size} px, the sample has {height}×{width}"
    for name, axis in (("rows", grid.rows), ("cols", grid.cols)):
        if not axis.is_ordered:
            return f"the tile grid's {name} start at {list(axis.starts)}: expected 0, ascending, below {axis.size}"
    if grid.count == 1:
        return "the tile grid has one tile: there is no border inside the picture"
    return Layout(grid, int(tiled.get("period") or _period(grid, plan)))


def _period(grid: TileGrid, plan: DecodePlan) -> int:
    """Pixels per latent of a receipt that does not say: from the plan's tile, else from the grid's own divisor."""
    if plan.tiling is not None and plan.tiling.tile > 0 and grid.cols.tile % plan.tiling.tile == 0:
        return max(1, grid.cols.tile // plan.tiling.tile)
    numbers = (grid.rows.tile, grid.cols.tile, *grid.rows.starts, *grid.cols.starts)
    return min(max(1, math.gcd(*numbers)), 8)
