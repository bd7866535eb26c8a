"""What each setting does by itself, and which settings interact, read from the cases of a full cross product.

A *main effect* is the mean of `case − case that differs in this setting alone`, which has the axis's reference value
there. An *interaction* is the mean of the difference of two such differences: what two settings do together beyond the
sum of both. Only complete pairs and quadruples count, and their number stands beside each figure. Pure arithmetic.

Source: the 2^k factorial design, as in Box, Hunter & Hunter, Statistics for Experimenters, chapter 5.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fidelity.records import Attribution, CaseResult, Effect, Interaction

BYTES = "allocated_peak_bytes"
UNITS = {"rmse": "grey levels", "lpips_alex": "1", "tile_seam": "grey levels", BYTES: "bytes"}
"""What is attributed, and its unit."""
REFERENCE = {"dtype": "fp32", "offload": "none"}
"""The value that the others of an axis are held against; `off` on every other axis."""
OFF = "off"
INERT = "offload"
"""The axis that moves weights and no pixel: it has no effect on RMSE, and interacts with nothing there."""
FLOOR = 0.01
"""Grey levels RMSE. Offloaded decodes are bit-equal where measured; the oracle's limit is the same."""

Settings = tuple[str, ...]
"""One case's value on each axis, in the order of `axes`."""


def attribute(cases: Iterable[CaseResult], *, floor: float = FLOOR) -> Attribution:
    """Main effects, pairwise interactions and alarms of all judged cases, one model at a time.

    Cases that could not be judged or cannot apply, and those of metamorphic checks, take no part; emulated fp16 takes
    none in bytes, where its figures are not its own. An alarm is an effect of offload on RMSE, alone or together with
    anything, above `floor` grey levels in any single pair or quadruple.
    """
    judged = [case for case in cases if case.verdict in ("pass", "fail") and case.check is None]
    effects: list[Effect] = []
    interactions: list[Interaction] = []
    for model in dict.fromkeys(case.model for case in judged):
        mine = [case for case in judged if case.model == model]
        axes = _axes(mine)
        for name in UNITS:
            table = _table(mine, axes, name)
            effects += _effects(model, name, axes, table)
            interactions += _interactions(model, name, axes, table)
    alarms = [*_alarms(effects, floor), *_alarms(interactions, floor)]
    return Attribution(tuple(effects), tuple(interactions), tuple(alarms))


# ---------------------------------------------------------------- cases as a table


def settings(case: CaseResult) -> dict[str, str]:
    """Every axis of a case with its value as text; latents are an axis without a reference, so it has no effects."""
    plan = case.plan
    return {
        "latents": case.latents,
        "dtype": plan.dtype,
        "force_upcast": _text(plan.force_upcast),
        "slicing": _text(plan.slicing),
        "tiling": _text(plan.tiling),
        "temporal": _text(plan.temporal),
        "offload": plan.offload,
        **{name: _text(value) for name, value in sorted(plan.options.items())},
    }


def _text(value: Any) -> str:
    return OFF if not value else "on" if value is True else str(value)


def _axes(cases: list[CaseResult]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(axis for case in cases for axis in settings(case)))


def _table(cases: list[CaseResult], axes: tuple[str, ...], name: str) -> dict[Settings, float]:
    table = {}
    for case in cases:
        value, found = _value(case, name), settings(case)
        if value is not None:
            table[tuple(found.get(axis, OFF) for axis in axes)] = value
    return table


def _value(case: CaseResult, name: str) -> float | None:
    if name != BYTES:
        found = case.measurements.get(name)
        return None if found is None else found.value
    emulated = any(case.receipts.get(one, {}).get("emulated") for one in ("precision", "dtype"))
    peak = None if case.memory is None else case.memory.allocated_peak_bytes
    return None if emulated or peak is None else float(peak)


def _values(axes: tuple[str, ...], table: Mapping[Settings, float], place: int) -> tuple[str, list[str]]:
    """The reference value of the axis at `place`, and its others in their first order; none for the latents."""
    against = REFERENCE.get(axes[place], OFF)
    seen = dict.fromkeys(key[place] for key in table) if axes[place] != "latents" else {}
    return against, [value for value in seen if value != against]


def _with(key: Settings, place: int, value: str) -> Settings:
    return (*key[:place], value, *key[place + 1 :])


# ---------------------------------------------------------------- differences, and differences of differences


def _effects(model: str, name: str, axes: tuple[str, ...], table: Mapping[Settings, float]) -> Iterator[Effect]:
    for place, axis in enumerate(axes):
        against, values = _values(axes, table, place)
        gaps: dict[str, list[float]] = defaultdict(list)
        for key, figure in table.items():
            twin = table.get(_with(key, place, against))
            if key[place] != against and twin is not None:
                gaps[key[place]].append(figure - twin)
        for value in values:
            if gaps[value]:
                yield Effect(model, name, UNITS[name], axis, value, against, *_summary(gaps[value]))


def _interactions(
    model: str, name: str, axes: tuple[str, ...], table: Mapping[Settings, float]
) -> Iterator[Interaction]:
    for first, second in itertools.combinations(range(len(axes)), 2):
        (a0, _), (b0, _) = (_values(axes, table, place) for place in (first, second))
        if "latents" in (axes[first], axes[second]):
            continue
        gaps: dict[tuple[str, str], list[float]] = defaultdict(list)
        for key, both in table.items():
            if key[first] == a0 or key[second] == b0:
                continue
            one, other = table.get(_with(key, second, b0)), table.get(_with(key, first, a0))
            neither = table.get(_with(_with(key, first, a0), second, b0))
            if one is not None and other is not None and neither is not None:
                gaps[key[first], key[second]].append((both - other) - (one - neither))
        for values, found in gaps.items():
            yield Interaction(model, name, UNITS[name], (axes[first], axes[second]), values, *_summary(found))


def _summary(gaps: list[float]) -> tuple[float, float, float, int]:
    return sum(gaps) / len(gaps), min(gaps), max(gaps), len(gaps)


def _alarms(found: Iterable[Effect | Interaction], floor: float) -> Iterator[str]:
    for each in found:
        worst = max(abs(each.least), abs(each.most))
        axes = each.axes if isinstance(each, Interaction) else (each.axis,)
        if each.measurement != "rmse" or INERT not in axes or not worst > floor:
            continue
        values = each.values if isinstance(each, Interaction) else (each.value,)
        what = " × ".join(f"{axis} {value}" for axis, value in zip(axes, values))
        yield (
            f"{each.model}: {what} moves RMSE by {worst:.3g} grey levels, the worst of {each.n} "
            f"{'quadruples' if isinstance(each, Interaction) else 'pairs'}, noise floor {floor:g}: "
            "offload changes no pixel"
        )
