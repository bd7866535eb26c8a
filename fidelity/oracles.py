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
from fidelity.records import DecodePlan, Limit, Measurement, Model, TileAxis, TileGrid

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


def has_one(plan: DecodePlan) -> bool:
    """Whether an oracle is known: not for options that are not diffusers' own, nor for temporal tiling."""
    return not any(plan.options.values()) and plan.temporal is None


def expected(module: nn.Module, latents: Tensor, plan: DecodePlan, *, model: Model, device: str) -> Tensor:
    """The sample (B, C, H, W; in the plan's dtype) that this plan should give for latents in its compute dtype.

    Source of the blend law: diffusers `AutoencoderKL.tiled_decode`, `blend_v`, `blend_h`.
    """
    plain = DecodePlan(dtype=plan.dtype, force_upcast=plan.force_upcast)
    with torch.no_grad(), apply_plan(module, plain, model=model, device=device):
        items = latents.split(1) if plan.slicing else (latents,)
        return torch.cat([_item(module, item, plan, model) for item in items])


def _item(module: nn.Module, latents: Tensor, plan: DecodePlan, model: Model) -> Tensor:
    if plan.tiling is None:
        return model.family.decode(module, latents)
    size = (latents.shape[-2], latents.shape[-1])
    grid = model.family.tile_grid(model.geometry, size, plan.tiling)
    f, tile = model.geometry.spatial, plan.tiling.tile
    tiles = [
        [
            model.family.decode(module, latents[..., top // f : top // f + tile, left // f : left // f + tile])
            for left in grid.cols.starts
        ]
        for top in grid.rows.starts
    ]
    return assemble(tiles, grid)


def compare(candidate: Tensor, expected: Tensor, *, data_range: tuple[float, float]) -> Measurement:
    """Largest absolute difference in grey levels per item, and its place; values that are NaN in both are equal.

    Both (B, C, H, W) fp32. Another shape, or a value that is finite in only one of them, is not measured: `reason`.
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
    y, x = divmod(int(apart[image].amax(0).argmax()), apart.shape[-1])
    where = {"image": image, "x": x, "y": y} if value else None
    exact = bool(same.all())
    return msgspec.structs.replace(unmeasured, value=value, per_image=per_image, where=where, exact=exact)


def assemble(tiles: list[list[Tensor]], grid: TileGrid) -> Tensor:
    """Join decoded tiles (B, C, h, w): each blends linearly into the one above, then into the one on its left.

    A tile shows from its start to the next tile's start. In a band of `n` pixels the weight of the later tile rises as
    0/n, 1/n, …, (n−1)/n. Neighbours are themselves blended already, so corners weigh four tiles.
    """
    done: list[list[Tensor]] = []
    for i, row in enumerate(tiles):
        line: list[Tensor] = []
        for j, tile in enumerate(row):
            if i:
                tile = _blend(done[i - 1][j], tile, grid.rows.band, -2)
            if j:
                tile = _blend(line[j - 1], tile, grid.cols.band, -1)
            line.append(tile)
        done.append(line)
    heights, widths = _shown(grid.rows), _shown(grid.cols)
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
