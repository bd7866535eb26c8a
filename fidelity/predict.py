"""What a decode will need, without weights and without a GPU: its peak by stage, and the law by which that grows.

    prediction = predict(model, (1024, 1024), DecodePlan(dtype="fp16"), device="cuda")
    prediction.allocated_peak_bytes

The decode runs on shapes alone (`simulation`), under the project's own optimizations; what kernels allocate for
themselves and when weights are resident is modelled beside it. How near this comes: docs/design/prediction.md.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from fidelity import admission, extent, optimizations, registry
from fidelity.errors import EvaluationError, RequestError
from fidelity.optimizations.encode import encodes, view
from fidelity.optimizations.precision import compute_dtype
from fidelity.optimizations.weights import kept_in_fp32
from fidelity.prediction import Fits, Largest, Prediction, Together, findings
from fidelity.records import STREAM, DecodePlan, MemoryKind, Model
from fidelity.records.memory import Holding, Stage
from fidelity.runner import image_of
from fidelity.simulation import caching, schedule
from fidelity.simulation.ledger import Holding as Held
from fidelity.simulation.ledger import Ledger
from fidelity.simulation.repeat import Memo
from fidelity.simulation.simulate import place, simulate

if TYPE_CHECKING:
    from torch import nn

NOT_RESERVED = "the CPU's allocator returns memory as it is freed: it reserves none"
SHOWN = 8
DEVICES = ("cpu", "cuda")


def predict(
    model: Model,
    size: tuple[int, int],
    plan: DecodePlan | None = None,
    *,
    frames: int | None = None,
    batch: int = 1,
    device: str = "cpu",
    concurrency: int = 1,
    resident: int = 0,
    with_law: bool = False,
    budget: int | None = None,
) -> Prediction:
    """Predict the memory of a decode to `batch` samples of `size` (height, width) and `frames`, under `plan`; without
    `frames`, of the fewest that the class decodes.

    fp16 is predicted as a device computes it, also where a CPU would emulate it. `concurrency` decodes at once share
    the weights; `resident` bytes of something else stay on the device. A `budget` in bytes, for all of that together,
    brings the law, but of a class of one size. Raises RequestError for a size, plan or device that cannot be.
    """
    start = time.perf_counter()
    plan = plan if plan is not None else DecodePlan()
    shape = latents_shape(model, size, frames, batch)
    _refuse(model, plan, shape, device, concurrency, resident, with_law)
    memo: Memo = {}

    def at(other: tuple[int, ...]) -> Prediction:
        return of_shape(model, other, plan, device, memo)

    found = at(shape)
    if registry.cuts(plan):
        found = replace(found, untiled_peak_bytes=of_shape(model, shape, uncut(plan), device).allocated_peak_bytes)
    if concurrency > 1 or resident:
        found = replace(found, together=together(found, concurrency, resident))
    if model.geometry.size is None and (with_law or budget is not None):
        found = replace(found, law=extent.law_of(model, plan, shape, found, at))
    if budget is not None:
        rule = rule_of(found, concurrency, resident)
        one = rule.weights_bytes + (budget - rule.once_bytes) // concurrency  # what a decode may take, weights included
        room = (extent.largest(model, plan, shape, found.law, found, one, at) if found.law is not None
                else extent.only(found, one))  # fmt: skip
        found = replace(found, budget=_of_all(room, rule, budget))
    said = (*_unlike(model, size, plan, found), *findings(found))
    return replace(found, findings=said, seconds=time.perf_counter() - start)


def together(one: Prediction, decodes: int, resident: int = 0) -> Together:
    """The most that so many decodes like this hold at once, weights shared, beside `resident` bytes: their peaks may
    coincide."""
    rule, reserved = rule_of(one, decodes, resident), one.reserved_peak_bytes
    return Together(rule, None if reserved is None else rule.once_bytes + decodes * (reserved - rule.weights_bytes))


def rule_of(one: Prediction, decodes: int, resident: int = 0, copies: int = 1) -> admission.Rule:
    """What must be free for so many decodes like this, beside `resident` bytes, with so many copies of the weights."""
    weights = 0 if one.weights_wait else one.weights_bytes
    peaks = {stage.name: stage.peak_bytes or 0 for stage in one.stages}
    return admission.rule(count=decodes, weights=weights, decode_peak=peaks["decode"] - weights,
                          convert_peak=peaks.get("convert", weights) - weights, resident=resident,
                          copies=copies)  # fmt: skip


def _of_all(room: Fits, rule: admission.Rule, budget: int) -> Fits:
    """What fits of one decode, with the peaks of all that the rule lets in."""
    peaks = (None if peak is None else rule.once_bytes + rule.count * (peak - rule.weights_bytes)
             for peak in (room.peak_bytes, room.law_bytes))  # fmt: skip
    return replace(room, budget_bytes=budget, **dict(zip(("peak_bytes", "law_bytes"), peaks)))


def uncut(plan: DecodePlan) -> DecodePlan:
    """The plan without what cuts a decode into tiles, or a video into chunks."""
    cutting = [name for name in plan.options if registry.cuts(DecodePlan(options={name: True}))]
    options = {name: value for name, value in plan.options.items() if name not in cutting}
    return replace(plan, tiling=None, temporal=None, options=options)


def _unlike(model: Model, size: tuple[int, int], plan: DecodePlan, found: Prediction) -> tuple[str, ...]:
    """What the class does to the size, where it gives another than it should: no figure of such a decode is of use."""
    height, width = found.sample[-2:]
    if (height, width) == size or encodes(plan):
        return ()
    return (f"{model.family.name} gives {height}×{width} under this plan where {size[0]}×{size[1]} was asked: "
            "the picture is wrong, and so is every figure here (docs/upstream.md)",)  # fmt: skip


def latents_shape(model: Model, size: tuple[int, int], frames: int | None, batch: int) -> tuple[int, ...]:
    """Latents (B, C, [T,] H, W) that decode to these samples. Raises RequestError naming the nearest that can be."""
    # of each by itself before anything is made of them: Python's own lists end at 2⁶³
    if max(*size, frames or 1, batch) <= extent.MOST_VALUES:
        shape = _latents_shape(model, size, frames, batch)
        if extent.values(model, shape) <= extent.MOST_VALUES:
            return shape
    raise RequestError(f"{size[0]}x{size[1]}, {frames or 1} frames, batch {batch}: a sample of more than "
                       f"{extent.MOST_VALUES:,} values: choose a smaller size, batch or number of frames")  # fmt: skip


def _latents_shape(model: Model, size: tuple[int, int], frames: int | None, batch: int) -> tuple[int, ...]:
    geometry = model.geometry
    if batch < 1 or (frames is not None and frames < 1) or min(size) < 1:
        given = "" if frames is None else f"{frames} frames, "
        raise RequestError(f"{size[0]}x{size[1]}, {given}batch {batch}: all must be at least 1")
    if any(side % geometry.spatial for side in size):
        near = "x".join(str(max(1, round(side / geometry.spatial)) * geometry.spatial) for side in size)
        raise RequestError(f"size {size[0]}x{size[1]}: {model.name} decodes multiples of {geometry.spatial} pixels; "
                           f"nearest: {near}")  # fmt: skip
    space = (size[0] // geometry.spatial, size[1] // geometry.spatial)
    if geometry.size is not None and space != geometry.size:
        only = "x".join(str(side * geometry.spatial) for side in geometry.size)
        raise RequestError(f"size {size[0]}x{size[1]}: {model.name} decodes {only} alone: choose that")
    if not geometry.video:
        if frames not in (None, 1):
            raise RequestError(f"{frames} frames: {model.name} is an image autoencoder: leave --frames out")
        return (batch, geometry.latent_channels, *space)
    least = model.family.fewest_frames
    if frames is None:
        return (batch, geometry.latent_channels, least, *space)
    lengths = range(least, max(least, frames) + 3)
    above = bisect_left(lengths, frames, key=geometry.sample_frames)
    long = min(lengths[max(0, above - 1) : above + 1], key=lambda n: abs(geometry.sample_frames(n) - frames))
    if geometry.sample_frames(long) != frames:
        few = ", ".join(str(geometry.sample_frames(least + n)) for n in range(3))
        raise RequestError(f"{frames} frames: {model.name} decodes {few} … frames; "
                           f"nearest: {geometry.sample_frames(long)}")  # fmt: skip
    return (batch, geometry.latent_channels, long, *space)


def _refuse(
    model: Model,
    plan: DecodePlan,
    shape: tuple[int, ...],
    device: str,
    concurrency: int,
    resident: int,
    with_law: bool,
) -> None:
    if with_law and model.geometry.size is not None:
        raise RequestError(f"{model.name} decodes one size alone: no law over sizes can be fitted: leave it out")
    if device not in DEVICES:
        raise RequestError(f"device {device!r}: a prediction is for {' or '.join(DEVICES)}")
    if concurrency < 1 or resident < 0:
        raise RequestError(
            f"concurrency {concurrency}, resident {resident}: at least 1 decode, and no fewer than 0 bytes"
        )
    if concurrency > 1 and plan.offload not in ("none", "model"):
        raise RequestError(f"concurrency {concurrency} with offload {plan.offload}: decodes that share an autoencoder "
                           "would send away the weights that another is using: choose none or model")  # fmt: skip
    if plan.tiling is not None and not model.family.hides_tiles:
        model.family.tile_grid(model.geometry, (shape[-2], shape[-1]), plan.tiling)
    reason = optimizations.inapplicable(plan, model, shape)
    if reason is not None:
        raise RequestError(f"{model.name}: {reason}: leave it out")


# ---------------------------------------------------------------- one prediction


def of_shape(
    model: Model, shape: tuple[int, ...], plan: DecodePlan, device: str, memo: Memo | None = None
) -> Prediction:
    """Predict one decode of latents (B, C, [T,] H, W), and nothing around it. Raises RequestError.

    `memo` keeps what calls of the decoder booked, for other shapes under the same plan.
    """
    dtype = compute_dtype(plan)
    stream = bool(plan.options.get(STREAM))
    seen, given, convert = _driven(model, shape, plan)
    # precision and offload write through `.data` and move weights: the walk gives weights their dtype and residency
    others = {name: value for name, value in plan.options.items() if name != STREAM}
    rest = replace(plan, dtype="fp32", force_upcast=False, offload="none", options=others)
    about: dict[str, int] = {}

    def build() -> nn.Module:
        module = seen.family.build(seen.config)
        about["fp32"] = schedule.weights_bytes(module)
        about["pinned"] = 0
        if stream:
            place(module, dtype, device, kept_in_fp32)
            about["pinned"] = schedule.pinned_bytes(module, plan.offload)
        return module

    try:
        ledger, sample, weights = simulate(
            build,
            seen.family.decode,
            given,
            dtype=dtype,
            device=device,
            keep_fp32=kept_in_fp32,
            offload=plan.offload,
            stream=stream,
            memo=memo,
            decoder=seen.family.decoder,
            applied=lambda module: _applied(module, rest, seen, device),
            convert=convert,
        )
    except EvaluationError as error:
        raise RequestError(f"{model.name}: {error}") from error
    return Prediction(
        model=model.name,
        family=model.family.name,
        device=device,
        plan=plan,
        latents=shape,
        sample=sample,
        allocated_peak_bytes=ledger.peak,
        reserved_peak_bytes=caching.reserved_bytes(ledger.events) if device == "cuda" else None,
        reserved_reason=NOT_RESERVED if device != "cuda" else None,
        weights_bytes=weights,
        weights_wait=plan.offload == "disk" or (device == "cuda" and plan.offload not in ("none", "model")),
        pinned_bytes=about["pinned"],
        stages=(*_before(weights, about["fp32"], plan, device), *_stages(ledger)),
        at_peak=_holders(ledger),
        largest=_largest(ledger.largest, math.prod(given) * dtype.itemsize),
    )


def _driven(model: Model, shape: tuple[int, ...], plan: DecodePlan) -> tuple[Model, tuple[int, ...], Any]:
    """The model as it is driven, the shape of what it is given, and what is done with the result: a plan for the
    encoder has it encode a picture."""
    if not encodes(plan):
        return model, shape, lambda sample: image_of(sample, model.data_range)
    geometry = model.geometry
    frames = (geometry.sample_frames(shape[2]),) if geometry.video else ()
    sides = (side * geometry.spatial for side in shape[-2:])
    return view(model), (shape[0], geometry.sample_channels, *frames, *sides), None


def _applied(module: nn.Module, plan: DecodePlan, model: Model, device: str) -> Any:
    return optimizations.apply_plan(module, plan, model=model, device=device)


def _before(weights: int, full: int, plan: DecodePlan, device: str) -> tuple[Stage, ...]:
    """What is needed before the decode. `from_pretrained` builds the module without data and reads the file's tensors,
    which become its weights; in another dtype than the file's, both are there at once. Measured: a test."""
    whole = full if plan.dtype == "fp32" else full + weights
    load = Stage("load", whole, part="from_pretrained of an fp32 file")
    moved = device == "cuda" and plan.offload in ("none", "model")
    return (load, Stage("onload", weights)) if moved else (load,)


def _stages(ledger: Ledger) -> tuple[Stage, ...]:
    """As a measured decode has them (`memory.allocator`)."""
    calls = Counter(span.name for span in ledger.closed)
    peaks: dict[str, int] = {}
    for span in ledger.closed:
        peaks[span.name] = max(peaks.get(span.name, 0), span.peak)
    names = ["decode", "tile", "assemble", "convert"] if calls["tile"] > 1 else ["decode", "tile", "convert"]
    return tuple(Stage(name, peaks[name], calls[name] if name == "tile" else 1) for name in names if name in peaks)  # type: ignore[arg-type]


def _holders(ledger: Ledger) -> tuple[Holding, ...]:
    """The largest of what was alive at the peak, alike ones together."""
    alike: dict[Holding, list[int]] = {}
    several = sum(span.name == "tile" for span in ledger.closed) > 1
    for held in ledger.at_peak:
        kind = _kind(held, several)
        about = Holding(0, kind) if kind == "weights" else Holding(0, kind, *_about(held))  # weights of all modules
        alike.setdefault(about, []).append(held.bytes)
    found = [replace(about, bytes=sum(sizes), count=len(sizes)) for about, sizes in alike.items()]
    return tuple(sorted(found, key=lambda holder: -holder.bytes))[:SHOWN]


def _kind(held: Held, several: bool) -> MemoryKind:
    """What an allocation is for, as far as it is known beforehand: the sample is among activations, or tiles."""
    if held.what == "weights":
        return "weights"
    if not held.shape:
        return "workspace"
    if held.stage == "convert":
        return "copies"
    return "tiles" if several and held.stage == "assemble" and not held.module else "activations"


def _largest(held: Held, latents_bytes: int) -> Largest:
    return Largest(held.bytes, *_about(held), times_latents=held.bytes / latents_bytes)


def _about(held: Held) -> tuple[str, str, tuple[int, ...], str]:
    return held.what, held.module, held.shape, held.dtype
