"""What the models tell beforehand, as a section of summary.md."""

from __future__ import annotations

from fidelity.records import RunResult
from fidelity.report import evidence, words
from fidelity.report.comment import code, table, text

MOST_MODELS = 10
MOST_ROWS = 24


def section(run: RunResult) -> list[str]:
    """How far each model looks, predicted beside measured on the latents it was probed with, and its room in fp16."""
    outlooks, rooms = evidence.outlooks(run), evidence.rooms(run)
    if not outlooks and not rooms:
        return []
    lines = ["### What the decoders tell beforehand", ""]
    for outlook in outlooks[:MOST_MODELS]:
        lines += [f"{code(outlook.model, 60)}: {text(' '.join(outlook.said), 1500)}", ""]
    rows = [
        [code(outlook.model, 60), f"{each.tile}", f"{each.overlap:g}", words.number(each.predicted),
         "not measured" if each.measured is None else words.number(each.measured),
         "–" if each.ratio is None else f"{each.ratio:.2f}", words.number(each.seam)]
        for outlook in outlooks for each in outlook.meetings if each.own
    ]  # fmt: skip
    if rows:
        header = ["model", "tile", "overlap", "predicted RMSE, all items", "measured RMSE, all items", "ratio", "seam"]
        lines += [*table(header, rows[:MOST_ROWS], right=6), ""]
        lines += [f"… and {len(rows) - MOST_ROWS} more in `report.html`.", ""] if len(rows) > MOST_ROWS else []
    for room in rooms[:MOST_MODELS]:
        mark = "❌ " if room.headroom.agrees is False else ""
        where = f"{code(room.model, 60)} on {code(room.latents, 60)}"
        lines.append(f"- {mark}fp16 headroom of {where}: {text(room.headroom.words)}")
    return lines
