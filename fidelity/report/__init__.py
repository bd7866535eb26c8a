"""What people and CI read: results.json, report.html, summary.md and junit.xml, all rendered from one RunResult.

Nothing is measured or decided here. Text from models, plugins and paths is escaped by each format's own rules.
"""

from __future__ import annotations

from pathlib import Path

from fidelity.records import RunResult


def write_all(run: RunResult, folder: Path) -> None:
    """Write all four files to `folder`, each atomically; results.json first, so that the rest can be rendered again."""
    from fidelity.report import html, json, junit, markdown

    for form in (json, junit, markdown, html):
        form.write(run, folder)
