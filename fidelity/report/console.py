"""The terminal: progress with what is left, a line per case if asked, a table worst first, one line at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from fidelity.records import CaseResult, RunResult
from fidelity.report import memory, trend, words

STYLES: dict[words.Kind, str] = {
    "error": "bold magenta", "surprise": "bold red", "expected": "yellow", "pass": "green", "not_applicable": "dim",
}  # fmt: skip
LABELS: dict[words.Kind, str] = {
    "error": "ERROR", "surprise": "SURPRISE", "expected": "expected", "pass": "pass", "not_applicable": "n/a",
}  # fmt: skip
NAMES = ("rmse", "lpips", "seam", "peak", "s")
EVERY_SECONDS = 10.0
"""How often progress says something where there is no terminal."""


def console(stream: TextIO | None = None, *, width: int | None = None) -> Console:
    """A console that is plain and never wraps when piped; rich itself honours NO_COLOR, TERM and COLUMNS."""
    out = Console(file=stream or sys.stdout, width=width, highlight=False, markup=False, emoji=False)
    if width is None and not out.is_terminal:
        out = Console(file=stream or sys.stdout, width=240, highlight=False, markup=False, emoji=False)
    return out


@contextmanager
def progress(
    costs: Mapping[str, float], *, kept: Collection[str] = (), jobs: int = 1, verbose: bool = False,
    stream: TextIO | None = None,
) -> Iterator[Advance]:  # fmt: skip
    """Yields `advance(case)`, to be called as each case ends. Goes to stderr, so that stdout stays the table's.

    `costs`: what each case to be judged is thought to cost, in any unit; `kept`: those that cost nothing, since an
    earlier run judged them; `jobs`: how many go on at once. On a terminal: a bar, the phase (`advance.phase`) or case,
    what is left. Elsewhere: a plain line at the first case, every ten seconds and at the end.
    `verbose`: a line for each case as it ends, with its verdict and figures.
    """
    out = console(stream or sys.stderr)
    pace = Pace(costs, kept, jobs)
    if out.is_terminal:
        yield from _bar(pace, out, verbose)
    else:
        yield from _lines(pace, out, verbose)


@dataclass(frozen=True)
class Advance:
    """To be called with each case that has ended; `phase` with what goes on before the first one."""

    case: Callable[[CaseResult], None]
    phase: Callable[[str], None]

    def __call__(self, result: CaseResult) -> None:
        self.case(result)


class Pace:
    """What is left of a run, from what its cases are thought to cost and how fast they went so far.

    The first case brings the start of the workers with it, so time counts from its end on; until a tenth of the rest
    is done, the costs are believed too, scaled by what the cases so far say that they took: another machine's costs
    are wrong by one factor.
    """

    def __init__(self, costs: Mapping[str, float], kept: Collection[str] = (), jobs: int = 1):
        self.jobs = jobs
        self.spent = self.thought = 0.0
        self.costs = {name: 0.0 if name in kept else max(cost, 1e-6) for name, cost in costs.items()}
        self.open = dict(self.costs)
        self.start = time.monotonic()
        self.first: tuple[float, float] | None = None
        """When the first case ended, and what was then left of the costs."""

    @property
    def total(self) -> int:
        return len(self.costs)

    @property
    def done(self) -> int:
        return len(self.costs) - len(self.open)

    def advance(self, name: str, seconds: float = 0.0) -> None:
        cost = self.open.pop(name, 0.0)
        if cost and seconds:
            self.spent, self.thought = self.spent + seconds, self.thought + cost
        if self.first is None and cost:
            self.first = (time.monotonic(), sum(self.open.values()))

    def left(self) -> float | None:
        """Seconds; None before the first case that was not kept has ended."""
        if self.first is None:
            return None
        since, at_first = self.first
        rest = sum(self.open.values())
        believed = at_first / 10
        scale = self.spent / self.thought / self.jobs if self.thought else 1.0
        seconds = (time.monotonic() - since + believed * scale) / max(at_first - rest + believed, 1e-9)
        return rest * seconds


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
    told = (
        cases if len(cases) == 1 and cases[0].verdict != "pass" else surprises
    )  # one case was asked for: say all of it
    for case in told[:limit]:
        _explain(case, out, with_code=len(cases) == 1)
    if len(surprises) > limit:
        out.print(f"… and {len(surprises) - limit} more surprises", style="dim")
    for case in shown:  # as expected; those that were told above have said so
        if case not in told and (said := memory.exhausted(case)) is not None:
            out.print(Text(words.line(f"{case.id}: {said}", 1000), style="dim"), soft_wrap=True)
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


def drifts(run: RunResult, *, stream: TextIO | None = None) -> None:
    """Print what drifts below its limit over the history, one line each."""
    out = console(stream)
    for line in trend.notes(run.trend) if run.trend is not None else ():
        out.print(Text(words.line(line, 1000), style="yellow"), soft_wrap=True)


def resume(run: RunResult, command: str, *, others: Sequence[str] = (), stream: TextIO | None = None) -> None:
    """Say how an interrupted run goes on, by the exact command, and which suites were not begun."""
    out = console(stream or sys.stderr)
    judged, total = len(words.judged(run)), run.suite.get("judged")
    of = f" of {total}" if isinstance(total, int) else ""
    out.print(Text(f"interrupted after {judged}{of} cases; go on with", style="bold yellow"), soft_wrap=True)
    out.print(Text(f"  {command}"), soft_wrap=True)
    if others:
        out.print(Text(f"not begun: {', '.join(others)}", style="yellow"), soft_wrap=True)


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
    widths = [max(len(name), *(len(row[place]) for row in numbers)) for place, name in enumerate(NAMES)]
    verdicts = [_verdict(case) for case in cases]
    verdict_width = max(len("verdict"), *(len(verdict) for verdict in verdicts))
    room = out.width - sum(widths) - verdict_width - (len(NAMES) + 1)
    room = max(16, min(room, max(len(case.id) for case in cases)))
    grid = Table(
        Column("case", no_wrap=True, width=room),
        Column("verdict", no_wrap=True),
        *(Column(name, justify="right", no_wrap=True) for name in NAMES),
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


def _explain(case: CaseResult, out: Console, *, with_code: bool = False) -> None:
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
    if with_code and case.code:
        out.print("\nreproduction without fidelity:\n", style="bold")
        out.print(Text(case.code), soft_wrap=True)


def _line(case: CaseResult, pace: Pace) -> Text:
    """`[12/16] pass model/latents/plan · rmse 0.285 · peak 34.3 MiB · 0.40 s`, and why where it is a surprise."""
    kind = words.kind(case)
    figures = dict(zip((*NAMES[:3], "peak"), _numbers(case)))
    told = [f"{name} {figure}" for name, figure in figures.items() if figure != "–"]
    span = words.seconds(case)
    told += [] if span is None else [words.duration(span)]
    if kind in ("error", "surprise"):
        told += [reason.message for reason in case.reasons[:1]]
    text = Text(f"[{pace.done}/{pace.total}] ", style="dim")
    text.append(f"{LABELS[kind]:<8} ", style=STYLES[kind])
    text.append(words.line(" · ".join([case.id, *told]), 1000), style="default")
    return text


def _bar(pace: Pace, out: Console, verbose: bool) -> Iterator[Advance]:
    name = TextColumn(
        "{task.fields[case]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
    )
    with Progress(
        BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(), _Left(pace), name,
        console=out, transient=True, expand=True,
    ) as bar:  # fmt: skip
        task = bar.add_task("cases", total=pace.total, case="")

        def advance(case: CaseResult) -> None:
            pace.advance(case.id, sum(case.seconds.values()))
            if verbose:
                bar.console.print(_line(case, pace), soft_wrap=True)
            bar.update(task, completed=pace.done, case=words.line(case.id))

        yield Advance(advance, lambda text: bar.update(task, case=words.line(text)))


def _rough(seconds: float) -> str:
    """A guess has no hundredths: `3 s`, `2:10`."""
    return f"{max(1, round(seconds))} s" if round(seconds) < 60 else words.duration(round(seconds))


class _Left(ProgressColumn):
    """What is left: `2:10 left`."""

    def __init__(self, pace: Pace):
        super().__init__()
        self.pace = pace

    def render(self, task: Task) -> Text:
        left = self.pace.left()
        return Text("" if left is None or task.finished else f"{_rough(left)} left", style="dim")


def _lines(pace: Pace, out: Console, verbose: bool) -> Iterator[Advance]:
    last = pace.start - EVERY_SECONDS

    def advance(case: CaseResult) -> None:
        nonlocal last
        pace.advance(case.id, sum(case.seconds.values()))
        now = time.monotonic()
        due = now - last >= EVERY_SECONDS or pace.done == pace.total
        left = pace.left()
        about = "" if left is None else f", about {_rough(left)} left"
        tail = about if pace.done < pace.total else f" in {words.duration(now - pace.start)}"
        if verbose:
            out.print(_line(case, pace).append(tail if due else "", style="dim"), soft_wrap=True)
        elif due:
            out.print(f"{pace.done}/{pace.total} {words.line(case.id)}{tail}", soft_wrap=True)
        last = now if due else last

    yield Advance(advance, lambda _: None)
