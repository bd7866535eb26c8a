"""What two runs say of each other: records, without the deciding (`compare`) and the rendering (`report`)."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from fidelity.records import Better, DecodePlan, VerdictName

Outcome = Literal["regressed", "worse", "same", "better", "appeared", "vanished", "not_comparable", "unjudged"]
OUTCOMES: tuple[Outcome, ...] = (
    "regressed", "vanished", "not_comparable", "worse", "better", "appeared", "same", "unjudged",
)  # fmt: skip
"""Worst first. `worse` is within what may rise, or not gated; `unjudged` was judged on neither side."""
TITLES: dict[Outcome, str] = {
    "regressed": "regressed",
    "vanished": "vanished",
    "not_comparable": "not comparable",
    "worse": "worse, no regression",
    "better": "better",
    "appeared": "appeared",
    "same": "the same",
    "unjudged": "judged on neither side",
}


class Rise(Struct, frozen=True):
    """How much worse something may get: an amount in its own unit, or a share of what it was."""

    amount: float
    relative: bool = False

    def of(self, base: float) -> float:
        return self.amount * abs(base) if self.relative else self.amount

    def __str__(self) -> str:
        return f"{self.amount * 100:g} %" if self.relative else f"{self.amount:g}"


class Rises(Struct, frozen=True):
    """What may rise from one run to the other before it counts as a regression.

    `measurements` replaces, by name, what is allowed by default: the case's noise floor, but at least what a repeated
    decode is allowed to differ by; between environment classes the stated drift limit on `rmse`, and nothing else.
    """

    measurements: dict[str, Rise] = {}
    memory: Rise | None = Rise(0.05, relative=True)
    """Of the allocated peak of each case; None: not gated."""
    memory_across: bool = False
    """Whether peaks are gated between environment classes too, where another machine's kernels need other workspaces (a
    bf16 decode 2.4 times as much without bf16 instructions)."""
    time: Rise | None = None
    """Of the decode seconds over all cases; None: shown, not gated."""
    allow: tuple[Literal["vanished", "goldens", "partial"], ...] = ()
    """`vanished`: a case that was judged may be absent. `partial`: BASE may be a partial run. `goldens`: a case may
    lean on another golden; its measurements are compared if the latents and weights are the same ones, else not."""


class Change(Struct, frozen=True):
    """One figure in both runs."""

    name: str
    unit: str
    better: Better
    base: float | None
    head: float | None
    rise: float | None = None
    """By how much it got worse, in `unit`, negative where it got better; None where a side has no number."""
    allowed: float | None = None
    """What it may rise by; None where it is not gated."""
    outcome: Literal["regressed", "worse", "same", "better"] = "same"
    reason: str | None = None


class CaseChange(Struct, frozen=True):
    """One case in both runs; a side that is None has no such case."""

    id: str
    outcome: Outcome
    base: VerdictName | None
    head: VerdictName | None
    model: str
    latents: str
    plan: DecodePlan
    check: str | None = None
    reasons: tuple[str, ...] = ()
    """Why it regressed, vanished or cannot be compared, one line each."""
    changes: tuple[Change, ...] = ()
    """Every measurement that both runs know of, and the allocated peak as `allocated_peak_bytes`."""
    seconds: float | None = None
    """Decode seconds as a ratio, head ÷ base; None where either has none of its own."""
    images: tuple[str, ...] = ()

    def change(self, name: str) -> Change | None:
        return next((each for each in self.changes if each.name == name), None)


class AxisChange(Struct, frozen=True):
    """All cases that share one value of one axis."""

    axis: str
    value: str
    cases: int
    regressed: int
    better: int
    rmse: float | None
    """Mean rise of RMSE, grey levels."""
    rmse_worst: float | None
    memory: float | None
    """Median ratio of allocated peaks, head ÷ base."""
    seconds: float | None
    """Median ratio of decode seconds, head ÷ base."""


class Pace(Struct, frozen=True):
    """Decode seconds of all comparable cases: the median of the ratios head ÷ base, and their quartiles."""

    ratio: float | None
    low: float | None = None
    high: float | None = None
    cases: int = 0
    allowed: float | None = None
    """The largest ratio that passes; None: not gated."""
    reason: str | None = None
    """Why it was not compared, or why it fails."""

    @property
    def regressed(self) -> bool:
        return self.allowed is not None and (self.ratio is None or not self.ratio <= self.allowed)


class Side(Struct, frozen=True):
    """One of the two runs."""

    name: str
    suite: str
    commit: str | None
    recorded: str | None
    environment: str
    exit_status: int


class Comparison(Struct, frozen=True):
    """BASE and HEAD, side by side."""

    base: Side
    head: Side
    cases: tuple[CaseChange, ...]
    """Worst first."""
    axes: tuple[AxisChange, ...]
    pace: Pace
    differences: tuple[tuple[str, str, str], ...] = ()
    """What else differs between the runs: name, base, head."""
    notes: tuple[str, ...] = ()
    """What the differences mean for the comparison."""
    schema: Literal["fidelity.comparison/1"] = "fidelity.comparison/1"

    def count(self, outcome: Outcome) -> int:
        return sum(case.outcome == outcome for case in self.cases)

    @property
    def regressions(self) -> tuple[CaseChange, ...]:
        """Cases for which the comparison fails."""
        return tuple(case for case in self.cases if case.reasons and case.outcome in OUTCOMES[:3])

    @property
    def exit_status(self) -> int:
        """0 nothing got worse beyond what may rise · 1 something did."""
        return 1 if self.regressions or self.pace.regressed else 0
