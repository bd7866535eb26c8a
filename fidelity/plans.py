"""Values of a plan as people write them: checked axis by axis, from a suite's TOML or from `--plan` text."""

from __future__ import annotations

import math
import re
from types import ModuleType
from typing import Any

import msgspec

from fidelity.errors import SuiteError, UnknownName
from fidelity.records import DTYPES, OFFLOADS, DecodePlan, Temporal, Tiling
from fidelity.registry import unknown

BUILT_IN_AXES = ("dtype", "force_upcast", "slicing", "tiling", "temporal", "offload")
_NOT_AXES = ("precision",)
"""Registered optimizations that have an axis of another name: `dtype` is the precision's."""
_WORD = re.compile(r"[\w.]+")


def axes(registry: ModuleType) -> tuple[str, ...]:
    """Every axis of a matrix, the offload last: cells that differ in nothing else are neighbours."""
    extra = (name for name in registry.OPTIMIZATIONS if name not in (*BUILT_IN_AXES, *_NOT_AXES))
    return (*BUILT_IN_AXES[:-1], *extra, BUILT_IN_AXES[-1])


# ---------------------------------------------------------------- one value of one axis


def value(axis: str, raw: Any) -> Any:
    """The plan's value of `axis` for what TOML or text gave. Raises SuiteError or UnknownName."""
    if axis == "dtype":
        return _choice("dtype", raw, DTYPES)
    if axis == "offload":
        return _choice("offload", raw, OFFLOADS)
    if axis in ("force_upcast", "slicing"):
        if not isinstance(raw, bool):
            raise SuiteError(f"{axis} is {raw!r}: write true or false")
        return raw
    if axis in ("tiling", "temporal"):
        return None if raw is False else tiles(axis, raw)
    return _option(axis, raw)


def _choice(axis: str, raw: Any, known: tuple[str, ...]) -> str:
    if not isinstance(raw, str) or raw not in known:
        raise UnknownName(unknown(axis, raw, known))
    return raw


def tiles(axis: str, raw: Any) -> Tiling | Temporal:
    """A Tiling or Temporal of a table with `tile` (at least 1) and `overlap` (in [0, 1)). Raises SuiteError."""
    if not isinstance(raw, dict):
        raise SuiteError(f"{axis} is {raw!r}: write false, or a table like {{ tile = 16, overlap = 0.25 }}")
    for key in raw:
        if key not in ("tile", "overlap"):
            raise SuiteError(f"{axis}: {unknown('key', key, ('tile', 'overlap'))}")
    for key in ("tile", "overlap"):
        if key not in raw:
            raise SuiteError(f"{axis} has no {key}: write {{ tile = 16, overlap = 0.25 }}")
        tile_number(axis, key, raw[key])
    kind = Tiling if axis == "tiling" else Temporal
    return kind(tile=raw["tile"], overlap=float(raw["overlap"]))


def tile_number(axis: str, key: str, raw: Any) -> None:
    """Refuse a `tile` that is no whole number from 1 on, or an `overlap` outside [0, 1)."""
    unit = "latent pixels" if axis == "tiling" else "latent frames"
    if key == "tile" and (type(raw) is not int or raw < 1):
        raise SuiteError(f"{axis}: tile is {raw!r}: write a whole number of {unit}, at least 1")
    if key == "overlap" and (type(raw) not in (int, float) or not 0 <= raw < 1):
        raise SuiteError(f"{axis}: overlap is {raw!r}: write a fraction of the tile from 0 up to, not including, 1")


def _option(name: str, raw: Any) -> Any:
    if isinstance(raw, bool) or (isinstance(raw, (int, float)) and math.isfinite(raw)):
        return raw
    if isinstance(raw, str) and _WORD.fullmatch(raw):
        return raw
    raise SuiteError(f"{name} is {raw!r}: write true, false, a finite number, or a word of letters, digits, _ and .")


def plan(values: dict[str, Any]) -> DecodePlan:
    """A DecodePlan of checked axis values; what is false or left out is off."""
    built_in = {axis: chosen for axis, chosen in values.items() if axis in BUILT_IN_AXES}
    options = {name: chosen for name, chosen in values.items() if name not in BUILT_IN_AXES and chosen}
    return DecodePlan(**built_in, options=options)


# ---------------------------------------------------------------- --plan text

_ALIASES = {"upcast": "force_upcast"}
_PARTS = {
    "tile": ("tiling", "tile"),
    "overlap": ("tiling", "overlap"),
    "temporal_tile": ("temporal", "tile"),
    "temporal_overlap": ("temporal", "overlap"),
}


def parse_plan(text: str, registry: ModuleType) -> DecodePlan:
    """The plan that `bf16,tile=16,overlap=0.25,slicing,disk` says; what is not named is off, the dtype fp32.

    Tokens: a dtype, an offload mode, `slicing`, `force_upcast` or `upcast`, `tile=` with `overlap=`, `temporal_tile=`
    with `temporal_overlap=`, `dtype=`, `offload=`, and registered optimizations as `name` or `name=value`.
    Raises SuiteError, or UnknownName with the closest token.
    """
    try:
        return plan({axis: value(axis, raw) for axis, raw in _tokens(text, registry).items()})
    except (SuiteError, UnknownName) as error:
        raise type(error)(f"--plan {text!r}: {error}") from None


def _tokens(text: str, registry: ModuleType) -> dict[str, Any]:
    """Raw values by axis."""
    values: dict[str, Any] = {}
    for token in (part.strip() for part in text.split(",")):
        if not token:
            raise SuiteError("an empty token; write for example bf16,tile=16,overlap=0.25,slicing")
        axis, raw = _token(token, registry)
        if isinstance(raw, dict):
            raw = _merge(values.pop(axis, {}), raw)
        if axis in values:
            raise SuiteError(f"{axis} is said twice")
        values[axis] = raw
    return values


def _token(token: str, registry: ModuleType) -> tuple[str, Any]:
    """Axis and raw value of one token; a dict is a part of a value."""
    name, _, text = token.partition("=")
    name = _ALIASES.get(name.strip(), name.strip())
    if name in _PARTS:
        axis, part = _PARTS[name]
        return axis, {part: _scalar(text.strip())}
    flags = [axis for axis in axes(registry) if axis not in ("dtype", "offload", "tiling", "temporal")]
    if "=" in token:
        if name in flags or name in ("dtype", "offload"):
            return name, _scalar(text.strip())
    elif name in DTYPES:
        return "dtype", name
    elif name in OFFLOADS:
        return "offload", name
    elif name in flags:
        return name, True
    known = (*DTYPES, *OFFLOADS, *flags, *_ALIASES, *(f"{each}=" for each in (*_PARTS, "dtype", "offload")))
    raise UnknownName(unknown("token", token, known))


def _merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    for key in new:
        if key in old:
            raise SuiteError(f"{key} is said twice")
    return {**old, **new}


def _scalar(text: str) -> Any:
    """true, false, a number, or the text itself."""
    if text in ("true", "false"):
        return text == "true"
    try:
        return msgspec.convert(text, int | float, strict=False)
    except msgspec.ValidationError:
        return text
