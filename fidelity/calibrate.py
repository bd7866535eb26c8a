"""`fidelity calibrate SUITE`: the noise floor of each model and plain dtype, and limits that follow from it.

Every figure is the worst over the suite's latents. What is proposed is TOML to paste into the suite: each limit says
what was measured, where and when; nothing is written by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import date

from msgspec import Struct

from fidelity import golden
from fidelity.errors import RequestError
from fidelity.goldens import ask, keys
from fidelity.noise import CONDITIONS, PLAIN, Noise, floors
from fidelity.records import DecodePlan
from fidelity.runs import Options
from fidelity.suite import Suite
from fidelity.worker import Floored, Floors

PROPOSED = {"rmse": "lower", "lpips_alex": "lower", "ssim": "higher"}
"""Measurements for which a limit is proposed, and which direction is better."""
ELSEWHERE = {"fp32": 0.1, "bf16": 1.0, "fp16": 0.1}
"""Grey levels RMSE that another CPU's kernels may add, by the dtype that computes (EVIDENCE, measured with a lower
instruction set: 2e-5 of 2 in fp32, a grey level in bf16; emulated fp16 computes in fp32)."""
LEAST = {"lpips_alex": 1e-4, "ssim": 1e-4}
"""The smallest step from perfect that a limit may demand: below it, figures are rounding of the metric itself."""


class Row(Struct, frozen=True):
    """The noise of one plain plan of one model on one set of latents, under one condition."""

    model: str
    latents: str
    noise: Noise


def calibrate(suite: Suite, options: Options, conditions: Sequence[str] = CONDITIONS) -> list[Row]:
    """Measure every plain plan (dtype and upcast) that the suite's judged cases compute in, on all of their latents.

    Raises GoldenError if a golden is missing, RequestError if the suite judges nothing against a golden, and what a
    worker raises.
    """
    tasks = []
    for model, latents in keys(suite):
        golden.check(suite.golden, model, latents, suite=str(suite.path))
        tasks.append(Floors(model, latents, _plains(suite, model, latents), tuple(conditions)))
    if not tasks:
        raise RequestError(f"{suite.path}: nothing to calibrate: no case is judged against a golden, only by checks")
    replies = ask(suite, options, tasks)
    return [
        Row(task.model, task.latents, noise)
        for task, reply in zip(tasks, replies, strict=True)
        if isinstance(reply, Floored)
        for noise in reply.noise
    ]


def _plains(suite: Suite, model: str, latents: str) -> tuple[DecodePlan, ...]:
    mine = [case.plan for case in suite.judged if (case.model, case.latents, case.check) == (model, latents, None)]
    return tuple(dict.fromkeys(DecodePlan(dtype=plan.dtype, force_upcast=plan.force_upcast) for plan in mine))


# ---------------------------------------------------------------- the table


def table(rows: Iterable[Row]) -> list[str]:
    """Lines for people: by model, plain plan and condition, the worst over all latents and the latents that it was."""
    rows = list(rows)
    head = ["model", "plain decode", "condition", "rmse", "max_abs", *(f"Δ {name}" for name in PROPOSED), "latents"]
    lines = [head]
    for model, plan, condition in dict.fromkeys((row.model, row.noise.plan, row.noise.condition) for row in rows):
        mine = [row for row in rows if (row.model, row.noise.plan, row.noise.condition) == (model, plan, condition)]
        worst = max(mine, key=lambda row: math.inf if row.noise.rmse is None else row.noise.rmse)
        figures = [_figure(worst.noise.rmse), _figure(worst.noise.max_abs)]
        moved = [_figure(_worst(mine, name, condition)) for name in PROPOSED]
        lines.append([model, _name(plan), condition, *figures, *moved, worst.latents])
    note = (
        "rmse and max_abs in grey levels between the two decodes; Δ: how far a measurement moves; of plain, its value"
    )
    widths = [max(len(line[place]) for line in lines) for place in range(len(head))]
    numbers = range(3, len(head) - 1)
    laid = [
        "  ".join(
            cell.rjust(width) if place in numbers else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    ]
    return [*laid, note]


def _name(plan: DecodePlan) -> str:
    return plan.dtype + (" upcast" if plan.force_upcast else "")


def _worst(rows: list[Row], name: str, condition: str) -> float | None:
    """The largest movement over the latents; of `plain`, the worst value itself. None if one was not measured."""
    values = [row.noise.moved.get(name) for row in rows]
    if any(value is None for value in values):
        return None
    pick = min if condition == PLAIN and PROPOSED[name] == "higher" else max
    return pick(value for value in values if value is not None)


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"


# ---------------------------------------------------------------- the proposal


def proposal(rows: Iterable[Row], *, factor: float, today: date, environment: str = "") -> list[str]:
    """TOML lines: a [[limits.where]] for each model and plain plan, for the cases that options should not change.

    The limit is the plain decode's worst × `factor`, plus the worst noise, plus what another CPU may add; beside the
    limit on RMSE of a half dtype stands the upper rule, which moves with the machine. Raises RequestError if `factor`
    is no number from 1 on.
    """
    if not math.isfinite(factor) or factor < 1:
        raise RequestError(
            f"--factor {factor:g}: write a number from 1 on: below it the plain decode itself would fail"
        )
    rows = list(rows)
    several = len({row.model for row in rows}) > 1
    lines = [f"# Limits that fidelity calibrate proposes{f' from {environment}' if environment else ''}."]
    for model, plan in dict.fromkeys((row.model, row.noise.plan) for row in rows):
        mine = [row for row in rows if (row.model, row.noise.plan) == (model, plan)]
        lines += ["", *_rule(model if several else None, plan, mine, factor, today)]
    return lines


def refuse_factor(factor: float) -> None:
    """Raise RequestError for a factor under which the plain decode itself would fail."""
    if not math.isfinite(factor) or factor < 1:
        raise RequestError(
            f"--factor {factor:g}: write a number from 1 on: below it the plain decode itself would fail"
        )


def _rule(model: str | None, plan: DecodePlan, rows: list[Row], factor: float, today: date) -> list[str]:
    plain = [row for row in rows if row.noise.condition == PLAIN]
    match = [f'model = "{model}"'] if model else []
    match += [f'dtype = "{plan.dtype}"', *_upcast(plan), "tiling = false"]
    if not plain or any(row.noise.rmse is None for row in plain):
        where = ", ".join(row.latents for row in plain if row.noise.rmse is None) or "nothing"
        return [f"# {{ {', '.join(match)} }}: the plain decode is not finite ({where}), so nothing is proposed"]
    noise = floors(row.noise for row in rows).get(plan.dtype, {})
    limits = [(name, _limit(name, plan, plain, noise.get(name, 0.0), factor, today)) for name in PROPOSED]
    width = max(len("match"), *(len(name) for name in PROPOSED))
    named = [f"{name:<{width}} = {text}" for name, text in limits if text]
    return ["[[limits.where]]", f"{'match':<{width}} = {{ {', '.join(match)} }}", *named]


def _upcast(plan: DecodePlan) -> list[str]:
    """The upcast applies to fp16 alone, and what holds with it does not hold without."""
    return [f"force_upcast = {str(plan.force_upcast).lower()}"] if plan.dtype == "fp16" else []


def _limit(name: str, plan: DecodePlan, plain: list[Row], noise: float, factor: float, today: date) -> str | None:
    """The limit on one measurement as a TOML value, None where it was not measured everywhere."""
    values = [(row.noise.moved.get(name), row.latents) for row in plain]
    if any(value is None for value, _ in values):
        return None
    perfect = 1.0 if PROPOSED[name] == "higher" else 0.0
    loss, where = max((abs(perfect - value), latents) for value, latents in values if value is not None)
    computes = "fp32" if plan.force_upcast else plan.dtype
    room = ELSEWHERE[computes] if name == "rmse" else LEAST[name]
    allowed = round_up(loss * factor + noise + room)
    origin = f"calibrated {today.isoformat()}: plain {_name(plan)} {abs(perfect - loss):.6g} ({where}) × {factor:g}"
    origin += f", noise {noise:.2g}, and {room:g} for another CPU's kernels"
    if perfect:
        origin = origin.replace(" × ", ", its distance from 1 × ", 1)
        return f'{{ min = {max(0.0, 1 - allowed):.6g}, origin = "{origin}" }}'
    upper = f"times_plain = {factor:g}, " if name == "rmse" and plan.dtype != "fp32" and not plan.force_upcast else ""
    return f'{{ max = {allowed:g}, {upper}origin = "{origin}" }}'


def round_up(value: float) -> float:
    """The next number of two significant digits that is not below `value`."""
    if value <= 0:
        return 0.0
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    rounded = math.ceil(value / step - 1e-9) * step
    return float(f"{rounded:.2g}") if float(f"{rounded:.2g}") >= value else float(f"{rounded + step:.2g}")


__all__ = ["Row", "calibrate", "proposal", "refuse_factor", "round_up", "table"]
