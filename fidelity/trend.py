"""The trend of a run's measurements over the runs before it, and the drift in it that no limit sees.

A limit sees one run. Ten runs that each lose a hundredth of a grey level, or one that loses half of what its limit
allows, pass; the *drift* of a series of runs shows them. Pure arithmetic, no tensors, no database.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Literal, NamedTuple

from msgspec import Struct

FEWEST = 3
"""Runs below which nothing is called a drift."""
CONCORDANCE = 0.6
"""Kendall's τ of values against time from which a series counts as going one way."""
GREY = "grey levels"
SAME_DRIFT = 1e-3
"""Grey levels: what a repeated decode may differ by in one environment class, as in `references.DRIFT_LIMIT_SAME`."""
SAME_SHARE = 1e-3
"""The same for measurements of other units, as a share of what they were."""
SAME_LEAST = 1e-6
"""Below this, in any unit, a change is none."""


class TrendRun(Struct, frozen=True):
    """One run of a history."""

    recorded: str
    suite: str
    commit: str | None
    environment: str
    """Its environment class."""
    versions: dict[str, str]
    exit_status: int


class Series(Struct, frozen=True):
    """One measurement of one case over the runs of a trend, oldest first; None where it was not measured."""

    case: str
    name: str
    unit: str
    better: Literal["lower", "higher"]
    values: tuple[float | None, ...]
    floor: float | None = None
    """Its noise floor in the newest run, None where none is known."""
    limit: float | None = None

    @property
    def known(self) -> int:
        """Runs in which it was measured."""
        return sum(value is not None for value in self.values)

    @property
    def within(self) -> bool:
        """Whether the newest value is within its limit; without a limit or a value, nothing says that it is not."""
        newest = self.values[-1] if self.values else None
        if self.limit is None or newest is None:
            return True
        return newest <= self.limit if self.better == "lower" else newest >= self.limit


class Drift(Struct, frozen=True):
    """A series that got worse by more than its noise floor while every run stayed within its limit."""

    case: str
    name: str
    unit: str
    kind: Literal["step", "creep"]
    before: float
    after: float
    floor: float
    runs: int
    """Comparable runs that were looked at, the newest included."""
    since: int
    """Place in the trend of the first run of the new level, of a creep the run after the oldest."""
    limit: float | None = None

    @property
    def rise(self) -> float:
        return abs(self.after - self.before)


class Trend(Struct, frozen=True):
    """The last runs of a history, the newest of them the run that carries this; bounded in size."""

    runs: tuple[TrendRun, ...]
    series: tuple[Series, ...] = ()
    drifts: tuple[Drift, ...] = ()
    left_out: int = 0
    """Series that were left out to bound the size; every one of them is in the database."""
    untested: int = 0
    """Series of too few comparable runs for a drift to be told."""
    drifting: int = 0
    """Series that drift, of which `drifts` holds the worst."""


def least(unit: str, level: float) -> float:
    """The smallest change of a measurement at this level that is one: what a repeated decode may differ by."""
    return max(SAME_DRIFT if unit == GREY else SAME_SHARE * abs(level), SAME_LEAST)


def drift(series: Series) -> Drift | None:
    """What the series shows: None where it shows no drift, or the newest run left its limit, which its gate says.

    A *step*: all values from some run on are worse than all before it by more than the noise floor. A *creep*: no
    single step is half of it, yet values go one way (Kendall's τ ≥ 0.6) and the median of the newest third is worse
    than that of the oldest third by more than the floor. The floor is what rounding alone was seen to do, so a repeat
    of the same decode shows neither; it is never taken below `least`. A value that is None (not measured, or of a run
    that cannot be compared with the newest) counts for nothing. Source of τ: Kendall 1938; as a test of trend, Mann
    1945.
    """
    sign = 1.0 if series.better == "lower" else -1.0
    known = [(place, sign * value) for place, value in enumerate(series.values) if value is not None]
    if len(known) < FEWEST or known[-1][0] != len(series.values) - 1 or not series.within:
        return None
    values = [value for _, value in known]
    floor = max(series.floor or 0.0, least(series.unit, values[0]))
    if max(values) - min(values) <= floor:
        return None  # nothing moved beyond rounding, as in nearly every series
    step, creep = _step(values, floor), _creep(values, floor)
    found = creep if step is None or (creep is not None and step.gap < (creep.after - creep.before) / 2) else step
    if found is None:
        return None
    return Drift(
        case=series.case,
        name=series.name,
        unit=series.unit,
        kind=found.kind,
        before=sign * found.before,
        after=sign * found.after,
        floor=floor,
        runs=len(values),
        since=known[found.start][0],
        limit=series.limit,
    )


class Found(NamedTuple):
    """A drift within plain values, worse upwards."""

    kind: Literal["step", "creep"]
    start: int
    before: float
    after: float
    gap: float


def _step(values: Sequence[float], floor: float) -> Found | None:
    """The widest gap between all earlier and all later values."""
    gaps = [(min(values[at:]) - max(values[:at]), at) for at in range(1, len(values))]
    gap, at = max(gaps, key=lambda each: each[0])
    return Found("step", at, median(values[:at]), median(values[at:]), gap) if gap > floor else None


def _creep(values: Sequence[float], floor: float) -> Found | None:
    third = max(1, len(values) // 3)
    before, after = median(values[:third]), median(values[-third:])
    one_way = after - before > floor and _tau(values) >= CONCORDANCE
    return Found("creep", 1, before, after, 0.0) if one_way else None


def _tau(values: Sequence[float]) -> float:
    """Kendall's τ-a of values against their order: 1 rising throughout, −1 falling, 0 neither."""
    pairs = [(b > a) - (b < a) for place, a in enumerate(values) for b in values[place + 1 :]]
    return sum(pairs) / len(pairs)


__all__ = ["SAME_DRIFT", "SAME_LEAST", "SAME_SHARE", "Drift", "Series", "Trend", "TrendRun", "drift", "least"]
