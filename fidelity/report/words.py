"""What every rendering says alike: which kind a case is of, which is worst, and how figures are written."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

from fidelity.records import CaseResult, DecodePlan, Limit, Measurement, RunResult
from fidelity.standings import PlanSummary
from fidelity.standings import against_golden as against_golden
from fidelity.standings import emulated as emulated
from fidelity.standings import peak as peak
from fidelity.standings import seconds as seconds
from fidelity.standings import value as value

Kind = Literal["error", "surprise", "expected", "pass", "not_applicable"]

KINDS: tuple[Kind, ...] = ("error", "surprise", "expected", "pass", "not_applicable")
"""Worst first. Every case is of exactly one kind."""

TITLES: dict[Kind, str] = {
    "error": "errors",
    "surprise": "surprises",
    "expected": "failed as expected",
    "pass": "passed",
    "not_applicable": "not applicable",
}
MARKS: dict[Kind, str] = {"error": "✖", "surprise": "◆", "expected": "▲", "pass": "●", "not_applicable": "–"}
"""One shape a kind, so that nothing is told by colour alone."""

MAIN = ("rmse", "lpips_alex", "tile_seam")
"""The three measurements that a table shows first."""


def kind(case: CaseResult) -> Kind:
    """How a case ended, against what its suite expects of it."""
    if case.verdict == "not_applicable":
        return "not_applicable"
    if case.surprise:
        return "error" if case.verdict == "error" else "surprise"
    return "pass" if case.verdict == "pass" else "expected"


def counts(run: RunResult) -> dict[Kind, int]:
    """Cases of each kind; the values add up to all cases."""
    seen = Counter(kind(case) for case in run.cases)
    return {name: seen[name] for name in KINDS}


def judged(run: RunResult) -> list[CaseResult]:
    return [case for case in run.cases if case.verdict != "not_applicable"]


def worst_first(cases: Iterable[CaseResult]) -> list[CaseResult]:
    """Errors, surprises and expected failures by how far they are over their limits, then passes by RMSE downwards."""
    return sorted(
        cases, key=lambda case: (KINDS.index(kind(case)), -excess(case), -(value(case, "rmse") or 0.0), case.id)
    )


def excess(case: CaseResult) -> float:
    """How many times its limit the worst reason of a red case measured; inf where it was not even a number."""
    if case.verdict == "pass":
        return 0.0
    return max((_times(case, reason) for reason in case.reasons), default=math.inf)


def _times(case: CaseResult, reason: Any) -> float:
    if reason.measured is None or reason.limit is None:
        return math.inf
    measurement = case.measurements.get(reason.name)
    over, under = reason.measured, reason.limit
    if measurement is not None and measurement.better == "higher":
        over, under = under, over
    return over / under if under > 0 else math.inf


def took(run: RunResult) -> str:
    """`in 3:41` where the run recorded its time, else what its judged decodes took together."""
    stored = run.suite.get("seconds")
    if isinstance(stored, (int, float)) and not isinstance(stored, bool):
        return f"in {duration(float(stored))}"
    return f"with {duration(sum(seconds(case) or 0.0 for case in run.cases))} of judged decodes"


def notes(run: RunResult) -> list[str]:
    """What the suite and the run have to say, each once."""
    return list(dict.fromkeys(map(str, [*run.suite.get("notes", ()), *run.notes])))


def excluded(run: RunResult) -> list[tuple[str, int]]:
    """Reasons why the suite leaves cells out, with how many each covers, most first."""
    given = run.suite.get("excluded", ())
    return Counter(str(item.get("reason")) for item in given if isinstance(item, dict)).most_common()


def suite_facts(run: RunResult) -> list[tuple[str, str]]:
    """What is known of the suite, without what `notes` and `excluded` tell."""
    return facts({name: item for name, item in run.suite.items() if name not in ("notes", "excluded")})


def suite_name(run: RunResult) -> str:
    return str(run.suite.get("name") or "fidelity")


def summary(run: RunResult) -> str:
    """`612 cases: 380 passed, 96 failed as expected, 0 surprises, 136 not applicable`; partial runs say so."""
    tally = counts(run)
    surprises = tally["surprise"] + tally["error"]
    parts = [
        f"{tally['pass']} passed",
        f"{tally['expected']} failed as expected",
        f"{surprises} {'surprise' if surprises == 1 else 'surprises'}"
        + (f" ({plural(tally['error'], 'error')})" if tally["error"] else ""),
        f"{tally['not_applicable']} not applicable",
    ]
    return f"{plural(len(run.cases), 'case')}{' (partial run)' if run.partial else ''}: {', '.join(parts)}"


def headline(run: RunResult) -> str:
    """The decision in one sentence."""
    tally = counts(run)
    surprises = tally["surprise"] + tally["error"]
    if not judged(run):
        return "Nothing was judged."
    drifted = sum(not reference.ok for reference in run.reference)
    tail = (
        f" {plural(drifted, 'reference')} left {'its golden' if drifted == 1 else 'their goldens'}." if drifted else ""
    )
    if run.partial:
        tail += " The run is partial: what is missing was not judged."
    if surprises:
        judged_wrong = tally["surprise"]
        parts = [plural(judged_wrong, "case") + " did not end as the suite expects"] if judged_wrong else []
        parts += [plural(tally["error"], "case") + " could not be judged"] if tally["error"] else []
        return f"{'; '.join(parts)}.{tail}"
    return f"Every case ended as the suite expects.{tail}"


def plan(settings: DecodePlan) -> str:
    """A plan in words, defaults left out: `bf16, slicing, tile 16 overlap 0.25, offload disk`."""
    parts: list[str] = [settings.dtype + (" upcast" if settings.force_upcast else "")]
    if settings.slicing:
        parts.append("slicing")
    if settings.tiling is not None:
        parts.append(f"tile {settings.tiling.tile} overlap {settings.tiling.overlap:g}")
    if settings.temporal is not None:
        parts.append(f"frames {settings.temporal.tile} overlap {settings.temporal.overlap:g}")
    if settings.offload != "none":
        parts.append(f"offload {settings.offload}")
    for name, setting in sorted(settings.options.items()):
        if setting:
            parts.append(name if setting is True else f"{name} {setting}")
    return ", ".join(parts)


def figures(held: PlanSummary) -> str:
    """`14.5 MiB peak, 79 % less than plain fp32; 0.19 s; RMSE 0.523`."""
    percent = 0 if held.saved is None else round(held.saved * 100)
    saved = f", {abs(percent)} % {'less' if percent > 0 else 'more'} than plain fp32" if percent else ""
    return f"{size(held.peak_bytes)} peak{saved}; {duration(held.seconds)}; RMSE {number(held.rmse)}"


def case(result: CaseResult) -> str:
    """A case's plan in words, and its check if it is one."""
    return plan(result.plan) + (f" · check {result.check}" if result.check else "")


def approve(result: CaseResult) -> str | None:
    """The command that approves what a case of a suite measured; None where there is nothing to approve."""
    run = "fidelity run "
    if result.check or result.verdict not in ("pass", "fail") or not result.reproduce.startswith(run):
        return None
    if " --plan " in result.reproduce:
        return None
    return f"fidelity golden approve {result.reproduce.removeprefix(run)} --reason 'why this may change'"


def number(figure: float | None, measurement: Measurement | None = None) -> str:
    """Three significant digits, `0` where it is exactly that, `–` where there is none."""
    if figure is None:
        return "–"
    if measurement is not None and measurement.exact:
        return "0 exact" if figure == 0 else "exact"
    if figure == 0 or not math.isfinite(figure):
        return f"{figure:g}"
    magnitude = abs(figure)
    if magnitude >= 1000 or magnitude < 0.001:
        return f"{figure:.2e}"
    return f"{figure:.{max(0, 2 - math.floor(math.log10(magnitude)))}f}"


def size(count: int | None) -> str:
    """Bytes in binary units: `448.6 MiB`."""
    if count is None:
        return "–"
    figure, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(figure) < 1024:
            break
        figure, unit = figure / 1024, larger
    return f"{figure:.0f} {unit}" if unit == "B" or figure >= 1000 else f"{figure:.{1 if figure >= 10 else 2}f} {unit}"


def duration(span: float | None) -> str:
    """`0.31 s`, `12 s`, `3:41`, `1:02:03`."""
    if span is None:
        return "–"
    if span < 10:
        return f"{span:.2f} s"
    if span < 60:
        return f"{span:.0f} s"
    minutes, rest = divmod(round(span), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def limit(bound: Limit | None) -> str:
    """`≤ 4` or `≥ 0.95`, both where both are set; `≤ 4, ≤ 3 × plain` with the upper rule."""
    if bound is None:
        return ""
    parts = [f"≥ {bound.min:g}"] if bound.min is not None else []
    parts += [f"≤ {bound.max:g}"] if bound.max is not None else []
    parts += [f"≤ {bound.times_plain:g} × plain"] if bound.times_plain is not None else []
    return ", ".join(parts)


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def line(text: str, length: int = 400) -> str:
    """`text` as one line without control characters, cut at `length` with an ellipsis."""
    flat = " ".join("".join(char if char.isprintable() else " " for char in str(text)).split())
    return flat if len(flat) <= length else flat[: length - 1] + "…"


def facts(node: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Nested data as (dotted key, text) pairs, for environments and receipts of any shape."""
    if isinstance(node, dict):
        return [pair for key, item in node.items() for pair in facts(item, f"{prefix}.{key}" if prefix else str(key))]
    if isinstance(node, (list, tuple)):
        return [(prefix, ", ".join(str(item) for item in node))]
    return [
        (
            prefix,
            {None: "–", True: "yes", False: "no"}.get(node, str(node))
            if node is None or isinstance(node, bool)
            else str(node),
        )
    ]


def not_applicable(run: RunResult) -> list[tuple[str, int]]:
    """Reasons why cells could not apply, with how many cells each covers, most first."""
    tally = Counter(
        reason.message for case in run.cases if case.verdict == "not_applicable" for reason in case.reasons[:1]
    )
    silent = sum(case.verdict == "not_applicable" and not case.reasons for case in run.cases)
    return [*tally.most_common(), *([("no reason was recorded", silent)] if silent else [])]
