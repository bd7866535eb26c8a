"""What a decode will need, without weights and without a GPU: its peak by stage, and the law by which that grows.

    prediction = predict(model, (1024, 1024), DecodePlan(dtype="fp16"), device="cuda")
    prediction.allocated_peak_bytes

The decode runs on shapes alone (`memory.simulate`), under the project's own optimizations; what kernels allocate for
themselves and when weights are resident is modelled beside it. How near this comes: docs/design/prediction.md.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from fidelity import optimizations
from fidelity.errors import EvaluationError, RequestError
from fidelity.lazy import torch
from fidelity.memory import caching, law
from fidelity.memory.ledger import Holding, Ledger
from fidelity.memory.simulate import simulate
from fidelity.optimizations.weights import kept_in_fp32
from fidelity.prediction import Fits, Holder, Largest, Prediction, findings, in_units
from fidelity.records import DecodePlan, Model, Stage
from fidelity.runner import image_of

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
    with_law: bool = False,
    budget: int | None = None,
) -> Prediction:
    """Predict the memory of a decode to `batch` samples of `size` (height, width) and `frames`, under `plan`; without
    `frames`, of the fewest that the class decodes.

    fp16 is predicted as a device computes it, also where a CPU would emulate it. A `budget` in bytes brings the law.
    Raises RequestError for a size, plan or device that cannot be.
    """
    start = time.perf_counter()
    plan = plan if plan is not None else DecodePlan()
    shape = latents_shape(model, size, frames, batch)
    _refuse(model, plan, shape, device)
    found = of_shape(model, shape, plan, device)
    if plan.tiling is not None or plan.temporal is not None:
        whole = of_shape(model, shape, replace(plan, tiling=None, temporal=None), device).allocated_peak_bytes
        found = replace(found, untiled_peak_bytes=whole)
    if with_law or budget is not None:
        found = replace(found, law=_law(model, plan, shape, found, device))
    if budget is not None:
        found = replace(found, budget=_fits(model, plan, shape, found, device, budget))
    said = (*_unlike(model, size, found), *findings(found))
    return replace(found, findings=said, seconds=time.perf_counter() - start)


def _unlike(model: Model, size: tuple[int, int], found: Prediction) -> tuple[str, ...]:
    """What the class does to the size, where it gives another than it should: no figure of such a decode is of use."""
    height, width = found.sample[-2:]
    if (height, width) == size:
        return ()
    return (f"{model.family.name} gives {height}×{width} under this plan where {size[0]}×{size[1]} was asked: "
            "the picture is wrong, and so is every figure here (docs/upstream.md)",)  # fmt: skip


def latents_shape(model: Model, size: tuple[int, int], frames: int | None, batch: int) -> tuple[int, ...]:
    """Latents (B, C, [T,] H, W) that decode to these samples. Raises RequestError naming the nearest that can be."""
    geometry = model.geometry
    if batch < 1 or (frames is not None and frames < 1) or min(size) < 1:
        given = "" if frames is None else f"{frames} frames, "
        raise RequestError(f"{size[0]}x{size[1]}, {given}batch {batch}: all must be at least 1")
    if any(side % geometry.spatial for side in size):
        near = "x".join(str(max(1, round(side / geometry.spatial)) * geometry.spatial) for side in size)
        raise RequestError(f"size {size[0]}x{size[1]}: {model.name} decodes multiples of {geometry.spatial} pixels; "
                           f"nearest: {near}")  # fmt: skip
    space = (size[0] // geometry.spatial, size[1] // geometry.spatial)
    if not geometry.video:
        if frames not in (None, 1):
            raise RequestError(f"{frames} frames: {model.name} is an image autoencoder: leave --frames out")
        return (batch, geometry.latent_channels, *space)
    # most classes decode a picture as one latent frame; where two are too few, one is as well
    least = model.family.least_frames if model.family.least_frames > 2 else 1
    if frames is None:
        return (batch, geometry.latent_channels, least, *space)
    lengths = range(least, max(least, frames // geometry.temporal) + 3)
    long = min(lengths, key=lambda n: abs(geometry.sample_frames(n) - frames))
    if geometry.sample_frames(long) != frames:
        few = ", ".join(str(geometry.sample_frames(least + n)) for n in range(3))
        raise RequestError(f"{frames} frames: {model.name} decodes {few} … frames; "
                           f"nearest: {geometry.sample_frames(long)}")  # fmt: skip
    return (batch, geometry.latent_channels, long, *space)


def _refuse(model: Model, plan: DecodePlan, shape: tuple[int, ...], device: str) -> None:
    if device not in DEVICES:
        raise RequestError(f"device {device!r}: a prediction is for {' or '.join(DEVICES)}")
    if plan.tiling is not None and not model.family.hides_tiles:
        model.family.tile_grid(model.geometry, (shape[-2], shape[-1]), plan.tiling)
    reason = optimizations.inapplicable(plan, model, shape)
    if reason is not None:
        raise RequestError(f"{model.name}: {reason}: leave it out")


# ---------------------------------------------------------------- one prediction


def of_shape(model: Model, shape: tuple[int, ...], plan: DecodePlan, device: str) -> Prediction:
    """Predict one decode of latents (B, C, [T,] H, W), and nothing around it. Raises RequestError."""
    half = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = torch.float32 if plan.force_upcast else half[plan.dtype]
    # precision and offload write through `.data` and move weights: the walk gives weights their dtype and residency
    rest = replace(plan, dtype="fp32", force_upcast=False, offload="none")
    try:
        ledger, sample, weights = simulate(
            lambda: model.family.build(model.config),
            model.family.decode,
            shape,
            dtype=dtype,
            device=device,
            keep_fp32=kept_in_fp32,
            offload=plan.offload,
            decoder=model.family.decoder,
            applied=lambda module: _applied(module, rest, model, device),
            convert=lambda sample: image_of(sample, model.data_range),
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
        stages=_stages(ledger),
        at_peak=_holders(ledger.at_peak),
        largest=_largest(ledger.largest, math.prod(shape) * dtype.itemsize),
    )


def _applied(module: nn.Module, plan: DecodePlan, model: Model, device: str) -> Any:
    return optimizations.apply_plan(module, plan, model=model, device=device)


def _stages(ledger: Ledger) -> tuple[Stage, ...]:
    """As a measured decode has them (`memory.allocator`)."""
    calls = Counter(span.name for span in ledger.closed)
    peaks: dict[str, int] = {}
    for span in ledger.closed:
        peaks[span.name] = max(peaks.get(span.name, 0), span.peak)
    names = ["decode", "tile", "assemble", "convert"] if calls["tile"] > 1 else ["decode", "tile", "convert"]
    return tuple(Stage(name, peaks[name], calls[name] if name == "tile" else 1) for name in names if name in peaks)  # type: ignore[arg-type]


def _holders(held: tuple[Holding, ...]) -> tuple[Holder, ...]:
    """The largest of what was alive, alike ones together."""
    alike: dict[Holder, list[int]] = {}
    for holding in held:
        weights = holding.what == "weights"  # of all modules together
        about = Holder(0, "weights") if weights else Holder(0, *_about(holding))
        alike.setdefault(about, []).append(holding.bytes)
    found = [replace(about, bytes=sum(sizes), count=len(sizes)) for about, sizes in alike.items()]
    return tuple(sorted(found, key=lambda holder: -holder.bytes))[:SHOWN]


def _largest(holding: Holding, latents_bytes: int) -> Largest:
    return Largest(holding.bytes, *_about(holding), times_latents=holding.bytes / latents_bytes)


def _about(holding: Holding) -> tuple[str, str, tuple[int, ...], str]:
    return holding.what, holding.module, holding.shape, holding.dtype


# ---------------------------------------------------------------- over sizes


def _law(model: Model, plan: DecodePlan, shape: tuple[int, ...], found: Prediction, device: str) -> law.Law:
    """Fitted to this prediction and to two pictures of half and two thirds of its sides, which hold a tile at least."""
    peaks = {_pixels(model, shape): found.allocated_peak_bytes}
    least = plan.tiling.tile + 1 if plan.tiling is not None else 1
    for share in (1 / 2, 2 / 3, 2, 3):
        sides = tuple(max(least, round(side * share)) for side in shape[-2:])
        other = (*shape[:-2], *sides)
        if len(peaks) < 3 and _pixels(model, other) not in peaks:
            peaks[_pixels(model, other)] = of_shape(model, other, plan, device).allocated_peak_bytes
    return law.fit(peaks)


def _fits(model: Model, plan: DecodePlan, shape: tuple[int, ...], found: Prediction, device: str, budget: int) -> Fits:
    """The largest picture of this shape's proportions whose predicted peak is within the budget: from the law, and then
    checked by a prediction of its own."""
    fits = found.allocated_peak_bytes <= budget
    assert found.law is not None
    height, width = shape[-2:]
    scale = math.sqrt(found.law.pixels(budget) / (height * width * model.geometry.spatial**2))
    least = plan.tiling.tile + 1 if plan.tiling is not None else 1
    for rows in _downwards(int(height * scale)):
        sides = (rows, round(width * rows / height))
        if min(sides) < 1 or max(sides) < least:
            break
        other = (*shape[:-2], *sides)
        peak = of_shape(model, other, plan, device).allocated_peak_bytes
        if peak <= budget:
            return Fits(budget, fits, *_pixels(model, other), peak)
    return Fits(budget, fits, None, None, None, f"not even the smallest picture: {in_units(found.law.constant_bytes)} "
                                                "do not depend on its size")  # fmt: skip


def _downwards(first: int) -> list[int]:
    """A few sizes below the first, in steps that grow: the law is near, but no bound."""
    return [first - step for step in (0, 1, 2, 4, 8, 16, 32) if first - step > 0]


def _pixels(model: Model, shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[-2] * model.geometry.spatial, shape[-1] * model.geometry.spatial
