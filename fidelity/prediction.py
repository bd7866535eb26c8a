"""What was predicted of one decode's memory, and how it is said."""

from __future__ import annotations

from msgspec import Struct

from fidelity.admission import Rule
from fidelity.records import DecodePlan
from fidelity.records.memory import Holding, Stage
from fidelity.simulation.law import Law
from fidelity.wording import in_units

METHOD = "operators on shapes alone + workspace, attention kernel and residency of weights as modelled"


class Largest(Struct, frozen=True):
    """The largest tensor that the decode makes, and how many times the latents' bytes that is."""

    bytes: int
    what: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    times_latents: float


class Together(Struct, frozen=True):
    """Decodes at once in one process, which share the weights, beside what else stays on the device."""

    rule: Rule
    """What must be free for them; its `reserve_bytes` are their allocated peak, where all their peaks coincide."""
    reserved_peak_bytes: int | None
    """The same sum of what CUDA's allocator reserves for one decode; None on a CPU."""


class Fits(Struct, frozen=True):
    """What a budget of bytes allows: whether this decode fits, and the largest picture that does."""

    budget_bytes: int
    fits: bool
    height: int | None
    width: int | None
    peak_bytes: int | None
    """Of that picture, by a prediction of its own."""
    law_bytes: int | None = None
    """And by the law."""
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
    at_peak: tuple[Holding, ...]
    largest: Largest
    untiled_peak_bytes: int | None = None
    """The allocated peak of the same decode without tiles and chunks, where this one has some."""
    weights_wait: bool = False
    """Whether an offload keeps the weights elsewhere until they are needed: the peak holds few of them."""
    pinned_bytes: int = 0
    """Pinned copies of weights in main memory, of an offload with a stream."""
    together: Together | None = None
    """Where several decodes run at once, or something else stays on the device."""
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
        cut, by = in_units(found.allocated_peak_bytes), _cut_by(found.plan)
        out.append(f"{by} does not lower the peak: {cut} with, {in_units(whole)} without; {_worst(found)}")
    stages = {stage.name: stage.peak_bytes for stage in found.stages if stage.peak_bytes is not None}
    if found.untiled_peak_bytes is not None and stages.get("assemble", 0) > stages.get("tile", 0):
        out.append(f"assembling the tiles needs more than any of them: {in_units(stages['assemble'])} against "
                   f"{in_units(stages['tile'])}; a smaller tile saves nothing")  # fmt: skip
    if stages.get("convert", 0) > stages.get("decode", 0):
        out.append(f"the conversion to an image needs more than the decode: {in_units(stages['convert'])}")
    return tuple(out)


def _cut_by(plan: DecodePlan) -> str:
    return next((name for name in ("tiling", "temporal", *plan.options) if name in plan.settings), "tiling")


def _worst(found: Prediction) -> str:
    tensors = [holder for holder in found.at_peak if holder.kind != "weights"]
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
    if found.pinned_bytes:
        out.append(f"main memory     {in_units(found.pinned_bytes)} of pinned copies, which the stream copies from")
    for stage in found.stages:
        if stage.name == "load":
            out.append(f"  load          {in_units(stage.peak_bytes or 0)} of main memory  ({stage.part})")
            continue
        calls = f"  ({stage.calls} calls)" if stage.calls > 1 else ""
        out.append(f"  {stage.name:<13} {in_units(stage.peak_bytes or 0)}{calls}")
    out.append("at the peak")
    out += [f"  {in_units(holder.bytes):<13} {_held(holder)}" for holder in found.at_peak]
    largest = found.largest
    out.append(f"largest tensor  {in_units(largest.bytes)}  {largest.what} in {largest.module or 'the autoencoder'} "
               f"{_shape(largest.shape)} {largest.dtype}, {largest.times_latents:,.0f}× the latents")  # fmt: skip
    if found.untiled_peak_bytes is not None:
        out.append(f"uncut           {in_units(found.untiled_peak_bytes)}")
    out += [*_together_lines(found), *_law_lines(found)]
    out += [f"finding         {finding}" for finding in found.findings]
    return [*out, f"predicted in {found.seconds:.1f} s"]


def _together_lines(found: Prediction) -> list[str]:
    if found.together is None:
        return []
    rule, kept = found.together.rule, found.together.reserved_peak_bytes
    beside = f" beside {in_units(rule.resident_bytes)}" if rule.resident_bytes else ""
    reserved = f", reserved {in_units(kept)}" if kept is not None else ""
    what = "decodes at once, which share the weights" if rule.count > 1 else "decode"
    return [
        f"together        {rule.count} {what}{beside}: {in_units(rule.reserve_bytes)}{reserved}",
        f"admission       reserve {in_units(rule.once_bytes)} once and {in_units(rule.each_bytes)} for each decode "
        "until it has ended: their peaks may coincide",
    ]


def _law_lines(found: Prediction) -> list[str]:
    out = []
    if found.law is not None:
        lines_ = found.law.stages.items()
        holds = [f"{name} {in_units(line.constant_bytes)} + {line.bytes_per_pixel:,.1f} B per pixel"
                 for name, line in lines_]  # fmt: skip
        out.append(f"law             {'the largest of: ' if len(holds) > 1 else ''}{'; '.join(holds)}")
        out.append(f"  {'size':<13} {'predicted':>11} {'law':>11} {'deviation':>9}")
        out += [f"  {size:<13} {in_units(peak):>11} {in_units(line):>11} {share:>+9.1%}"
                for size, peak, line, share in found.law.rows()]  # fmt: skip
    if found.budget is not None:
        room = found.budget
        largest = room.reason
        if room.peak_bytes is not None and room.law_bytes is not None:
            largest = (f"up to {room.height}x{room.width}, predicted {in_units(room.peak_bytes)}, by the law "
                       f"{in_units(room.law_bytes)}")  # fmt: skip
        out.append(
            f"budget          {in_units(room.budget_bytes)}: {'fits' if room.fits else 'does not fit'}; {largest}"
        )
    return out


def _held(holder: Holding) -> str:
    where = f" in {holder.module}" if holder.module else ""
    shape = f" {_shape(holder.shape)} {holder.dtype}" if holder.shape else ""
    times = f" ({holder.count} of them)" if holder.count > 1 else ""
    return f"{holder.what or holder.kind}{where}{shape}{times}"


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))
