"""Markdown for a comment on GitHub: text that stays text, tables, and sections as many as fit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from fidelity.report import words

COMMENT = 65_536
"""Characters of a comment on GitHub. A step summary may have 1 MiB."""


def bounded(sections: Sequence[Sequence[str]], page: str) -> str:
    """Sections one below the other, as many as fit into a comment; what did not fit is named, and stands in `page`."""
    whole = [["\n".join(section), section[0]] for section in sections if section]
    kept: list[str] = []
    left, room = [], COMMENT - 500
    for body, title in whole:
        if len(body) <= room:
            kept.append(body)
            room -= len(body) + 2
        else:
            left.append(words.line(title.lstrip("#<>/ "), 60))
    if not kept and whole:  # a first section that long is one absurd name
        kept.append(whole[0][0][:room])
    if left:
        kept.append(f"Left out, to fit into a comment: {text(', '.join(left), 300)}. All of it is in `{page}`.")
    return "\n\n".join(kept) + "\n"


def text(raw: str, length: int = 400) -> str:
    """`raw` as inert Markdown text on one line: no table, code, HTML, link, emphasis or mention comes of it."""
    escaped = re.sub(r"([\\`*_{}\[\]|~#])", r"\\\1", words.line(raw, length))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("@", "@\u200b")


def code(raw: str, length: int = 400) -> str:
    """`raw` as a code span on one line, safe inside a table; the fence is longer than any run of backticks in it."""
    flat = words.line(raw, length).replace("|", "\\|")
    fence = "`" * (max((len(run) for run in re.findall("`+", flat)), default=0) + 1)
    pad = " " if "`" in flat else ""
    return f"{fence}{pad}{flat}{pad}{fence}" if flat else ""


def table(header: Sequence[str], rows: Iterable[Sequence[str]], right: int = 0) -> list[str]:
    """A table whose last `right` columns are aligned to the right."""
    rule = ["---"] * (len(header) - right) + ["--:"] * right
    return [f"| {' | '.join(cells)} |" for cells in (header, rule, *rows)]
