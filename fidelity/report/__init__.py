"""What people and CI read: results.json, report.html, summary.md and junit.xml, all rendered from one RunResult.

Nothing is measured or decided here. Text from models, plugins and paths is escaped by each format's own rules.
"""

from __future__ import annotations

from pathlib import Path

from fidelity.errors import OutputError
from fidelity.records import RunResult


def write_all(run: RunResult, folder: Path) -> tuple[str, ...]:
    """Write all four files to `folder`, each atomically; results.json first, so that the rest can be rendered again.

    Returns what could not be rendered, a line each: minutes of decodes are not lost to a page that cannot be drawn.
    Raises OutputError if `folder` cannot be written.
    """
    from fidelity.report import html, json, junit, markdown

    json.write(run, folder)
    failed = []
    for form in (junit, markdown, html):
        try:
            form.write(run, folder)
        except OutputError:
            raise
        except Exception as error:  # whatever a template may raise
            name = form.__name__.rpartition(".")[2]
            failed.append(f"{name} could not be rendered: {type(error).__name__}: {error}; results.json is whole")
    return tuple(failed)
