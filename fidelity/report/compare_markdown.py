"""comparison.md: two runs side by side, as a pull-request comment."""

from __future__ import annotations

from fidelity.comparison import TITLES, CaseChange, Comparison, Outcome
from fidelity.report import compare, words
from fidelity.report.comment import bounded, code, table, text

MOST_CASES = 25
MOST_REASONS = 4
MOST_ROWS = 60


def render(comparison: Comparison) -> str:
    """Markdown within a comment's length: the decision, what got worse and why, what differs, by axis."""
    sections = [
        _decision(comparison),
        _regressions(comparison),
        _others(comparison),
        _axes(comparison),
        _differences(comparison),
    ]
    return bounded(sections, "comparison.html")


def _decision(found: Comparison) -> list[str]:
    mark = "❌" if found.exit_status else "✅"
    ends = (found.base, found.head)
    named = [code(side.name, 120) + (f" ({code(side.commit, 50)})" if side.commit else "") for side in ends]
    return [
        f"## {mark} {text(found.head.suite, 120)}: {text(compare.headline(found))}",
        "",
        f"{named[1]} against {named[0]}: {compare.tally(found)}. {text(compare.pace(found.pace))}",
        *(f"\n> {text(note, 600)}" for note in found.notes[:20]),
    ]


def _regressions(found: Comparison) -> list[str]:
    bad = found.regressions
    if not bad:
        return []
    lines = ["### What got worse, worst first", ""]
    for case in bad[:MOST_CASES]:
        lines.append(f"- {code(case.id)}: **{compare.verdicts(case)}**")
        lines += [f"  - {text(reason)}" for reason in case.reasons[:MOST_REASONS]]
        if len(case.reasons) > MOST_REASONS:
            lines.append(f"  - … and {len(case.reasons) - MOST_REASONS} more reasons")
    if len(bad) > MOST_CASES:
        lines += ["", f"… and {len(bad) - MOST_CASES} more in `comparison.html`."]
    return lines


def _others(found: Comparison) -> list[str]:
    """What moved without being a regression."""
    lines = []
    for outcome in ("worse", "better", "appeared", "vanished"):
        cases = [case for case in found.cases if case.outcome == outcome and case not in found.regressions]
        if cases:
            lines += _table(outcome, cases)  # type: ignore[arg-type]
    return lines


def _table(outcome: Outcome, cases: list[CaseChange]) -> list[str]:
    rows = [
        [code(case.id), compare.verdicts(case), *(compare.moved(case.change(name)) for name in compare.MAIN)]
        for case in cases[:MOST_ROWS]
    ]
    head = f"{words.plural(len(cases), 'case')} {TITLES[outcome]}"
    more = [f"\n… and {len(cases) - MOST_ROWS} more in `comparison.html`."] if len(cases) > MOST_ROWS else []
    body = table(["case", "verdict", "RMSE", "LPIPS", "seam", "peak"], rows, right=4)
    return [f"<details><summary>{head}</summary>", "", *body, *more, "", "</details>", ""]


def _axes(found: Comparison) -> list[str]:
    if not found.axes:
        return []
    rows = [[text(one.axis, 60), text(one.value, 80), *compare.axis(one)] for one in found.axes[:MOST_ROWS]]
    more = [f"\n… and {len(found.axes) - MOST_ROWS} more in `comparison.html`."] if len(found.axes) > MOST_ROWS else []
    return [
        "### By axis",
        "",
        *table(["axis", "value", *compare.AXIS_HEADER], rows, right=7),
        *more,
        "",
        "Rise of RMSE in grey levels; peak and time are medians over the cases.",
    ]


def _differences(found: Comparison) -> list[str]:
    if not found.differences:
        return ["Suite, environment and versions are the same."]
    rows = [[text(name, 60), code(was, 80), code(now, 80)] for name, was, now in found.differences[:40]]
    return ["### What else differs", "", *table(["", "base", "head"], rows)]
