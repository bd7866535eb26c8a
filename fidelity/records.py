"""The nouns of fidelity as frozen records, and their lossless JSON.

Data (`Struct`) goes to `results.json` and back unchanged; the few records that hold code or tensors
(`Model`, `Latents`, `Decoded`) are plain dataclasses and never leave the process that made them.

Tensors are (B, C, H, W) or (B, C, T, H, W), fp32. "Grey levels" are 255ths of the declared range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import msgspec
from msgspec import Struct

from fidelity.trend import Trend

if TYPE_CHECKING:
    import torch
    from torch import nn

DTypeName = Literal["fp32", "bf16", "fp16"]
OffloadName = Literal["none", "model", "sequential", "group_block", "group_leaf", "disk"]
VerdictName = Literal["pass", "fail", "error", "not_applicable"]
Better = Literal["lower", "higher"]
FrameLaw = Literal["causal", "every", "odd", "clips"]
"""Sample frames of n latent frames: `causal` f_t · (n − 1) + 1; `every` f_t · n; `odd` as n is, causal or every;
`clips` causal within each clip of `Geometry.clip` frames."""
ReferencePolicy = Literal["full", "native_tile", "sliced"]
"""How a reference is decoded: `full` as a whole; `native_tile` in the tiles that a class is trained on; `sliced` as a
whole, but one item at a time, of a class that cannot decode several."""

DTYPES: tuple[DTypeName, ...] = ("fp32", "bf16", "fp16")
OFFLOADS: tuple[OffloadName, ...] = ("none", "model", "sequential", "group_block", "group_leaf", "disk")
DIAGNOSES: tuple[str, ...] = (
    "seam", "band", "corner", "chroma", "tone_drift", "periodic", "geometry", "not_engaged", "non_finite", "scale",
    "shift", "double_normalised", "clipping", "truncation", "order", "misaligned", "temporal_seam", "ghost", "dtype",
    "nondeterministic", "state_leak", "memory", "not_as_specified", "regressed", "blur", "crash", "drift",
)  # fmt: skip
"""The closed list of what a red case can be blamed on (CONTRACT)."""

Receipts = dict[str, dict[str, Any]]
"""What really happened, by option: each has `requested`, `engaged` (True, False, or None where nothing can be proved),
`reason` (None, or why it did not engage), and what was seen. Keys besides the options: `decoder` (calls, shapes),
`dtype` (weights, middle_layer, output, emulated), `state` (restored, leaks)."""


# ---------------------------------------------------------------- plans


class Tiling(Struct, frozen=True, forbid_unknown_fields=True):
    """Spatial tiling: `tile` in latent pixels, `overlap` a fraction of the tile in [0, 1)."""

    tile: int
    overlap: float

    def __str__(self) -> str:
        return f"t{self.tile}o{self.overlap:g}"


class Temporal(Struct, frozen=True, forbid_unknown_fields=True):
    """Temporal tiling: `tile` in latent frames, `overlap` a fraction of the tile in [0, 1)."""

    tile: int
    overlap: float

    def __str__(self) -> str:
        return f"f{self.tile}o{self.overlap:g}"


class DecodePlan(Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of one decode. `options` holds further optimizations by name; a false value is the same as none."""

    dtype: DTypeName = "fp32"
    force_upcast: bool = False
    slicing: bool = False
    tiling: Tiling | None = None
    temporal: Temporal | None = None
    offload: OffloadName = "none"
    options: dict[str, Any] = {}

    @property
    def id(self) -> str:
        """A readable, stable id: `bf16-upcast0-slice1-t16o0.25-disk`."""
        parts = [self.dtype, f"upcast{self.force_upcast:d}", f"slice{self.slicing:d}", str(self.tiling or "t0")]
        if self.temporal is not None:
            parts.append(str(self.temporal))
        parts.append(self.offload)
        extra = (
            f"+{name}" if value is True else f"+{name}={value}" for name, value in sorted(self.options.items()) if value
        )
        return "-".join(parts) + "".join(extra)

    @property
    def settings(self) -> dict[str, Any]:
        """Every optimization that this plan turns on, by its registered name, in no particular order."""
        built_in = {
            "precision": self.dtype if self.dtype != "fp32" else None,
            "force_upcast": self.force_upcast,
            "slicing": self.slicing,
            "tiling": self.tiling,
            "temporal": self.temporal,
            "offload": self.offload if self.offload != "none" else None,
        }
        return {name: value for name, value in {**built_in, **self.options}.items() if value}

    def __hash__(self) -> int:
        return hash(self.id)


# ---------------------------------------------------------------- models and latents


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


# ---------------------------------------------------------------- optimizations

Proof = Callable[["Observation"], dict[str, Any]]


@dataclass
class Observation:
    """What hooks saw during the judged decode. Filled by the runner, read by the optimizations' proofs."""

    calls: int = 0
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    """Input shape of each call of the decoder, in order."""
    call_dtypes: set[str] = field(default_factory=set)
    middle_dtypes: set[str] = field(default_factory=set)
    weight_devices: set[str] = field(default_factory=set)
    weight_dtypes: set[str] = field(default_factory=set)
    """Floating point dtypes of the decoder's weights and buffers while it was called."""
    started_ns: int = 0
    """`time.perf_counter_ns()` when watching began: what fired before belongs to another decode."""
    output_dtype: str = ""
    grid: TileGrid | None = None
    """The grid that the plan asks for, None where it asks for none."""
    chunks: tuple[Chunk, ...] = ()
    """The chunks of latent frames that the plan asks for, none where it asks for none."""
    frames: TileAxis | None = None
    """Where those chunks lie in the sample."""
    call_frames: tuple[int, ...] = (1,)
    """The latent frames that the decoder should see in each call for one item and tile, in order."""
    batch: int = 0
    activations: Any = None
    """What each module gave, where the decode was watched for that."""


class Optimization(Protocol):
    """Applies one setting to a module, proves that it ran, and restores. Nothing survives it."""

    @property
    def name(self) -> str: ...

    @property
    def summary(self) -> str: ...

    @property
    def order(self) -> int:
        """Applied in ascending order, undone in descending order: precision 10, slicing 20, tiling 30, offload 90."""

    def inapplicable(self, value: Any, plan: DecodePlan, model: Model, shape: tuple[int, ...]) -> str | None:
        """Why this setting cannot apply to latents of this shape, or None. A pure function; imports no torch."""

    def apply(
        self, module: nn.Module, value: Any, *, plan: DecodePlan, model: Model, device: str
    ) -> AbstractContextManager[Proof]:
        """Apply on entry, restore on exit. Yields the proof: Observation -> receipt (`engaged`, `reason`, …)."""


# ---------------------------------------------------------------- what is measured


class Measurement(Struct, frozen=True):
    """One number's whole story. `value` is the worst image's; None means "not measured", and then `reason` says why."""

    name: str = ""
    value: float | None = None
    unit: str = ""
    better: Better = "lower"
    per_image: tuple[float | None, ...] = ()
    where: dict[str, Any] | None = None
    """Place of the worst: `image`, `x`, `y` (pixels), and a detector's own keys (`axis`, `tile` …)."""
    reason: str | None = None
    exact: bool = False
    detection_limit: float | None = None
    """The smallest injected defect that this measurement would have caught on this image, in `unit`."""
    details: dict[str, Any] = {}

    @staticmethod
    def worst(per_image: Sequence[float | None], better: Better) -> tuple[int, float | None]:
        """Index and value of the worst image. A value that was not measured, or is not finite, is the worst of all."""
        for index, value in enumerate(per_image):
            if value is None or not math.isfinite(value):
                return index, None
        pick = max if better == "lower" else min
        index = pick(range(len(per_image)), key=lambda i: per_image[i])  # type: ignore[arg-type,return-value]
        return index, per_image[index]


class Stage(Struct, frozen=True):
    """One stage of a decode's memory: its peak of bytes alive, and how often it ran."""

    name: Literal["load", "onload", "decode", "tile", "assemble", "convert", "encode"]
    peak_bytes: int
    calls: int = 1


class MemoryTrace(Struct, frozen=True):
    """Peak memory of one decode. A figure that could not be measured is None and `reason` says why."""

    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    resident_peak_bytes: int | None = None
    """Rise of the process's resident high-water mark over its size before the decode, plus resident weights."""
    weights_bytes: int | None = None
    method: str = ""
    reason: str | None = None
    stages: tuple[Stage, ...] = ()
    timeline: tuple[int, ...] = ()
    """Bytes alive over the decode, resident weights included: the most in each of at most 128 equal shares of the
    allocator's events, in their order (not by the clock, so that the same decode gives the same line)."""


@dataclass(frozen=True)
class Decoded:
    """What happened: the sample as fp32 on the CPU in the declared range, and the proof of how it was made."""

    sample: torch.Tensor
    seconds: dict[str, float]
    """`decode`: the judged decode, by itself; `memory`: the traced decode before it, where there was one."""
    receipts: Receipts
    memory: MemoryTrace
    repeat_exact: bool | None = None
    """Whether a second decode under the same plan gave the same bits; None if there was none."""
    activations: Any = None
    """What each module gave (`optimizations.activations.Activations`), where that was asked for."""


# ---------------------------------------------------------------- cases and verdicts


class Limit(Struct, frozen=True, forbid_unknown_fields=True):
    """A bound on one measurement and where it comes from. Met when equal."""

    origin: str
    max: float | None = None
    min: float | None = None
    times_plain: float | None = None
    """Beside `max`: also at most this many times what the plain full decode of the same dtype and upcast costs on the
    same latents, plus the noise floor."""


class Expectation(Struct, frozen=True):
    """How a case should end. An expected failure must have exactly these diagnoses."""

    verdict: Literal["pass", "fail", "error"] = "pass"
    diagnosis: tuple[str, ...] = ()
    reason: str = ""


class Case(Struct, frozen=True):
    """One cell: model × latents × plan, with its limits and what the suite expects of it."""

    model: str
    latents: str
    plan: DecodePlan
    limits: dict[str, Limit] = {}
    expected: Expectation = Expectation()
    not_applicable: str | None = None
    """The reason why this cell cannot apply, known before anything is decoded."""
    check: str | None = None
    """The metamorphic check that judges it, without a golden; None: judged against the golden."""

    @property
    def id(self) -> str:
        return f"{self.model}/{self.latents}/{self.plan.id}{f'~{self.check}' if self.check else ''}"


class Reason(Struct, frozen=True):
    """Why a case is not green: one line for people, the figures for machines."""

    name: str
    message: str
    measured: float | None = None
    limit: float | None = None
    unit: str = ""
    diagnosis: tuple[str, ...] = ()


class ApprovedValues(Struct, frozen=True):
    """What was approved for a case, to stand beside what it measured."""

    environment_class: str
    gated: bool
    """Whether this run held the case to it: only in the class in which it was approved."""
    values: dict[str, float]
    floors: dict[str, float] = {}
    """Noise floors of the case's dtype."""


class CaseResult(Struct, frozen=True):
    """Case, receipts, measurements and verdict: the only thing that is stored and rendered."""

    id: str
    model: str
    latents: str
    plan: DecodePlan
    verdict: VerdictName
    expected: Literal["pass", "fail", "error"] = "pass"
    expected_reason: str = ""
    expected_diagnosis: tuple[str, ...] = ()
    surprise: bool = False
    reasons: tuple[Reason, ...] = ()
    diagnosis: tuple[str, ...] = ()
    receipts: Receipts = {}
    measurements: dict[str, Measurement] = {}
    limits: dict[str, Limit] = {}
    memory: MemoryTrace | None = None
    seconds: dict[str, float] = {}
    images: dict[str, tuple[str, ...]] = {}
    """`golden`, `candidate`, `difference`: one PNG a batch item, of a video one a frame, item after item (frame t of
    item b stands at b · frames + t). Paths relative to the run's folder."""
    frames: int = 1
    """Frames of each batch item; 1 for images."""
    data_range: tuple[float, float] = (-1.0, 1.0)
    reproduce: str = ""
    """The command that judges this case again."""
    code: str = ""
    """The same in plain diffusers, of a case that is not green: a short program; empty where there is none."""
    notes: tuple[str, ...] = ()
    check: str | None = None
    """The metamorphic check that judged it; None: judged against the golden."""
    approved: ApprovedValues | None = None
    """What was approved for this very case, gated or only shown; None where nothing was, in any class."""


class Layer(Struct, frozen=True):
    """One module of the decoder in one decode: the largest |activation| that it gave."""

    name: str
    kind: str
    """Its class."""
    max_abs: float | None
    """None where it gave a value that is not finite."""
    headroom: float | None
    """65504 / max_abs: below 1 it overflows in fp16."""


class Headroom(Struct, frozen=True):
    """How far the fp32 reference decode stays below 65504, the largest fp16 number."""

    layers: tuple[Layer, ...] = ()
    """The tightest, tightest first; a module that only passes on what another gave is not counted."""
    watched: int = 0
    """Modules that gave something."""
    force_upcast: bool = False
    """What the model's config declares."""
    reason: str | None = None
    """Why there is none."""

    @property
    def tightest(self) -> float | None:
        """The least headroom of any layer; 0 where one was not finite, None where nothing was measured."""
        return (self.layers[0].headroom or 0.0) if self.layers else None

    @property
    def over(self) -> tuple[Layer, ...]:
        """The layers, of those listed, that overflow in fp16."""
        return tuple(layer for layer in self.layers if (layer.headroom or 0.0) < 1)

    @property
    def agrees(self) -> bool | None:
        """Whether the config declares force_upcast where it is needed; None where nothing was measured."""
        return None if self.tightest is None else self.force_upcast or self.tightest >= 1

    @property
    def words(self) -> str:
        """What follows for fp16, in a few words, held against what the config declares."""
        if self.tightest is None:
            return f"not measured: {self.reason}"
        if self.tightest < 1:
            which = f"needs force_upcast: {self.layers[0].name} passes 65504"
            return f"{which}, and it is declared" if self.force_upcast else f"{which}, and it is not declared"
        room = f"65504 is {self.tightest:.3g} times the largest activation"
        return f"{room}, though force_upcast is declared" if self.force_upcast else f"{room}: no force_upcast needed"


class Reference(Struct, frozen=True):
    """The reference plan decoded again in this run, against its golden."""

    model: str
    latents: str
    drift: float | None
    """RMSE in grey levels; None where it could not be decoded, and `reason` says why."""
    limit: float
    ok: bool
    same_environment: bool
    approved: bool = False
    """Whether measurements were approved in this environment class, so that regressions are gated."""
    reason: str | None = None
    recorded: bool = False
    """Whether this run recorded the golden (--record-missing)."""
    seconds: float = 0.0
    diagnosis: tuple[str, ...] = ()
    """What the drifted decode shows, beside the drift."""
    headroom: Headroom | None = None
    """None in a run of before it was measured."""
    digests: dict[str, str] = {}
    """Of the golden that was leaned on: `weights`, `latents`, `sample`. Empty in a run of before they were kept."""


class Reach(Struct, frozen=True):
    """How far a decoder looks, in latent pixels; profiles start at distance 0 and are in grey levels."""

    pixel: tuple[float, ...]
    """Largest change of the sample at each distance from one latent pixel that moved by one standard deviation."""
    edge: tuple[float, ...]
    """RMS error of a decode that was cut off, at each distance from the cut, beyond `tone`: lost context."""
    tone: tuple[float, ...]
    """RMS error far from any cut, of crops of each of `sizes`: other statistics; the same everywhere in a crop."""
    sizes: tuple[int, ...]
    """Sides of the crops, latent pixels, the larger first."""
    is_global: bool
    """Whether one pixel moves the whole picture (statistics or attention over all of it): tiling is never exact."""
    before: tuple[float, ...] = ()
    """Largest change at each distance in latent frames before the one that moved; the first is its own frame."""
    after: tuple[float, ...] = ()
    """The same for the frames after it."""
    frames_reason: str | None = None
    """Why nothing is known of frames: pictures have none."""


class Prediction(Struct, frozen=True):
    """What a tiling will cost on one set of latents, from the reach alone, before it was decoded."""

    latents: str
    tile: int
    overlap: float
    rmse: float
    """Grey levels over the whole picture."""


class ModelReach(Struct, frozen=True):
    """The reach of one model, measured once in a run on some of its latents, and what follows from it."""

    model: str
    latents: str
    """Those that it was measured on."""
    reach: Reach | None
    predictions: tuple[Prediction, ...] = ()
    reason: str | None = None
    """Why there is none."""


class Effect(Struct, frozen=True):
    """What one setting does by itself: its case minus the case that differs in nothing else, over all such pairs."""

    model: str
    measurement: str
    unit: str
    axis: str
    value: str
    against: str
    """The axis's reference value."""
    mean: float
    least: float
    most: float
    n: int
    """Complete pairs."""


class Interaction(Struct, frozen=True):
    """What two settings do together beyond the sum of what each does alone: a difference of differences."""

    model: str
    measurement: str
    unit: str
    axes: tuple[str, str]
    values: tuple[str, str]
    mean: float
    least: float
    most: float
    n: int
    """Complete quadruples."""


class Attribution(Struct, frozen=True):
    """Main effects and pairwise interactions over the cross product, and those where there should be none."""

    effects: tuple[Effect, ...] = ()
    interactions: tuple[Interaction, ...] = ()
    alarms: tuple[str, ...] = ()


class RunResult(Struct, frozen=True):
    """A whole run, as stored in results.json (schema fidelity.results/1)."""

    suite: dict[str, Any]
    environment: dict[str, Any]
    reference: tuple[Reference, ...] = ()
    cases: tuple[CaseResult, ...] = ()
    notes: tuple[str, ...] = ()
    partial: bool = False
    attribution: Attribution | None = None
    """None in a run of before there was any."""
    reach: tuple[ModelReach, ...] = ()
    """Of each model that the run tiled."""
    commit: str | None = None
    """Of the checkout that was run in, `-dirty` behind it where tracked files were edited; None where none is known."""
    recorded: str | None = None
    """When the run began: UTC, ISO 8601."""
    trend: Trend | None = None
    """Earlier runs of the history that this one was added to; None where it was added to none."""
    schema: Literal["fidelity.results/1"] = "fidelity.results/1"

    @property
    def exit_status(self) -> int:
        """0 as expected · 1 a surprise that was judged · 3 a case that could not be judged (3 wins)."""
        surprises = [case for case in self.cases if case.surprise]
        if any(case.verdict == "error" for case in surprises):
            return 3
        return 1 if surprises else 0


# ---------------------------------------------------------------- JSON


def to_json(record: Any) -> bytes:
    """Encode a record as indented JSON. Raises ValueError on NaN or infinity: a number that is none has a reason."""
    built = msgspec.to_builtins(record)
    _refuse_non_finite(built, "$")
    return msgspec.json.format(msgspec.json.encode(built), indent=1)


def from_json(data: bytes | str, kind: type[Any]) -> Any:
    """Decode a record of `kind`. Raises msgspec.ValidationError with the path of what does not fit."""
    return msgspec.json.decode(data, type=kind)


def _refuse_non_finite(node: Any, path: str) -> None:
    if isinstance(node, float) and not math.isfinite(node):
        raise ValueError(f"{path} is {node}: store null and a reason")
    if isinstance(node, Mapping):
        for key, value in node.items():
            _refuse_non_finite(value, f"{path}.{key}")
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            _refuse_non_finite(value, f"{path}[{index}]")
