"""GitHub Actions: annotations of what is red, and the step summary. Elsewhere nothing is printed or written.

Source: docs.github.com, "Workflow commands for GitHub Actions": ten annotations of a level in a step, a step summary
of 1 MiB; `%`, CR and LF escaped in a message, `:` and `,` too in a property.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from fidelity.comparison import Comparison
from fidelity.records import CaseResult, RunResult
from fidelity.report import words

MOST = 10
"""Annotations of one level that GitHub shows of a step."""
SUMMARY_BYTES = 2**20
LONGEST = 1000
"""Characters of one annotation's message."""


def run(result: RunResult, markdown: str, stream: TextIO | None = None) -> None:
    """Annotate the surprises of a run, worst first, and append `markdown` to the step summary."""
    red = [case for case in words.worst_first(result.cases) if case.surprise]
    file = _within_workspace(str(result.suite.get("path") or ""))
    _annotate([(case.id, _said(case)) for case in red], file, stream)
    _summarize(markdown, stream)


def comparison(found: Comparison, markdown: str, stream: TextIO | None = None) -> None:
    """Annotate what got worse from one run to another, and append `markdown` to the step summary."""
    red = [(case.id, "; ".join(case.reasons)) for case in found.regressions]
    if found.pace.regressed:
        red.insert(0, ("decode time", str(found.pace.reason)))
    _annotate(red, None, stream)
    _summarize(markdown, stream)


def _said(case: CaseResult) -> str:
    blame = f" ({', '.join(case.diagnosis)})" if case.diagnosis else ""
    why = "; ".join(reason.message for reason in case.reasons) or f"expected {case.expected}"
    return f"{case.verdict}{blame}, expected {case.expected}: {why}"


def _annotate(red: Sequence[tuple[str, str]], file: str | None, stream: TextIO | None) -> None:
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return
    shown = list(red[:MOST] if len(red) <= MOST else red[: MOST - 1])
    if len(red) > len(shown):
        more = len(red) - len(shown)
        shown.append((f"{more} more", f"{more} more of {len(red)}: see the step summary and the report"))
    for title, message in shown:
        print(command("error", words.line(message, LONGEST), title=words.line(title, 250), file=file),
              file=stream or sys.stdout, flush=True)  # fmt: skip


def command(level: str, message: str, **properties: str | None) -> str:
    """One workflow command: `::error title=a%3Ab,file=x.toml::message`."""
    given = ",".join(f"{name}={_property(value)}" for name, value in properties.items() if value)
    return f"::{level}{' ' if given else ''}{given}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _within_workspace(path: str) -> str | None:
    """A file as GitHub names it, from the workspace's root; None for one that lies elsewhere."""
    root = os.environ.get("GITHUB_WORKSPACE")
    if not root or not path:
        return None
    absolute = Path(path).absolute()
    return str(absolute.relative_to(root)) if absolute.is_relative_to(root) else None


def _summarize(markdown: str, stream: TextIO | None) -> None:
    """Append to the step summary what still fits: GitHub drops the whole of one that is too long."""
    place = os.environ.get("GITHUB_STEP_SUMMARY")
    if not place:
        return
    path = Path(place)
    try:
        taken = path.stat().st_size if path.exists() else 0
        data = (markdown + "\n").encode("utf-8", "replace")
        if taken + len(data) >= SUMMARY_BYTES:
            data = b"\nThe summary of another run did not fit here; it is in its summary.md.\n"
        if taken + len(data) < SUMMARY_BYTES:
            with path.open("ab") as summary:
                summary.write(data)
    except OSError as error:  # the run's own files are written: a lost summary is said and costs nothing else
        said = f"the step summary {place} cannot be written: {error.strerror or error}"
        print(command("warning", said), file=stream or sys.stdout, flush=True)
