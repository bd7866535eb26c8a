"""A comparison on the terminal: what got worse and why, by axis, one line at the end."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from fidelity.comparison import TITLES, CaseChange, Comparison
from fidelity.report import compare, words
from fidelity.report.console import console, fold

STYLES = {
    "regressed": "bold red", "vanished": "bold magenta", "not_comparable": "bold magenta", "worse": "yellow",
    "better": "green", "appeared": "green", "same": "dim", "unjudged": "dim",
}  # fmt: skip


def show(comparison: Comparison, *, limit: int = 20, stream: TextIO | None = None, width: int | None = None) -> None:
    """Print the cases that moved, worst first, `limit` of them, the reasons of regressions, axes and differences."""
    out = console(stream, width=width)
    moved = [case for case in comparison.cases if case.outcome not in ("same", "unjudged")]
    if moved:
        out.print(_cases(moved[:limit], out))
        if len(moved) > limit:
            out.print(f"… and {len(moved) - limit} more", style="dim")
    for case in comparison.regressions[:limit]:
        out.print()
        out.print(Text(words.line(f"{case.id}: {compare.verdicts(case)}"), style=STYLES[case.outcome]), soft_wrap=True)
        for reason in case.reasons:
            out.print(Text(f"  {words.line(reason, 1000)}"), soft_wrap=True)
    if comparison.axes:
        out.print()
        out.print(_axes(comparison))
    for name, was, now in comparison.differences:
        out.print(Text(words.line(f"{name}: {was} → {now}"), style="dim"), soft_wrap=True)
    for note in comparison.notes:
        out.print(Text(words.line(note, 1000), style="yellow"), soft_wrap=True)


def finish(comparison: Comparison, *, page: Path | None = None, stream: TextIO | None = None) -> None:
    """Print the decision on one line, never wrapped."""
    said = f"{compare.headline(comparison)} {compare.tally(comparison)}. {compare.pace(comparison.pace)}"
    style = "bold red" if comparison.exit_status else "bold green"
    tail = f" → {page}" if page else ""
    console(stream).print(Text(words.line(said, 2000) + tail, style=style), soft_wrap=True)


def _cases(cases: list[CaseChange], out: Console) -> Table:
    rows = [[compare.moved(case.change(name)) for name in compare.MAIN] for case in cases]
    names = ("rmse", "lpips", "seam", "peak")
    widths = [max(len(name), *(len(row[place]) for row in rows)) for place, name in enumerate(names)]
    outcome_width = max(len(TITLES[case.outcome]) for case in cases)
    room = max(16, min(out.width - sum(widths) - outcome_width - 6, max(len(case.id) for case in cases)))
    grid = Table(
        Column("case", no_wrap=True, width=room),
        Column("", no_wrap=True),
        *(Column(name, justify="right", no_wrap=True) for name in names),
        box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold",
    )  # fmt: skip
    for case, row in zip(cases, rows):
        outcome = Text(TITLES[case.outcome], style=STYLES[case.outcome])
        grid.add_row(Text(fold(words.line(case.id), room)), outcome, *map(Text, row))
    return grid


def _axes(comparison: Comparison) -> Table:
    grid = Table(
        Column("axis", no_wrap=True),
        Column("", no_wrap=True),
        *(Column(name, justify="right", no_wrap=True) for name in compare.AXIS_HEADER),
        box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold",
    )  # fmt: skip
    for one in comparison.axes:
        grid.add_row(*map(Text, (words.line(one.axis, 24), words.line(one.value, 30), *compare.axis(one))))
    return grid
