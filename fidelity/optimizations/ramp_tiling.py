"""A second tiler beside diffusers' own, of any class: weights that add up instead of blends one into the other.

Tiles start at 0, stride, 2·stride … below size − overlap, the stride being tile − overlap. Each is multiplied by
weights that rise evenly from 0 to 1, both inclusive, over the overlap's sample pixels on its top and left edge where it
is not the first; the sum of the products is divided by the sum of the weights. The earlier tile keeps weight 1 to its
end, so at the far edge of the overlap it still counts half, and is then gone: that is where this law leaves an edge.

A suite says `ramp_tiling = "t16o4"`: tiles of 16 latent pixels that overlap by 4. The overlap is a number of latent
pixels, and not a share as `tiling` has it, because this law has a step and a ramp for each whole number and no other.

It is entered as anybody's optimization is, by one decorated generator: docs/guide/your-own-optimization.md goes through
it. `ramp_decode` itself takes any function from latents to a sample.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from fidelity.errors import EvaluationError, SuiteError
from fidelity.lazy import torch
from fidelity.optimizations.attributes import attributes_kept
from fidelity.optimizations.outputs import sample_of, with_sample
from fidelity.optimizations.tiling import receipt
from fidelity.records import DecodePlan, Model, Proof, TileAxis, TileGrid
from fidelity.registry import optimization

if TYPE_CHECKING:
    from torch import Tensor, nn

_VALUE = re.compile(r"t(\d+)o(\d+)")


def parse(value: Any) -> tuple[int, int]:
    """Tile and overlap, latent pixels, of `t16o4`. Raises SuiteError unless 0 ≤ overlap < tile, both whole."""
    found = _VALUE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise SuiteError(f"ramp_tiling is {value!r}: write tile and overlap in whole latent pixels, like 't16o4'")
    tile, overlap = int(found[1]), int(found[2])
    if not overlap < tile:
        nearest = f"t{max(1, tile)}o{max(0, tile - 1)}"
        raise SuiteError(f"ramp_tiling is {value!r}: the overlap of {overlap} is not below the tile of {tile}, so no "
                         f"tile would follow; nearest legal: {nearest!r}")  # fmt: skip
    return tile, overlap


def ramp_grid(tile: int, overlap: int, latent_size: tuple[int, int], spatial: int) -> TileGrid:
    """Where the tiles lie, in sample pixels; one tile where the latents are no larger than it."""
    rows, cols = (_axis(tile, overlap, size, spatial) for size in latent_size)
    return TileGrid(rows=rows, cols=cols)


def _axis(tile: int, overlap: int, size: int, spatial: int) -> TileAxis:
    starts = tuple(range(0, max(1, size - overlap), tile - overlap))
    return TileAxis(
        starts=tuple(start * spatial for start in starts),
        band=overlap * spatial,
        tile=tile * spatial,
        size=size * spatial,
    )


def ramp_decode(decode: Callable[[Tensor], Tensor], latents: Tensor, grid: TileGrid, spatial: int) -> Tensor:
    """Decode latents (B, C, [T,] H, W) tile by tile and add the tiles up by their ramps: (B, C', [T',] H·f, W·f).

    `decode` is any function from latents to a sample f = `spatial` times as large. Sums are fp32, the result has the
    samples' dtype. Raises EvaluationError if a tile's sample is of another size.
    """
    total = weights = torch.zeros(())
    for top, down in _ramps(grid.rows):
        for left, across in _ramps(grid.cols):
            rows, cols = (slice(start, start + len(ramp)) for start, ramp in ((top, down), (left, across)))
            part = latents[
                ..., rows.start // spatial : rows.stop // spatial, cols.start // spatial : cols.stop // spatial
            ]
            sample = decode(part)
            if sample.shape[-2:] != (len(down), len(across)):
                seen, wanted = ("×".join(map(str, size)) for size in (sample.shape[-2:], (len(down), len(across))))
                place = f"row {rows.start // spatial}, column {cols.start // spatial}"
                raise EvaluationError(f"ramp_tiling: the tile at latent {place} gave {seen} pixels, expected {wanted}")
            if not total.ndim:
                total = sample.new_zeros((*sample.shape[:-2], grid.rows.size, grid.cols.size), dtype=torch.float32)
                weights = total.new_zeros((grid.rows.size, grid.cols.size))
            weight = (down[:, None] * across[None, :]).to(sample.device)
            total[..., rows, cols] += sample.float() * weight
            weights[rows, cols] += weight
    return total.div_(weights).to(sample.dtype)


def _ramps(axis: TileAxis) -> Iterator[tuple[int, Tensor]]:
    """First sample pixel of each tile along an axis, and its weights there."""
    for start in axis.starts:
        weights = torch.ones(min(axis.tile, axis.size - start))
        if start and axis.band:
            weights[: axis.band] = torch.linspace(0, 1, axis.band)
        yield start, weights


# ---------------------------------------------------------------- the optimization


def _grid(value: str, model: Model, shape: tuple[int, ...]) -> TileGrid:
    return ramp_grid(*parse(value), (shape[-2], shape[-1]), model.geometry.spatial)


def _inapplicable(value: str, plan: DecodePlan, model: Model, shape: tuple[int, ...]) -> str | None:
    tile, _ = parse(value)
    if plan.tiling is not None:
        return "ramp_tiling: tiling cuts the latents already, and one of the two would cut the other's tiles"
    if max(shape[-2:]) <= tile:
        return f"ramp_tiling: tile {tile} is not smaller than the latents {shape[-2]}×{shape[-1]}"
    return None


@optimization("ramp_tiling", order=30, inapplicable=_inapplicable, grid=_grid)
def ramp_tiling(module: nn.Module, value: str, *, plan: DecodePlan, model: Model, device: str) -> Iterator[Proof]:
    """Decode in tiles of the project's own, added up by ramps: `t16o4` is tile 16, overlap 4, in latent pixels."""
    whole = getattr(module, "decode", None)
    if whole is None:
        raise EvaluationError(f"ramp_tiling: {type(module).__name__} has no decode to call tile by tile")

    def tiled(latents: Tensor, *args: Any, **kwargs: Any) -> Any:
        output: Any = None

        def decode(part: Tensor) -> Tensor:
            nonlocal output
            output = whole(part, *args, **kwargs)
            return sample_of(output)

        grid = _grid(value, model, tuple(latents.shape))
        sample = ramp_decode(decode, latents, grid, model.geometry.spatial)
        return with_sample(output, sample)

    with attributes_kept(module, ("decode",)):
        module.decode = tiled  # type: ignore[assignment]
        yield partial(receipt, plan=plan, spatial=model.geometry.spatial)
