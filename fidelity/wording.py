"""Figures and places in words, for every message that names them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from fidelity.errors import RequestError

BARE = ("", "1", "share")
"""Units that say nothing which the measurement's name does not."""
LINES: dict[tuple[Any, Any], str] = {
    ("border", "x"): "left border",
    ("border", "y"): "upper border",
    ("band end", "x"): "far edge of the blend",
    ("band end", "y"): "far edge of the blend",
}


def amount(value: float, unit: str, digits: int = 4) -> str:
    """`22.54 grey levels`; a share or a pure number without a unit."""
    return f"{value:.{digits}g}" if unit in BARE else f"{value:.{digits}g} {unit}"


UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30,
         "TB": 10**12, "TIB": 2**40}  # fmt: skip
_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B)?\s*", re.IGNORECASE)


def in_units(count: int) -> str:
    """`1.50 GiB`, and below that `14.5 MiB`."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def parse_bytes(given: str | int, what: str) -> int:
    """Bytes of `8GiB`, `6.5 GB`, `512MiB`, of a whole number, or of text without a unit from a MiB on: a smaller one
    lacks its unit. Raises RequestError that begins with `what`."""
    text = str(given)
    found = _BYTES.fullmatch(text)
    count = int(Fraction(found[1]) * UNITS[(found[2] or "B").upper()]) if found else 0
    if count < 1:
        raise RequestError(f"{what} {text!r}: write a size above 0, as in 8GiB or 512MiB")
    if count >= 2**63:
        raise RequestError(f"{what} {text[:40]!r}: more than any device has: write a size below 8388608TiB")
    if isinstance(given, str) and found and not found[2] and count < UNITS["MIB"]:
        raise RequestError(f"{what} {text!r} is {count} bytes: write its unit, as in {count}GiB or {count}MiB")
    return count


def place(where: Mapping[str, Any] | None) -> str:
    """`in image 0 at x 128, y 160: left border of tile (1, 1), rows 128 to 192`; empty where there is no place.

    Keys that no detector of the project writes stand behind, as they are: nothing of a place is left out.
    """
    left = dict(where or {})
    item = ", ".join(f"{name} {left.pop(name)}" for name in ("image", "frame") if name in left)
    pixel = ", ".join(f"{name} {left.pop(name)}" for name in ("x", "y") if name in left)
    spot = " ".join([*([f"in {item}"] if item else []), *([f"at {pixel}"] if pixel else [])])
    told = ", ".join([*_tile(left), *_grid(left), *(f"{name} {_plain(value)}" for name, value in left.items())])
    return f"{spot}: {told}" if spot and told else spot or told


def _tile(left: dict[str, Any]) -> list[str]:
    """The tile, the line along it, and how far: taken out of `left`."""
    axis, line, tile = left.get("axis"), left.get("line"), left.pop("tile", None)
    named = None if tile is None else f"tile {_plain(tile)}"
    said = []
    if (line, axis) in LINES:
        del left["line"]
        named = LINES[line, axis] if named is None else f"{LINES[line, axis]} of {named}"
    said += [] if named is None else [named]
    if axis in ("x", "y") and "span" in left:
        first, last = left.pop("span")
        said.append(f"{'rows' if axis == 'x' else 'columns'} {first} to {last}")
        left.pop("axis")
        # where the line lies is the pixel's own x or y, so it is said already
        left.pop("position", None)
    if "box" in left:
        top, bottom, first, last = left.pop("box")
        said.append(f"rows {top} to {bottom}, columns {first} to {last}")
    return said


def _grid(left: dict[str, Any]) -> list[str]:
    """A grid found blind, and a joint between frames: taken out of `left`."""
    said = []
    if left.get("axis") in ("x", "y") and {"pitch", "phase"} <= left.keys():
        side = "columns" if left.pop("axis") == "x" else "rows"
        said.append(f"lines every {left.pop('pitch')} {side} from {left.pop('phase')}")
    if "chunk" in left and "line" in left:
        said.append(f"joint at frame {left.pop('line')}, chunk {left.pop('chunk')}")
    return said


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"({', '.join(map(_plain, value))})" if isinstance(value, (list, tuple)) else str(value)
