"""Pictures drawn by code, of what photographs lack: thin lines, and flat colours with hard edges."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fidelity.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

SIDE = 192
"""Pixels: a multiple of every compression in use up to 64."""
COLOURS = ((200, 40, 40), (40, 160, 60), (40, 70, 190), (230, 200, 60), (128, 128, 128), (20, 20, 20), (245, 245, 245),
           (150, 60, 160), (60, 180, 190))  # fmt: skip


def lines() -> Tensor:
    """(1, 3, SIDE, SIDE) in [0, 1]: dark lines one pixel wide on paper, upright, level and slanted, ever closer."""
    picture = torch.full((1, 3, SIDE, SIDE), 0.94)
    half, at, gap = SIDE // 2, 4, 16
    while at < SIDE:
        picture[..., :half, at] = 0.1
        picture[..., half:, :half][..., at // 2, :] = 0.1
        at, gap = at + gap, max(4, gap - 1)
    across = torch.arange(half)
    for slant in range(0, half, 12):
        picture[..., half + across, half + (across // 2 + slant) % half] = 0.1
    return picture


def flat() -> Tensor:
    """(1, 3, SIDE, SIDE) in [0, 1]: three by three plain fields of colour."""
    fields = torch.tensor(COLOURS, dtype=torch.float32).div(255).T.reshape(1, 3, 3, 3)
    return fields.repeat_interleave(SIDE // 3, -1).repeat_interleave(SIDE // 3, -2)


PICTURES = {"drawn-lines": lines, "drawn-flat": flat}
