"""The command line. Modules that cost time are imported by the command that needs them: `--help`, `ls` and `validate`
import neither torch nor diffusers.

Exit status: 0 as the suites expect · 1 a gate failed · 2 the request is wrong · 3 a case could not be judged.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fidelity import __version__
from fidelity.errors import FidelityError, RequestError

if TYPE_CHECKING:
    from fidelity.records import RunResult
    from fidelity.runs import Options
    from fidelity.suite import Suite

WRONG_REQUEST, NOT_JUDGED, INTERRUPTED = 2, 3, 130
_STATUS: list[int] = []
"""Statuses of the runs that ended, for when their printing cannot."""
QUICK_SUITE = Path(__file__).parent / "data" / "quick.toml"

plugin_option = click.option("--plugin", "plugins", multiple=True, metavar="MODULE", help="Import MODULE first.")
model_option = click.option("--model", metavar="NAME=PATH", help="Evaluate the autoencoder at PATH as NAME.")
case_option = click.option("--case", "glob", metavar="GLOB", help="Only cases whose whole id matches.")
device_option = click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
jobs_option = click.option("--jobs", type=int, help="Worker processes, each on cores of its own.")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="fidelity")
def cli() -> None:
    """What did slicing, tiling, offload and half precision do to the picture?"""


def _prepare(plugins: tuple[str, ...], model: str | None) -> tuple[Any, tuple[str, str] | None, Any]:
    """The registry with plugins loaded, and the --model's name, path and Model."""
    sys.path[:0] = [entry for entry in [os.getcwd()] if plugins and entry not in sys.path]
    from fidelity import registry
    from fidelity.models.load import from_path

    registry.load_plugins(plugins)
    if model is None:
        return registry, None, None
    name, equals, path = model.partition("=")
    if not equals or not name or not path:
        raise RequestError(f"--model {model!r}: write NAME=PATH, as in --model mine=/models/sdxl-vae")
    absolute = str(Path(path).expanduser().absolute())
    return registry, (name, absolute), from_path(name, absolute)


# ---------------------------------------------------------------- run


@cli.command()
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

    registry, substitute, mine = _prepare(plugins, model)
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
    _STATUS.append(status)
    if not quiet:
        console.table(result)
    console.finish(result, seconds=time.monotonic() - start, report=folder / "report.html")
    return status


# ---------------------------------------------------------------- ls, validate, inspect

KINDS = ("models", "latents", "optimizations", "metrics", "detectors", "checks", "suites")


@cli.command("ls")
@click.argument("kind", type=click.Choice(KINDS))
@plugin_option
def ls(kind: str, plugins: tuple[str, ...]) -> int:
    """List what there is, one line each."""
    registry, _, _ = _prepare(plugins, None)
    if kind == "suites":
        from fidelity import suite as suite_

        rows = suite_.listing(Path("suites"), registry)
    else:
        rows = [(name, _describe(kind, entry)) for name, entry in getattr(registry, kind.upper()).items()]
    width = max((len(name) for name, _ in rows), default=0)
    for name, text in rows:
        click.echo(f"{name:<{width}}  {text}".rstrip())
    return 0


def _describe(kind: str, entry: Any) -> str:
    if kind == "models":
        geometry, scaling = entry.geometry, entry.scaling
        facts = [entry.family.name, f"f{geometry.spatial}", f"c{geometry.latent_channels}"]
        facts += [f"f_t{geometry.temporal}"] if geometry.video else []
        facts += [f"{geometry.compression:g}× compression"]
        facts += [f"factor {scaling.factor:g}"] if scaling.factor else []
        facts += [f"shift {scaling.shift:g}"] if scaling.shift else []
        facts += ["force_upcast"] if entry.force_upcast else []
        return f"{' · '.join(facts)} · {entry.summary}"
    if kind in ("metrics", "detectors"):
        return f"{entry.unit}, {entry.better} is better · {entry.summary}"
    if kind == "checks":
        return f"{entry.unit}, blamed on {', '.join(entry.diagnosis)} · {entry.summary}"
    return str(entry.summary)


@cli.command()
@click.argument("path", metavar="SUITE", type=click.Path(path_type=Path))
@model_option
@plugin_option
def validate(path: Path, model: str | None, plugins: tuple[str, ...]) -> int:
    """Check every name, range and tile geometry of a suite before anything is decoded."""
    from collections import Counter

    from fidelity import suite as suite_

    registry, _, mine = _prepare(plugins, model)
    loaded = suite_.load(path, registry, substitute=mine)
    reasons = Counter(case.not_applicable for case in loaded.cases if case.not_applicable)
    judged = [case for case in loaded.cases if not case.not_applicable]
    expected = Counter(case.expected.verdict for case in judged)
    idle = sum(reasons.values())
    click.echo(f"{loaded.name}: {len(loaded.cases)} cases, {len(judged)} judged, {idle} not applicable")
    for verdict, count in expected.items():
        click.echo(f"  {count:5}  expected to {verdict}")
    for reason, count in reasons.most_common():
        click.echo(f"  {count:5}  not applicable: {reason}")
    for reason, count in Counter(reason for _, reason in loaded.excluded).most_common():
        click.echo(f"  {count:5}  excluded: {reason}")
    click.echo(f"  about {suite_.time_estimate(loaded):.0f} s of decodes on one core")
    return 0


@cli.command("inspect")
@click.argument("name", metavar="MODEL")
@device_option
@model_option
@plugin_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect_(name: str, device: str, model: str | None, plugins: tuple[str, ...], as_json: bool) -> int:
    """Geometry, scaling, legal tiles, round-trip error, and how far the decoder looks. MODEL is a name or NAME=PATH."""
    registry, _, mine = _prepare(plugins, model or (name if "=" in name else None))
    from fidelity import inspection
    from fidelity.environment import check_device
    from fidelity.records import to_json

    chosen = mine if mine is not None and mine.name == name.partition("=")[0] else registry.MODELS.get(name)
    check_device(device)
    photographs = [source for each, source in registry.LATENTS.items() if each.startswith("photo-")]
    found = inspection.inspect(chosen, photographs, device)
    if as_json:
        click.echo(to_json(found).decode())
        return 0
    for line in inspection.lines(found):
        click.echo(line)
    return 0


# ---------------------------------------------------------------- goldens


@cli.group("golden")
def golden_group() -> None:
    """The life of goldens: nothing is overwritten without approve."""


@golden_group.command("record")
@click.argument("path", metavar="SUITE", type=click.Path(path_type=Path))
@device_option
@model_option
@plugin_option
def golden_record(path: Path, device: str, model: str | None, plugins: tuple[str, ...]) -> int:
    """Record the goldens of SUITE that do not exist yet."""
    from fidelity import goldens

    loaded, options = _suite_and_options(path, device, model, plugins)
    for key in goldens.record(loaded, options):
        click.echo(f"recorded {'/'.join(key)}")
    return 0


@golden_group.command("verify")
@click.argument("path", metavar="SUITE", type=click.Path(path_type=Path))
@case_option
@device_option
@model_option
@plugin_option
def golden_verify(path: Path, glob: str | None, device: str, model: str | None, plugins: tuple[str, ...]) -> int:
    """Decode every reference again and hold it against its golden; unused goldens fail too."""
    from fidelity import goldens
    from fidelity import suite as suite_

    loaded, options = _suite_and_options(path, device, model, plugins)
    loaded = suite_.select(loaded, glob) if glob else loaded
    references, unused = goldens.verify(loaded, options, filtered=glob is not None)
    for reference in references:
        drift = "not measured" if reference.drift is None else f"{reference.drift:.4g} grey levels RMSE"
        click.echo(f"{'ok  ' if reference.ok else 'FAIL'} {reference.model}/{reference.latents}: {drift}"
                   f"{'' if reference.ok else f' · {reference.reason}'}")  # fmt: skip
    for key in unused:
        click.echo(f"FAIL {'/'.join(key)}: no case uses this golden; fidelity golden prune {path} removes it")
    if not all(reference.ok for reference in references):
        return NOT_JUDGED
    return 1 if unused else 0


@golden_group.command("approve")
@click.argument("path", metavar="SUITE", type=click.Path(path_type=Path))
@click.option("--reason", required=True, help="Why the measurements or goldens may change; kept with them.")
@case_option
@device_option
@jobs_option
@model_option
@plugin_option
def golden_approve(path: Path, reason: str, glob: str | None, device: str, jobs: int | None, model: str | None,
                   plugins: tuple[str, ...]) -> int:  # fmt: skip
    """Record goldens anew whose reference moved, run SUITE, and store its measurements as approved."""
    from fidelity import goldens
    from fidelity import suite as suite_
    from fidelity.report import console

    loaded, options = _suite_and_options(path, device, model, plugins, jobs)
    loaded = suite_.select(loaded, glob) if glob else loaded
    with console.progress(len(loaded.judged)) as advance:
        result, renewed = goldens.approve(loaded, options, reason=reason, progress=advance)
    for key in renewed:
        click.echo(f"recorded anew {'/'.join(key)}")
    approved = sum(case.verdict in ("pass", "fail") for case in result.cases)
    click.echo(f"approved the measurements of {approved} cases in {result.environment.get('class')}")
    return NOT_JUDGED if any(case.verdict == "error" for case in result.cases) else 0


@golden_group.command("prune")
@click.argument("path", metavar="SUITE", type=click.Path(path_type=Path))
@plugin_option
def golden_prune(path: Path, plugins: tuple[str, ...]) -> int:
    """Remove goldens that no suite beside SUITE uses."""
    from fidelity import goldens

    loaded, _ = _suite_and_options(path, "cpu", None, plugins)
    for key in goldens.prune(loaded):
        click.echo(f"removed {'/'.join(key)}")
    return 0


@cli.command()
@click.argument("path", metavar="SUITE", type=click.Path(path_type=Path))
@click.option("--factor", type=float, default=1.5, show_default=True, help="Limit over the worst that was measured.")
@click.option("--json", "as_json", is_flag=True, help="Print every figure as one JSON list instead.")
@case_option
@device_option
@model_option
@plugin_option
def calibrate(path: Path, factor: float, as_json: bool, glob: str | None, device: str, model: str | None,
              plugins: tuple[str, ...]) -> int:  # fmt: skip
    """Measure the noise floor of each model and dtype of SUITE, and propose limits as TOML."""
    from datetime import date

    from fidelity import calibrate as calibrate_
    from fidelity import suite as suite_
    from fidelity.environment import environment_class, make_deterministic
    from fidelity.records import to_json

    loaded, options = _suite_and_options(path, device, model, plugins)
    loaded = suite_.select(loaded, glob) if glob else loaded
    calibrate_.refuse_factor(factor)
    rows = calibrate_.calibrate(loaded, options)
    if as_json:
        click.echo(to_json(rows).decode())
        return 0
    make_deterministic(1)  # as the worker was, so that the class is the worker's
    where = f"{loaded.name} on {environment_class(device)}"
    for line in [*calibrate_.table(rows), "", *calibrate_.proposal(rows, factor=factor, today=date.today(),
                                                                    environment=where)]:  # fmt: skip
        click.echo(line)
    return 0


def _suite_and_options(
    path: Path, device: str, model: str | None, plugins: tuple[str, ...], jobs: int | None = None
) -> tuple[Suite, Options]:
    from fidelity import runs
    from fidelity import suite as suite_

    registry, substitute, mine = _prepare(plugins, model)
    loaded = suite_.load(path, registry, substitute=mine)
    options = runs.Options(device=device, jobs=jobs, plugins=plugins, path=(os.getcwd(),) if plugins else (),
                           substitute=substitute)  # fmt: skip
    return loaded, options


# ---------------------------------------------------------------- report


@cli.command("report")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
def report_(folder: Path) -> int:
    """Render DIR's reports again from its results.json; never measures."""
    from fidelity import report
    from fidelity.report import console, json

    result: RunResult = json.read(folder)
    report.write_all(result, folder)
    console.table(result)
    console.finish(result, report=folder / "report.html")
    return result.exit_status


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: errors are one line on standard error. A SIGTERM ends a run as Ctrl-C does."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a parent may have left SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    try:
        status = cli.main(args=arguments, prog_name="fidelity", standalone_mode=False) or 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "")
        status = 0
    except click.ClickException as error:
        click.echo(f"fidelity: {' '.join(error.format_message().split())}", err=True)
        status = WRONG_REQUEST
    except click.Abort:
        click.echo("fidelity: interrupted; nothing was written", err=True)
        status = INTERRUPTED
    except BrokenPipeError:  # whoever read our output has gone; what was asked for is written
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = _STATUS[-1] if _STATUS else NOT_JUDGED
    except OSError as error:
        click.echo(f"fidelity: {error.filename or 'a file'} cannot be used: {error.strerror or error}", err=True)
        status = WRONG_REQUEST
    except FidelityError as error:
        click.echo(f"fidelity: {error}", err=True)
        status = WRONG_REQUEST if isinstance(error, RequestError) else NOT_JUDGED
    sys.exit(int(status))


if __name__ == "__main__":
    main()
