"""diffusers 0.42.1's `AutoencoderKL.tiled_decode`, `_decode` and `decode` taken apart, so that a fault replaces a line.

Classes are patched, never instances, and before the module is loaded: a fault in a library is there from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from diffusers import AutoencoderKL
from diffusers.models.autoencoders.vae import DecoderOutput
from torch import Tensor

Rows = list[list[Tensor]]


class Tiler:
    """`tiled_decode` in steps. `i` and `j` count tiles down and across."""

    def __init__(self, vae: Any, **amounts: Any):
        self.vae, self.amounts = vae, amounts
        for name, value in amounts.items():
            setattr(self, name, value)

    def step(self) -> int:
        return int(self.vae.tile_latent_min_size * (1 - self.vae.tile_overlap_factor))

    def extent(self) -> int:
        return int(self.vae.tile_sample_min_size * self.vae.tile_overlap_factor)

    def limit(self) -> int:
        return self.vae.tile_sample_min_size - int(self.vae.tile_sample_min_size * self.vae.tile_overlap_factor)

    def starts(self, size: int) -> list[int]:
        return list(range(0, size, self.step()))

    def cut(self, z: Tensor, i: int, j: int) -> Tensor:
        size, top, left = self.vae.tile_latent_min_size, self.starts(z.shape[2])[i], self.starts(z.shape[3])[j]
        return z[:, :, top : top + size, left : left + size]

    def decode(self, tile: Tensor) -> Tensor:
        if self.vae.config.use_post_quant_conv:
            tile = self.vae.post_quant_conv(tile)
        return self.vae.decoder(tile)

    def tile(self, z: Tensor, i: int, j: int) -> Tensor:
        return self.decode(self.cut(z, i, j))

    def blend_v(self, a: Tensor, b: Tensor, blend_extent: int) -> Tensor:
        return self.vae.blend_v(a, b, blend_extent)

    def blend_h(self, a: Tensor, b: Tensor, blend_extent: int) -> Tensor:
        return self.vae.blend_h(a, b, blend_extent)

    def mix(self, rows: Rows, i: int, j: int) -> Tensor:
        tile = rows[i][j]
        if i > 0:
            tile = self.blend_v(rows[i - 1][j], tile, self.extent())
        if j > 0:
            tile = self.blend_h(rows[i][j - 1], tile, self.extent())
        return tile

    def crop(self, tile: Tensor, i: int, j: int) -> Tensor:
        return tile[:, :, : self.limit(), : self.limit()]

    def join(self, rows: Rows) -> Tensor:
        return torch.cat([torch.cat(row, dim=3) for row in rows], dim=2)

    def __call__(self, z: Tensor) -> Tensor:
        rows = [
            [self.tile(z, i, j) for j in range(len(self.starts(z.shape[3])))]
            for i in range(len(self.starts(z.shape[2])))
        ]
        return self.join(
            [[self.crop(self.mix(rows, i, j), i, j) for j in range(len(row))] for i, row in enumerate(rows)]
        )


def tiler(kind: type[Tiler]) -> Callable[..., Any]:
    """Injects a Tiler in place of `tiled_decode`."""

    @contextmanager
    def inject(**amounts: Any) -> Iterator[None]:
        def tiled_decode(vae: Any, z: Tensor, return_dict: bool = True) -> Any:
            sample = kind(vae, **amounts)(z)
            return DecoderOutput(sample=sample) if return_dict else (sample,)

        with patch.object(AutoencoderKL, "tiled_decode", tiled_decode):
            yield

    return inject


def method(name: str, owner: Any = AutoencoderKL) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Injects `f(original, self, *args, **amounts)` in place of a method: `@method("_decode")`."""

    def decorate(faulty: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def inject(**amounts: Any) -> Iterator[None]:
            original = getattr(owner, name)

            def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
                return faulty(original, self, *args, **kwargs, **amounts)

            with patch.object(owner, name, replaced):
                yield

        return inject

    return decorate


def plain_decode(vae: Any, z: Tensor) -> Any:
    """`_decode` without its tiling branch."""
    if vae.post_quant_conv is not None:
        z = vae.post_quant_conv(z)
    return DecoderOutput(sample=vae.decoder(z))


def sliced(faulty: Callable[..., Tensor]) -> Callable[..., Any]:
    """Injects `f(vae, z, **amounts)` as the slicing branch of `decode`."""

    @method("decode")
    def inject(
        original: Any, vae: Any, z: Tensor, return_dict: bool = True, generator: Any = None, **amounts: Any
    ) -> Any:
        if vae.use_slicing and z.shape[0] > 1:
            return DecoderOutput(sample=faulty(vae, z, **amounts))
        return original(vae, z, return_dict)

    return inject
