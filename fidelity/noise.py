"""How far a decode moves when nothing changes but rounding: a second time, other threads, another place in the batch.

Each is a condition under which one plain plan is decoded twice. *Apart* is the largest difference between the two
samples themselves; *moved* is how far each measurement against the golden moves between them, which is what a gate on
that measurement has to forgive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from msgspec import Struct

from fidelity.errors import EvaluationError
from fidelity.lazy import torch
from fidelity.records import DTYPES, DecodePlan, Measurement

if TYPE_CHECKING:
    from torch import Tensor

    from fidelity.runner import Runner

    Measure = Callable[[Tensor, Tensor, DecodePlan], dict[str, Measurement]]

REPEAT, THREADS, POSITION, ALONE, PLAIN = "repeat", "threads", "position", "alone", "plain"
CONDITIONS = (REPEAT, THREADS, POSITION, ALONE, PLAIN)
"""`plain` is not noise: it is what the dtype by itself costs against the golden; in fp32, the reference's own drift."""
PLAIN_PLANS = tuple(DecodePlan(dtype=dtype) for dtype in DTYPES)


class Noise(Struct, frozen=True):
    """One condition of one plain plan on one set of latents."""

    plan: DecodePlan
    condition: str
    rmse: float | None
    """Grey levels between the two samples; None where a value of either is not finite."""
    max_abs: float | None
    moved: dict[str, float]
    """By measurement; without those that were not measured on both sides. Of `plain`: the measurements themselves."""


def measure_noise(
    runner: Runner,
    latents: Tensor,
    golden: Tensor,
    plans: Sequence[DecodePlan],
    conditions: Iterable[str],
    measure: Measure,
) -> Iterator[Noise]:
    """Decode each plan under each condition. `measure(candidate, golden, plan)` is what a case would be measured by.

    Latents and golden (B, C, [T,] H, W) fp32, at least one item; position and alone are of the first item, beside the
    second or, in a batch of one, beside its own mirror image. Raises what a decode raises, the model loaded anew.

    The runner's own net is spread once, after the decodes and under the process's own thread count: its probe has the
    bits of that count, and would take another's for state left behind.
    """
    try:
        yield from _measured(runner, latents, golden, plans, conditions, measure)
    except BaseException:
        runner.reload()
        raise
    leaks = runner.restore()["leaks"]
    if leaks:
        raise EvaluationError(f"a plain decode left something behind, so its noise means nothing: {leaks[0]}")


def _measured(
    runner: Runner,
    latents: Tensor,
    golden: Tensor,
    plans: Sequence[DecodePlan],
    conditions: Iterable[str],
    measure: Measure,
) -> Iterator[Noise]:
    for plan in plans:
        decode = _decoder(runner, plan)
        with threads(1):
            first = decode(latents)
        for condition in conditions:
            if condition == PLAIN:
                found = measure(first, golden, plan)
                moved = {name: one.value for name, one in found.items() if one.value is not None}
                yield Noise(plan, PLAIN, found["rmse"].value, found["max_abs"].value, moved)
                continue
            one, other, against = _sides(condition, decode, first, latents, golden)
            yield _between(plan, condition, one, other, against, measure)


def _sides(
    condition: str, decode: Callable[[Tensor], Tensor], first: Tensor, latents: Tensor, golden: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The two samples that should be the same, and the golden of both."""
    if condition in (REPEAT, THREADS):
        with threads(2 if condition == THREADS else 1):
            return first, decode(latents), golden
    item = latents[:1]
    beside = latents[1:2] if latents.shape[0] > 1 else item.flip(-1)
    with threads(1):
        leading = decode(torch.cat([item, beside]))[:1]
        if condition == ALONE:
            return leading, decode(item), golden[:1]
        return leading, decode(torch.cat([beside, item]))[1:2], golden[:1]


def _between(plan: DecodePlan, condition: str, one: Tensor, other: Tensor, golden: Tensor, measure: Measure) -> Noise:
    apart = measure(other, one, plan)
    pairs = zip(measure(one, golden, plan).items(), measure(other, golden, plan).values())
    moved = {
        name: abs(left.value - right.value)
        for (name, left), right in pairs
        if left.value is not None and right.value is not None
    }
    return Noise(plan, condition, apart["rmse"].value, apart["max_abs"].value, moved)


def _decoder(runner: Runner, plan: DecodePlan) -> Callable[[Tensor], Tensor]:
    def decode(latents: Tensor) -> Tensor:
        with runner.applied(plan) as run:
            return run(latents)[0]

    return decode


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with this many threads, and with as many as before afterwards, whatever happens."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def floors(found: Iterable[Noise]) -> dict[str, dict[str, float]]:
    """The noise floor of each measurement by dtype: the worst condition. What was not measured has none."""
    worst: dict[str, dict[str, float]] = {}
    for noise in found:
        if noise.condition != PLAIN:
            mine = worst.setdefault(noise.plan.dtype, {})
            for name, moved in noise.moved.items():
                mine[name] = max(moved, mine.get(name, 0.0))
    return worst


__all__ = ["CONDITIONS", "PLAIN_PLANS", "Noise", "floors", "measure_noise", "threads"]
