"""`fidelity run`: decode, measure, gate, report."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import structs

from fidelity.cli.common import (
    INTERRUPTED,
    NOT_JUDGED,
    case_option,
    device_option,
    jobs_option,
    model_option,
    plugin_option,
    prepare,
    status_of,
    tell,
    undisturbed,
)  # fmt: skip
from fidelity.errors import LatentsError, RequestError
from fidelity.wording import parse_bytes

if TYPE_CHECKING:
    from fidelity.records import Model, RunResult
    from fidelity.runs import Options
    from fidelity.suite import Suite

ENDED: list[int] = []
"""Statuses of the runs that ended, for when their printing cannot."""
DATA = Path(__file__).parent.parent / "data"
QUICK_SUITES = (DATA / "quick.toml", DATA / "quick_video.toml", DATA / "quick_drawn.toml")
"""For `--plan` without a suite: the first whose latents the model takes."""


def _quick(mine: Model | None, registry: Any) -> Path:
    """The suite of one plan: photographs where the model encodes pictures, else panned ones, else drawn latents."""
    pictures, videos, drawn = QUICK_SUITES
    if mine is None:
        return pictures
    for path, latents in ((pictures, "photo-pair"), (videos, "photo-pan")):
        try:
            registry.LATENTS.get(latents).shape(mine.geometry)
        except LatentsError:
            continue
        return path if mine.family.encodes else drawn
    return drawn


@click.command()
@click.argument("suites", nargs=-1, metavar="SUITE…", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Default: runs/<suite>, with --case beside a larger run there.",
)
@click.option("--plan", metavar="PLAN", help="One plan instead of the matrix: bf16,tile=16,overlap=0.25,slicing.")
@click.option("--record-missing", is_flag=True, help="Record goldens that do not exist, then judge against them.")
@click.option("--memory-limit", metavar="SIZE", help="What each decode may need beyond the loaded model: 24MiB, 6GiB.")
@click.option("--resume", is_flag=True, help="Keep the results of an interrupted run.")
@click.option("--history", type=click.Path(path_type=Path), metavar="DB", help="Add the run to this file.")
@click.option("-v", "--verbose", is_flag=True, help="A line for each case as it ends.")
@click.option("-q", "--quiet", is_flag=True, help="Only the summary line.")
@case_option
@device_option
@jobs_option
@model_option
@plugin_option
def run(suites: tuple[Path, ...], out: Path | None, plan: str | None, glob: str | None, device: str,
        jobs: int | None, model: str | None, plugins: tuple[str, ...], record_missing: bool, memory_limit: str | None,
        resume: bool, history: Path | None, verbose: bool, quiet: bool) -> int:  # fmt: skip
    """Decode, measure and gate every case of the suites; write tables, pictures and reports.

    Without a SUITE, --plan is judged on a pair of photographs against a golden recorded on the spot.
    """
    from fidelity import folders, runs
    from fidelity import suite as suite_
    from fidelity.history import schema

    if quiet and verbose:
        raise RequestError("--quiet and --verbose ask for opposite things: leave one out")
    registry, substitute, mine = prepare(plugins, model)
    if not suites and plan is None:
        raise RequestError("nothing to run: name a suite, as in fidelity run suites/reference.toml, or give --plan")
    wanted = suite_.parse_plan(plan, registry) if plan is not None else None
    allowed = parse_bytes(memory_limit, "--memory-limit") if memory_limit is not None else None
    loaded: list[Suite] = []
    for path in suites or (_quick(mine, registry),):
        one = suite_.load(path, registry, substitute=mine)
        one = suite_.with_plan(one, wanted) if wanted is not None else one
        one = suite_.select(one, glob) if glob is not None else one
        one = suite_.with_memory_limit(one, allowed) if allowed is not None else one
        loaded.append(suite_.on(one, device))
    names = [one.name for one in loaded]
    if len(set(names)) < len(names):
        raise RequestError(f"two of the suites have the same name ({', '.join(names)}): rename one")
    parent = out or Path("runs")
    targets = [out] if out is not None and len(loaded) == 1 else [parent / one.name for one in loaded]
    if glob is not None and not resume:  # a selection never takes the place of a larger run
        sizes = [len(one.judged) for one in loaded]
        if out is None:
            targets = [folders.for_selection(folder, size) for folder, size in zip(targets, sizes)]
        for folder, size in zip(targets, sizes):
            folders.refuse_larger(folder, size)
    for folder in targets:
        folders.refuse_foreign(folder)
    if history is not None:
        schema.refuse(history)
    options = runs.Options(
        device=device,
        jobs=jobs,
        plugins=plugins,
        path=(os.getcwd(),) if plugins else (),
        substitute=substitute,
        record_missing=record_missing,
        private_goldens=not suites,
        memory_limit=allowed,
    )
    status = 0
    for place, (one, folder) in enumerate(zip(loaded, targets)):
        request = _request(str(one.path) if suites else None, plan, model, device, plugins, memory_limit)
        again = _again(request, glob=glob, jobs=jobs, record_missing=record_missing, history=history)
        job = Job(one, folder, dataclasses.replace(options, request=request), resume, quiet, verbose, history, again)
        status = max(status, job.run(others=names[place + 1 :]))
        if status == INTERRUPTED:
            break
    return status


def _request(suite: str | None, plan: str | None, model: str | None, device: str, plugins: tuple[str, ...],
             memory_limit: str | None = None) -> str:  # fmt: skip
    """The command line that reproduces a case, up to its --case."""
    words = ["fidelity", "run", *([suite] if suite else [])]
    named = (("--plan", plan), ("--model", model), ("--memory-limit", memory_limit))
    for option, value in (*named, *(("--plugin", name) for name in plugins)):
        words += [option, value] if value is not None else []
    words += ["--device", device] if device != "cpu" else []
    return shlex.join(words)


def _again(request: str, *, record_missing: bool, **options: Any) -> str:
    """The whole command line but for --out and --resume."""
    names = {"glob": "--case", "jobs": "--jobs", "history": "--history"}
    words = [word for key, value in options.items() if value is not None for word in (names[key], str(value))]
    words += ["--record-missing"] if record_missing else []
    return f"{request} {shlex.join(words)}".rstrip()


@dataclasses.dataclass(frozen=True)
class Job:
    """One suite to be run into one folder."""

    suite: Suite
    folder: Path
    options: Options
    resume: bool
    quiet: bool
    verbose: bool
    history: Path | None
    again: str
    """The command line that goes on with it, but for --out and --resume."""

    def run(self, others: list[str]) -> int:
        """Run, write, print; returns the exit status. `others` are the suites that follow."""
        import shutil
        import time
        from contextlib import ExitStack

        from fidelity import folders, report
        from fidelity.report import console, github, markdown

        start = time.monotonic()
        kept = folders.resumable(self.folder, self.suite, self.options) if self.resume else None
        with ExitStack() as writing, folders.staged(self.folder) as stage:
            if kept is not None and (self.folder / "images").is_dir():
                shutil.copytree(self.folder / "images", stage.path / "images")
            judged = self._execute(stage.path, kept)
            writing.enter_context(undisturbed())
            folder = stage.settle(judged, resumed=self.resume)
            resume = f"{self.again} --out {shlex.quote(os.path.relpath(folder))} --resume"
            if judged.partial:
                click.echo("fidelity: stopping, writing what was judged", err=True)
                judged = structs.replace(judged, suite={**judged.suite, "resume": resume})
            result, unsaved = self._recorded(judged)
            failed = report.write_all(result, stage.path)
        status = tell(failed, max(status_of(result), NOT_JUDGED if unsaved else 0))
        ENDED.append(status)
        if not self.quiet:
            console.table(result)
            console.drifts(result)
        github.run(result, markdown.render(result))
        console.finish(result, seconds=time.monotonic() - start, report=folder / "report.html")
        if result.partial:
            console.resume(result, resume, others=others)
        if unsaved:
            add = f"fidelity history {shlex.quote(str(self.history))} --add {shlex.quote(os.path.relpath(folder))}"
            click.echo(f"fidelity: {unsaved}; the run is in {folder}: {add} adds it", err=True)
        return status

    def _execute(self, folder: Path, kept: RunResult | None) -> RunResult:
        from contextlib import nullcontext
        from datetime import datetime, timezone

        from fidelity import estimate, runs
        from fidelity.history.commit import commit
        from fidelity.pool import default_jobs
        from fidelity.report import console

        began, which = datetime.now(timezone.utc).isoformat(timespec="milliseconds"), commit()
        costs = {case.id: estimate.seconds(self.suite, case) for case in self.suite.judged}
        before = {case.id for case in kept.cases} if kept is not None else ()
        jobs = self.options.jobs or default_jobs(self.options.device)
        told = console.progress(costs, kept=before, jobs=jobs, verbose=self.verbose)
        with nullcontext(console.Advance(runs.silent, runs.silent)) if self.quiet else told as advance:
            result = runs.execute(self.suite, folder, self.options, kept=kept, progress=advance, phase=advance.phase)
        return structs.replace(result, recorded=began, commit=which)

    def _recorded(self, result: RunResult) -> tuple[RunResult, str | None]:
        """The result with its trend and drifts, added to the history; or as it is, with why it was not added."""
        if self.history is None:
            return result, None
        if result.partial:
            said = "a partial run is not added to the history; a complete one will be"
            return structs.replace(result, notes=(*result.notes, said)), None
        from fidelity.history import database
        from fidelity.report import trend as said_of

        try:
            trend = database.append(self.history, result)
        except (sqlite3.Error, RequestError) as error:  # results that took minutes outweigh a file that went bad
            why = f"the run was not added to {self.history}: {error}"
            return structs.replace(result, notes=(*result.notes, why)), why
        return structs.replace(result, trend=trend, notes=(*result.notes, *said_of.notes(trend))), None
