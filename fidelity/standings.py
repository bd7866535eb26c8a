"""How each plan of a run stands: what it passed, what it saves, and which to take. Read from cases, nothing measured.

Peaks of different latents cannot be compared (another size needs other memory), so each model has one *yardstick*: the
latents with the most measured peaks. Savings are against the plain fp32 decode of the same latents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeVar

from msgspec import Struct, structs

from fidelity.records import CaseResult, DecodePlan, RunResult

ALIKE = 1.5
"""Decodes timed once differ by as much on a shared machine, doing the same work: no reason to prefer one."""


class PlanSummary(Struct, frozen=True):
    """One plan of one model over all latents that it was judged with."""

    model: str
    plan: DecodePlan
    passed: tuple[str, ...]
    """Names of the latents with which it passed every gate."""
    failed: tuple[str, ...]
    """Names of those with which it failed or could not be judged."""
    missing: tuple[str, ...]
    """Names of the model's latents with which it was not judged, though nothing says that it cannot apply."""
    case: str
    """Id of its case on the yardstick."""
    peak_bytes: int | None
    seconds: float | None
    saved: float | None
    """Share of the plain fp32 decode's peak that is not needed, 0.25 for a quarter; negative where it needs more."""
    rmse: float | None
    """The worst RMSE over all latents, grey levels; None if one was not measured."""
    emulated: bool
    lpips: float | None = None
    """The worst LPIPS over all latents; None if one was not measured."""
    seam: float | None = None
    """The worst `tile_seam` over all latents, grey levels; None if one was not measured, as where nothing is tiled."""
    need_bytes: int | None = None
    """The largest peak over all latents, reserved where the device reserves; None if one was not measured."""

    @property
    def passes(self) -> bool:
        """Passed with every latents that it was judged with, of which there is at least one."""
        return bool(self.passed) and not self.failed

    @property
    def everywhere(self) -> bool:
        """Passed with all latents of the model to which it can apply."""
        return self.passes and not self.missing


class Choice(Struct, frozen=True):
    """What to take under one memory budget."""

    budget: int
    """Bytes; the peak of some plan, so that it is met when equal."""
    recommended: PlanSummary
    """The fastest that fits; of those as fast (see `ALIKE`) the closest to the golden, then the least, the simplest."""
    closest: PlanSummary
    """The one with the least RMSE that fits."""
    least: PlanSummary
    """The one with the least peak of all."""


def summarize(run: RunResult) -> dict[str, list[PlanSummary]]:
    """Every plan that was judged against a golden, by model, in the order of the run.

    A plan of which a metamorphic check failed has failed, whatever it costs: the check's name stands beside the
    latents' among the failed.
    """
    drifted = {(each.model, each.latents) for each in run.reference if not each.ok}
    return {model: _of_model([case for case in run.cases if case.model == model], drifted) for model in _names(run)}


def recommend(plans: Sequence[PlanSummary], budget: int | None = None) -> list[PlanSummary]:
    """Plans that pass everywhere and need at most `budget` bytes: least peak first, then seconds, then settings.

    A plan without a measured peak (emulated, or not measured) is never recommended: what it needs is not known; nor is
    one of the encoder, whose decode is plain.
    """
    fitting = [
        plan
        for plan in plans
        if plan.everywhere and not plan.emulated and plan.peak_bytes is not None and not plan.plan.options.get("encode")
        and (budget is None or plan.peak_bytes <= budget)
    ]  # fmt: skip
    return sorted(fitting, key=_cheapest)


def choices(plans: Sequence[PlanSummary]) -> list[Choice]:
    """What to take under every budget at which something more fits, ascending; none where nothing can be recommended.

    All plans here passed every gate, so the recommended one is the fastest. Those within `ALIKE` times its time count
    as equally fast: of them the closest to the golden, then the least peak, then the fewest settings decide.
    """
    able = recommend(plans)
    found = []
    for budget in sorted({plan.peak_bytes for plan in able if plan.peak_bytes is not None}):
        fitting = recommend(able, budget)
        soonest = min(_or_inf(plan.seconds) for plan in fitting)
        fast = [plan for plan in fitting if _or_inf(plan.seconds) <= ALIKE * soonest]
        found.append(Choice(budget, min(fast, key=_plainest), min(fitting, key=_closest), able[0]))
    return found


# ---------------------------------------------------------------- figures of one case


def against_golden(cases: Iterable[CaseResult]) -> list[CaseResult]:
    """Those that a golden judges: checks tell nothing of what a plan costs."""
    return [each for each in cases if each.check is None]


def value(case: CaseResult, name: str) -> float | None:
    """A measurement's figure, None where it was not measured."""
    measurement = case.measurements.get(name)
    return None if measurement is None else measurement.value


def emulated(case: CaseResult) -> bool:
    """Whether half precision was emulated: such a decode has no memory or time of its own."""
    return any(case.receipts.get(name, {}).get("emulated") is True for name in ("dtype", "precision"))


def peak(case: CaseResult) -> int | None:
    return None if case.memory is None else case.memory.allocated_peak_bytes


def needed(case: CaseResult) -> int | None:
    """What a device must have: the reserved peak, which runs out first, where one was measured, else the allocated."""
    if case.memory is None or case.memory.reserved_peak_bytes is None:
        return peak(case)
    return case.memory.reserved_peak_bytes


def seconds(case: CaseResult) -> float | None:
    return case.seconds.get("decode")


# ---------------------------------------------------------------- summing up


def yardstick(cases: Sequence[CaseResult]) -> str | None:
    """The latents with the most measured peaks, then the most judged cases; None where nothing was judged."""
    judged = [case for case in against_golden(cases) if case.verdict != "not_applicable"]
    peaks = Counter(case.latents for case in judged if peak(case) is not None)
    numbers = Counter(case.latents for case in judged)
    return max(numbers, key=lambda name: (peaks[name], numbers[name]), default=None)


def _names(run: RunResult) -> list[str]:
    return list(dict.fromkeys(case.model for case in against_golden(run.cases)))


def _cheapest(plan: PlanSummary) -> tuple[float, float, int, str]:
    return _or_inf(plan.peak_bytes), _or_inf(plan.seconds), len(plan.plan.settings), plan.plan.id


def _plainest(plan: PlanSummary) -> tuple[float, float, int, float, str]:
    """Without the time, but for plans that are alike in all else."""
    return (_or_inf(plan.rmse), _or_inf(plan.peak_bytes), len(plan.plan.settings), _or_inf(plan.seconds), plan.plan.id)


def _closest(plan: PlanSummary) -> tuple[float, float, float, int, str]:
    return _or_inf(plan.rmse), *_cheapest(plan)


def _or_inf(figure: float | None) -> float:
    return float("inf") if figure is None else figure


def _of_model(cases: list[CaseResult], drifted: set[tuple[str, str]]) -> list[PlanSummary]:
    broken: dict[str, list[str]] = {}
    for case in cases:
        if case.check is not None and case.verdict in ("fail", "error"):
            broken.setdefault(case.plan.id, []).append(f"{case.latents}~{case.check}")
    found = _held(against_golden(cases), drifted)
    return [structs.replace(each, failed=(*each.failed, *broken.get(each.plan.id, ()))) for each in found]


def _held(cases: list[CaseResult], drifted: set[tuple[str, str]]) -> list[PlanSummary]:
    measure = yardstick(cases)
    if measure is None:
        return []
    # A partial run has not yet met all latents, but those that cannot apply to any plan are no gap either.
    latents = list(dict.fromkeys(case.latents for case in cases if case.verdict != "not_applicable"))
    by_plan: dict[str, list[CaseResult]] = {}
    for case in cases:
        by_plan.setdefault(case.plan.id, []).append(case)
    plain = next((case for case in by_plan.get(DecodePlan().id, []) if case.latents == measure), None)
    base = None if plain is None else peak(plain)
    found = (_summary(group, latents, measure, base, drifted) for group in by_plan.values())
    return [summary for summary in found if summary is not None]


def _summary(
    cases: list[CaseResult], latents: list[str], measure: str, base: int | None, drifted: set[tuple[str, str]]
) -> PlanSummary | None:
    judged = [case for case in cases if case.verdict != "not_applicable"]
    if not judged:
        return None
    met = {case.latents for case in cases}
    place = next((case for case in judged if case.latents == measure), None)
    held = None if place is None else peak(place)
    sound = {case.latents for case in judged if _is_sound(case, drifted)}
    return PlanSummary(
        model=judged[0].model,
        plan=judged[0].plan,
        passed=tuple(case.latents for case in judged if case.latents in sound),
        failed=tuple(case.latents for case in judged if case.latents not in sound),
        missing=tuple(name for name in latents if name not in met),
        case=(place or judged[0]).id,
        peak_bytes=held,
        seconds=None if place is None else seconds(place),
        saved=None if not base or held is None else 1 - held / base,
        rmse=_worst([value(case, "rmse") for case in judged]),
        emulated=any(emulated(case) for case in judged),
        lpips=_worst([value(case, "lpips_alex") for case in judged]),
        seam=_worst([value(case, "tile_seam") for case in judged]),
        need_bytes=_worst([needed(case) for case in judged]),
    )


def _is_sound(case: CaseResult, drifted: set[tuple[str, str]]) -> bool:
    """Passed as its suite expects: one that passes though it should fail is a surprise, and tells of nothing."""
    return case.verdict == "pass" and not case.surprise and (case.model, case.latents) not in drifted


Figure = TypeVar("Figure", int, float)


def _worst(figures: Sequence[Figure | None]) -> Figure | None:
    """The largest; None if one was not measured."""
    known = [figure for figure in figures if figure is not None]
    return max(known) if len(known) == len(figures) else None
