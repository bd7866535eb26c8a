"""The module around a decoder of somebody's own: the switches, calls and places for hooks of diffusers' classes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from fidelity.lazy import torch
from fidelity.models.base import _first

if TYPE_CHECKING:
    from torch import Tensor, nn


def host(decoder: Any, encoder: Any, tile: Callable[..., Any] | None) -> nn.Module:
    """A module with `decode`, `encode`, slicing and tiling around a decoder and, if there is one, an encoder: modules,
    bound methods of modules, or any callables. `tile` is the decoder's own tiler; None: `cut`."""
    return _host_class()(_as_module(decoder), None if encoder is None else _as_module(encoder), tile)


def _as_module(thing: Any) -> nn.Module:
    return thing if isinstance(thing, torch.nn.Module) else _called_class()(thing)


@cache
def _called_class() -> type[Any]:
    # made at first use: a class that inherits from torch's cannot stand at module level without importing torch
    class Called(torch.nn.Module):
        """A callable as a module, so that hooks see its calls; of a bound method, with the module that it is of."""

        def __init__(self, function: Callable[..., Any]):
            super().__init__()
            owner = getattr(function, "__self__", None)
            if isinstance(owner, torch.nn.Module):
                self.owner = owner
            self.function = function

        def forward(self, value: Tensor) -> Any:
            return self.function(value)

    return Called


@cache
def _host_class() -> type[Any]:
    from diffusers.utils.accelerate_utils import apply_forward_hook

    class Host(torch.nn.Module):
        """What an optimization finds on a diffusers autoencoder, around a decoder that is none."""

        def __init__(self, decoder: nn.Module, encoder: nn.Module | None, tiler: Callable[..., Any] | None):
            super().__init__()
            self.decoder, self.encoder, self.tiler = decoder, encoder, tiler
            self.use_slicing = self.use_tiling = False
            self.tile, self.overlap = 0, 0.0

        def enable_slicing(self) -> None:
            self.use_slicing = True

        def enable_group_offload(self, **how: Any) -> None:
            from diffusers.hooks import apply_group_offloading

            # hooks of the decoder itself: this module's own `forward`, where diffusers would hang them, never runs
            apply_group_offloading(self.decoder, **how)

        @apply_forward_hook
        def decode(self, latents: Tensor) -> Tensor:
            """The sample of latents (B, C, [T,] H, W), item by item and tile by tile where those are on."""
            items = latents.split(1) if self.use_slicing else (latents,)
            return torch.cat([self._item(item) for item in items])

        def _item(self, latents: Tensor) -> Tensor:
            if not self.use_tiling or max(latents.shape[-2:]) <= self.tile:
                return self._whole(latents)
            return (self.tiler or cut)(self._whole, latents, self.tile, self.overlap)

        def _whole(self, latents: Tensor) -> Tensor:
            return _first(self.decoder(latents), ("sample",))

    return Host


# ---------------------------------------------------------------- the tiler of those that have none


def cut(decode: Callable[[Tensor], Tensor], latents: Tensor, tile: int, overlap: float) -> Tensor:
    """Decode in square tiles of `tile` latent pixels that overlap by a share, blended linearly where they do.

    The law of diffusers' video classes (`AutoencoderKLWan.tiled_decode`): tiles start every tile · (1 − overlap), each
    is mixed into the one above and then into the one on its left, pixel rows of weight 0/n, 1/n, …, (n − 1)/n.
    """
    step = round(tile * (1 - overlap))
    height, width = latents.shape[-2:]
    above: list[Tensor] = []
    lines = []
    for top in range(0, height, step):
        row: list[Tensor] = []
        for column, left in enumerate(range(0, width, step)):
            part = latents[..., top : top + tile, left : left + tile]
            done = decode(part)
            f = done.shape[-1] // part.shape[-1]
            band = (tile - step) * f
            done = _mix(above[column], done, band, -2) if above else done
            row.append(_mix(row[-1], done, band, -1) if row else done)
        above = row
        lines.append(torch.cat([each[..., : step * f, : step * f] for each in row], dim=-1))
    return torch.cat(lines, dim=-2)[..., : height * f, : width * f]


def _mix(before: Tensor, after: Tensor, band: int, dim: int) -> Tensor:
    """`after`, its first pixels along `dim` mixed with the last of `before`; a product rounds as the dtype does."""
    extent = min(before.shape[dim], after.shape[dim], band)
    if not extent:
        return after
    later = torch.arange(extent, device=after.device, dtype=torch.float64) / extent
    weights = [each.float().view(-1, *[1] * (-1 - dim)) for each in (1 - later, later)]
    sides = before.narrow(dim, before.shape[dim] - extent, extent), after.narrow(dim, 0, extent)
    mixed = sum((side.float() * weight).to(after.dtype) for side, weight in zip(sides, weights))
    return torch.cat([mixed, after.narrow(dim, extent, after.shape[dim] - extent)], dim=dim)  # type: ignore[list-item]
