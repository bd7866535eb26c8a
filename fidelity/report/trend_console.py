"""A trend on the terminal: its runs, a line of bars for each series, and its drifts in words."""

from __future__ import annotations

from typing import TextIO

from rich.table import Column, Table
from rich.text import Text

from fidelity.report import trend as said
from fidelity.report import words
from fidelity.report.console import console, fold
from fidelity.trend import Series, Trend

MOST_SERIES = 30


def show(trend: Trend, *, stream: TextIO | None = None, width: int | None = None) -> None:
    """Print the runs, oldest first; the series that drift, then those that moved most; and the drifts' own lines."""
    out = console(stream, width=width)
    out.print(_runs(trend))
    out.print()
    drifting = {(one.case, one.name) for one in trend.drifts}

    def order(one: Series) -> tuple[bool, bool, float]:
        return ((one.case, one.name) not in drifting, one.unit == "s", -said.moved(one))  # times always move

    ordered = sorted(trend.series, key=order)
    shown = ordered[:MOST_SERIES]
    grid = Table(
        Column("case", no_wrap=True), Column("measurement", no_wrap=True), Column("", no_wrap=True),
        Column("first", justify="right", no_wrap=True), Column("last", justify="right", no_wrap=True),
        Column("", no_wrap=True), box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold",
    )  # fmt: skip
    room = max(16, out.width - 40 - len(trend.runs))
    for one in shown:
        known = [value for value in one.values if value is not None]
        ends = [said.figure(one.name, value) for value in (known[0], known[-1])] if known else ["–", "–"]
        drifts = (one.case, one.name) in drifting
        mark = Text("drift" if drifts else "", style="bold red")
        name = Text(fold(words.line(one.case), room))
        grid.add_row(name, Text(one.name), Text(said.spark(one.values)), *map(Text, ends), mark)
    out.print(grid)
    if len(ordered) + trend.left_out > len(shown):
        more = len(ordered) + trend.left_out - len(shown)
        out.print(f"… and {more} more: narrow with --case and --measurement", style="dim")
    for line in said.notes(trend):
        out.print(Text(words.line(line, 1000), style="yellow"), soft_wrap=True)
    if not trend.drifts:
        few = f"; {trend.untested} series have too few comparable runs to tell" if trend.untested else ""
        out.print(Text(f"nothing drifts below its limit{few}"), soft_wrap=True)


def _runs(trend: Trend) -> Table:
    grid = Table(
        Column("run", no_wrap=True), Column("commit", no_wrap=True), Column("environment", no_wrap=True),
        Column("versions that changed", no_wrap=True), Column("exit", justify="right", no_wrap=True),
        title=words.line(trend.runs[-1].suite, 80), title_justify="left", title_style="bold",
        box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold",
    )  # fmt: skip
    before: dict[str, str] = {}
    for place, one in enumerate(trend.runs):
        changed = [
            f"{name} {version}" for name, version in one.versions.items() if before.get(name, version) != version
        ]
        cells = (one.recorded[:16].replace("T", " "), said.short(one.commit), one.environment,
                 ", ".join(changed) if place else "", str(one.exit_status))  # fmt: skip
        grid.add_row(*(Text(words.line(cell, 80)) for cell in cells))
        before = one.versions
    return grid
