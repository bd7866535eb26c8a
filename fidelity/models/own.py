"""Decoders that are no diffusers class: any module, or any callable from latents to a sample, becomes a Model.

    from fidelity import Geometry, decoder, weights

    @decoder("mine", geometry=Geometry(spatial=8, latent_channels=4))
    def mine(path="mine.safetensors"):
        "My distilled decoder"                            # what `fidelity ls models` prints
        module = Network()
        module.load_state_dict(weights(path))
        return module

docs/guide/your-own-model.md has the whole of it, docs/examples/taef2.py a real one.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fidelity.errors import (
    EvaluationError,
    FidelityError,
    IllegalTiling,
    LatentsError,
    ModelError,
    PluginError,
    in_one_line,
)
from fidelity.lazy import torch
from fidelity.models.base import _first
from fidelity.models.host import host
from fidelity.models.load import CANDIDATES, _merge, _read_tensors, _shards
from fidelity.models.shapes import is_fake, on_shapes, really
from fidelity.models.strided import StridedFamily
from fidelity.records import Geometry, Model, Scaling, TileAxis, TileGrid, Tiling
from fidelity.registry import MODELS

if TYPE_CHECKING:
    from torch import Tensor, nn

Load = Callable[..., Any]
"""`f()` or `f(path)`: a module, or a callable from latents to a sample (of an encoder: from an image to latents)."""
Tile = Callable[["Callable[[Tensor], Tensor]", "Tensor", int, float], "Tensor"]
"""`f(decode, latents, tile, overlap) -> sample`: a tiler of one's own."""
Grid = Callable[[int, int, float], "tuple[tuple[int, ...], int]"]
"""`f(size, tile, overlap) -> (starts, band)` along one axis, in latent pixels: where that tiler's tiles lie."""
F = TypeVar("F", bound=Load)


def decoder(
    name: str,
    *,
    geometry: Geometry,
    data_range: tuple[float, float] = (-1.0, 1.0),
    scaling: Scaling = Scaling(),  # noqa: B008  (frozen)
    encoder: Load | None = None,
    tile: Tile | None = None,
    grid: Grid | None = None,
    force_upcast: bool = False,
) -> Callable[[F], F]:
    """Register what the decorated function loads as the model `name`.

    The function takes nothing, or the path that `--model NAME=PATH` gives, and returns an `nn.Module`, a module's bound
    method (`vae.decode`), or any callable: latents (B, C, [T,] H, W) as the decoder takes them → sample in
    `data_range`. `encoder` loads in the same way what gives such latents of an image in `data_range`; without it there
    are no photographs. Tiles are cut and blended linearly as diffusers' video classes do, unless `tile` does it; `grid`
    says where that one's tiles lie, else they are looked for blind.

    Raises PluginError for a declaration that cannot be.
    """
    _check(name, geometry, data_range, scaling, tile, grid)

    def register(load: F) -> F:
        family = OwnFamily(name, load, encoder, geometry, tile, grid)
        summary = (load.__doc__ or "a decoder of one's own").strip().split("\n")[0]
        MODELS.add(name, Model(name=name, summary=summary, family=family, geometry=geometry,  # type: ignore[arg-type]
                               scaling=scaling, config={}, load=partial(family.build, {}), force_upcast=force_upcast,
                               data_range=data_range))  # fmt: skip
        return load

    return register


def _check(name: str, geometry: Any, data_range: Any, scaling: Any, tile: Any, grid: Any) -> None:
    def refuse(why: str) -> None:
        raise PluginError(f"decoder {name!r}: {why}")

    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        refuse("use letters, digits, '.', '_' and '-' in its name (it becomes a folder's)")
    if not isinstance(geometry, Geometry) or min(geometry.spatial, geometry.latent_channels) < 1:
        refuse(f"geometry is {geometry!r}: write Geometry(spatial=8, latent_channels=4), both at least 1")
    if len(data_range) != 2 or not all(map(math.isfinite, data_range)) or data_range[0] >= data_range[1]:
        refuse(f"data_range is {data_range!r}: write (lowest, highest), as in (0, 1)")
    for key, values in (("mean", scaling.mean), ("std", scaling.std)):
        if values is not None and len(values) != geometry.latent_channels:
            refuse(f"scaling.{key} has {len(values)} values, the latents have {geometry.latent_channels} channels")
    if grid is not None and tile is None:
        refuse("grid= says where the tiles of tile= lie: give tile= as well, or leave both out")


def weights(path: str | Path) -> dict[str, Tensor]:
    """Every weight, by its name, of a `.safetensors` file, a pickle of plain tensors (`weights_only`), or a folder in
    diffusers' layout.

    Raises ModelError, in one line, if it is not there, cannot be read, or holds anything but finite tensors.
    """
    path = Path(path).expanduser()
    file: Path | None = path
    if path.is_dir():
        file = next((path / each for each in CANDIDATES if (path / each).is_file()), None)
        if file is None:
            raise ModelError(f"weights: none in {path}: expected {CANDIDATES[0]} (or an index, or fp16); "
                             "name the file itself if it has another name")  # fmt: skip
    elif not path.is_file():
        raise ModelError(f"weights: {path} does not exist")
    try:
        shards = _shards(path.name, file)  # type: ignore[arg-type]
        state = _merge(path.name, (pair for each in shards for pair in _read_tensors(path.name, each)))
    except ModelError as error:  # no model yet: its author reads of a file
        raise ModelError(f"weights: {str(error).removeprefix(f'model {path.name!r}: ')}") from error
    for key, value in state.items():
        bad = int((~torch.isfinite(value)).sum()) if value.is_floating_point() else 0
        if bad:
            raise ModelError(f"weights: {key!r} of {path} has {bad} of {value.numel()} values that are NaN or inf")
    return state


class OwnFamily(StridedFamily):
    """One decoder of somebody's own, with the switches that diffusers' classes have."""

    temporal_controls = "none"

    def __init__(self, name: str, load: Load, encoder: Load | None, geometry: Geometry, tile: Tile | None = None,
                 grid: Grid | None = None):  # fmt: skip
        self.name, self.summary = name, "a decoder of one's own, no diffusers class"
        self._load, self._encoder, self._geometry, self._tile, self._grid = load, encoder, geometry, tile, grid
        self.encodes = encoder is not None
        self.tiles_itself, self.hides_tiles = tile is not None, tile is not None and grid is None
        self.tile_controls = "tile, overlap share" if tile is None else "its own tiler"

    # ------------------------------------------------------------ loading

    def at(self, model: Model, path: str | Path) -> Model:
        """The same decoder with its weights at `path`. Raises ModelError if its load function takes none."""
        if not _takes_path(self._load):
            raise ModelError(f"model {self.name!r}: its load function takes no path: leave =PATH out")
        config = {"path": str(path)}
        return replace(model, load=partial(self.build, config), config=config, source=str(path))

    def build(self, config: Mapping[str, Any]) -> nn.Module:
        """What the load functions give, fp32 in eval mode on the CPU; on shapes alone where those are asked for."""
        with really() as fake:
            inner = self._loaded(self._load, config.get("path"))
            encoder = None if self._encoder is None else self._loaded(self._encoder, config.get("path"))
            module = host(inner, encoder, self._tile).float().eval().requires_grad_(False)
        return on_shapes(module) if fake is not None else module

    def _loaded(self, load: Load, path: str | None) -> Any:
        if path is None and _takes_path(load, required=True):
            raise ModelError(f"model {self.name!r}: say where its weights are: --model {self.name}=PATH")
        named = getattr(load, "__name__", "load")  # a partial has none
        try:
            with torch.random.fork_rng(devices=[]):
                made = load(path) if path is not None and _takes_path(load) else load()
        except FidelityError as error:
            raise ModelError(f"model {self.name!r}: {error}") from error
        except Exception as error:  # a load function raises whatever it likes
            raise ModelError(f"model {self.name!r}: {named}() raised {in_one_line(error)}") from error
        if not callable(made):
            raise ModelError(f"model {self.name!r}: {named}() gave {type(made).__name__}: return an nn.Module, "
                             "or a callable from latents to a sample")  # fmt: skip
        return made

    # ------------------------------------------------------------ decoding

    def encode(self, module: Any, image: Tensor) -> Tensor:
        if module.encoder is None:
            raise LatentsError(f"model {self.name!r} has no encoder, so it takes no pictures: give it one (encoder=), "
                               "or latents that are drawn or a file's")  # fmt: skip
        return _first(module.encoder(image), ("latents", "latent"))

    def decode(self, module: Any, latents: Tensor) -> Tensor:
        """The sample; ModelError where its shape is not what the declared geometry makes of the latents."""
        try:
            sample = module.decode(latents)
        except Exception as error:
            if is_fake(latents):
                raise EvaluationError(f"it cannot run on shapes alone: {in_one_line(error)}") from error
            raise
        wanted = self._sample_shape(tuple(latents.shape))
        if tuple(sample.shape) != wanted:
            raise ModelError(f"model {self.name!r}: latents {list(latents.shape)} gave {list(sample.shape)}, its "
                             f"declared geometry {list(wanted)}: correct Geometry(spatial=…, …)")  # fmt: skip
        return sample

    def _sample_shape(self, latents: tuple[int, ...]) -> tuple[int, ...]:
        own = self._geometry
        frames = (own.sample_frames(latents[2]),) if own.video else ()
        return (latents[0], own.sample_channels, *frames, latents[-2] * own.spatial, latents[-1] * own.spatial)

    def middle(self, module: Any) -> nn.Module:
        """All of it: every layer with weights that runs is a witness of the dtype."""
        return module.decoder

    # ------------------------------------------------------------ tiles

    def tile_grid(self, geometry: Geometry, latent_size: tuple[int, int], tiling: Tiling) -> TileGrid:
        """Where tiles will lie. Raises IllegalTiling, also where its own tiler does not say."""
        if self._tile is None:
            return super().tile_grid(geometry, latent_size, tiling)
        if self._grid is None:
            raise IllegalTiling(f"{self.name} does not declare where its tiles lie (grid=): they are looked for blind")
        rows, cols = (self._axis(size, geometry.spatial, tiling) for size in latent_size)
        return TileGrid(rows=rows, cols=cols)

    def _axis(self, size: int, spatial: int, tiling: Tiling) -> TileAxis:
        assert self._grid is not None
        asked = f"{self.name}: grid({size}, {tiling.tile}, {tiling.overlap:g})"
        try:
            starts, band = self._grid(size, tiling.tile, tiling.overlap)
            axis = TileAxis(starts=tuple(int(start) * spatial for start in starts), band=int(band) * spatial,
                            tile=tiling.tile * spatial, size=size * spatial)  # fmt: skip
        except Exception as error:  # somebody's own function raises, or gives, whatever it likes
            raise IllegalTiling(f"{asked} raised {in_one_line(error)}: it has to give (starts, band)") from error
        if not axis.is_ordered or axis.band < 0:
            raise IllegalTiling(
                f"{asked} gave starts {list(starts)} and band {band}: "
                f"expected 0, ascending, below {size}, and a band of 0 or more"
            )
        return axis

    def set_tiling(self, module: Any, geometry: Geometry, tiling: Tiling) -> None:
        if self._tile is None:
            self.tile_grid(geometry, (tiling.tile + 1, tiling.tile + 1), tiling)  # raises where the stride is not whole
        module.use_tiling, module.tile, module.overlap = True, tiling.tile, tiling.overlap

    def tiling_attributes(self) -> tuple[str, ...]:
        return ("use_tiling", "tile", "overlap")


def _takes_path(load: Load, *, required: bool = False) -> bool:
    parameters = list(inspect.signature(load).parameters.values())
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return bool(positional) and (not required or positional[0].default is inspect.Parameter.empty)
