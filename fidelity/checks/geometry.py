"""Where a class cuts: that it does where its threshold says, and alike in both directions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from fidelity.checks.subject import Subject
from fidelity.lazy import torch
from fidelity.records import DecodePlan, Tiling
from fidelity.registry import check

if TYPE_CHECKING:
    from torch import Tensor


@check("tile_holds_image", diagnosis=("geometry",), sets="tiling")
def tile_holds_image(runner: Subject, latents: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """Tiling by a tile that holds the whole picture is the full decode, though its stride is shorter than that."""
    height, width = latents.shape[-2:]
    tile = -(-max(height, width) // 4) * 4  # a quarter of it is whole
    tiling = Tiling(tile, 0.25)
    runner.model.family.tile_grid(runner.model.geometry, (height, width), tiling)
    # nothing to prove of the tiling: that it stays idle is the very point
    return runner.decode(latents, replace(plan, tiling=tiling), prove=False), runner.decode(latents, plan)


@check("transposed", diagnosis=("geometry",), unit="calls", needs="tiling")
def transposed(runner: Subject, latents: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """Transposed latents are cut into the transposed tiles, at sizes about the tile and its stride."""
    assert plan.tiling is not None
    runner.decode(latents, plan)  # proves that it tiles here
    tile = plan.tiling.tile
    stride = max(1, round(tile * (1 - plan.tiling.overlap)))
    between = (stride + tile + 1) // 2
    # one side about the tile and its stride, the other longer than a tile; and both below it, one above its stride
    sizes = [(side, tile + 4) for side in (stride, between, tile, tile + 1)] + [(max(1, stride // 2), between)]
    item = latents[:1] if latents.shape[-1] >= latents.shape[-2] else latents[:1].transpose(-1, -2)
    cut: list[dict[tuple[int, int], int]] = [{}, {}]
    for size in dict.fromkeys(sizes):
        piece = item[..., : size[0], : size[1]]
        for seen, turned in zip(cut, (False, True)):
            for high, broad, times in runner.tile_calls(piece.transpose(-1, -2) if turned else piece, plan):
                key = (broad, high) if turned else (high, broad)
                seen[key] = seen.get(key, 0) + times
    return _counts(cut[1], cut), _counts(cut[0], cut)


def _counts(seen: dict[tuple[int, int], int], all_seen: Iterable[dict[tuple[int, int], int]]) -> Tensor:
    """(1, 1, H, W): how often a tile of y × x latent pixels was seen, at (y, x)."""
    keys = [key for one in all_seen for key in one]
    table = torch.zeros(1, 1, 1 + max(high for high, _ in keys), 1 + max(wide for _, wide in keys))
    for (high, wide), times in seen.items():
        table[0, 0, high, wide] = times
    return table
