"""How much memory one decode held, when, and for what.

Bytes throughout. *Allocated* is what an allocator handed out to tensors and kernels; *resident* is what the kernel gave
the process, *reserved* what a caching allocator keeps from others. They are never added to one another.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

StageName = Literal["load", "onload", "decode", "tile", "assemble", "convert", "encode"]
MemoryKind = Literal["weights", "staging", "activations", "workspace", "tiles", "output", "copies"]

MEMORY_KINDS: dict[MemoryKind, str] = {
    "weights": "weights and buffers that lie where the decode runs",
    "staging": "what bringing weights in needs besides the weights themselves",
    "activations": "tensors of the decoder at work",
    "workspace": "what kernels allocate for themselves while they run",
    "tiles": "decoded tiles, chunks and items that wait to be put together, and what blending makes of them",
    "output": "the sample",
    "copies": "what the conversion to an image and its encoding make of the sample",
}


class Stage(Struct, frozen=True):
    """One stage of a decode's memory: its peak of bytes alive, everything that was alive beside it included."""

    name: StageName
    peak_bytes: int | None
    """Allocated. None where the stage allocates past torch's allocator: `resident_bytes` is its figure then."""
    calls: int = 1
    part: str = ""
    """Which of several stages of this name: `uint8`, `PIL`, `PNG`, `JPEG`, `WebP`, …"""
    each: tuple[int, ...] = ()
    """The peak of each call, in order, where there were several (of at most the first 1,024)."""
    resident_bytes: int | None = None
    """By how much the process's resident memory rose at most in this stage; None where it was not measured."""
    result_bytes: int | None = None
    """What the stage leaves behind: an array, an image, an encoded file."""
    traced_bytes: int | None = None
    """By how much the memory of numpy and Python rose at most, as they report it to tracemalloc."""
    held: tuple[Holding, ...] = ()
    """Of a stage after the decode: the copies of the sample that were alive when it began."""
    seconds: float | None = None
    reason: str | None = None
    """Why a figure is missing."""

    @property
    def is_after(self) -> bool:
        """Whether it is one of the steps of a server after the decode."""
        return self.name in ("convert", "encode") and bool(self.part)


class Span(Struct, frozen=True):
    """A stretch of the timeline, in shares: `start` included, `stop` not."""

    name: StageName
    start: int
    stop: int
    part: str = ""


class Holding(Struct, frozen=True):
    """What was alive at one instant: `count` allocations of one kind, their bytes together."""

    bytes: int
    kind: MemoryKind
    what: str = ""
    """The operator that made it."""
    module: str = ""
    """Dotted path; empty: the autoencoder itself, or what runs around it."""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    count: int = 1


class Peak(Struct, frozen=True):
    """The instant at which most was alive."""

    bytes: int
    stage: StageName
    module: str
    """The module that ran."""
    operator: str
    held: tuple[Holding, ...]
    """What was alive, the largest first, alike ones together; the first twelve."""
    by_kind: dict[str, int]
    """All that was alive, by kind: their sum is `bytes`."""


class Transfers(Struct, frozen=True):
    """Weights that an offload brought in and sent away during one decode."""

    onloads: int
    offloads: int
    bytes_in: int
    """Of weights that came from elsewhere (another device, a file, a copy in main memory)."""
    bytes_out: int
    """Of weights that left the execution device: copied back, or dropped, as accelerate's sequential and disk offload
    do with a copy that they brought in."""
    seconds: float
    """Spent in bringing them in and sending them away."""
    resident: tuple[int, ...] = ()
    """Bytes of weights resident over the decode: the most in each of the shares of `timeline`."""


class Exhausted(Struct, frozen=True):
    """Memory ran out inside a decode: where, what lived then, and what would have fitted."""

    stage: str
    module: str
    message: str
    """The allocator's own words."""
    requested_bytes: int | None
    """What it refused; None where it does not say."""
    alive_bytes: int | None
    """Allocated at that instant, resident weights included; None where it was not followed."""
    limit_bytes: int | None
    """What the case was allowed; None: all that the machine has."""
    held: tuple[Holding, ...] = ()
    fits: str | None = None
    """The id of the nearest plan of the suite that fits."""
    fits_bytes: int | None = None
    """What that plan needs, as predicted."""
    reason: str | None = None
    """Why there is no such plan, or why a figure is missing."""


class MemoryTrace(Struct, frozen=True):
    """Peak memory of one decode. A figure that could not be measured is None and `reason` says why."""

    allocated_peak_bytes: int | None = None
    """The largest sum alive at one instant of the decode and its conversion, resident weights included."""
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
    layers: dict[str, tuple[int, ...]] = {}
    """What those bytes were, by kind (`MEMORY_KINDS`), at the worst instant of each share; only kinds that occur."""
    spans: tuple[Span, ...] = ()
    """Which stage ran when, over those shares."""
    peak: Peak | None = None
    kept: tuple[int, ...] = ()
    """Of several calls of the decoder, the bytes of activations that were alive when each had returned (the first
    1,024): what it left beside what it gave."""
    transfers: Transfers | None = None
    """Of a plan with offload."""
    refused: int = 0
    """How often the allocator refused what the traced decode asked for, whether it went on or not."""
    predicted_peak_bytes: int | None = None
    """What shapes alone say of the same decode (`fidelity predict`), where nothing could be measured."""
    exhausted: Exhausted | None = None
    """Where memory ran out."""
