"""Tiling: the latents through the decoder in overlapping tiles, as the family's class does it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from fidelity.errors import EvaluationError
from fidelity.optimizations.attributes import attributes_kept
from fidelity.records import DecodePlan, Model, Observation, Proof, TileAxis, TileGrid, Tiling
from fidelity.registry import optimization

if TYPE_CHECKING:
    from torch import nn


def _not_smaller(value: Tiling, plan: DecodePlan, model: Model, shape: tuple[int, ...]) -> str | None:
    if "tiling" in model.family.lacks:
        return f"tiling: {model.family.name} does not tile"
    height, width = shape[-2:]
    if model.family.will_tile((height, width), value):
        return None
    return f"tile {value.tile} is not smaller than the latents {height}×{width}"


def _grid(value: Tiling, model: Model, shape: tuple[int, ...]) -> TileGrid | None:
    if model.family.hides_tiles:
        return None
    return model.family.tile_grid(model.geometry, (shape[-2], shape[-1]), value)


@optimization("tiling", order=30, inapplicable=_not_smaller, grid=_grid)
def tiling(module: nn.Module, value: Tiling, *, plan: DecodePlan, model: Model, device: str) -> Iterator[Proof]:
    """Decode in tiles of `tile` latent pixels that overlap by a fraction, with every attribute the class needs."""
    family, names = model.family, model.family.tiling_attributes()
    if not any(hasattr(module, name) for name in names):
        raise EvaluationError(
            f"tiling: {type(module).__name__} has none of {', '.join(names)}: it is no {family.name}, "
            "or this version of diffusers does not tile it"
        )
    with attributes_kept(module, names):
        family.set_tiling(module, model.geometry, value)
        prove = partial(receipt, plan=plan, spatial=model.geometry.spatial)
        yield partial(_own_receipt, prove=prove, tile=value.tile) if family.tiles_itself else prove


def receipt(seen: Observation, *, plan: DecodePlan, spatial: int) -> dict[str, Any]:
    """The proof of any tiler: the decoder's calls and their sizes against the plan's grid, which detectors read."""
    reason = _untiled(seen, plan, spatial)
    return {
        "engaged": reason is None,
        "reason": reason,
        # it did tile, but not as asked
        "diagnosis": ["geometry"] if reason and seen.calls > seen.batch * len(seen.call_frames) else None,
        "calls": seen.calls,
        "shapes": [[*shape, times] for shape, times in Counter(seen.shapes).items()],
        "grid": msgspec.to_builtins(seen.grid),
        "period": spatial,
    }


def _own_receipt(seen: Observation, *, prove: Proof, tile: int) -> dict[str, Any]:
    """The proof of a tiler that a decoder of somebody's own brings along: what it does out of sight cannot be proved,
    and where its tiles lie may not be declared."""
    found = prove(seen)
    if not seen.calls:
        unseen = "its own tiler goes past the decoder that it is given: nothing about its tiles can be proved"
        return {**found, "engaged": None, "reason": unseen}
    if seen.grid is not None:
        return found
    side = max(max(shape[-2:]) for shape in seen.shapes)
    times = sum(shape[0] for shape in seen.shapes) / seen.batch  # that each item passed through the decoder
    tiled = times > len(seen.call_frames) and side <= tile
    reason = f"tiles of {tile} latent pixels asked, the decoder saw {seen.calls} calls of up to {side}"
    return {**found, "engaged": tiled, "reason": None if tiled else reason, "diagnosis": None}


def _untiled(seen: Observation, plan: DecodePlan, spatial: int) -> str | None:
    """Why the calls seen are not those that the grid asks for, or None if they are."""
    if seen.grid is None:
        return "there is no grid to compare the decoder's calls with"
    each = len(seen.call_frames) * (seen.batch if plan.slicing else 1)
    per_slice = _tile_sizes(seen.grid.rows, seen.grid.cols, spatial)
    expected = Counter({size: times * each for size, times in per_slice.items()})
    if seen.calls != seen.grid.count * each:
        return f"expected {seen.grid.count * each} decoder calls, saw {seen.calls}"
    sizes = Counter((shape[-2], shape[-1]) for shape in seen.shapes)
    if sizes != expected:
        return f"expected tiles of {_words(expected)}, saw {_words(sizes)}"
    return None


def _tile_sizes(rows: TileAxis, cols: TileAxis, spatial: int) -> Counter[tuple[int, int]]:
    """How many tiles of which size, in latent pixels: the last ones end at the picture's border."""

    def extents(axis: TileAxis) -> list[int]:
        return [min(axis.tile, axis.size - start) // spatial for start in axis.starts]

    return Counter((height, width) for height in extents(rows) for width in extents(cols))


def _words(sizes: Counter[tuple[int, int]]) -> str:
    return ", ".join(f"{times}× {height}×{width}" for (height, width), times in sorted(sizes.items()))
