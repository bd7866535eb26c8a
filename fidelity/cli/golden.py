"""`fidelity golden`: the life of goldens, and `fidelity calibrate`, where their limits come from."""

from __future__ import annotations

from pathlib import Path

import click

from fidelity.cli.common import (
    NOT_JUDGED,
    case_option,
    device_option,
    jobs_option,
    json_option,
    model_option,
    plugin_option,
    suite_and_options,
    suite_argument,
)  # fmt: skip


@click.group("golden")
def golden_group() -> None:
    """The life of goldens: nothing is overwritten without approve."""


@golden_group.command("record")
@suite_argument
@device_option
@model_option
@plugin_option
def golden_record(path: Path, device: str, model: str | None, plugins: tuple[str, ...]) -> int:
    """Record the goldens of SUITE that do not exist yet."""
    from fidelity import goldens

    loaded, options = suite_and_options(path, device, model, plugins)
    for key in goldens.record(loaded, options):
        click.echo(f"recorded {'/'.join(key)}")
    return 0


@golden_group.command("verify")
@suite_argument
@case_option
@device_option
@model_option
@plugin_option
def golden_verify(path: Path, glob: str | None, device: str, model: str | None, plugins: tuple[str, ...]) -> int:
    """Decode every reference again and hold it against its golden; unused goldens fail too."""
    from fidelity import goldens
    from fidelity import suite as suite_

    loaded, options = suite_and_options(path, device, model, plugins)
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
@suite_argument
@click.option("--reason", required=True, help="Why the measurements or goldens may change; kept with them.")
@case_option
@device_option
@jobs_option
@model_option
@plugin_option
def golden_approve(path: Path, reason: str, glob: str | None, device: str, jobs: int | None, model: str | None,
                   plugins: tuple[str, ...]) -> int:  # fmt: skip
    """Record goldens anew whose reference moved, run SUITE, and store its measurements as approved."""
    from fidelity import estimate, goldens
    from fidelity import suite as suite_
    from fidelity.report import console

    loaded, options = suite_and_options(path, device, model, plugins, jobs)
    loaded = suite_.select(loaded, glob) if glob else loaded
    with console.progress({case.id: estimate.seconds(loaded, case) for case in loaded.judged}) as advance:
        result, renewed = goldens.approve(loaded, options, reason=reason, progress=advance)
    for key in renewed:
        click.echo(f"recorded anew {'/'.join(key)}")
    approved = sum(case.verdict in ("pass", "fail") for case in result.cases)
    click.echo(f"approved the measurements of {approved} cases in {result.environment.get('class')}")
    return NOT_JUDGED if any(case.verdict == "error" for case in result.cases) else 0


@golden_group.command("prune")
@suite_argument
@plugin_option
def golden_prune(path: Path, plugins: tuple[str, ...]) -> int:
    """Remove goldens that no suite beside SUITE uses."""
    from fidelity import goldens

    loaded, _ = suite_and_options(path, "cpu", None, plugins)
    for key in goldens.prune(loaded):
        click.echo(f"removed {'/'.join(key)}")
    return 0


@click.command()
@suite_argument
@click.option("--factor", type=float, default=1.5, show_default=True, help="Limit over the worst that was measured.")
@json_option
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

    loaded, options = suite_and_options(path, device, model, plugins)
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
