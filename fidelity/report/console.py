"""The terminal: a progress bar with the case and what is left, a table worst first, one line at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from fidelity.records import CaseResult, RunResult
from fidelity.report import words

STYLES: dict[words.Kind, str] = {
    "error": "bold magenta", "surprise": "bold red", "expected": "yellow", "pass": "green", "not_applicable": "dim",
}  # fmt: skip
LABELS: dict[words.Kind, str] = {
    "error": "ERROR", "surprise": "SURPRISE", "expected": "expected", "pass": "pass", "not_applicable": "n/a",
}  # fmt: skip
EVERY_SECONDS = 10.0
"""How often progress says something where there is no terminal."""


def console(stream: TextIO | None = None, *, width: int | None = None) -> Console:
    """A console that is plain and never wraps when piped; rich itself honours NO_COLOR, TERM and COLUMNS."""
    out = Console(file=stream or sys.stdout, width=width, highlight=False, markup=False, emoji=False)
    if width is None and not out.is_terminal:
        out = Console(file=stream or sys.stdout, width=240, highlight=False, markup=False, emoji=False)
    return out


@contextmanager
def progress(total: int, stream: TextIO | None = None) -> Iterator[Callable[[str], None]]:
    """Yields `advance(case_id)`, to be called as each case ends. Goes to stderr, so that stdout stays the table's.

    On a terminal: a bar, the case, what is left. Elsewhere: a plain line at the start's first case, every ten seconds
    and at the end.
    """
    out = console(stream or sys.stderr)
    if out.is_terminal:
        yield from _bar(total, out)
    else:
        yield from _lines(total, out)


def table(run: RunResult, *, limit: int = 20, stream: TextIO | None = None, width: int | None = None) -> None:
    """Print judged cases worst first, `limit` of them, then the surprises' reasons in words."""
    out = console(stream, width=width)
    cases = words.worst_first(words.judged(run))
    if not cases:
        out.print("nothing was judged", style="bold red")
        return
    shown = cases[:limit]
    out.print(_table(shown, out))
    if len(cases) > limit:
        out.print(f"… and {len(cases) - limit} more", style="dim")
    surprises = [case for case in cases if case.surprise]
    for case in surprises[:limit]:
        _explain(case, out)
    if len(surprises) > limit:
        out.print(f"… and {len(surprises) - limit} more surprises", style="dim")
    if any(words.emulated(case) for case in shown):
        out.print("E: fp16 emulated, so it has no memory of its own", style="dim")


def summary(run: RunResult, *, seconds: float | None = None, report: Path | None = None) -> str:
    """`612 cases: 380 passed, 96 failed as expected, 0 surprises, 136 not applicable in 3:41 → runs/x/report.html`."""
    took = words.took(run) if seconds is None else f"in {words.duration(seconds)}"
    return f"{words.summary(run)} {took}{'' if report is None else f' → {report}'}"


def finish(
    run: RunResult, *, seconds: float | None = None, report: Path | None = None, stream: TextIO | None = None
) -> None:
    """Print the summary line, never wrapped, so that the path can be clicked or cut."""
    out = console(stream)
    style = {0: "bold green", 1: "bold red", 3: "bold magenta"}[run.exit_status]
    out.print(Text(words.line(summary(run, seconds=seconds, report=report), 2000), style=style), soft_wrap=True)


def fold(name: str, width: int) -> str:
    """`name` on lines of at most `width`: its plan on a line of its own, broken after `/` and `-` where possible."""
    lines, line = [], ""
    place, _, plan = name.rpartition("/")
    if len(name) > width and place and plan:
        return fold(f"{place}/", width) + "\n" + fold(plan, width)
    for piece in name.replace("/", "/\0").replace("-", "-\0").split("\0"):
        if line and len(line) + len(piece) > width:
            lines.append(line)
            line = ""
        line += piece
        while len(line) > width:
            lines.append(line[:width])
            line = line[width:]
    return "\n".join([*lines, line] if line else lines)


def _table(cases: list[CaseResult], out: Console) -> Table:
    numbers = [_numbers(case) for case in cases]
    names = ["rmse", "lpips", "seam", "peak", "s"]
    widths = [max(len(name), *(len(row[place]) for row in numbers)) for place, name in enumerate(names)]
    verdicts = [_verdict(case) for case in cases]
    verdict_width = max(len("verdict"), *(len(verdict) for verdict in verdicts))
    room = out.width - sum(widths) - verdict_width - (len(names) + 1)
    room = max(16, min(room, max(len(case.id) for case in cases)))
    grid = Table(
        Column("case", no_wrap=True, width=room),
        Column("verdict", no_wrap=True),
        *(Column(name, justify="right", no_wrap=True) for name in names),
        box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold",
    )  # fmt: skip
    for case, verdict, row in zip(cases, verdicts, numbers):
        style = STYLES[words.kind(case)]
        grid.add_row(Text(fold(words.line(case.id), room)), Text(verdict, style=style), *(Text(cell) for cell in row))
    return grid


def _numbers(case: CaseResult) -> list[str]:
    figures = [words.number(words.value(case, name)) for name in words.MAIN]
    span = words.seconds(case)
    return [*figures, words.size(words.peak(case)), "–" if span is None else f"{span:.2f}"]


def _verdict(case: CaseResult) -> str:
    mark = " E" if words.emulated(case) else ""
    return LABELS[words.kind(case)] + mark


def _explain(case: CaseResult, out: Console) -> None:
    blame = f" ({', '.join(case.diagnosis)})" if case.diagnosis else ""
    expected = case.expected + (f" for {', '.join(case.expected_diagnosis)}" if case.expected_diagnosis else "")
    style = STYLES[words.kind(case)]
    out.print()
    title = words.line(f"{case.id}: {case.verdict}{blame}, expected {expected}")
    out.print(Text(title, style=style), soft_wrap=True)
    for reason in case.reasons:
        out.print(Text(f"  {words.line(reason.message, 1000)}"), soft_wrap=True)
    if case.reproduce:
        out.print(Text(f"  {words.line(case.reproduce, 1000)}", style="dim"), soft_wrap=True)


def _bar(total: int, out: Console) -> Iterator[Callable[[str], None]]:
    name = TextColumn(
        "{task.fields[case]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
    )
    with Progress(
        BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(), _Left(), name,
        console=out, transient=True, expand=True,
    ) as bar:  # fmt: skip
        task = bar.add_task("cases", total=total, case="")
        yield lambda case_id: bar.update(task, advance=1, case=words.line(case_id))


class _Left(ProgressColumn):
    """What is left at the pace so far: `2:10 left`."""

    def render(self, task: Task) -> Text:
        left = task.time_remaining
        return Text("" if left is None or task.finished else f"{words.duration(left)} left", style="dim")


def _lines(total: int, out: Console) -> Iterator[Callable[[str], None]]:
    start = time.monotonic()
    last, done = start - EVERY_SECONDS, 0

    def advance(case_id: str) -> None:
        nonlocal last, done
        done += 1
        now = time.monotonic()
        if now - last < EVERY_SECONDS and done < total:
            return
        last = now
        left = (now - start) / done * (total - done)
        tail = f", about {words.duration(left)} left" if done < total else f" in {words.duration(now - start)}"
        out.print(f"{done}/{total} {words.line(case_id)}{tail}", soft_wrap=True)

    yield advance
