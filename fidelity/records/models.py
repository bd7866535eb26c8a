"""Which autoencoder, what its class can do, its geometry, and the latents it decodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from msgspec import Struct

from fidelity.records.plans import DecodePlan, Temporal, Tiling

if TYPE_CHECKING:
    import torch
    from torch import nn


FrameLaw = Literal["causal", "every", "odd", "clips"]
"""Sample frames of n latent frames: `causal` f_t · (n − 1) + 1; `every` f_t · n; `odd` as n is, causal or every;
`clips` causal within each clip of `Geometry.clip` frames."""
ReferencePolicy = Literal["full", "native_tile", "sliced"]
"""How a reference is decoded: `full` as a whole; `native_tile` in the tiles that a class is trained on; `sliced` as a
whole, but one item at a time, of a class that cannot decode several."""


class Geometry(Struct, frozen=True):
    """Sizes of an autoencoder: `spatial` f and `temporal` f_t compression, latent and sample channels."""

    spatial: int
    latent_channels: int
    temporal: int = 1
    sample_channels: int = 3
    video: bool = False
    frames: FrameLaw = "causal"
    size: tuple[int, int] | None = None
    """The only height and width of latents that the class decodes; None: any."""
    clip: int = 0
    """Frames of a clip, where each clip is coded by itself (`frames` is "clips")."""

    def sample_frames(self, frames: int) -> int:
        """Frames of the sample of this many latent frames: a causal decoder gives one for the first, f_t for others."""
        if self.frames == "clips":
            tokens = -(-self.clip // self.temporal)
            clips, rest = divmod(frames, tokens)
            first = self.clip - self.temporal * (tokens - 1)
            return self.clip * clips + (first + self.temporal * (rest - 1) if rest else 0)
        whole = self.frames == "every" or (self.frames == "odd" and frames % 2 == 0)
        return self.temporal * frames if whole else self.temporal * (frames - 1) + 1

    @property
    def compression(self) -> float:
        """Values of the image per value of the latents: f² · f_t · 3 / c."""
        return self.spatial**2 * self.temporal * self.sample_channels / self.latent_channels


class Scaling(Struct, frozen=True):
    """How the denoiser's latents relate to the decoder's: z = latents / factor + shift, or · std + mean per channel."""

    factor: float | None = None
    shift: float | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None


class TileAxis(Struct, frozen=True):
    """Tiles along one axis of the sample, in sample pixels, or chunks of a video, in sample frames.

    `starts`: where each tile's own content begins in the output (the first is 0); `band`: how many pixels from there
    are blended with the tile before; `tile`: nominal tile size; `size`: the output's size.
    """

    starts: tuple[int, ...]
    band: int
    tile: int
    size: int

    @property
    def is_ordered(self) -> bool:
        """Whether the starts begin at 0 and ascend, all of them inside the size."""
        return self.starts[:1] == (0,) and list(self.starts) == sorted({*self.starts}) and self.starts[-1] < self.size

    @property
    def edges(self) -> tuple[int, ...]:
        """Borders inside the picture at which a tile begins to show (all starts but the first)."""
        return self.starts[1:]


class TileGrid(Struct, frozen=True):
    """Where the tiles of one decode lie in the sample, and how many decoder calls they need per batch item or batch."""

    rows: TileAxis
    cols: TileAxis

    @property
    def count(self) -> int:
        return len(self.rows.starts) * len(self.cols.starts)


class Chunk(Struct, frozen=True):
    """One decode of a part of a video: latent frames `start` to `stop`, of whose sample the first `drop` frames go."""

    start: int
    stop: int
    drop: int = 0


class Family(Protocol):
    """One autoencoder class: how to describe, load and drive it. One file each in `fidelity/models/`."""

    name: str
    """The diffusers class name, as in `config.json`'s `_class_name`."""
    summary: str
    tile_controls: str
    """What a user can set of its spatial tiles, in a few words; "none" where the class does not tile."""
    temporal_controls: str
    """The same of its chunks in time."""
    tiles_itself: bool
    """Whether it cuts by a law of its own that no oracle knows: a decoder of somebody's own with a tiler of its own."""
    hides_tiles: bool
    """Whether it does not even say where those tiles lie, so that seams can only be looked for blind."""
    carries: ClassVar[bool]
    """Whether a chunk hands a cache on to the next, so that chunks must give what all frames at once give."""
    tiles_alike: ClassVar[bool]
    """Whether its tiled encode is known to cut and blend by the law of its tiled decode, which an oracle then holds."""
    encodes: bool
    """Whether it has an encoder, so that photographs can be put into latents."""
    streams: ClassVar[bool]
    """Whether `segments` can carry a causal cache on from one part of a video to the next."""
    data_range: ClassVar[tuple[float, float]]
    """Of images and samples."""
    lacks: ClassVar[frozenset[str]]
    """Options that the class itself refuses: `slicing`, `tiling`, `group_offload`, `encode`, `tiled_encode`."""
    scratch: ClassVar[frozenset[str]]
    """Attributes that every decode leaves behind in a part of the module, and that none reads."""
    least_frames: ClassVar[int]
    """Latent frames of a video that the class decodes without fail."""
    fewest_frames: ClassVar[int]
    """Latent frames of the shortest sample that the class decodes: one, a picture's, where it decodes pictures."""

    def describe(self, name: str, config: Mapping[str, Any], load: Callable[[], nn.Module]) -> Model:
        """Derive a Model from a config alone; imports neither torch nor diffusers."""

    def build(self, config: Mapping[str, Any]) -> nn.Module:
        """An instance without trained weights (fp32, CPU, eval); the loader fills it strictly."""

    def absent(self) -> str | None:
        """Why no instance can be built with what is installed, or None; imports neither torch nor diffusers."""

    def encode(self, module: nn.Module, image: torch.Tensor) -> torch.Tensor:
        """Latents as the decoder takes them (posterior mode) of an image (B, 3, H, W) in the declared range."""

    def decode(self, module: nn.Module, latents: torch.Tensor) -> torch.Tensor:
        """The sample of latents as the decoder takes them: what a pipeline would call."""

    def decoder(self, module: nn.Module) -> nn.Module:
        """The submodule that is called once per tile, slice or batch."""

    def middle(self, module: nn.Module) -> nn.Module:
        """A submodule in the middle of the decoder, where the compute dtype is witnessed."""

    def call_shape(self, geometry: Geometry, shape: tuple[int, ...], named: Mapping[str, Any]) -> tuple[int, ...]:
        """The latents (B, C, [T,] h, w) in a call of the decoder, from the shape of its first tensor and what it got by
        name."""

    def tile_grid(self, geometry: Geometry, latent_size: tuple[int, int], tiling: Tiling) -> TileGrid:
        """Where tiles will lie. Raises IllegalTiling, with the value and the next legal one, if they cannot."""

    def will_tile(self, latent_size: tuple[int, int], tiling: Tiling) -> bool:
        """Whether the class tiles at all at this size (its own threshold rule)."""

    def set_tiling(self, module: nn.Module, geometry: Geometry, tiling: Tiling) -> None:
        """Turn tiling on with every attribute that the class needs for this tile and overlap."""

    def assemble(self, tiles: list[list[torch.Tensor]], grid: TileGrid) -> torch.Tensor | None:
        """The sample of its decoded tiles, row by row, where a class blends by a law of its own; None: the common one,
        by which each tile blends into the one above it and then into the one on its left."""

    def tiling_attributes(self) -> tuple[str, ...]:
        """Names of all attributes that set_tiling or enable_tiling may write; they are saved and put back."""

    def native_tiling(self, geometry: Geometry) -> Tiling | None:
        """The tiles of the reference of a class that is trained on tiles; None: it is decoded whole."""

    def tile_frames(self, frames: int) -> tuple[int, ...]:
        """The latent frames of each call for one tile: as without tiles, unless tiling cuts the frames as well."""

    def temporal_attributes(self) -> tuple[str, ...]:
        """The same for set_temporal; none where the class does not cut a video into chunks."""

    def set_temporal(self, module: nn.Module, geometry: Geometry, temporal: Temporal) -> None:
        """Turn chunks of latent frames on with every attribute that the class needs."""

    def chunks(self, geometry: Geometry, frames: int, temporal: Temporal) -> tuple[Chunk, ...]:
        """How the class cuts this many latent frames; one chunk where it does not. Raises IllegalTiling."""

    def frame_axis(self, geometry: Geometry, frames: int, temporal: Temporal) -> TileAxis:
        """Where the chunks lie in the sample. Raises IllegalTiling."""

    def fits(self, frames: int) -> bool:
        """Whether a video of this many latent frames is coded as it is, none of them filled up or dropped."""

    def call_frames(self, frames: int) -> tuple[int, ...]:
        """The latent frames of each decoder call when this many are decoded without cutting, in order."""

    def segments(self, module: nn.Module, latents: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
        """The finished sample of `size` latent frames after another, the class's causal cache carried over. Together
        they are what `decode` gives. Raises EvaluationError where the class has no such cache."""

    def decode_alone(self, module: nn.Module, latents: torch.Tensor) -> torch.Tensor:
        """The sample of one tile or chunk as the class has it before it puts tiles together."""

    def finish(self, module: nn.Module, sample: torch.Tensor) -> torch.Tensor:
        """What the class does last, to the whole of what was put together."""


@dataclass(frozen=True)
class Model:
    """Which autoencoder: how to load it, its family, geometry, scaling convention and reference policy."""

    name: str
    summary: str
    family: Family
    geometry: Geometry
    scaling: Scaling
    config: Mapping[str, Any]
    load: Callable[[], nn.Module]
    """A fresh instance with its weights, fp32 on the CPU, eval mode. Raises ModelError."""
    force_upcast: bool = False
    data_range: tuple[float, float] = (-1.0, 1.0)
    reference: ReferencePolicy = "full"
    source: str | None = None

    @property
    def reference_plan(self) -> DecodePlan:
        """The plan of the reference, fp32. Native tiles are what a class does when it is asked for nothing."""
        return DecodePlan(slicing=self.reference == "sliced")


@dataclass(frozen=True)
class LatentSource:
    """A named recipe for latents. `shape` is known before anything is loaded; `make` is deterministic."""

    name: str
    summary: str
    shape: Callable[[Geometry], tuple[int, ...]]
    make: Callable[[Model, nn.Module], Latents]
    pictured: bool = False
    """Whether what it makes has a picture behind it, so that the encoder can be judged on it."""


@dataclass(frozen=True)
class Latents:
    """Latents as the decoder takes them, fp32 on the CPU, with their digest and the source image if there is one."""

    name: str
    tensor: torch.Tensor
    digest: str
    image: torch.Tensor | None = None
    """(B, 3, [T,] H, W) in the model's declared range."""
