"""`fidelity run`: decode, measure, gate, report."""

from __future__ import annotations

import dataclasses
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fidelity.cli.common import (
    INTERRUPTED,
    case_option,
    device_option,
    jobs_option,
    model_option,
    plugin_option,
    prepare,
)  # fmt: skip
from fidelity.errors import RequestError

if TYPE_CHECKING:
    from fidelity.runs import Options
    from fidelity.suite import Suite

ENDED: list[int] = []
"""Statuses of the runs that ended, for when their printing cannot."""
QUICK_SUITE = Path(__file__).parent.parent / "data" / "quick.toml"


@click.command()
@click.argument("suites", nargs=-1, metavar="SUITE…", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Default: runs/<suite>.")
@click.option("--plan", metavar="PLAN", help="One plan instead of the matrix: bf16,tile=16,overlap=0.25,slicing.")
@click.option("--record-missing", is_flag=True, help="Record goldens that do not exist, then judge against them.")
@click.option("--resume", is_flag=True, help="Keep the results of an interrupted run.")
@click.option("-q", "--quiet", is_flag=True, help="Only the summary line.")
@case_option
@device_option
@jobs_option
@model_option
@plugin_option
def run(suites: tuple[Path, ...], out: Path | None, plan: str | None, glob: str | None, device: str,
        jobs: int | None, model: str | None, plugins: tuple[str, ...], record_missing: bool, resume: bool,
        quiet: bool) -> int:  # fmt: skip
    """Decode, measure and gate every case of the suites; write tables, pictures and reports.

    Without a SUITE, --plan is judged on a pair of photographs against a golden recorded on the spot.
    """
    from fidelity import folders, runs
    from fidelity import suite as suite_

    registry, substitute, mine = prepare(plugins, model)
    if not suites and plan is None:
        raise RequestError("nothing to run: name a suite, as in fidelity run suites/reference.toml, or give --plan")
    wanted = suite_.parse_plan(plan, registry) if plan is not None else None
    loaded: list[Suite] = []
    for path in suites or (QUICK_SUITE,):
        one = suite_.load(path, registry, substitute=mine)
        one = suite_.with_plan(one, wanted) if wanted is not None else one
        loaded.append(suite_.select(one, glob) if glob is not None else one)
    names = [one.name for one in loaded]
    if len(set(names)) < len(names):
        raise RequestError(f"two of the suites have the same name ({', '.join(names)}): rename one")
    parent = out or Path("runs")
    targets = [out] if out is not None and len(loaded) == 1 else [parent / one.name for one in loaded]
    for folder in targets:
        folders.refuse_foreign(folder)
    options = runs.Options(
        device=device,
        jobs=jobs,
        plugins=plugins,
        path=(os.getcwd(),) if plugins else (),
        substitute=substitute,
        record_missing=record_missing,
        private_goldens=not suites,
    )
    status = 0
    for one, folder in zip(loaded, targets):
        request = _request(str(one.path) if suites else None, plan, model, device, plugins)
        status = max(status, _run_one(one, folder, dataclasses.replace(options, request=request), resume, quiet))
        if status == INTERRUPTED:
            break
    return status


def _request(suite: str | None, plan: str | None, model: str | None, device: str, plugins: tuple[str, ...]) -> str:
    """The command line that reproduces a case, up to its --case."""
    words = ["fidelity", "run", *([suite] if suite else [])]
    for option, value in (("--plan", plan), ("--model", model), *(("--plugin", name) for name in plugins)):
        words += [option, value] if value is not None else []
    words += ["--device", device] if device != "cpu" else []
    return shlex.join(words)


def _run_one(one: Suite, folder: Path, options: Options, resume: bool, quiet: bool) -> int:
    import shutil
    import time
    from contextlib import nullcontext

    from fidelity import folders, report, runs
    from fidelity.report import console

    start = time.monotonic()
    kept = folders.resumable(folder, one, options) if resume else None
    with folders.staged(folder) as stage:
        if kept is not None and (folder / "images").is_dir():
            shutil.copytree(folder / "images", stage.path / "images")
        with console.progress(len(one.judged)) if not quiet else nullcontext(runs.silent) as advance:
            result = runs.execute(one, stage.path, options, kept=kept, progress=advance)
        report.write_all(result, stage.path)
        folder = stage.settle(result, resumed=resume)
    status = INTERRUPTED if result.partial else result.exit_status
    ENDED.append(status)
    if not quiet:
        console.table(result)
    console.finish(result, seconds=time.monotonic() - start, report=folder / "report.html")
    return status
