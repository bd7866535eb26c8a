"""The pages of benchmarks/detection.py: their tables as markdown, the plot as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- detection: begin -->", "<!-- detection: end -->"
OURS = ("none", "fp16", "bf16")
CONTENTS = ("flat", "textured", "dark")


def wilson(hits: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share."""
    if not count:
        return 0.0, 1.0
    share = hits / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def gates(table: Sequence[dict[str, Any]]) -> list[str]:
    return [name for name in table[0] if name not in ("kind", *OURS, *CONTENTS)]


def render(table: Sequence[dict[str, Any]], head: bool = True) -> str:
    """The table of smallest amplitudes."""
    columns = [*OURS, *CONTENTS, *gates(table)]
    titles = ["no noise", "fp16", "bf16", *(f"bf16, {content}" for content in CONTENTS), *gates(table)]
    lines = []
    if head:
        lines += ["| injected | " + " | ".join(titles) + " |", "|---|" + "---:|" * len(columns)]
    lines += [f"| {row['kind']} | " + " | ".join(_cell(row[name]) for name in columns) + " |" for row in table]
    return "\n".join(lines) + "\n"


def _cell(amplitude: float) -> str:
    if math.isnan(amplitude):
        return "–"
    return "not at all" if math.isinf(amplitude) else f"{amplitude:.2g}" if amplitude < 10 else f"{amplitude:.0f}"


def write(page: Path, clean: Sequence[dict[str, Any]], table: Sequence[dict[str, Any]], said: str, last: str) -> None:
    """Put both tables between the marks of the page. `said` stands between them, `last` below."""
    text = page.read_text()
    if BEGIN not in text or END not in text:
        raise SystemExit(f"{page} has no lines {BEGIN} and {END}: put them where the tables belong")
    alarms = ["| detector | overlap | false alarms | of | Wilson 95 % |", "|---|---|---:|---:|---|"]
    for row in clean:
        low, high = row["interval"]
        alarms.append(
            f"| {row['name']} | {row['overlap']} | {row['alarms']} | {row['count']} | {low:.2%} to {high:.2%} |"
        )
    body = [BEGIN, "Clean decodes:\n", "\n".join(alarms), f"\n{said}\n", render(table), *([last] if last else []), END]
    page.write_text(text[: text.index(BEGIN)] + "\n".join(body) + text[text.index(END) + len(END) :])


def plot(table: Sequence[dict[str, Any]]) -> str:
    """A dot for each smallest amplitude, on a logarithmic axis from 0.1 to 256 grey levels; a hollow one: never."""
    colours = {"none": "#1a7f37", "fp16": "#57ab5a", "bf16": "#9be9a8"}
    greys = dict(zip(gates(table), ("#1f4e8c", "#3f7cc4", "#8a5fbf", "#c2571a", "#8c1f1f")))
    left, width, step, top = 210, 560, 34, 56
    height = top + step * len(table) + 40

    def x(amplitude: float) -> float:
        return left + width * (math.log10(min(max(amplitude, 0.1), 256)) + 1) / (math.log10(256) + 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 30} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{left + width + 30}" height="{height}" fill="white"/>',
    ]
    for tick in (0.1, 0.3, 1, 3, 10, 30, 100, 256):
        parts.append(f'<line x1="{x(tick):.0f}" x2="{x(tick):.0f}" y1="{top - 8}" y2="{height - 30}" stroke="#ddd"/>')
        parts.append(f'<text x="{x(tick):.0f}" y="{height - 14}" text-anchor="middle">{tick:g}</text>')
    for index, (name, colour) in enumerate({**colours, **greys}.items()):
        at = 14 + 190 * (index % 4), 16 + 18 * (index // 4)
        label = {"none": "fidelity, no noise", "fp16": "over fp16", "bf16": "over bf16"}.get(name, name)
        parts.append(f'<circle cx="{at[0]}" cy="{at[1] - 4}" r="5" fill="{colour}"/>')
        parts.append(f'<text x="{at[0] + 10}" y="{at[1]}">{label.replace("<", "&lt;")}</text>')
    for index, row in enumerate(table):
        y = top + step * index + step / 2
        parts.append(f'<text x="{left - 12}" y="{y + 4:.0f}" text-anchor="end">{row["kind"]}</text>')
        for name, colour in {**greys, **colours}.items():
            amplitude = row[name]
            if not math.isnan(amplitude):
                fill = "white" if math.isinf(amplitude) else colour
                parts.append(f'<circle cx="{x(amplitude):.1f}" cy="{y:.0f}" r="5" fill="{fill}" stroke="{colour}"/>')
    return "\n".join([*parts, "</svg>\n"])
