"""What was predicted of one decode's memory, and how it is said."""

from __future__ import annotations

from msgspec import Struct

from fidelity.memory.law import Law
from fidelity.records import DecodePlan, Stage
from fidelity.wording import in_units

METHOD = "operators on shapes alone + workspace, attention kernel and residency of weights as modelled"


class Holder(Struct, frozen=True):
    """What was alive at the worst instant: `count` allocations of one kind, their bytes together."""

    bytes: int
    what: str
    module: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    count: int = 1


class Largest(Struct, frozen=True):
    """The largest tensor that the decode makes, and how many times the latents' bytes that is."""

    bytes: int
    what: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    times_latents: float


class Fits(Struct, frozen=True):
    """What a budget of bytes allows: whether this decode fits, and the largest picture that does."""

    budget_bytes: int
    fits: bool
    height: int | None
    width: int | None
    peak_bytes: int | None
    reason: str | None = None


class Prediction(Struct, frozen=True):
    """The predicted memory of one decode. `reserved_peak_bytes` is None on a CPU, and `reserved_reason` says why."""

    model: str
    family: str
    device: str
    plan: DecodePlan
    latents: tuple[int, ...]
    sample: tuple[int, ...]
    allocated_peak_bytes: int
    reserved_peak_bytes: int | None
    weights_bytes: int
    stages: tuple[Stage, ...]
    at_peak: tuple[Holder, ...]
    largest: Largest
    untiled_peak_bytes: int | None = None
    """The allocated peak of the same decode without tiles, where this one has some."""
    law: Law | None = None
    budget: Fits | None = None
    findings: tuple[str, ...] = ()
    method: str = METHOD
    reserved_reason: str | None = None
    seconds: float = 0.0


def findings(found: Prediction) -> tuple[str, ...]:
    out = []
    whole = found.untiled_peak_bytes
    if whole is not None and found.allocated_peak_bytes >= whole:
        tiled = in_units(found.allocated_peak_bytes)
        out.append(f"tiling does not lower the peak: {tiled} with tiles, {in_units(whole)} without; {_worst(found)}")
    stages = {stage.name: stage.peak_bytes for stage in found.stages if stage.peak_bytes is not None}
    if found.untiled_peak_bytes is not None and stages.get("assemble", 0) > stages.get("tile", 0):
        out.append(f"assembling the tiles needs more than any of them: {in_units(stages['assemble'])} against "
                   f"{in_units(stages['tile'])}; a smaller tile saves nothing")  # fmt: skip
    if stages.get("convert", 0) > stages.get("decode", 0):
        out.append(f"the conversion to an image needs more than the decode: {in_units(stages['convert'])}")
    return tuple(out)


def _worst(found: Prediction) -> str:
    tensors = [holder for holder in found.at_peak if holder.what != "weights"]
    return f"{tensors[0].what} in {tensors[0].module or 'the assembly'} holds it" if tensors else "weights hold it"


def lines(found: Prediction) -> list[str]:
    """The prediction in words, a line each."""
    weights = f"weights {in_units(found.weights_bytes)}"
    reserved = in_units(found.reserved_peak_bytes) if found.reserved_peak_bytes is not None else "none"
    out = [
        f"{found.model} · {found.family} · {found.plan.id} · latents {_shape(found.latents)} → {_shape(found.sample)} "
        f"· {found.device}",
        f"allocated peak  {in_units(found.allocated_peak_bytes)}  ({weights})",
        f"reserved peak   {reserved}" + (f"  ({found.reserved_reason})" if found.reserved_reason else ""),
    ]
    for stage in found.stages:
        calls = f"  ({stage.calls} calls)" if stage.calls > 1 else ""
        out.append(f"  {stage.name:<13} {in_units(stage.peak_bytes or 0)}{calls}")
    out.append("at the peak")
    out += [f"  {in_units(holder.bytes):<13} {_held(holder)}" for holder in found.at_peak]
    largest = found.largest
    out.append(f"largest tensor  {in_units(largest.bytes)}  {largest.what} in {largest.module or 'the autoencoder'} "
               f"{_shape(largest.shape)} {largest.dtype}, {largest.times_latents:,.0f}× the latents")  # fmt: skip
    if found.untiled_peak_bytes is not None:
        out.append(f"without tiles   {in_units(found.untiled_peak_bytes)}")
    out += _law_lines(found)
    out += [f"finding         {finding}" for finding in found.findings]
    return [*out, f"predicted in {found.seconds:.1f} s"]


def _law_lines(found: Prediction) -> list[str]:
    out = []
    if found.law is not None:
        line = f"{in_units(found.law.constant_bytes)} + {found.law.bytes_per_pixel:,.0f} B per pixel"
        sizes = f"fitted to {', '.join(found.law.fitted)} within {found.law.largest_error:.1%}"
        out.append(f"law             {line}, {sizes}")
    if found.budget is not None:
        room = found.budget
        largest = (f"up to {room.height}x{room.width} ({in_units(room.peak_bytes)})" if room.peak_bytes is not None
                   else room.reason)  # fmt: skip
        out.append(
            f"budget          {in_units(room.budget_bytes)}: {'fits' if room.fits else 'does not fit'}; {largest}"
        )
    return out


def _held(holder: Holder) -> str:
    where = f" in {holder.module}" if holder.module else ""
    shape = f" {_shape(holder.shape)} {holder.dtype}" if holder.shape else ""
    times = f" ({holder.count} of them)" if holder.count > 1 else ""
    return f"{holder.what}{where}{shape}{times}"


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))
