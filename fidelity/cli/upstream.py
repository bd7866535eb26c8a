"""`fidelity upstream`: the defects of diffusers that suites hold, as a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fidelity.cli.common import plugin_option, prepare
from fidelity.errors import OutputError, RequestError

if TYPE_CHECKING:
    from fidelity.records import RunResult


@click.command("upstream")
@click.argument("suites", nargs=-1, metavar="SUITE…", type=click.Path(path_type=Path))
@click.option("--results", multiple=True, metavar="DIR", type=click.Path(path_type=Path), help="Figures of this run.")
@click.option("--write", "page", metavar="FILE", type=click.Path(path_type=Path), help="Write the page there.")
@plugin_option
def upstream_(suites: tuple[Path, ...], results: tuple[Path, ...], page: Path | None, plugins: tuple[str, ...]) -> int:
    """Print the expected failures with versions of the SUITEs: class, what, reproduction. Measures nothing."""
    if not suites:
        raise RequestError("nothing to write: name suites, as in fidelity upstream suites/*.toml")
    from fidelity import suite as suite_
    from fidelity import upstream
    from fidelity.report import json

    registry, _, _ = prepare(plugins, None)
    runs: list[RunResult] = [json.read(json.folder_of(folder)) for folder in results]
    text = upstream.render([suite_.load(path, registry) for path in suites], runs)
    if page is None:
        click.echo(text, nl=False)
        return 0
    try:
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{page} cannot be written: {error.strerror or error}") from error
    click.echo(f"{page}: {text.count('<a id=')} defects")
    return 0
