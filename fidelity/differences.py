"""What differs between two runs besides their figures: environment, goldens, suite; and what that means for them."""

from __future__ import annotations

from collections.abc import Sequence

from fidelity.comparison import CaseChange
from fidelity.records import RunResult
from fidelity.trend import SAME_DRIFT, SAME_SHARE

UNKNOWN = "an unknown environment"
OTHER_DRIFT = {"fp32": 0.1, "bf16": 1.0, "fp16": 0.25}
"""Grey levels RMSE between environment classes: other kernels move an fp32 decode by 2e-5 of 2 (the limit is that of
`references.DRIFT_LIMIT_OTHER`), a bf16 decode by one grey level, and fp16, with eight times its digits, by an eighth of
that beside fp32's own."""


def environment_class(run: RunResult) -> str:
    return str(run.environment.get("class") or UNKNOWN)


def same_class(base: RunResult, head: RunResult) -> bool:
    """Whether both ran in one environment class; one that is unknown is like no other."""
    return environment_class(base) == environment_class(head) != UNKNOWN


def other_goldens(base: RunResult, head: RunResult) -> dict[tuple[str, str], tuple[str, ...]]:
    """What is another in the golden of a model's latents, for those that lean on another: weights, latents, sample."""
    before = {(one.model, one.latents): one.digests for one in base.reference}
    found = {}
    for one in head.reference:
        was = before.get((one.model, one.latents), {})
        other = tuple(name for name, digest in one.digests.items() if was.get(name, digest) != digest)
        if other:
            found[one.model, one.latents] = other
    return found


def table(base: RunResult, head: RunResult) -> list[tuple[str, str, str]]:
    """Name, base and head of everything about the two runs that differs."""

    def about(run: RunResult) -> dict[str, str]:
        versions = {f"version of {name}": str(one) for name, one in dict(run.environment.get("versions", {})).items()}
        request = run.suite.get("request") or {}
        return {
            "suite": str(run.suite.get("name")),
            "suite file": str(run.suite.get("digest"))[:12],
            "commit": str(run.commit),
            "model": str(request.get("model")),
            **{name: str(run.environment.get(name)) for name in ("class", "device", "threads", "fp16", "platform")},
            **versions,
        }

    before, after = about(base), about(head)
    names = dict.fromkeys([*before, *after])
    return [
        (name, before.get(name, "absent"), after.get(name, "absent"))
        for name in names
        if before.get(name) != after.get(name)
    ]


def meaning(
    base: RunResult,
    head: RunResult,
    goldens: dict[tuple[str, str], tuple[str, ...]],
    cases: Sequence[CaseChange],
    memory_across: bool,
) -> list[str]:
    """What the differences mean for the comparison, one line each."""
    notes = []
    same = same_class(base, head)
    if not same:
        drift = ", ".join(f"{name} {limit:g}" for name, limit in OTHER_DRIFT.items())
        shown = "other measurements and time" if memory_across else "other measurements, memory and time"
        notes.append(
            f"another environment class ({environment_class(base)}, now {environment_class(head)}): RMSE is held to "
            f"the stated drift limit ({drift} grey levels), {shown} are shown and not gated"
        )
    if base.suite.get("digest") != head.suite.get("digest"):
        notes.append("the suites are not the same file: cases are compared where both have them")
    notes += [f"{'/'.join(key)} leans on a golden of other {' and '.join(other)}" for key, other in goldens.items()]
    silent = [f"{one.model}/{one.latents}" for run in (base, head) for one in run.reference if not one.digests]
    if silent:
        names = ", ".join(dict.fromkeys(silent))
        notes.append(
            f"a run of an earlier version does not say which golden it leaned on: taken as the same for {names}"
        )
    notes += [f"{name} is a partial run" for name, run in (("BASE", base), ("HEAD", head)) if run.partial]
    floors = sum(case.outcome in ("regressed", "worse", "same", "better") for case in cases)
    known = sum(case.approved is not None for case in head.cases if case.verdict in ("pass", "fail"))
    if same and floors and not known:
        notes.append(f"no noise floor is approved here: a rise may be {SAME_DRIFT:g} grey levels, or {SAME_SHARE:.1%}")
    return notes


__all__ = ["OTHER_DRIFT", "environment_class", "meaning", "other_goldens", "same_class", "table"]
