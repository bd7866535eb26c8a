"""`fidelity history`: the trend of the runs in a history file."""

from __future__ import annotations

import sqlite3
from fnmatch import fnmatchcase
from pathlib import Path

import click

from fidelity.cli.common import case_option, json_option
from fidelity.errors import EvaluationError, RequestError

MOST_NAMES = 5
"""Cases that a refusal names."""


@click.command("history")
@click.argument("database", metavar="DB", type=click.Path(path_type=Path))
@case_option
@click.option("--measurement", metavar="NAME", help="Only this measurement. Default: the main ones.")
@click.option("--add", "folder", type=click.Path(path_type=Path), metavar="DIR", help="Add the run in DIR first.")
@json_option
def history_(database: Path, glob: str | None, measurement: str | None, folder: Path | None, as_json: bool) -> int:
    """Print how measurements moved over the runs in DB, and what drifts below its limit."""
    from fidelity.history import database as history
    from fidelity.history import schema
    from fidelity.records import to_json
    from fidelity.report import json, trend_console

    if folder is not None:
        schema.refuse(database)
        add(database, json.read(folder))
    names = (measurement,) if measurement is not None else None if as_json else history.FIRST

    def wanted(case: str, name: str) -> bool:
        return (names is None or name in names) and (glob is None or fnmatchcase(case, glob))

    found = history.read(database, wanted)
    if not found:
        raise RequestError(f"history {database} holds no run: add one with `fidelity run SUITE --history {database}`")
    shown = {suite: trend for suite, trend in found.items() if trend.series}
    if not shown:
        asked = [f"--case {glob}" if glob else "", f"--measurement {measurement}" if measurement else ""]
        known = _known(database, by_case=glob is not None)
        raise RequestError(f"history {database} holds nothing for {' '.join(filter(None, asked))}; it holds {known}")
    if as_json:
        click.echo(to_json(shown).decode())
        return 0
    for trend in shown.values():
        trend_console.show(trend)
    return 0


def _known(database: Path, *, by_case: bool) -> str:
    """What the newest runs of a history hold: their measurements, and where cases were asked for some of these."""
    from fidelity.history import database as history

    series = [one for trend in history.read(database).values() for one in trend.series]
    names = ", ".join(sorted({one.name for one in series})) or "no measurement"
    cases = sorted({one.case for one in series})
    more = f" … ({len(cases)} in all)" if len(cases) > MOST_NAMES else ""
    return f"{names} of {', '.join(cases[:MOST_NAMES])}{more}" if by_case and cases else names


def add(database: Path, run: object) -> None:
    """Add a stored run. Raises EvaluationError if the file cannot be written."""
    from fidelity.history import database as history

    try:
        history.append(database, run)  # type: ignore[arg-type]
    except sqlite3.Error as error:
        raise EvaluationError(f"history {database}: the run was not added ({error}): try again") from error
