"""comparison.html: two runs side by side on one page without scripts; it works from disk and in any browser."""

from __future__ import annotations

import math
from typing import Any

from fidelity.comparison import TITLES, CaseChange, Comparison
from fidelity.report import compare, html, trend, words

MOST_OPEN = 40
"""Regressed cases that are shown with all their figures; the others stand in the table."""
DOTS = 260
"""Size of the scatter of RMSE, in pixels."""


def render(comparison: Comparison) -> str:
    """The page. All text from the runs is escaped; nothing is fetched and nothing runs."""
    return html.fill(
        "compare.html.j2",
        ("compare.css",),
        found=comparison,
        words=words,
        compare=compare,
        said=trend,
        titles=TITLES,
        regressions=comparison.regressions,
        most_open=MOST_OPEN,
        dots=_dots(comparison.cases),
        size=DOTS,
    )


def _dots(cases: tuple[CaseChange, ...]) -> list[dict[str, Any]]:
    """Where each case's RMSE lies, base across and head up, on one logarithmic scale; zero lies at the corner."""
    pairs = [(case, change.base, change.head) for case in cases if (change := case.change("rmse")) is not None]
    whole = [(case, was, now) for case, was, now in pairs if was is not None and now is not None]
    positive = [value for _, was, now in whole for value in (was, now) if value > 0]
    if not positive:
        return []
    low, high = math.log10(min(positive)) - 0.3, math.log10(max(positive)) + 0.1

    def place(value: float) -> float:
        return round(8 + (DOTS - 16) * ((math.log10(value) - low) / (high - low) if value > 0 else 0.0), 1)

    return [
        {
            "x": place(was),
            "y": round(DOTS - place(now), 1),
            "kind": compare.KINDS[case.outcome],
            "said": f"{case.id}: {words.number(was)} → {words.number(now)}",
        }
        for case, was, now in reversed(whole)
    ]
