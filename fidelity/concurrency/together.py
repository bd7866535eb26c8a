"""n decodes at once, measured together and held against n times one, and against what an admission rule reserves.

    found = measure(model, latents, DecodePlan(), count=4)
    found.peaks, found.rule.reserve_bytes, found.findings

Peaks together depend on timing: several rounds are measured. That each decode gives the bits that it gives alone is
measured with them, as state that a class keeps on the instance makes decodes that share it spoil one another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from fidelity import admission, capacity, optimizations
from fidelity.admission import Rule
from fidelity.concurrency import serving
from fidelity.concurrency.bench import AT_ONCE, Alone, Bench
from fidelity.concurrency.record import Concurrency, Way
from fidelity.concurrency.serving import Processes, Served
from fidelity.errors import RequestError
from fidelity.latents import unscale
from fidelity.lazy import torch
from fidelity.memory import cuda, threads
from fidelity.memory.available import available_bytes
from fidelity.memory.resident import resident_peak
from fidelity.optimizations.precision import compute_dtype, is_emulated
from fidelity.records import DecodePlan, Model
from fidelity.wording import in_units

if TYPE_CHECKING:
    from torch import Tensor

ROUNDS = 5
SIDE = 32
"""Latent pixels, where nobody says a size."""
CPU_METHOD = "the allocator's events of all threads, in the order of one clock"
PROCESSES_METHOD = "the allocator's events of all processes, in the order of one clock"
CUDA_METHOD = "torch.cuda peak counters, which are one for the process"
CUDA_PROCESSES = "each CUDA process counts for itself alone, so that their peaks have no common clock: measure threads"


def measure(
    model: Model,
    latents: Tensor | None = None,
    plan: DecodePlan | None = None,
    *,
    count: int = 4,
    resident: int = 0,
    rounds: int = ROUNDS,
    way: Way = "threads",
    device: str = "cpu",
    plugins: Sequence[str] = (),
) -> Concurrency:
    """Decode `count` latents like these (B, C, [T,] H, W; without them seeded ones of 32×32) under `plan`, alone and at
    once, beside `resident` bytes that are allocated and written.

    Operators should have one thread each (`environment.make_deterministic`): what helper threads allocate is not seen.
    Raises RequestError for what cannot be, EvaluationError where a decode fails alone.
    """
    plan = plan if plan is not None else DecodePlan()
    base = latents if latents is not None else seeded(model)
    available = available_bytes(device)
    _refuse(model, plan, tuple(base.shape), device, way, count, resident, rounds, available)
    copies = count if way == "processes" else 1
    if available is not None:  # even one decode alone may be more than there is
        capacity.refuse_beyond(capacity.expected(model, tuple(base.shape), plan, device, count=count, resident=resident,
                                                 copies=copies), available, device)  # fmt: skip
    bench = Bench(model, plan, device, _distinct(base, count, plan, device))
    with _standing_in(resident, device) as held, bench.ready():
        alone = bench.alone()
        reserve = _rule(bench, alone, held, copies)
        capacity.refuse_beyond(reserve, available, device)
        measured = Measured()
        with closing(Processes(model, plan, device, count, plugins)) if way == "processes" else nullcontext() as pool:
            for _ in range(rounds):
                _round(bench, measured, held, pool)
        bench.compare([bench.serve(bench.latents[0])], "alone, after those at once,")
        written = bench.written() if bench.spoiled else ""
    return _concluded(bench, alone, reserve, measured, way, available, written)


def seeded(model: Model, shape: tuple[int, ...] | None = None) -> Tensor:
    """Latents in the decoder's units, drawn from seed 0: of `shape`, or of 32×32 and the fewest frames."""
    frames = (model.family.least_frames,) if model.geometry.video else ()
    shape = shape or (1, model.geometry.latent_channels, *frames, *(model.geometry.size or (SIDE, SIDE)))
    size, free = 4 * math.prod(shape), available_bytes("cpu")
    if free is not None and size > free:
        raise RequestError(f"latents {'×'.join(map(str, shape))} take {in_units(size)} and there are {in_units(free)}")
    return unscale(torch.randn(shape, generator=torch.Generator().manual_seed(0)), model.scaling)


def _refuse(model: Model, plan: DecodePlan, shape: tuple[int, ...], device: str, way: Way, count: int, resident: int,
            rounds: int, available: int | None) -> None:  # fmt: skip
    for value, what in ((count, "decodes at once"), (rounds, "rounds")):
        if value < 1:
            raise RequestError(f"{value} {what}: at least 1")
    if count > shape[-1]:
        raise RequestError(f"{count} decodes at once: each gets latents of its own, these moved sideways, and "
                           f"{shape[-1]} latent pixels allow {shape[-1]}: choose fewer, or a wider size")  # fmt: skip
    if is_emulated(plan, device):
        raise RequestError(f"{plan.id}: fp16 is emulated on a CPU, where it has neither memory nor time of its own: "
                           "choose bf16, or a GPU")  # fmt: skip
    reason = optimizations.inapplicable(plan, model, shape)
    if reason is not None:
        raise RequestError(f"{model.name}: {reason}: leave it out")
    if available is not None and resident >= available:
        raise RequestError(
            f"{in_units(resident)} beside the decodes: {device} has {in_units(available)} left; say less"
        )
    if way == "processes":
        serving.check_portable(model)


def _distinct(base: Tensor, count: int, plan: DecodePlan, device: str) -> list[Tensor]:
    """Latents of each decode's own, as the plan takes them: a result that another's data reached must show."""
    return [torch.roll(base, step, -1).to(device, compute_dtype(plan)) for step in range(count)]


@contextmanager
def _standing_in(size: int, device: str) -> Iterator[int]:
    """A buffer of `size` bytes, each of them written; yields what the allocator gave for it."""
    if not size:
        yield 0
        return
    on_cuda = torch.device(device).type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_cuda else 0
    with threads.record() as changes:
        buffer = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    given = torch.cuda.memory_allocated(device) - before if on_cuda else threads.peak([changes])
    yield given or buffer.untyped_storage().nbytes()
    del buffer


def _rule(bench: Bench, alone: Alone, held: int, copies: int) -> Rule | None:
    """What to reserve for all of the latents at once, from each alone; None where that was not measured."""
    if not alone.decode:
        return None
    count = len(bench.latents)
    return admission.rule(count=count, weights=bench.weights, decode_peak=max(alone.decode),
                          convert_peak=max(alone.convert), resident=held, copies=copies)  # fmt: skip


# ---------------------------------------------------------------- at once


@dataclass
class Measured:
    """One figure a round."""

    peaks: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    rises: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def _round(bench: Bench, measured: Measured, held: int, pool: Processes | None) -> None:
    """All latents at once, twice: recorded, and timed."""
    if pool is not None:
        served, timed = (pool.serve(bench.latents, recorded=recorded) for recorded in (True, False))
        rises = [one.rise_bytes for one in served]
        measured.rises += [sum(rise for rise in rises if rise is not None)] if None not in rises else []
        copies = bench.weights * len(bench.latents)
    else:
        copies, (served, timed) = bench.weights, _in_threads(bench, measured, held)
    if not bench.on_cuda and all(one.changes.reason is None for one in served):
        measured.peaks.append(copies + held + threads.peak(one.changes for one in served))
    measured.seconds.append(serving.wall(timed))
    bench.compare([*served], AT_ONCE)
    bench.compare([*timed], AT_ONCE)


def _in_threads(bench: Bench, measured: Measured, held: int) -> tuple[list[Served], list[Served]]:
    if bench.on_cuda:
        meter = cuda.Meter(bench.device)
        meter.start(bench.weights + held)
        with meter.stage("together"):
            served = serving.in_threads(bench.serve, bench.latents)
        measured.peaks.append(max(meter.allocated["together"]))
        measured.reserved.append(meter.reserved)
    else:
        with resident_peak(bench.device) as risen:
            served = serving.in_threads(partial(bench.serve, recorded=True), bench.latents)
        measured.rises += [risen.rise_bytes] if risen.rise_bytes is not None else []
    return served, serving.in_threads(bench.serve, bench.latents)


def _concluded(bench: Bench, alone: Alone, reserve: Rule | None, measured: Measured, way: Way, available: int | None,
               written: str) -> Concurrency:  # fmt: skip
    count = len(bench.latents)
    peak = unneeded = None
    coincided: tuple[float, ...] = ()
    if not measured.peaks:
        reserve = None
    if reserve is not None:
        beside = reserve.each_bytes
        peak, unneeded = bench.weights + beside, reserve.reserve_bytes - max(measured.peaks)
        coincided = tuple((together - reserve.once_bytes) / (count * beside) for together in measured.peaks)
    seconds = median(alone.seconds)
    on_cpu = PROCESSES_METHOD if way == "processes" else CPU_METHOD
    return Concurrency(
        model=bench.model.name,
        family=bench.model.family.name,
        device=bench.device,
        plan=bench.plan,
        way=way,
        count=count,
        latents=tuple(bench.latents[0].shape),
        alone_peak_bytes=peak,
        peaks=tuple(measured.peaks),
        rule=reserve,
        coincided=coincided,
        unneeded_bytes=unneeded,
        reserved_peak_bytes=max(measured.reserved, default=None),
        resident_rises=tuple(measured.rises),
        available_bytes=available,
        seconds_alone=seconds,
        seconds_together=tuple(measured.seconds),
        throughput=count * seconds / median(measured.seconds),
        findings=_findings(bench, way, unneeded, written),
        method=CUDA_METHOD if bench.on_cuda else on_cpu,
        reason=None if reserve is not None else alone.reason or CUDA_PROCESSES,
    )


def _findings(bench: Bench, way: Way, unneeded: int | None, written: str) -> tuple[str, ...]:
    out = [f"{name} is not in force: {reason}" for name, reason in bench.not_engaged.items()]
    for when, all_ in bench.compared.items():
        raised = [off for off in all_ if isinstance(off, str)]
        off_by = [off for off in all_ if isinstance(off, float)]
        if off_by:
            largest = f"by up to {max(off_by):.3g}" if math.isfinite(max(off_by)) else "not finite, or of another shape"
            out.append(f"{len(off_by)} of {len(all_)} decodes {when} give other values than alone: {largest}")
        if raised:
            out.append(f"{len(raised)} of {len(all_)} decodes {when} raise what they do not alone: {raised[0]}")
    if bench.spoiled and way == "threads":
        about, who = f": each decode writes {written} of it" if written else "", bench.model.family.name
        if bench.plan.offload not in ("none", "model"):
            about, who = (
                ": a decode sends away the weights that another is using",
                f"{who} under offload {bench.plan.offload}",
            )
        out.append(f"{who} cannot share one instance between threads{about}; give each thread an "
                   "instance of its own, or let one decode in at a time")  # fmt: skip
    if unneeded is not None and unneeded < 0:
        out.append(f"the rule does not hold: {in_units(-unneeded)} more than it reserves were alive at once")
    return tuple(out)
