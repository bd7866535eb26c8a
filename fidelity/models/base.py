"""What the families share: a Model from a config alone, and `encode`/`decode` as diffusers' pipelines call them.

A family is a subclass with `name`, `summary`, `defaults`, `geometry` and its tiling law; it registers an instance:

    FAMILIES.add("AutoencoderKL", KLFamily())
"""

from __future__ import annotations

import importlib.metadata
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from fidelity.errors import EvaluationError, IllegalTiling, ModelError
from fidelity.lazy import torch
from fidelity.models.interface import interface
from fidelity.models.shapes import really
from fidelity.records import (
    Chunk,
    Family,
    Geometry,
    Model,
    ReferencePolicy,
    Scaling,
    Temporal,
    TileAxis,
    TileGrid,
    Tiling,
)

if TYPE_CHECKING:
    from torch import nn


class FamilyBase:
    """The parts of a Family that do not depend on how its class tiles.

    Modules are typed `Any` here: what a diffusers class adds to `nn.Module` is the family's own knowledge.
    """

    name: str = ""
    summary: str = ""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """What the class's constructor assumes for each key used here that a config leaves out."""
    tile_controls: str = "none"
    """What a user can set of its spatial tiles, in a few words; "none" where the class does not tile."""
    temporal_controls: str = "none"
    """The same of its chunks in time."""
    tiles_itself: bool = False
    """Whether tiles are cut by a law that no oracle knows."""
    hides_tiles: bool = False
    """Whether nobody knows where they lie."""
    carries: ClassVar[bool] = False
    """Whether a chunk hands a cache on to the next, so that chunks must give what all frames at once give."""
    tiles_alike: ClassVar[bool] = False
    """Whether its tiled encode is known to cut and blend by the law of its tiled decode, which an oracle then holds."""
    encodes: bool = True
    """Whether it has an encoder, so that photographs can be put into latents."""
    streams: ClassVar[bool] = False
    """Whether `segments` can carry a causal cache on from one part of a video to the next."""
    data_range: ClassVar[tuple[float, float]] = (-1.0, 1.0)
    """Of images and samples."""
    lacks: ClassVar[frozenset[str]] = frozenset()
    """Options that the class itself refuses: `slicing`, `tiling`, `group_offload`."""
    ignored: ClassVar[tuple[str, ...]] = ("num_batches_tracked",)
    """Ends of keys that a weight file may have or lack, as they decode nothing: a batch norm's counter, an integer."""
    scratch: ClassVar[frozenset[str]] = frozenset()
    """Attributes that every decode leaves behind in a part of the module, and that none reads."""
    reference: ClassVar[ReferencePolicy] = "full"
    """How the decode is made that all others are held against."""
    least_frames: ClassVar[int] = 2
    """Latent frames of a video that the class decodes without fail."""
    fewest_frames: ClassVar[int] = 1
    """Latent frames of the shortest sample that the class decodes: one, a picture's, where it decodes pictures."""

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        """Sizes from a config that is complete with `defaults`. Raises ModelError."""
        raise NotImplementedError

    def landmarks(self, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """A few weights whose shape the config fixes, to refuse a wrong file before torch is imported."""
        return {}

    def scaling(self, config: Mapping[str, Any], geometry: Geometry) -> Scaling:
        """The convention by which the denoiser's latents are scaled, as far as the config has it. Raises ModelError."""
        return read_scaling(config, geometry.latent_channels)

    def rename(self, key: str) -> str:
        """The name that today's class has for a key of a weight file; older names are mapped, others returned."""
        return key

    def describe(self, name: str, config: Mapping[str, Any], load: Callable[[], nn.Module]) -> Model:
        """Derive a Model from `config`. Raises ModelError naming the key that does not fit."""
        full = {**self.defaults, **config}
        try:
            geometry = self.geometry(full)
            scaling = self.scaling(full, geometry)
            upcast = full.get("force_upcast", False)
            if not isinstance(upcast, bool):
                raise ModelError(f"force_upcast is {upcast!r}, expected true or false")
        except ModelError as error:
            raise ModelError(f"model {name!r}: config of {self.name}: {error}") from None
        return Model(name=name, summary=self.summary, family=self.of(full), geometry=geometry, scaling=scaling,  # type: ignore[arg-type]
                     config=dict(config), load=load, force_upcast=upcast, data_range=self.data_range,
                     reference=self.reference)  # fmt: skip

    def of(self, config: Mapping[str, Any]) -> FamilyBase:
        """The family of a model with this config, complete with `defaults`; one whose laws need more of it than the
        geometry holds is an instance of its own."""
        return self

    def build(self, config: Mapping[str, Any]) -> nn.Module:
        """An instance without trained weights, on the CPU in eval mode; keys that diffusers does not know are left out,
        as its own `from_config` does. The caller's random generator is not moved.

        Raises ModelError where the installed diffusers has no such class.
        """
        absent = self.absent()
        if absent is not None:
            raise ModelError(absent)
        import diffusers

        with really():  # some of its files make tensors when they are imported, which is at the first look
            cls = getattr(diffusers, self.name)
        known = inspect.signature(cls.__init__).parameters
        with torch.random.fork_rng(devices=[]):
            module = cls(**{key: value for key, value in config.items() if key in known})
        self.settle(module)
        return module.eval().requires_grad_(False)

    def absent(self) -> str | None:
        """Why the installed diffusers cannot build it: an older one has no such class. Imports no diffusers."""
        builds_itself = type(self).build is not FamilyBase.build
        if builds_itself or interface(self.name).calls:
            return None
        return f"diffusers {importlib.metadata.version('diffusers')} has no {self.name}: install a later one"

    def settle(self, module: Any) -> None:
        """Turn off what the class does by default that a full decode does not: the reference is a full decode."""

    def encode(self, module: Any, image: torch.Tensor) -> torch.Tensor:
        """Latents as the decoder takes them: the posterior's mode where there is one. (B, 3, [T,] H, W) in range."""
        encoded = module.encode(image)
        if hasattr(encoded, "latent_dist"):
            return encoded.latent_dist.mode()
        return _first(encoded, ("latents", "latent"))

    def decode(self, module: Any, latents: torch.Tensor) -> torch.Tensor:
        """The sample (B, C, [T,] H, W) of latents as the decoder takes them: what a pipeline would call."""
        return _first(module.decode(latents), ("sample",))

    def decoder(self, module: Any) -> nn.Module:
        """The submodule that is called once per tile, slice or batch."""
        return module.decoder

    def middle(self, module: Any) -> nn.Module:
        """A submodule in the middle of the decoder, where the compute dtype is witnessed."""
        return module.decoder.mid_block

    def call_shape(self, geometry: Geometry, shape: tuple[int, ...], named: Mapping[str, Any]) -> tuple[int, ...]:
        """The latents (B, C, [T,] h, w) in a call of the decoder, from the shape of its first tensor and what it got by
        name."""
        return shape

    # -------------------------------------------------------- tiles: by default a class has none

    def tiling_attributes(self) -> tuple[str, ...]:
        return ()

    def will_tile(self, latent_size: tuple[int, int], tiling: Tiling) -> bool:
        return False

    def tile_grid(self, geometry: Geometry, latent_size: tuple[int, int], tiling: Tiling) -> TileGrid:
        raise IllegalTiling(f"{self.name} does not tile: leave tiling out")

    def set_tiling(self, module: Any, geometry: Geometry, tiling: Tiling) -> None:
        raise IllegalTiling(f"{self.name} does not tile: leave tiling out")

    def native_tiling(self, geometry: Geometry) -> Tiling | None:
        """The tiles of the reference of a class that is trained on tiles; None: it is decoded whole."""
        return None

    def tile_frames(self, frames: int) -> tuple[int, ...]:
        """The latent frames of each call for one tile: as without tiles, unless tiling cuts the frames as well."""
        return self.call_frames(frames)

    def assemble(self, tiles: list[list[torch.Tensor]], grid: TileGrid) -> torch.Tensor | None:
        """The sample of its decoded tiles, row by row, where a class blends by a law of its own; None: the common one,
        by which each tile blends into the one above it and then into the one on its left."""
        return None

    # -------------------------------------------------------- chunks of a video: by default a class has none

    def temporal_attributes(self) -> tuple[str, ...]:
        return ()

    def set_temporal(self, module: Any, geometry: Geometry, temporal: Temporal) -> None:
        raise IllegalTiling(f"{self.name} does not cut a video into chunks: leave temporal out")

    def chunks(self, geometry: Geometry, frames: int, temporal: Temporal) -> tuple[Chunk, ...]:
        raise IllegalTiling(f"{self.name} does not cut a video into chunks: leave temporal out")

    def frame_axis(self, geometry: Geometry, frames: int, temporal: Temporal) -> TileAxis:
        """Each chunk but the first shows from where the dropped frames end; one that carries on shows all its own."""
        whole, axis = geometry.sample_frames(frames), self.chunks(geometry, frames, temporal)
        if self.carries:
            begun = tuple(geometry.sample_frames(each.start) if each.start else 0 for each in axis)
            return TileAxis(starts=begun, band=0, tile=geometry.temporal * temporal.tile, size=whole)
        starts = [geometry.sample_frames(chunk.start + 1) - 1 + chunk.drop for chunk in axis]
        step = geometry.temporal * (axis[1].start if len(axis) > 1 else frames)
        tile = geometry.temporal * temporal.tile
        shown = tuple(start for start in starts if start < whole)
        return TileAxis(starts=shown, band=max(0, tile - step), tile=tile, size=whole)

    def fits(self, frames: int) -> bool:
        """Whether a video of this many latent frames is coded as it is, none of them filled up or dropped."""
        return True

    def call_frames(self, frames: int) -> tuple[int, ...]:
        """All frames at once, for one video; of an image, 1."""
        return (frames,)

    def segments(self, module: Any, latents: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
        raise EvaluationError(f"{self.name} carries no causal cache from one part of a video to the next")

    def decode_alone(self, module: Any, latents: torch.Tensor) -> torch.Tensor:
        return self.decode(module, latents)

    def finish(self, module: Any, sample: torch.Tensor) -> torch.Tensor:
        return sample


def _first(output: Any, names: Sequence[str]) -> torch.Tensor:
    """The tensor of a diffusers output, a tuple, or a bare tensor (classes and versions differ in which they give)."""
    for name in names:
        if hasattr(output, name):
            return getattr(output, name)
    return output[0] if isinstance(output, tuple) else output


# ---------------------------------------------------------------- reading a config


def whole(config: Mapping[str, Any], key: str) -> int:
    """A whole number above 0. Raises ModelError."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{key} is {value!r}, expected a whole number above 0")
    return value


def wholes(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """A list of at least one whole number above 0. Raises ModelError."""
    value = config.get(key)
    if not isinstance(value, (list, tuple)) or not value:
        raise ModelError(f"{key} is {value!r}, expected a list of whole numbers")
    return tuple(whole({f"{key}[{i}]": item}, f"{key}[{i}]") for i, item in enumerate(value))


def read_scaling(config: Mapping[str, Any], channels: int) -> Scaling:
    """The scaling convention of a config: scaling_factor, shift_factor, latents_mean and latents_std.

    Raises ModelError if one is no finite number, a factor or spread is 0, or a list is not as long as `channels`.
    """
    factor, shift = (_number(config.get(key), key) for key in ("scaling_factor", "shift_factor"))
    mean, std = (_numbers(config.get(key), key, channels) for key in ("latents_mean", "latents_std"))
    if factor == 0 or (std and 0 in std):
        raise ModelError("scaling_factor and latents_std must not be 0")
    return Scaling(factor=factor, shift=shift, mean=mean, std=std)


def _number(value: Any, key: str) -> float | None:
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise ModelError(f"{key} is {value!r}, expected a finite number")
    return float(value)


def _numbers(value: Any, key: str, channels: int) -> tuple[float, ...] | None:
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or len(value) != channels or None in value:
        raise ModelError(f"{key} is {value!r}, expected a list of {channels} numbers, one a latent channel")
    return tuple(_number(item, key) for item in value)  # type: ignore[misc]


# ---------------------------------------------------------------- tiles


def legal_tiles(family: Family, geometry: Geometry, overlap: float, largest: int = 128) -> tuple[int, ...]:
    """Tile sizes, in latent pixels up to `largest`, that the family's class decodes faithfully at this overlap."""
    beyond = (largest + 1, largest + 1)  # latents that every one of these tiles has to cut
    legal = []
    for tile in range(1, largest + 1):
        try:
            family.tile_grid(geometry, beyond, Tiling(tile, overlap))
        except IllegalTiling:
            continue
        legal.append(tile)
    return tuple(legal)
