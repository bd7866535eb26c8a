"""What the option should have given: the same tiles and items, each decoded by the plain path, put together by us.

Honest tiling of a GroupNorm decoder costs ten grey levels against the golden, which cannot see a wrong line of one
there; the oracle can. It decodes with the plan's own dtype and batch shape, so that nothing but the option's own work
(slicing, cutting, blending, joining, offloading) can differ, and that is exact but for the last rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fidelity.lazy import torch
from fidelity.optimizations import apply_plan
from fidelity.records import DecodePlan, Limit, Measurement, Model, Reason, TileAxis, TileGrid
from fidelity.registry import OPTIMIZATIONS

if TYPE_CHECKING:
    from torch import Tensor, nn

NAME = "oracle_max_abs"
LIMIT = Limit(
    max=0.01,
    origin="noise floor: the oracle decodes the same tiles in the same dtype and batch shape, bit-equal where measured",
)
"""Grey levels. tests/test_oracles.py holds honest decodes to the bit, in every dtype."""


def shared(plan: DecodePlan) -> DecodePlan:
    """The plan whose oracle this plan shares: offload changes no value."""
    return msgspec.structs.replace(plan, offload="none")


def has_one(plan: DecodePlan, model: Model | None = None) -> bool:
    """Whether an oracle is known: of options that are not diffusers' own, for those that change nothing only; and not
    for the tiles of a model that cuts by a law of its own."""
    if plan.tiling is not None and model is not None and model.family.tiles_itself:
        return False
    if plan.tiling is not None and plan.options.get("encode") and model is not None and not model.family.tiles_alike:
        return False
    on = [name for name, value in plan.options.items() if value]
    return all(name in OPTIMIZATIONS and getattr(OPTIMIZATIONS.get(name), "exact", False) for name in on)


def expected(module: nn.Module, latents: Tensor, plan: DecodePlan, *, model: Model, device: str) -> Tensor:
    """The sample (B, C, [T,] H, W; in the plan's dtype) that this plan should give for latents in its compute dtype.

    Source of the blend law: diffusers `AutoencoderKL.tiled_decode`, `blend_v`, `blend_h`, and `blend_t` of
    `AutoencoderKLHunyuanVideo._temporal_tiled_decode`.
    """
    plain = DecodePlan(dtype=plan.dtype, force_upcast=plan.force_upcast)
    with torch.no_grad(), apply_plan(module, plain, model=model, device=device):
        items = latents.split(1) if plan.slicing else (latents,)
        return torch.cat([_item(module, item, plan, model) for item in items])


def _item(module: nn.Module, latents: Tensor, plan: DecodePlan, model: Model) -> Tensor:
    """One item: chunks in time, each of tiles in space, as far as the plan asks for them."""
    if plan.temporal is None or model.family.carries:
        return model.family.finish(module, _tiled(module, latents, plan, model))
    frames = latents.shape[2]
    chunks = [
        _tiled(module, latents[:, :, each.start : each.stop], plan, model)[:, :, each.drop :]
        for each in model.family.chunks(model.geometry, frames, plan.temporal)
    ]
    axis = model.family.frame_axis(model.geometry, frames, plan.temporal)
    return model.family.finish(module, join(chunks, axis, dim=-3))


def native_grid(model: Model, shape: tuple[int, ...]) -> TileGrid | None:
    """Where the tiles lie that a class cuts by itself when it is asked for none; None where it cuts none."""
    size, native = (shape[-2], shape[-1]), model.family.native_tiling(model.geometry)
    tiles = native is not None and model.family.will_tile(size, native)
    return model.family.tile_grid(model.geometry, size, native) if native is not None and tiles else None


def _tiled(module: nn.Module, latents: Tensor, plan: DecodePlan, model: Model) -> Tensor:
    size = (latents.shape[-2], latents.shape[-1])
    grid = (
        native_grid(model, tuple(latents.shape))
        if plan.tiling is None
        else model.family.tile_grid(model.geometry, size, plan.tiling)
    )
    if grid is None:
        return model.family.decode_alone(module, latents)
    f = model.geometry.spatial
    tile = grid.rows.tile // f
    tiles = [
        [
            model.family.decode_alone(module, latents[..., top // f : top // f + tile, left // f : left // f + tile])
            for left in grid.cols.starts
        ]
        for top in grid.rows.starts
    ]
    own = model.family.assemble(tiles, grid)
    if own is not None:
        return own
    patch = min(tile, size[1]) * f // tiles[0][0].shape[-1]  # what is put together may not be in pixels yet
    return assemble(tiles, grid, patch)


def compare(candidate: Tensor, expected: Tensor, *, data_range: tuple[float, float]) -> Measurement:
    """Largest absolute difference in grey levels per item, and its place; values that are NaN in both are equal.

    Both (B, C, [T,] H, W) fp32. Another shape, or a value finite in only one of them, is not measured: `reason`.
    """
    unmeasured = Measurement(name=NAME, unit="grey levels", better="lower")
    if candidate.shape != expected.shape:
        sizes = " and ".join("×".join(map(str, tensor.shape)) for tensor in (candidate, expected))
        return msgspec.structs.replace(unmeasured, reason=f"candidate and oracle differ in shape: {sizes}")
    low, high = data_range
    same = (candidate == expected) | (candidate.isnan() & expected.isnan())
    apart = torch.where(same, 0.0, (candidate - expected).abs() * (255.0 / (high - low)))
    if not bool(apart.isfinite().all()):
        return msgspec.structs.replace(unmeasured, reason="a value is finite in only one of candidate and oracle")
    per_image = tuple(apart.flatten(1).amax(1).tolist())
    image, value = Measurement.worst(per_image, "lower")
    *frame, y, x = (int(each) for each in torch.unravel_index(apart[image].amax(0).argmax(), apart.shape[2:]))
    where = {"image": image, **({"frame": frame[0]} if frame else {}), "x": x, "y": y} if value else None
    exact = bool(same.all())
    return msgspec.structs.replace(unmeasured, value=value, per_image=per_image, where=where, exact=exact)


def shape_reason(candidate: Tensor, expected: Tensor) -> Reason | None:
    """Why the two cannot be compared at all: the decode gave another size than its plan should."""
    if candidate.shape == expected.shape:
        return None
    seen, want = ("×".join(map(str, tensor.shape)) for tensor in (candidate, expected))
    said = f"the sample is {seen}, put together independently it is {want}"
    return Reason("oracle_shape", said, diagnosis=("not_as_specified",))


def join(parts: list[Tensor], axis: TileAxis, dim: int) -> Tensor:
    """Join decoded parts along `dim`, each blended linearly into the one before, which is itself blended already.

    A part without anything left to show has no start on the axis, and is left out.
    """
    done: list[Tensor] = []
    for part in parts:
        done.append(_blend(done[-1], part, axis.band, dim) if done else part)
    return torch.cat([part.narrow(dim, 0, length) for part, length in zip(done, _shown(axis))], dim=dim)


def assemble(tiles: list[list[Tensor]], grid: TileGrid, patch: int = 1) -> Tensor:
    """Join decoded tiles (B, C, [T,] h, w): each blends linearly into the one above, then into the one on its left.

    `grid` is in sample pixels, `patch` of which are one pixel of the tiles. A tile shows from its start to the next
    one's. In a band of `n` pixels the weight of the later tile rises as 0/n, 1/n, …, (n−1)/n. Neighbours are themselves
    blended already, so corners weigh four tiles.
    """
    done: list[list[Tensor]] = []
    for i, row in enumerate(tiles):
        line: list[Tensor] = []
        for j, tile in enumerate(row):
            if i:
                tile = _blend(done[i - 1][j], tile, grid.rows.band // patch, -2)
            if j:
                tile = _blend(line[j - 1], tile, grid.cols.band // patch, -1)
            line.append(tile)
        done.append(line)
    heights, widths = ([length // patch for length in _shown(axis)] for axis in (grid.rows, grid.cols))
    return torch.cat(
        [
            torch.cat([tile[..., :height, :width] for tile, width in zip(line, widths)], dim=-1)
            for line, height in zip(done, heights)
        ],
        dim=-2,
    )


def _shown(axis: TileAxis) -> list[int]:
    ends = [*axis.starts[1:], axis.size]
    return [end - start for start, end in zip(axis.starts, ends)]


def _blend(before: Tensor, after: Tensor, band: int, dim: int) -> Tensor:
    """`after`, its first pixels along `dim` mixed with the last of `before`; each product rounds as its dtype does."""
    extent = min(before.shape[dim], after.shape[dim], band)
    if extent == 0:
        return after
    shape = [-1 if axis == after.ndim + dim else 1 for axis in range(after.ndim)]
    rise = (torch.arange(extent, dtype=torch.float64) / extent).to(after.device)
    late, early = (weight.float().reshape(shape) for weight in (rise, 1 - rise))
    tail = before.narrow(dim, before.shape[dim] - extent, extent)
    head = after.narrow(dim, 0, extent)
    mixed = (tail.float() * early).to(after.dtype) + (head.float() * late).to(after.dtype)
    rest = after.narrow(dim, extent, after.shape[dim] - extent)
    return torch.cat([mixed, rest], dim=dim)
