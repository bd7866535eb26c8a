"""What a server does with a sample after the decode, each step a stage of its own with its copies.

Three counts stand side by side and are never added: torch's allocator (`peak_bytes`), what numpy and Python report to
tracemalloc (`traced_bytes`), and the kernel's resident high-water mark (`resident_bytes`), which alone sees Pillow and
the encoders.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from fidelity import conversion
from fidelity.errors import first_line
from fidelity.latents import digest
from fidelity.lazy import np
from fidelity.memory import cuda, profiler
from fidelity.memory.resident import Resident, resident_peak
from fidelity.records import Holding, MemoryKind, MemoryTrace, Stage, StageName

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image
    from torch import Tensor

    DataRange = tuple[float, float]

MOST_PICTURES = 4
"""Of a batch, how many are encoded; `calls` tells how many there were."""
LEAST_BYTES = 4 * 2**20
"""Of a float32 sample: below, the pages of the interpreter's own heap weigh as much as the pictures."""
MOST_KEPT = 256
PAST_TORCH = "allocates past torch's allocator"
SMALL = f"resident: a sample under {LEAST_BYTES // 2**20} MiB is lost among the process's own pages"
NO_PYAV = "PyAV is not installed: pip install 'fidelity[video]'"
_KEPT: dict[tuple[str, tuple[float, float]], tuple[Stage, ...]] = {}


def stages(sample: Tensor, data_range: DataRange, *, held_bytes: int) -> tuple[Stage, ...]:
    """The stages of a sample (B, C, [T,] H, W) as it came out of the decoder, in its dtype and on its device.

    `held_bytes`: what torch's allocator holds beside the sample meanwhile, the resident weights; it is in `peak_bytes`
    alone. A batch of pictures is converted together and encoded one by one (at most `MOST_PICTURES`); of several clips
    the first is measured. Equal samples are measured once.
    """
    key = (digest(sample), data_range)
    if key not in _KEPT:
        while len(_KEPT) >= MOST_KEPT:
            _KEPT.pop(next(iter(_KEPT)))
        _KEPT[key] = _measured(sample.detach(), data_range)
    return tuple(
        stage if stage.peak_bytes is None else replace(stage, peak_bytes=stage.peak_bytes + held_bytes)
        for stage in _KEPT[key]
    )


def findings(memory: MemoryTrace) -> tuple[str, ...]:
    """A line where a stage after the decode holds more than the decode itself, as far as both lie in one memory."""
    decode = max((s.peak_bytes or 0 for s in memory.stages if s.name in ("decode", "tile", "assemble")), default=0)
    on_device = memory.reserved_peak_bytes is not None
    after = [stage for stage in memory.stages if stage.is_after]
    held = {
        stage.part: alive_bytes(stage, memory.weights_bytes or 0)
        for stage in after
        if stage.result_bytes is not None and not (on_device and stage.peak_bytes is None)
    }
    if not decode or not held:
        return ()
    part = max(held, key=lambda name: held[name])
    if held[part] <= decode:
        return ()
    said = f"{held[part] / 2**20:.1f} MiB against {decode / 2**20:.1f}"
    return (f"{part} after the decode holds more than the decode itself: {said}; no decode option lowers it",)


def alive_bytes(stage: Stage, weights_bytes: int) -> int:
    """The least that was alive at the worst instant of such a stage: weights, the copies that it found, its rise."""
    if stage.peak_bytes is not None:
        return stage.peak_bytes
    rise = max(stage.traced_bytes or 0, stage.resident_bytes or 0, stage.result_bytes or 0)
    return weights_bytes + sum(copy.bytes for copy in stage.held) + rise


# ---------------------------------------------------------------- measuring them


@dataclass
class _Figures:
    """One step's, known on its end."""

    seconds: float = 0.0
    traced_bytes: int = 0
    resident: Resident = field(default_factory=Resident)


@dataclass
class _Meter:
    """Books the stages of one sample; `large`: whether the kernel's count can tell its copies."""

    large: bool
    booked: list[Stage] = field(default_factory=list)

    @contextmanager
    def figures(self) -> Iterator[_Figures]:
        found = _Figures()
        with resident_peak() if self.large else nullcontext(Resident(reason=SMALL)) as found.resident:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            start = time.perf_counter()
            yield found
            found.seconds = time.perf_counter() - start
            found.traced_bytes = max(0, tracemalloc.get_traced_memory()[1] - before)

    def book(
        self, name: StageName, part: str, held: tuple[Holding, ...], result: int, found: _Figures, *,
        peak: int | None = None, by: str | None = None, calls: int = 1, less: str | None = None,
    ) -> None:  # fmt: skip
        """`by`: who allocates past torch, where it does; `less`: what was left out."""
        why = [f"{by} {PAST_TORCH}" if by else None, found.resident.reason, less]
        self.booked.append(
            Stage(name, peak, calls, part, held=held, resident_bytes=found.resident.rise_bytes, result_bytes=result,
                  traced_bytes=found.traced_bytes if by else None, seconds=found.seconds,
                  reason="; ".join(reason for reason in why if reason) or None)
        )  # fmt: skip

    def step(
        self, part: str, held: tuple[Holding, ...], by: str, make: Callable[[], Any], size: Callable[[Any], int]
    ) -> Any:
        """What `make` gives, booked as a conversion that allocates past torch's allocator."""
        with self.figures() as found:
            made = make()
        self.book("convert", part, held, size(made), found, by=by)
        return made


def _measured(sample: Tensor, data_range: DataRange) -> tuple[Stage, ...]:
    video = sample.ndim == 5
    _warm(video)
    meter = _Meter(sample.numel() * 4 >= LEAST_BYTES)
    with _tracing():
        pictures = _convert(meter, sample, data_range)
        if pictures:
            _encode(meter, pictures, video)
    return tuple(meter.booked)


def _convert(meter: _Meter, sample: Tensor, data_range: DataRange) -> list[Image]:
    """The steps up to Pillow's pictures; none where Pillow has no such pictures."""
    decoded = _copy("sample", sample.numel() * sample.element_size(), sample, "output")
    array = _array(meter, sample, data_range, decoded)
    held: tuple[Holding, ...] = (decoded, _copy("float32 array", array.nbytes, array))
    if sample.ndim == 5:  # what output_type="np" makes of the clips, where output_type="pil" does not
        meter.step("float32 stack", held, "numpy", partial(np.stack, [array]), _nbytes)
    if array.shape[-1] not in (1, 3):
        why = f"a picture has 1 or 3 channels, this sample has {array.shape[-1]}"
        meter.booked.append(Stage("convert", None, part="PIL", reason=why))
        return []
    pixels = meter.step("uint8", held, "numpy", partial(conversion.to_uint8, array), _nbytes)
    held = (*held, _copy("uint8 array", pixels.nbytes, pixels))
    return meter.step("PIL", held, "Pillow", partial(conversion.to_pil, pixels), _pil_bytes)


def _array(meter: _Meter, sample: Tensor, data_range: DataRange, decoded: Holding) -> NDArray[Any]:
    """Denormalised and moved to numpy: the steps that torch's allocator sees."""
    video = sample.ndim == 5
    with _allocated(sample.device) as first_peak, meter.figures() as first:
        unit = conversion.denormalise(sample[0].transpose(0, 1) if video else sample, data_range)
    with _allocated(sample.device) as second_peak, meter.figures() as second:
        array = conversion.array_of(unit)
    size = unit.numel() * unit.element_size()
    less = f"the first of {len(sample)} clips" if video and len(sample) > 1 else None
    held = (decoded, _copy("denormalised", size, unit))
    peaks = decoded.bytes + first_peak.rise, decoded.bytes + size + second_peak.rise
    meter.book("convert", "denormalise", held[:1], size, first, peak=peaks[0], less=less)
    meter.book("convert", "float32 array", held, array.nbytes, second, peak=peaks[1])
    return array


@dataclass
class _Peak:
    rise: int = 0
    """The most that torch's allocator handed out at once on the device, known on exit."""


@contextmanager
def _allocated(device: Any) -> Iterator[_Peak]:
    peak = _Peak()
    if device.type == "cuda":
        meter = cuda.Meter(str(device))
        meter.start(0)
        with meter.stage("step"):
            yield peak
        peak.rise = max(meter.allocated["step"])
        return
    with profiler.record() as recording:
        yield peak
    peak.rise = max(recording.alive, default=0)


def _encode(meter: _Meter, pictures: list[Image], video: bool) -> None:
    """Book the files that may be sent: each by itself, a server sends one kind."""
    held = (Holding(_pil_bytes(pictures), "copies", "PIL", shape=(len(pictures), *pictures[0].size[::-1])),)
    shown = pictures if video else pictures[:MOST_PICTURES]
    left = f"the first {len(shown)} of {len(pictures)} pictures" if len(shown) < len(pictures) else None
    kinds: dict[str, Callable[[], list[bytes]]]
    if video:
        kinds = {"WebP": lambda: [conversion.animation(shown)], "MP4": lambda: [conversion.film(shown)]}
    else:
        kinds = {kind: partial(_files, shown, kind) for kind in conversion.PICTURE_FILES}
    for kind, make in kinds.items():
        if kind == "MP4" and not conversion.has_pyav():
            meter.booked.append(Stage("encode", None, part=kind, reason=NO_PYAV))
            continue
        try:
            with meter.figures() as found:
                files = make()
        except Exception as error:  # whatever a codec refuses (WebP ends at 16,383 pixels): no figure, and no red case
            meter.booked.append(Stage("encode", None, part=kind, held=held, reason=f"not encoded: {first_line(error)}"))
            continue
        meter.book("encode", kind, held, sum(map(len, files)), found, by="the encoder", calls=len(files), less=left)


def _files(pictures: Sequence[Image], kind: str) -> list[bytes]:
    return [conversion.encode(picture, kind) for picture in pictures]


def _copy(what: str, size: int, of: Any, kind: MemoryKind = "copies") -> Holding:
    return Holding(size, kind, what, shape=tuple(of.shape), dtype=str(of.dtype).removeprefix("torch."))


def _nbytes(array: Any) -> int:
    return array.nbytes


def _pil_bytes(pictures: Sequence[Image]) -> int:
    """Pillow keeps RGB in four bytes a pixel and grey in one (its Storage.c)."""
    return sum(picture.width * picture.height * (1 if picture.mode == "L" else 4) for picture in pictures)


@contextmanager
def _tracing() -> Iterator[None]:
    """tracemalloc on; left on where somebody else had it on."""
    mine = not tracemalloc.is_tracing()
    if mine:
        tracemalloc.start()
    try:
        yield
    finally:
        if mine:
            tracemalloc.stop()


@cache
def _warm(video: bool) -> None:
    """Load the encoders' libraries, which are no stage's memory and no stage's time."""
    pictures = conversion.to_pil(conversion.to_uint8(np.zeros((2, 16, 16, 3), dtype="float32")))
    if not video:
        for kind in conversion.PICTURE_FILES:
            conversion.encode(pictures[0], kind)
        return
    conversion.animation(pictures)
    if conversion.has_pyav():
        conversion.film(pictures)
