"""The encoder under a plan: `encode = true` turns every other setting of the plan on for it, and the decode is plain.

Image-to-image and first-frame conditioning encode a picture with the same slicing, tiling, offload and half precision
as they decode one, by the same attributes of the class. So encoding is no suite of its own but one more axis: the
picture behind the latents is encoded under the plan, the latents that come out are decoded plainly and compared with
the golden, which is the plain decode of the latents of the picture encoded whole. The figures are then grey levels of
a picture, every metric and detector works as it does on a decode, tiles lie where the decoder's would, and limits,
oracles, memory and reports need nothing new; how far the latents themselves moved is `latents_rmse`.

`EncoderView` is what makes that short: seen through it, a family decodes pictures to latents.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fidelity.errors import EvaluationError, SuiteError
from fidelity.records import DecodePlan, Family, Geometry, Model, Observation, Proof, TileGrid, Tiling
from fidelity.registry import optimization

if TYPE_CHECKING:
    import torch
    from torch import nn

NAME = "encode"
PROBE = 8
"""Latent pixels of the picture that tells whether anything stuck to the encoder."""


def encodes(plan: DecodePlan) -> bool:
    """Whether the plan's settings are the encoder's."""
    return bool(plan.options.get(NAME))


class EncoderView:
    """A Family whose encoder stands in its decoder's place: it takes pictures (B, 3, [T,] H, W) and gives latents.

    Sizes are in sample pixels and frames throughout (`spatial` and `temporal` are 1). How many frames a class gives its
    encoder in a call is not assumed: `calls` keeps what was seen of a plain encode, by the number of frames.
    """

    tiles_itself = hides_tiles = carries = streams = False

    def __init__(self, family: Family, geometry: Geometry):
        self.family, self.whole = family, geometry
        self.calls: dict[int, tuple[int, ...]] = {}
        self.least_frames = geometry.sample_frames(family.least_frames) if geometry.video else 1

    def __getattr__(self, name: str) -> Any:
        """Whatever is not the encoder's own is the family's."""
        if name == "family":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.family, name)

    def decode(self, module: Any, image: torch.Tensor) -> torch.Tensor:
        return self.family.encode(module, image)

    def decoder(self, module: Any) -> nn.Module:
        return module.encoder

    def middle(self, module: Any) -> nn.Module:
        """The encoder's middle block; where a class names none, the part that stands in the middle."""
        parts = list(module.encoder.children())
        return getattr(module.encoder, "mid_block", None) or parts[len(parts) // 2]

    def call_shape(self, geometry: Geometry, shape: tuple[int, ...], named: Mapping[str, Any]) -> tuple[int, ...]:
        """In pixels, also where a class folds p × p of them into channels before its encoder."""
        patch = math.isqrt(max(1, shape[1] // self.whole.sample_channels))
        return (shape[0], shape[1] // patch**2, *shape[2:-2], shape[-2] * patch, shape[-1] * patch)

    def call_frames(self, frames: int) -> tuple[int, ...]:
        return self.calls.get(frames, (frames,))

    tile_frames = call_frames

    def tile_grid(self, geometry: Geometry, latent_size: tuple[int, int], tiling: Tiling) -> TileGrid:
        """As the decoder's: a class tiles both by the same attributes. Raises IllegalTiling."""
        return self.family.tile_grid(self.whole, self._latent(latent_size), tiling)

    def will_tile(self, latent_size: tuple[int, int], tiling: Tiling) -> bool:
        return self.family.will_tile(self._latent(latent_size), tiling)

    def _latent(self, size: tuple[int, int]) -> tuple[int, int]:
        return (-(-size[0] // self.whole.spatial), -(-size[1] // self.whole.spatial))

    def set_tiling(self, module: Any, geometry: Geometry, tiling: Tiling) -> None:
        self.family.set_tiling(module, self.whole, tiling)

    def native_tiling(self, geometry: Geometry) -> Tiling | None:
        return None

    def assemble(self, tiles: list[list[torch.Tensor]], grid: TileGrid) -> torch.Tensor | None:
        return None

    def decode_alone(self, module: Any, image: torch.Tensor) -> torch.Tensor:
        return self.family.encode(module, image)

    def finish(self, module: Any, latents: torch.Tensor) -> torch.Tensor:
        return latents


def view(model: Model) -> Model:
    """The model with its encoder in its decoder's place."""
    whole = model.geometry
    geometry = Geometry(
        spatial=1,
        latent_channels=whole.sample_channels,
        sample_channels=whole.latent_channels,
        video=whole.video,
        frames="every",
        size=tuple(side * whole.spatial for side in whole.size or (PROBE, PROBE)),  # type: ignore[arg-type]
    )
    return replace(model, family=EncoderView(model.family, whole), geometry=geometry)  # type: ignore[arg-type]


# ---------------------------------------------------------------- the optimization


def _inapplicable(value: Any, plan: DecodePlan, model: Model, shape: tuple[int, ...]) -> str | None:
    if value is not True:
        raise SuiteError(f"encode is {value!r}: write true, so that the plan's settings are the encoder's, or false")
    others = [name for name, on in plan.options.items() if on and name != NAME]
    if plan.temporal is not None:
        return "encode: chunks of latent frames are the decoder's, which stays plain"
    if others:
        return f"encode: {others[0]} changes the decode, which stays plain"
    if NAME in model.family.lacks:
        return f"encode: {model.family.name} has no encoder"
    if plan.tiling is not None and "tiled_encode" in model.family.lacks:
        return f"encode: the tiles of {model.name}'s encoder do not start at the top left corner: leave tiling out"
    return None


@optimization(NAME, order=5, inapplicable=_inapplicable, exact=True)
def encode(module: nn.Module, value: bool, *, plan: DecodePlan, model: Model, device: str) -> Iterator[Proof]:
    """Encode the picture behind the latents under the plan's settings, and decode the outcome plainly."""
    if not isinstance(model.family, EncoderView):
        raise EvaluationError("encode: latents alone have no picture to encode: name those of a photograph")

    def prove(seen: Observation) -> dict[str, Any]:
        return {
            "engaged": seen.calls > 0,
            "reason": None if seen.calls else "the encoder was never called",
            "calls": seen.calls,
            "shapes": [[*shape, times] for shape, times in Counter(seen.shapes).items()],
        }

    yield prove
