"""A history's trend in words: its drifts, one line each, and a series as a line of bars."""

from __future__ import annotations

from collections.abc import Sequence

from fidelity.report import words
from fidelity.trend import Drift, Series, Trend, TrendRun

BARS = "▁▂▃▄▅▆▇█"
MOST_NOTES = 5


def notes(trend: Trend, most: int = MOST_NOTES) -> list[str]:
    """Drifts that no limit sees, worst first; cases that drift alike (offload moves no pixel) share a line."""
    groups: dict[tuple[object, ...], list[Drift]] = {}
    for one in trend.drifts:
        alike = (one.name, one.kind, words.number(one.before), words.number(one.after), one.since)
        groups.setdefault(alike, []).append(one)
    lines = [f"{_drift(found[0], trend.runs)}{_more(len(found) - 1)}" for found in list(groups.values())[:most]]
    told = sum(len(found) for found in list(groups.values())[:most])
    if trend.drifting > told:
        lines.append(f"{trend.drifting - told} more series drift within their limits: see the history")
    return lines


def _more(count: int) -> str:
    return f"; {words.plural(count, 'more case')} alike" if count else ""


def _drift(one: Drift, runs: Sequence[TrendRun]) -> str:
    verb = {"step": "stepped", "creep": "crept"}[one.kind]
    limit = f", limit {figure(one.name, one.limit)}" if one.limit is not None else ", no limit"
    before, after = apart(one.name, one.before, one.after)
    ends = f"from {before} to {after} {unit(one)}".rstrip()
    return (
        f"drift below the limit: {one.name} of {one.case} {verb} {ends} over {one.runs} comparable runs "
        f"(noise floor {figure(one.name, one.floor)}{limit}), since {run(runs[one.since])}"
    )


def run(one: TrendRun) -> str:
    """A run in a few words: `1a2b3c4 of 2026-11-30 12:40`."""
    when = one.recorded[:16].replace("T", " ")
    return f"{short(one.commit)} of {when}" if one.commit else when


def short(commit: str | None) -> str:
    """A commit as people write it: `1a2b3c4`, `1a2b3c4-dirty`."""
    if not commit:
        return "–"
    name, dash, dirty = commit.partition("-")
    return name[:7] + dash + dirty


def unit(one: Drift | Series) -> str:
    return "" if one.unit == "bytes" else one.unit


def figure(name: str, value: float | None) -> str:
    return words.size(round(value)) if name.endswith("_bytes") and value is not None else words.number(value)


def apart(name: str, before: float, after: float) -> tuple[str, str]:
    """Two figures with as many digits as it takes to tell them apart."""
    said = figure(name, before), figure(name, after)
    for digits in range(4, 18):
        if said[0] != said[1] or before == after:
            break
        said = f"{before:.{digits}g}", f"{after:.{digits}g}"
    return said


def spark(values: Sequence[float | None]) -> str:
    """One bar a run, from the least to the most; `·` where there is no value, the lowest where all are the same."""
    known = [value for value in values if value is not None]
    if not known:
        return "·" * len(values)
    low, span = min(known), max(known) - min(known)

    def bar(value: float | None) -> str:
        if value is None:
            return "·"
        return BARS[min(len(BARS) - 1, int((value - low) / span * len(BARS)))] if span else BARS[0]

    return "".join(map(bar, values))


def moved(one: Series) -> float:
    """How far it moved, as a share of its level: what is told first where nothing drifts."""
    known = [value for value in one.values if value is not None]
    level = max(map(abs, known), default=0.0)
    return (max(known) - min(known)) / level if level else 0.0
