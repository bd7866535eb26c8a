"""`fidelity report`: render again what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fidelity.cli.common import status_of, tell

if TYPE_CHECKING:
    from fidelity.records import RunResult


@click.command("report")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
def report_(folder: Path) -> int:
    """Render DIR's reports again from its results.json; never measures. Exit status: as of the run."""
    from fidelity import report
    from fidelity.report import console, json

    folder = json.folder_of(folder)
    result: RunResult = json.read(folder)
    failed = report.write_all(result, folder)
    console.table(result)
    console.finish(result, report=folder / "report.html")
    return tell(failed, status_of(result))
