"""What n decodes at once took, held against the rule that lets them in, and how it is said."""

from __future__ import annotations

from statistics import median
from typing import Literal

from msgspec import Struct

from fidelity.admission import Rule, formula
from fidelity.records import DecodePlan
from fidelity.wording import in_units

Way = Literal["threads", "processes"]
MUCH = 1.25
"""From how many times what was allocated on a resident rise needs an explanation."""


class Concurrency(Struct, frozen=True):
    """n decodes at once. A figure that could not be measured is None, or its tuple is empty, and `reason` says why."""

    model: str
    family: str
    device: str
    plan: DecodePlan
    way: Way
    """In threads that share one instance, or in processes that have one each."""
    count: int
    latents: tuple[int, ...]
    """Of each decode."""
    alone_peak_bytes: int | None
    """Allocated by one decode with its conversion, its weights included, the stand-in left out."""
    peaks: tuple[int, ...]
    """Allocated by all together in each round, weights and stand-in included."""
    rule: Rule | None
    """What an admission rule must reserve: n times one, its weights as often as they are held, and the stand-in."""
    coincided: tuple[float, ...]
    """The share of n decodes' own peaks (beside weights and stand-in) that was alive at one instant of each round."""
    unneeded_bytes: int | None
    """What of the rule not even the worst round took."""
    reserved_peak_bytes: int | None
    """What CUDA's allocator kept from others in the worst round; None on a CPU, which reserves nothing."""
    resident_rises: tuple[int, ...]
    """By how much resident memory rose in each round, by the kernel's count; of processes, the sum of theirs."""
    available_bytes: int | None
    """What the device had left before anything of this was loaded."""
    seconds_alone: float
    """Median of single decodes, nothing recorded."""
    seconds_together: tuple[float, ...]
    """Of each round, nothing recorded: from the first start to the last end."""
    throughput: float
    """Decodes a second at once, over those one after another."""
    findings: tuple[str, ...]
    method: str
    reason: str | None = None


def lines(found: Concurrency) -> list[str]:
    """What was measured in words, a line each."""
    shape = "×".join(map(str, found.latents))
    where = "threads on one instance" if found.way == "threads" else "processes, an instance each"
    out = [f"{found.model} · {found.family} · {found.plan.id} · {found.count} at once in {where} · latents {shape} · "
           f"{found.device}"]  # fmt: skip
    if found.rule is None or found.alone_peak_bytes is None:
        out.append(f"memory          not measured: {found.reason}")
    else:
        out += _memory(found, found.rule, found.alone_peak_bytes)
    out += _resident(found)
    ratio = median(found.seconds_together) / found.seconds_alone
    out.append(f"time            {median(found.seconds_together):.3g} s at once, {found.seconds_alone:.3g} s one: "
               f"{ratio:.2f} times as long for {found.count}, throughput {found.throughput:.2f} times")  # fmt: skip
    if not found.findings:
        out.append("bits            each decode gives those that it gives alone")
    return [*out, *(f"finding         {finding}" for finding in found.findings)]


def _memory(found: Concurrency, reserve: Rule, alone: int) -> list[str]:
    worst, spare = max(found.peaks), found.unneeded_bytes or 0
    share = spare / reserve.reserve_bytes
    below = f"{in_units(spare)} ({share:.1%}) of it not needed" if spare >= 0 else f"{in_units(-spare)} above it"
    out = [
        f"alone           {in_units(alone)}  (weights {in_units(reserve.weights_bytes)})",
        f"together        {_spread(found.peaks)}  (allocated: {found.method})",
        f"peaks that met  {min(found.coincided):.0%} to {max(found.coincided):.0%} of {found.count} × one",
        f"rule            {formula(reserve)}",
        f"                measured at most {in_units(worst)}: {below}",
    ]
    if found.reserved_peak_bytes is not None:
        out.append(f"reserved        {in_units(found.reserved_peak_bytes)} in the worst round: what others cannot have")
    if found.available_bytes is None:
        out.append("headroom        unknown: the machine does not say what it has left")
    else:
        left = found.available_bytes - reserve.reserve_bytes
        said = in_units(left) if left >= 0 else f"none: {in_units(-left)} too few"
        out.append(f"headroom        {said} of {in_units(found.available_bytes)} that were free before")
    return out


def _resident(found: Concurrency) -> list[str]:
    """What the kernel counted, and why it is more, where it is."""
    if not found.resident_rises:
        return []
    out = [f"resident rise   {_spread(found.resident_rises)}, by the kernel's count"]
    if found.rule is None:
        return out
    allocated = max(found.peaks) - found.rule.once_bytes
    if max(found.resident_rises) > MUCH * allocated:
        times = max(found.resident_rises) / allocated
        out.append(f"                {times:.1f} times what was allocated: the C library keeps what was freed in "
                   "pieces; MALLOC_MMAP_THRESHOLD_=65536 in the environment makes it give them back")  # fmt: skip
    return out


def _spread(values: tuple[int, ...]) -> str:
    """The least, median and largest, where they differ."""
    low, middle, high = min(values), median(values), max(values)
    if low == high:
        return f"{in_units(high)} in {f'each of {len(values)} rounds' if len(values) > 1 else 'one round'}"
    return f"{in_units(low)} to {in_units(high)}, median {in_units(round(middle))}, in {len(values)} rounds"
