"""Gates: measurements and limits in, reasons out. Pure, without tensors, and fail closed.

Only a measured, finite value within its limit passes. What could not be measured, what is NaN, what was never asked for
is a reason; `verdict` turns reasons into one word and `surprise` compares it with what the suite expects.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from msgspec import Struct

from fidelity.records import DIAGNOSES, Case, Limit, Measurement, Reason, Receipts, VerdictName
from fidelity.wording import amount, place

NON_FINITE = "nonfinite_share"
PRECISION_RECEIPTS = ("dtype", "precision", "force_upcast")
"""A precision that was asked for and not reached is a fault of the dtype, not just an option that did nothing."""


# ---------------------------------------------------------------- limits


class Plain(Struct, frozen=True):
    """What the plain full decode of the same dtype and upcast costs in one measurement, and its noise floor."""

    value: float | None
    floor: float | None
    reason: str | None = None
    """Why it could not be measured."""


def judge(
    measurements: Mapping[str, Measurement],
    limits: Mapping[str, Limit],
    *,
    instruments: Mapping[str, tuple[str, ...]],
    plain: Mapping[str, Plain] = MappingProxyType({}),
) -> tuple[Reason, ...]:
    """Hold measurements against limits; a value equal to its limit passes.

    `instruments` gives, by measurement name, what a case is blamed on when that limit is crossed. A decode with
    non-finite values fails by that alone, with or without a limit: nothing else about it can be measured, so nothing
    else is looked for. A case without any limit cannot pass. A reason with a limit and no measured value says that the
    case could not be judged.
    """
    broken = _non_finite(measurements.get(NON_FINITE))
    if broken is not None:
        return (broken,)
    if not limits:
        return (Reason(name="limits", message="no limit: nothing was judged, so nothing passes; add one to [limits]"),)
    reasons: list[Reason] = []
    for name, limit in limits.items():
        found = measurements.get(name)
        blamed = instruments.get(name) or _own_diagnosis(found)
        reasons += _held(name, found, limit, blamed)
        reasons += _upper(name, found, limit, plain.get(name), blamed)
    return tuple(reasons)


def _own_diagnosis(found: Measurement | None) -> tuple[str, ...]:
    """What a measurement blames by itself: `tile_seam` that of the member that was worst."""
    named = found.details.get("diagnosis", ()) if found is not None else ()
    return (named,) if isinstance(named, str) else tuple(named)


def _non_finite(share: Measurement | None) -> Reason | None:
    if share is None:
        return None
    if not _finite(share.value):
        why = share.reason or f"its value is {share.value}"
        return Reason(NON_FINITE, f"{NON_FINITE} was not measured: {why}", limit=0.0, unit=share.unit)
    if share.value > 0:  # type: ignore[operator]
        message = f"the decode is not finite: {NON_FINITE} is {amount(share.value, share.unit)}, limit 0{_place(share)}"  # type: ignore[arg-type]
        return Reason(NON_FINITE, message, share.value, 0.0, share.unit, ("non_finite",))
    return None


def _held(name: str, found: Measurement | None, limit: Limit, diagnosis: tuple[str, ...]) -> list[Reason]:
    bounds = [(word, bound) for word, bound in (("max", limit.max), ("min", limit.min)) if bound is not None]
    if not bounds:
        return [Reason(name, f"the limit on {name} has neither max nor min: it would hold for anything")]
    return [reason for word, bound in bounds if (reason := _bounded(name, found, word, bound, limit, diagnosis))]


def _bounded(
    name: str, found: Measurement | None, word: str, bound: float, limit: Limit, diagnosis: tuple[str, ...]
) -> Reason | None:
    if found is None:
        return Reason(name, f"{name} was not measured, {word} {bound:g} ({limit.origin})", limit=bound)
    if found.exact and found.value is None and found.better == "higher" and word == "min":
        return None  # bit-equal: the value is infinite, which no JSON number can say
    if not _finite(found.value):
        why = found.reason or ("no value was given" if found.value is None else f"its value is {found.value}")
        return Reason(name, f"{name} was not measured: {why}; {word} {bound:g}", limit=bound, unit=found.unit)
    value: float = found.value  # type: ignore[assignment]
    if (word == "max" and value <= bound) or (word == "min" and value >= bound):
        return None
    relation = "above" if word == "max" else "below"
    message = f"{name} is {amount(value, found.unit)}, {relation} the limit {bound:g}{_place(found)}"
    return Reason(name, f"{message} ({limit.origin})", value, bound, found.unit, diagnosis)


def _upper(
    name: str, found: Measurement | None, limit: Limit, plain: Plain | None, diagnosis: tuple[str, ...]
) -> list[Reason]:
    """The upper rule: at most `times_plain` × what the plain decode costs, plus the floor."""
    times = limit.times_plain
    if times is None or found is None or not _finite(found.value):
        return []  # what was not measured is a reason already, by the limit that stands beside
    if plain is None or not _finite(plain.value) or not _finite(plain.floor) or not times > 0:
        why = (plain.reason if plain else None) or f"its {name} or the noise floor of it was not measured"
        said = f"{name} cannot be held to {times:g} × the plain decode of the same dtype: {why}"
        return [Reason(name, said, limit=limit.max if limit.max is not None else times, unit=found.unit)]
    value: float = found.value  # type: ignore[assignment]
    bound: float = times * plain.value + plain.floor  # type: ignore[operator]
    if value <= bound:
        return []
    sum_ = f"{times:g} × {plain.value:.4g} of the plain decode of the same dtype + noise floor {plain.floor:.2g}"
    said = f"{name} is {amount(value, found.unit)}, above {bound:.4g}, which is {sum_}{_place(found)}"
    return [Reason(name, f"{said} ({limit.origin})", value, bound, found.unit, diagnosis)]


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _place(measurement: Measurement) -> str:
    said = place(measurement.where)
    return f" {said}" if said else ""


# ---------------------------------------------------------------- receipts


def receipt_reasons(
    receipts: Receipts, requested: Iterable[str] = (), *, repeat_exact: bool | None = None
) -> tuple[Reason, ...]:
    """Say what the receipts give away: an option that did not engage, state left behind, a decode that varies.

    `requested`: names of the settings that the plan turns on; one without a receipt has not been shown to run.
    `repeat_exact`: whether a second decode gave the same bits; None where there was none. A receipt may claim that
    nothing can be proved (`engaged` None), but only with a reason.
    """
    reasons = [
        Reason(name, f"{name} was requested and left no receipt: nothing shows that it ran", diagnosis=_blame(name))
        for name in requested
        if name not in receipts
    ]
    for name, receipt in receipts.items():
        if name == "state":
            reasons += _state(receipt)
        elif "engaged" in receipt or receipt.get("requested"):
            reasons += _engaged(name, receipt)
    if repeat_exact is False:
        message = "the same plan decoded twice gave different bits"
        reasons.append(Reason("repeat", message, diagnosis=("nondeterministic",)))
    return tuple(reasons)


def _blame(name: str) -> tuple[str, ...]:
    return ("dtype",) if name in PRECISION_RECEIPTS else ("not_engaged",)


def _engaged(name: str, receipt: Mapping[str, Any]) -> list[Reason]:
    engaged, why = receipt.get("engaged"), receipt.get("reason")
    if engaged is True or (engaged is None and why):
        return []
    what = "did not engage" if engaged is False else "could not be proved to have run"
    blamed = tuple(receipt.get("diagnosis") or _blame(name))
    return [Reason(name, f"{name} {what}: {why or 'its receipt gives no reason'}", diagnosis=blamed)]


def _state(receipt: Mapping[str, Any]) -> list[Reason]:
    if receipt.get("restored") is True:
        return []
    leaks = receipt.get("leaks") or []
    listed = ", ".join(map(str, leaks)) if leaks else receipt.get("reason") or "the receipt does not say what"
    return [Reason("state", f"the instance was not restored after the decode: {listed}", diagnosis=("state_leak",))]


# ---------------------------------------------------------------- regressions


ROUNDING = 1e-8
"""Share of an approved value that another order of the same sums may move it by: no decode, only arithmetic."""


def regressions(
    measurements: Mapping[str, Measurement], approved: Mapping[str, float], floors: Mapping[str, float]
) -> tuple[Reason, ...]:
    """Compare with the approved values of this very case: worse by more than the noise floor is `regressed`.

    Better never fails. A metric without a floor has a floor of 0. A metric that was approved and is no longer measured
    fails: a value that disappeared is not an improvement.
    """
    reasons: list[Reason] = []
    for name, was in approved.items():
        found = measurements.get(name)
        if found is not None and found.exact and found.value is None and found.better == "higher":
            continue
        if found is None or not _finite(found.value):
            why = (found.reason if found else None) or "no value"
            message = f"{name} was approved at {was:.6g} and is no longer measured: {why}"
            reasons.append(Reason(name, message, diagnosis=("regressed",)))
            continue
        value: float = found.value  # type: ignore[assignment]
        floor = floors.get(name, 0.0) + ROUNDING * abs(was)
        worse = value - was if found.better == "lower" else was - value
        if not worse <= floor:  # a NaN floor or approved value holds nothing
            against = f"approved at {was:.6g}: worse by {worse:.3g}, noise floor {floor:.3g}"
            message = f"{name} is {amount(value, found.unit, 6)}, {against}"
            reasons.append(Reason(name, message, value, was, found.unit, ("regressed",)))
    return tuple(reasons)


# ---------------------------------------------------------------- verdicts


def verdict(reasons: Iterable[Reason], error: bool = False) -> VerdictName:
    """One word for a judged case: `error` if it could not be judged, `fail` if there is a reason, else `pass`.

    A limit whose measurement has no value could not be held against anything: that is an `error`, which no expected
    failure covers.
    """
    reasons = list(reasons)
    if error or any(reason.limit is not None and reason.measured is None for reason in reasons):
        return "error"
    return "fail" if reasons else "pass"


def diagnosis(reasons: Iterable[Reason]) -> tuple[str, ...]:
    """What the case is blamed on: the reasons' diagnoses, each once, in their first order."""
    found = dict.fromkeys(word for reason in reasons for word in reason.diagnosis)
    strangers = [word for word in found if word not in DIAGNOSES]
    if strangers:
        raise ValueError(f"unknown diagnosis {strangers[0]!r}: known: {', '.join(DIAGNOSES)}")
    return tuple(found)


def surprise(case: Case, verdict: VerdictName, diagnosis: Iterable[str] = ()) -> bool:
    """Whether the case ended otherwise than its suite expects; one that is not applicable never does.

    An expected failure must fail with exactly the expected diagnoses, in any order: failing for another reason as well
    is a surprise. An expected error may leave its diagnosis open.
    """
    if verdict == "not_applicable":
        return False
    expected = case.expected
    if verdict != expected.verdict:
        return True
    if verdict == "pass" or (verdict == "error" and not expected.diagnosis):
        return False
    return set(diagnosis) != set(expected.diagnosis)
