"""The roofline of a decode: what memory and arithmetic allow each part at best, and what it reached.

    ceiling(2.0, bandwidth=100, compute=1000)  # 200.0 GFLOP/s: memory binds

It explains time: which parts wait for memory and which for arithmetic. It says nothing of how much memory a decode
needs; `fidelity predict` does. The model is that of Williams, Waterman and Patterson (CACM 52:4, 2009).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from fidelity import capacity, optimizations
from fidelity.errors import RequestError
from fidelity.lazy import torch
from fidelity.memory.available import available_bytes
from fidelity.optimizations.precision import compute_dtype, is_emulated
from fidelity.records import DecodePlan, Model
from fidelity.roofline import machine, work

if TYPE_CHECKING:
    from torch import Tensor

LEAST_RATE, MOST_RATE = 1e-6, 1e12
Side = Literal["bandwidth", "compute"]
EMULATED = "fp16 is emulated on a CPU, so that its time says nothing: counted on shapes alone"
WEIGHTLESS = "a configuration without weights: counted on shapes alone, nothing was run"
"""Why nothing was reached."""


def ceiling(intensity: float, bandwidth: float, compute: float) -> float:
    """The most GFLOP/s at `intensity` (FLOP per byte, 0 or more) under `bandwidth` (GB/s) and `compute` (GFLOP/s).

    Raises RequestError for a value that is no finite number above 0 (of `intensity`, 0 or above).
    """
    rate(bandwidth, "bandwidth", "GB/s")
    rate(compute, "compute", "GFLOP/s")
    if not _is_number(intensity) or intensity < 0:
        raise RequestError(f"intensity {intensity!r}: a finite number of FLOP per byte, 0 or above")
    return min(compute, intensity * bandwidth)


def rate(value: float, what: str, unit: str) -> float:
    """The value, if it is a finite number above 0 that a machine may have. Raises RequestError."""
    if not _is_number(value) or value <= 0:
        raise RequestError(f"{what} {value!r}: write a finite number of {unit} above 0")
    if not LEAST_RATE <= value <= MOST_RATE:
        raise RequestError(f"{what} {value!r} {unit}: no machine has that: from {LEAST_RATE:g} to {MOST_RATE:g}")
    return float(value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class Roof(Struct, frozen=True):
    """One side of the roof: GB/s or GFLOP/s (10⁹), and where that comes from."""

    value: float
    origin: str


class Part(Struct, frozen=True):
    """A part of the decode under the roof. What was not run has no `seconds`, and no figure that needs them."""

    name: str
    flops: int
    bytes: int
    intensity: float | None
    """FLOP per byte; None where no bytes move."""
    ceiling: float | None
    """GFLOP/s."""
    bound: Side | None
    least_seconds: float
    """What its operators need at best, one after another: of each its FLOPs over compute or its bytes over bandwidth,
    whichever is longer. A part of convolutions that arithmetic binds and norms that memory binds cannot reach the
    ceiling of their sum."""
    waiting_seconds: float
    """Those of them that belong to operators that memory binds."""
    seconds: float | None = None
    achieved: float | None = None
    """GFLOP/s."""
    moved: float | None = None
    """GB/s."""
    share: float | None = None
    """Of the ceiling that was achieved; None without FLOPs."""
    share_by_operator: float | None = None
    """The least seconds over those taken."""


class Roofline(Struct, frozen=True):
    """A decode under the roof of one machine: by part of the decoder, and the whole."""

    model: str
    family: str
    device: str
    plan: DecodePlan
    latents: tuple[int, ...]
    bandwidth: Roof
    compute: Roof
    parts: tuple[Part, ...]
    whole: Part
    reason: str | None = None
    """Why nothing was reached."""

    @property
    def ridge(self) -> float:
        """FLOP per byte from which on arithmetic binds."""
        return self.compute.value / self.bandwidth.value


def measure(
    model: Model,
    latents: Tensor,
    plan: DecodePlan | None = None,
    *,
    bandwidth: float | None = None,
    compute: float | None = None,
    device: str = "cpu",
    weights: bool = True,
) -> Roofline:
    """Count the work of decoding these latents (B, C, [T,] H, W) under `plan`, and time it.

    `bandwidth` (GB/s) and `compute` (GFLOP/s) are declared; without them they are measured here. Without `weights` the
    decode is counted on shapes alone. Raises RequestError.
    """
    plan = plan if plan is not None else DecodePlan()
    dtype = compute_dtype(plan)
    reason = optimizations.inapplicable(plan, model, tuple(latents.shape))
    if reason is not None:
        raise RequestError(f"{model.name}: {reason}: leave it out")
    if plan.tiling is not None and not model.family.hides_tiles:
        model.family.tile_grid(model.geometry, (latents.shape[-2], latents.shape[-1]), plan.tiling)  # refuses bad tiles
    emulated = is_emulated(plan, device)
    if emulated and compute is None:
        raise RequestError("--dtype fp16: a CPU emulates it and has no rate of its own in it: declare --compute")
    why = EMULATED if emulated else None if weights else WEIGHTLESS
    if why is None:
        reserve = capacity.expected(model, tuple(latents.shape), plan, device)
        capacity.refuse_beyond(reserve, available_bytes(device), device)
    roofs = _roofs(bandwidth, compute, device, dtype)
    operators, seconds = _worked(model, latents, plan, dtype, device, shapes_alone=why is not None)
    flow, rate_ = (roof.value for roof in roofs)
    found = [part(name, operators.get(name, ()), flow, rate_, seconds.get(name)) for name in {**seconds, **operators}]
    everything = tuple(each for of_part in operators.values() for each in of_part)
    whole = part("whole decode", everything, flow, rate_, sum(seconds.values()) if seconds else None)
    return Roofline(model.name, model.family.name, device, plan, tuple(latents.shape), *roofs, tuple(found), whole, why)


def _roofs(bandwidth: float | None, compute: float | None, device: str, dtype: torch.dtype) -> tuple[Roof, Roof]:
    for value, what, unit in ((bandwidth, "bandwidth", "GB/s"), (compute, "compute", "GFLOP/s")):
        if value is not None:
            rate(value, what, unit)
    flow = Roof(*machine.bandwidth(device)) if bandwidth is None else Roof(float(bandwidth), "declared")
    return flow, Roof(*machine.compute(device, dtype)) if compute is None else Roof(float(compute), "declared")


def _worked(model: Model, latents: Tensor, plan: DecodePlan, dtype: torch.dtype, device: str, *,
            shapes_alone: bool) -> tuple[dict[str, work.Operators], dict[str, float]]:  # fmt: skip
    if shapes_alone:
        rest = DecodePlan(slicing=plan.slicing, tiling=plan.tiling, temporal=plan.temporal, options=plan.options)
        return work.on_shapes(model, tuple(latents.shape), rest, dtype), {}
    module, fed = model.load().to(device), latents.to(device, dtype)
    with torch.no_grad(), optimizations.apply_plan(module, plan, model=model, device=device):
        return work.counted(model, module, fed), work.timed(model, module, fed)


def part(name: str, operators: work.Operators, bandwidth: float, compute: float, seconds: float | None = None) -> Part:
    """One part under the roof; without `seconds` what it may reach, not what it did."""
    flops, moved = (sum(each[i] for each in operators) for i in (0, 1))
    least = sum(max(done / compute, size / bandwidth) for done, size in operators) / 1e9
    waiting = sum(size / bandwidth for done, size in operators if done / compute < size / bandwidth) / 1e9
    intensity = flops / moved if moved else None
    most = ceiling(intensity, bandwidth, compute) if intensity is not None else None
    achieved = flops / seconds / 1e9 if seconds else None
    return Part(
        name=name,
        flops=flops,
        bytes=moved,
        intensity=intensity,
        ceiling=most,
        bound=None if intensity is None else "bandwidth" if intensity * bandwidth < compute else "compute",
        least_seconds=least,
        waiting_seconds=waiting,
        seconds=seconds,
        achieved=achieved,
        moved=moved / seconds / 1e9 if seconds else None,
        share=achieved / most if achieved is not None and most else None,
        share_by_operator=least / seconds if seconds else None,
    )


# ---------------------------------------------------------------- in words


ALLOWED = ("part", "GFLOP", "MB", "FLOP/B", "ceiling GFLOP/s", "binds", "at least ms", "of it memory")
REACHED = ("ms", "GFLOP/s", "GB/s", "of the ceiling", "by operator")


def lines(found: Roofline) -> list[str]:
    """The roofline in words, a line each."""
    shape = "×".join(map(str, found.latents))
    out = [
        f"{found.model} · {found.family} · {found.plan.id} · latents {shape} · {found.device}",
        f"bandwidth  {found.bandwidth.value:.4g} GB/s, {found.bandwidth.origin}",
        f"compute    {found.compute.value:.4g} GFLOP/s, {found.compute.origin}",
        f"the two meet at {found.ridge:.3g} FLOP per byte: below, memory binds; from there on, arithmetic",
    ]
    head = ALLOWED + REACHED if found.reason is None else ALLOWED
    rows = [head, *(_row(one)[: len(head)] for one in (*found.parts, found.whole))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    out += ["  ".join(cell.ljust(width) if column == 0 else cell.rjust(width)
                      for column, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in rows]  # fmt: skip
    if found.reason is not None:
        out.append(f"not run: {found.reason}")
    return [*out, *SAID]


SAID = (
    "FLOPs are of convolutions, products and attention, by torch's counter; bytes of each operator's tensors, read and",
    "written once: caches between operators make it less (then above 100 %), what kernels copy makes it more.",
    "At least, and by operator: each operator under its own ceiling, one after another; of it memory: where it binds.",
    "This explains time. It says nothing of how much memory a decode needs: `fidelity predict` does.",
)


def _row(one: Part) -> tuple[str, ...]:
    def number(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    ms = None if one.seconds is None else 1e3 * one.seconds
    waits = one.waiting_seconds / one.least_seconds if one.least_seconds else None
    allowed = (one.name, f"{one.flops / 1e9:,.3f}", f"{one.bytes / 1e6:,.1f}", number(one.intensity, ".2f"),
               number(one.ceiling, ",.1f"), one.bound or "–", f"{1e3 * one.least_seconds:,.2f}",
               number(waits, ".0%"))  # fmt: skip
    reached = (number(ms, ",.2f"), number(one.achieved, ",.1f"), number(one.moved, ",.1f"),
               number(one.share, ".0%"), number(one.share_by_operator, ".0%"))  # fmt: skip
    return allowed + reached
