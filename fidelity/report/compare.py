"""What every rendering of a comparison says alike, and the three files that `fidelity compare --out` writes."""

from __future__ import annotations

from pathlib import Path

from fidelity.attribution import BYTES
from fidelity.comparison import OUTCOMES, TITLES, AxisChange, CaseChange, Change, Comparison, Outcome, Pace
from fidelity.errors import OutputError
from fidelity.records import to_json
from fidelity.report import files, trend, words

NAMES = ("comparison.json", "comparison.md", "comparison.html")
MARKS: dict[Outcome, str] = {
    "regressed": "✖", "vanished": "✖", "not_comparable": "◆", "worse": "▲", "better": "▼", "appeared": "+",
    "same": "●", "unjudged": "–",
}  # fmt: skip
"""One shape an outcome, so that nothing is told by colour alone."""
KINDS: dict[Outcome, str] = {
    "regressed": "surprise", "vanished": "error", "not_comparable": "error", "worse": "expected", "better": "pass",
    "appeared": "pass", "same": "not_applicable", "unjudged": "not_applicable",
}  # fmt: skip
"""The colour of each outcome, by the kind of case that has it elsewhere."""
MAIN = (*words.MAIN, BYTES)


def write_all(comparison: Comparison, folder: Path) -> None:
    """Write comparison.json, .md and .html to `folder`, each atomically. Raises OutputError; see `refuse_foreign`."""
    from fidelity.report import compare_html, compare_markdown

    files.write(folder / NAMES[0], to_json(comparison))
    files.write(folder / NAMES[1], compare_markdown.render(comparison))
    files.write(folder / NAMES[2], compare_html.render(comparison))


def refuse_foreign(folder: Path) -> None:
    """Raise OutputError if `folder` holds something other than a comparison: a run's folder is replaced whole."""
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} is a file: name a folder with --out")
    if folder.is_dir() and any(folder.iterdir()):
        if (folder / "results.json").is_file():
            raise OutputError(f"{folder} holds a run, nothing written: name a folder of its own with --out")
        if not (folder / NAMES[0]).is_file():
            raise OutputError(f"{folder} holds something other than a comparison, nothing written: name another --out")


def headline(comparison: Comparison) -> str:
    """The decision in one sentence."""
    bad = len(comparison.regressions)
    parts = [f"{words.plural(bad, 'case')} got worse"] if bad else []
    parts += [f"decoding got slower: {comparison.pace.reason}"] if comparison.pace.regressed else []
    if parts:
        return f"{'; '.join(parts)}."
    better = comparison.count("better")
    return "Nothing got worse beyond what may rise" + (
        f", {words.plural(better, 'case')} got better." if better else "."
    )


def counts(comparison: Comparison) -> list[tuple[Outcome, int]]:
    """How many cases had each outcome, worst first, without those that none had."""
    return [(outcome, count) for outcome in OUTCOMES if (count := comparison.count(outcome))]


def tally(comparison: Comparison) -> str:
    """`2 regressed, 14 the same, of 16 cases`."""
    parts = [f"{count} {TITLES[outcome]}" for outcome, count in counts(comparison)]
    return f"{', '.join(parts)}, of {words.plural(len(comparison.cases), 'case')}"


def figure(change: Change | None, value: float | None) -> str:
    """One side of a change, with `–` where there is no number."""
    if change is None or value is None:
        return "–"
    return words.size(round(value)) if change.unit == "bytes" else words.number(value)


def moved(change: Change | None) -> str:
    """`0.285 → 0.31`, one figure where both are the same."""
    if change is None or (change.base is None and change.head is None):
        return "–"
    ends = (figure(change, change.base), figure(change, change.head))
    if change.outcome == "regressed" and change.base is not None and change.head is not None:
        ends = trend.apart(change.name, change.base, change.head)
    return ends[0] if ends[0] == ends[1] else " → ".join(ends)


def share(ratio: float | None) -> str:
    """A ratio as a change in percent: `+5.2 %`, `0 %`."""
    if ratio is None:
        return "–"
    percent = round((ratio - 1) * 100, 1)
    return f"{'+' if percent > 0 else '−' if percent < 0 else ''}{abs(percent):g} %"


def signed(value: float | None) -> str:
    if value is None:
        return "–"
    return "0" if value == 0 else f"{'+' if value > 0 else '−'}{words.number(abs(value))}"


def verdicts(case: CaseChange) -> str:
    """`pass`, or `pass → fail` where they differ."""
    ends = [(side or "absent").replace("_", " ") for side in (case.base, case.head)]
    return ends[0] if ends[0] == ends[1] else " → ".join(ends)


def pace(found: Pace) -> str:
    """Time in one sentence."""
    if found.ratio is None:
        return f"Time was not compared: {found.reason}."
    assert found.low is not None
    assert found.high is not None
    gate = f", allowed {found.allowed:.3g} ×" if found.allowed is not None else ", not gated"
    ratio, low, high = (f"{figure:.3g}" for figure in (found.ratio, found.low, found.high))
    spread = f"half of {found.cases} between {low} and {high}" if low != high else words.plural(found.cases, "case")
    took = f"{ratio} × as long" if ratio != "1" else "as long as before"
    return f"Decodes take {took} ({spread}){gate}."


def plan(case: CaseChange) -> str:
    return words.plan(case.plan) + (f" · check {case.check}" if case.check else "")


def axis(found: AxisChange) -> tuple[str, ...]:
    """An axis's value as cells: cases, regressed, better, mean and worst RMSE rise, memory, time."""
    return (f"{found.cases}", f"{found.regressed}", f"{found.better}", signed(found.rmse), signed(found.rmse_worst),
            share(found.memory), share(found.seconds))  # fmt: skip


AXIS_HEADER = ("cases", "worse", "better", "RMSE, mean", "RMSE, worst", "peak", "time")
