"""Which plans of a run to take under a memory budget.

    for advice in recommend.from_run(run, models, Budget(4 * 2**30)):
        print(*offers.lines(advice), sep="\\n")

Only what the run measured counts: a plan is offered if it passed every gate, and lies on the Pareto front of memory,
fidelity and time. `fidelity.proposals` makes the same record from predictions alone, and says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from fidelity import standings
from fidelity.errors import RequestError
from fidelity.offers import Advice, Budget, Offer, Unmeasured, code
from fidelity.records import Model, RunResult
from fidelity.report import words
from fidelity.standings import ALIKE, PlanSummary
from fidelity.wording import in_units

ROUNDING = 1e-3
"""Grey levels of RMSE: two plans that differ by less are equally close to the golden."""
FEW = 3
"""Plans shown whose memory is only predicted."""


def from_run(run: RunResult, model_of: Callable[[str], Model], budget: Budget, only: str | None = None) -> list[Advice]:
    """Advice for each model of a run, or `only` for one. `model_of` finds a model by name, for its code.

    Raises RequestError for a partial run, for one that judged nothing against a golden, and for a model not in it.
    """
    if run.partial:
        raise RequestError(f"the run of {words.suite_name(run)} is partial: what is missing was not judged; finish it "
                           "with `fidelity run … --resume`, then recommend")  # fmt: skip
    found = {model: held for model, held in standings.summarize(run).items() if held}
    if not found:
        raise RequestError(f"the run of {words.suite_name(run)} judged nothing against a golden: nothing to recommend")
    if only is not None and only not in found:
        raise RequestError(f"model {only!r} is not in the run of {words.suite_name(run)}: it has {', '.join(found)}")
    return [_advise(run, model_of(name), held, budget) for name, held in found.items() if only in (None, name)]


def _advise(run: RunResult, model: Model, held: list[PlanSummary], budget: Budget) -> Advice:
    sound = [plan for plan in standings.recommend(held) if plan.need_bytes is not None]
    full = [plan for plan in sound if plan.rmse is not None and plan.seconds is not None]
    fitting = [plan for plan in full if _need(plan) <= budget.limit]
    best = sorted(front(fitting), key=_cost)
    least = min(full, key=_cost, default=None)
    reason = None
    if not full:
        reason = "no plan passed every gate with its memory, RMSE and time measured"
    elif not best:
        reason = f"nothing that passed every gate fits {in_units(budget.limit)}"
    return Advice(
        model=model.name,
        source="run",
        budget=budget,
        limit_bytes=budget.limit,
        offers=tuple(_offer(model, plan, _merits(plan, best), _device(run)) for plan in best),
        nearest=_offer(model, least, (), _device(run)) if least is not None and not best else None,
        reason=reason,
        basis=_basis(run, held, full, fitting, best),
        unmeasured=_unmeasured(run, held, budget),
    )


def _unmeasured(run: RunResult, held: list[PlanSummary], budget: Budget) -> tuple[Unmeasured, ...]:
    """The emulated plans that passed everywhere and are predicted to fit, least peak first; a few."""
    found = []
    for plan in held:
        if not plan.emulated or not plan.everywhere:
            continue
        cases = [case for case in run.cases if (case.model, case.plan.id) == (plan.model, plan.plan.id)
                 and case.check is None and case.verdict != "not_applicable"]  # fmt: skip
        peaks = [case.memory.predicted_peak_bytes for case in cases if case.memory is not None]
        known = [peak for peak in peaks if peak is not None]
        if cases and len(known) == len(cases) and max(known) <= budget.limit:
            found.append(Unmeasured(plan.plan, max(known), plan.case))
    return tuple(sorted(found, key=lambda each: (each.predicted_peak_bytes, each.plan.id))[:FEW])


def front(plans: Sequence[PlanSummary]) -> list[PlanSummary]:
    """The Pareto front of need, RMSE and time: no other needs no more, is no farther from the golden, and as fast.

    RMSE within `ROUNDING` and times within `ALIKE` of each other are equal; of plans equal in all, the one with the
    fewest settings stays.
    """
    kept: list[PlanSummary] = []
    for plan in sorted(plans, key=lambda each: (_need(each), _error(each), len(each.plan.settings), _cost(each))):
        if not any(_covers(other, plan) for other in kept):
            kept.append(plan)
    return [plan for plan in kept if not any(other is not plan and _covers(other, plan) for other in kept)]


def _covers(one: PlanSummary, other: PlanSummary) -> bool:
    """Whether the first is as good in all three: the second is then of no use. Times count beyond `ALIKE` alone."""
    no_worse = _need(one) <= _need(other) and _error(one) <= _error(other)
    return no_worse and (one.seconds or 0.0) <= ALIKE * (other.seconds or 0.0)


def _need(plan: PlanSummary) -> int:
    assert plan.need_bytes is not None
    return plan.need_bytes


def _error(plan: PlanSummary) -> int:
    assert plan.rmse is not None
    return round(plan.rmse / ROUNDING)


def _cost(plan: PlanSummary) -> tuple[int, float, int, str]:
    return _need(plan), plan.seconds or 0.0, len(plan.plan.settings), plan.plan.id


def _merits(plan: PlanSummary, offered: list[PlanSummary]) -> tuple[str, ...]:
    best = {
        "least memory": min(map(_need, offered)) == _need(plan),
        "closest to the golden": min(map(_error, offered)) == _error(plan),
        "fastest": min(each.seconds or 0.0 for each in offered) == plan.seconds,
    }
    return tuple(name for name, is_best in best.items() if is_best)


def _offer(model: Model, plan: PlanSummary, merits: tuple[str, ...], device: str) -> Offer:
    lines, reason = code(model, plan.plan, device)
    return Offer(
        plan.plan, _need(plan), lines, reason, merits, plan.case, plan.seconds, plan.rmse, plan.lpips, plan.seam
    )


def _device(run: RunResult) -> str:
    return "cuda" if str((run.suite.get("request") or {}).get("device", "cpu")).startswith("cuda") else "cpu"


def _basis(run: RunResult, held: list[PlanSummary], full: list[PlanSummary], fitting: list[PlanSummary],
           best: list[PlanSummary]) -> tuple[str, ...]:  # fmt: skip
    kind = "reserved" if _device(run) == "cuda" else "allocated"
    latents = ", ".join(dict.fromkeys(name for plan in held for name in (*plan.passed, *plan.failed)
                                      if "~" not in name))  # fmt: skip
    with_lpips, with_seam = (sum(getattr(plan, name) is not None for plan in full) for name in ("lpips", "seam"))
    return (
        f"measured with {latents} on {run.environment.get('class', 'an unnamed machine')}; memory is the largest "
        f"{kind} peak over them",
        f"of {len(held)} plans {len(full)} passed every gate with figures of their own, {len(fitting)} of them fit"
        + (f", {len(best)} are on the Pareto front" if best else "")
        + _left_out(held, full),
        f"fidelity is RMSE, the one of the three that each of them has (LPIPS {with_lpips} of {len(full)}, seams "
        f"{with_seam}: what is not tiled has none); the gates hold all three",
        f"times within {ALIKE:g}× are taken as equal: each was taken once",
    )


def _left_out(held: list[PlanSummary], full: list[PlanSummary]) -> str:
    why = Counter(_why(plan) for plan in held if plan not in full)
    return f"; left out: {', '.join(f'{count} {reason}' for reason, count in why.most_common())}" if why else ""


def _why(plan: PlanSummary) -> str:
    if plan.failed:
        return "failed, expected or not"
    if plan.emulated:
        return "emulated, without memory or time of their own"
    if plan.missing:
        return "not judged with all latents"
    return "without a measured peak, RMSE or time"


def known(models: Mapping[str, Model], extra: Mapping[str, Model]) -> Callable[[str], Model]:
    """Finds a model by name, `extra` first. Raises RequestError with what to say where it is unknown."""

    def find(name: str) -> Model:
        model = extra.get(name, models.get(name))
        if model is None:
            raise RequestError(f"model {name!r} of this run is not registered here, so its plans cannot be written as "
                               f"code: give --model {name}=PATH (a config.json is enough), or --plugin")  # fmt: skip
        return model

    return find
