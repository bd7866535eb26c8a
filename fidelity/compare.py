"""Two runs side by side: what got worse, better, appeared, vanished. Pure, without tensors, and fail closed.

What was a number and is none any more, what was judged and is not, what now leans on another golden is a regression
unless the caller allows it. Runs of different machines, suites or versions are compared, and the difference is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, median, quantiles
from typing import Literal

from fidelity.attribution import BYTES, settings
from fidelity.comparison import (
    OUTCOMES,
    AxisChange,
    CaseChange,
    Change,
    Comparison,
    Outcome,
    Pace,
    Rise,
    Rises,
    Side,
)
from fidelity.differences import (
    OTHER_DRIFT,
    environment_class,
    meaning,
    other_goldens,
    same_class,
    table,
)
from fidelity.errors import RequestError
from fidelity.records import CaseResult, Measurement, RunResult
from fidelity.registry import unknown
from fidelity.trend import SAME_LEAST, least
from fidelity.wording import amount

FEWEST_TIMES = 5
"""Pairs of decode times below which no pace is told."""
JUDGED = ("pass", "fail")
SEVERITY = {"pass": 0, "fail": 1, "error": 2}


def compare(base: RunResult, head: RunResult, rises: Rises, *, names: tuple[str, str] = ("BASE", "HEAD")) -> Comparison:
    """Hold `head` against `base`, case by case.

    Raises RequestError where there is nothing to compare, where a name in `rises` is of no measurement, and where time
    is to be gated between environment classes.
    """
    _refuse(base, head, rises, names)
    same = same_class(base, head)
    goldens = other_goldens(base, head)
    before, after = ({case.id: case for case in run.cases} for run in (base, head))
    ids = dict.fromkeys([*before, *after])
    found = [_case(before.get(name), after.get(name), rises, same, goldens) for name in ids]
    return Comparison(
        base=_side(base, names[0]),
        head=_side(head, names[1]),
        cases=tuple(sorted(found, key=_worst_first)),
        axes=tuple(_axes(found)),
        pace=_pace(found, rises.time, same),
        differences=tuple(table(base, head)),
        notes=tuple(meaning(base, head, goldens, found, rises.memory_across)),
    )


# ---------------------------------------------------------------- what may be asked


def _refuse(base: RunResult, head: RunResult, rises: Rises, names: tuple[str, str]) -> None:
    judged = [{case.id for case in run.cases if case.verdict in SEVERITY} for run in (base, head)]
    if not judged[0]:
        raise RequestError(f"{names[0]} judged no case: there is nothing to compare with")
    if base.partial and "partial" not in rises.allow:
        lacking = f"{names[0]} is a partial run ({len(judged[0])} judged): what it lacks gates nothing"
        raise RequestError(f"{lacking}; finish it with --resume, or say --allow partial")
    if not judged[0] & {case.id for case in head.cases}:
        raise RequestError(f"{names[0]} and {names[1]} have no case in common: compare runs of the same suite")
    known = dict.fromkeys(name for run in (base, head) for case in run.cases for name in case.measurements)
    for name in rises.measurements:
        if name not in known:
            raise RequestError(unknown("measurement", name, known))
    if rises.time is not None and not same_class(base, head):
        where = f"{environment_class(base)} and {environment_class(head)}"
        raise RequestError(f"time means nothing between {where}: leave out --max-time-rise, or run both on one machine")


# ---------------------------------------------------------------- one case


def _case(
    base: CaseResult | None,
    head: CaseResult | None,
    rises: Rises,
    same: bool,
    goldens: dict[tuple[str, str], tuple[str, ...]],
) -> CaseChange:
    shown = head or base
    assert shown is not None
    reasons, changes, outcome = _held(base, head, rises, same, goldens.get((shown.model, shown.latents), ()))
    return CaseChange(
        id=shown.id,
        outcome=outcome,
        base=base.verdict if base else None,
        head=head.verdict if head else None,
        model=shown.model,
        latents=shown.latents,
        plan=shown.plan,
        check=shown.check,
        reasons=tuple(reasons),
        changes=tuple(changes),
        seconds=_ratio(base, head),
        images=head.images.get("candidate", ()) if head else (),
    )


def _held(
    base: CaseResult | None, head: CaseResult | None, rises: Rises, same: bool, other: tuple[str, ...]
) -> tuple[list[str], list[Change], Outcome]:
    if base is None or base.verdict not in SEVERITY:
        return [], [], "appeared" if head is not None and head.verdict in SEVERITY else "unjudged"
    if head is None:
        gone = [] if "vanished" in rises.allow else [f"was judged ({base.verdict}) and is absent"]
        return gone, [], "vanished"
    reasons = _verdict(base, head)
    if other and base.check is None and ("goldens" not in rises.allow or other != ("sample",)):
        said = f"leans on a golden of other {' and '.join(other)}: its measurements cannot be compared"
        told = [] if "goldens" in rises.allow else [said]
        return [*told, *reasons], [], "regressed" if reasons else "not_comparable"
    changes = _changes(base, head, rises, same) if base.verdict in JUDGED and head.verdict in JUDGED else []
    reasons += [change.reason for change in changes if change.outcome == "regressed" and change.reason]
    if reasons:
        return reasons, changes, "regressed"
    seen = {change.outcome for change in changes}
    if SEVERITY[head.verdict] < SEVERITY[base.verdict]:
        return [], changes, "better"
    return [], changes, "worse" if "worse" in seen else "better" if "better" in seen else "same"


def _verdict(base: CaseResult, head: CaseResult) -> list[str]:
    """Why the verdict itself is a regression: worse, no longer judged, or failing for something new."""
    why = "; ".join(reason.message for reason in head.reasons[:2])
    tail = f": {why}" if why else ""
    if head.verdict == "not_applicable":
        return [f"was judged ({base.verdict}) and is not applicable now{tail}"]
    if SEVERITY[head.verdict] > SEVERITY[base.verdict]:
        return [f"{base.verdict} became {head.verdict}{tail}"]
    new = [name for name in head.diagnosis if name not in base.diagnosis]
    if head.verdict == "fail" and new:
        return [f"fails for {', '.join(new)} as well, or instead{tail}"]
    if head.surprise and not base.surprise:
        # A defect that is meant to be found and no longer is: the detector may have gone blind.
        return [f"ended as expected ({_ending(base)}) and is a surprise now ({_ending(head)}){tail}"]
    return []


def _ending(case: CaseResult) -> str:
    return " for ".join([case.verdict, *([", ".join(case.diagnosis)] if case.diagnosis else [])])


# ---------------------------------------------------------------- figures


def _changes(base: CaseResult, head: CaseResult, rises: Rises, same: bool) -> list[Change]:
    names = dict.fromkeys([*base.measurements, *head.measurements])
    return [
        *(_measured(name, base, head, rises, same) for name in names),
        _peak(base, head, rises.memory, gated=same or rises.memory_across),
    ]


def _measured(name: str, base: CaseResult, head: CaseResult, rises: Rises, same: bool) -> Change:
    was, now = base.measurements.get(name), head.measurements.get(name)
    about = now or was
    assert about is not None
    before, after = _number(was), _number(now)
    allowed = None if before is None else _allowed(name, about, before, head, rises, same)
    if before is not None and after is None and not (now is not None and now.exact and now.value is None):
        why = (now.reason if now else None) or "no value"
        lost = f"{name} was {amount(before, about.unit)} and is no longer measured: {why}"
        return Change(name, about.unit, about.better, before, None, None, allowed, "regressed", lost)
    if before is None and was is not None and was.exact and now is not None and not now.exact:
        return _left_exact(name, now, after, gated=name in rises.measurements)
    if before is None or after is None:
        outcome = "better" if now is not None and now.exact and before is not None else "same"
        return Change(name, about.unit, about.better, before, after, outcome=outcome)  # type: ignore[arg-type]
    rise = after - before if about.better == "lower" else before - after
    return _weighed(Change(name, about.unit, about.better, before, after, rise, allowed))


def _left_exact(name: str, now: Measurement, after: float | None, *, gated: bool) -> Change:
    """From bit-equal, an infinite value that no JSON number can say, to a finite one: no amount covers that."""
    became = f"is no longer measured: {now.reason or 'no value'}" if after is None else f"is {amount(after, now.unit)}"
    outcome: Literal["regressed", "worse"] = "regressed" if gated or after is None else "worse"
    reason = f"{name} was that of an exact decode and {became}"
    return Change(name, now.unit, now.better, None, after, outcome=outcome, reason=reason)


def _allowed(name: str, about: Measurement, before: float, head: CaseResult, rises: Rises, same: bool) -> float | None:
    """What a measurement may rise by; None where nothing is known that would make a rise mean something."""
    if name in rises.measurements:
        return rises.measurements[name].of(before)
    if head.check is None and not same:
        return OTHER_DRIFT[head.plan.dtype] if name == "rmse" else None
    if not same:
        return None
    floor = head.approved.floors.get(name, 0.0) if head.approved else 0.0
    return max(floor, least(about.unit, before))


def _weighed(change: Change) -> Change:
    """The change with its outcome; a rise that is no number is within nothing."""
    rise, allowed = change.rise, change.allowed
    assert rise is not None
    assert change.head is not None
    if allowed is not None and not rise <= allowed:
        said = f"{change.name} rose from {change.base:.4g} to {amount(change.head, change.unit)}"
        if change.better == "higher":
            said = said.replace(" rose ", " fell ", 1)
        outcome, reason = "regressed", f"{said}: worse by {rise:.3g}, allowed {allowed:.3g}"
    else:
        outcome, reason = "same" if abs(rise) <= SAME_LEAST else "worse" if rise > 0 else "better", None
    return Change(change.name, change.unit, change.better, change.base, change.head, rise, allowed, outcome, reason)  # type: ignore[arg-type]


def _peak(base: CaseResult, head: CaseResult, may: Rise | None, *, gated: bool) -> Change:
    was, now = (case.memory.allocated_peak_bytes if case.memory else None for case in (base, head))
    method = (base.memory.method if base.memory else "", head.memory.method if head.memory else "")
    if was is not None and now is None and may is not None:
        why = (head.memory.reason if head.memory else None) or "no figure"
        return Change(BYTES, "bytes", "lower", was, None, None, may.of(was), "regressed",
                      f"the allocated peak was {was / 2**20:.1f} MiB and is no longer measured: {why}")  # fmt: skip
    if was is None or now is None:
        return Change(BYTES, "bytes", "lower", was, now)
    if method[0] != method[1]:
        other = f"measured by {method[1]}, before by {method[0]}: not compared"
        return Change(BYTES, "bytes", "lower", was, now, reason=other)
    allowed = may.of(was) if may is not None and gated else None
    change = _weighed(Change(BYTES, "bytes", "lower", was, now, float(now - was), allowed))
    if change.outcome != "regressed":
        return change
    share = f"{(now - was) / was:.1%}" if was else f"{now} bytes"
    said = f"the allocated peak rose from {was / 2**20:.1f} to {now / 2**20:.1f} MiB, by {share}"
    return Change(BYTES, "bytes", "lower", was, now, change.rise, allowed, "regressed", f"{said}, allowed {may}")


def _number(found: Measurement | None) -> float | None:
    return found.value if found is not None and found.value is not None and math.isfinite(found.value) else None


# ---------------------------------------------------------------- time


def _ratio(base: CaseResult | None, head: CaseResult | None) -> float | None:
    """Decode seconds, head ÷ base; None unless both were judged in a precision of their own."""
    if base is None or head is None or base.verdict not in JUDGED or head.verdict not in JUDGED:
        return None
    if any(case.receipts.get("precision", {}).get("emulated") for case in (base, head)):
        return None
    was, now = base.seconds.get("decode"), head.seconds.get("decode")
    return now / was if was and now else None


def _pace(cases: Sequence[CaseChange], may: Rise | None, same: bool) -> Pace:
    ratios = [case.seconds for case in cases if case.seconds is not None]
    allowed = None if may is None else 1 + may.of(1.0)
    if not same:
        return Pace(None, cases=len(ratios), reason="time means nothing between environment classes")
    if len(ratios) < FEWEST_TIMES:
        few = f"{len(ratios)} decodes have a time on both sides, fewer than {FEWEST_TIMES}"
        return Pace(None, cases=len(ratios), allowed=allowed, reason=few)
    low, middle, high = quantiles(ratios, n=4)
    slow = allowed is not None and middle > allowed
    reason = f"decodes take {middle:.3g} × as long, allowed {allowed:.3g}" if slow else None
    return Pace(middle, low, high, len(ratios), allowed, reason)


# ---------------------------------------------------------------- over all cases


def _axes(cases: Iterable[CaseChange]) -> list[AxisChange]:
    """Every value of every axis that takes more than one, in the order of the run."""
    groups: dict[str, dict[str, list[CaseChange]]] = {}
    for case in cases:
        if case.outcome in ("unjudged", "appeared", "vanished"):
            continue
        about = {"model": case.model, **settings(case), **({"check": case.check} if case.check else {})}  # type: ignore[arg-type]
        for axis, value in about.items():
            groups.setdefault(axis, {}).setdefault(value, []).append(case)
    return [
        _axis(axis, value, found)
        for axis, values in groups.items()
        if len(values) > 1
        for value, found in values.items()
    ]


def _axis(axis: str, value: str, cases: list[CaseChange]) -> AxisChange:
    moved = [one.rise for case in cases if (one := case.change("rmse")) is not None and one.rise is not None]
    peaks = [one.head / one.base for case in cases if (one := case.change(BYTES)) is not None and one.head and one.base]
    paces = [case.seconds for case in cases if case.seconds is not None]
    return AxisChange(
        axis=axis,
        value=value,
        cases=len(cases),
        regressed=sum(case.outcome in OUTCOMES[:3] and bool(case.reasons) for case in cases),
        better=sum(case.outcome == "better" for case in cases),
        rmse=fmean(moved) if moved else None,
        rmse_worst=max(moved, default=None),
        memory=median(peaks) if peaks else None,
        seconds=median(paces) if paces else None,
    )


def _worst_first(case: CaseChange) -> tuple[int, bool, float, str]:
    """By outcome; among regressions those of the verdict first, then by how many times what was allowed."""
    over = [change.rise / change.allowed for change in case.changes if change.rise is not None and change.allowed]
    return (OUTCOMES.index(case.outcome), case.base == case.head, -max(over, default=0.0), case.id)


def _side(run: RunResult, name: str) -> Side:
    return Side(
        name,
        str(run.suite.get("name") or "fidelity"),
        run.commit,
        run.recorded,
        environment_class(run),
        run.exit_status,
    )


__all__ = ["compare"]
