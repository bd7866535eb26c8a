"""What the models themselves say: how far each looks, what that foretells of its tiles, and how near fp16 it overflows.

Read from a run, nothing measured: predictions stand beside the cases that measured the same.
"""

from __future__ import annotations

import math

from msgspec import Struct

from fidelity.records import CaseResult, Headroom, ModelReach, Prediction, Reach, RunResult
from fidelity.report import words


class Meeting(Struct, frozen=True):
    """One tiling of one set of latents: the predicted RMSE beside the measured, in grey levels."""

    latents: str
    own: bool
    """Whether the reach was measured on these very latents."""
    tile: int
    overlap: float
    predicted: float
    measured: float | None
    """Over all items of the batch together; None where no case measured it."""
    seam: float | None
    """`tile_seam` of the same case."""
    case: str | None

    @property
    def ratio(self) -> float | None:
        """Predicted by measured."""
        return self.predicted / self.measured if self.measured else None


class Outlook(Struct, frozen=True):
    """How far a model looks, in words, and how its predictions met what was measured."""

    model: str
    found: ModelReach
    said: tuple[str, ...]
    meetings: tuple[Meeting, ...] = ()
    """Those of the latents that it was measured on first, then by tile and overlap."""


class Room(Struct, frozen=True):
    """The tightest headroom of a model in fp16, over all latents of the run."""

    model: str
    latents: str
    headroom: Headroom


def outlooks(run: RunResult) -> list[Outlook]:
    """One for each model whose reach the run measured, or could not measure."""
    return [_outlook(run, found) for found in run.reach]


def rooms(run: RunResult) -> list[Room]:
    """The tightest reference of each model; models of which none was measured are last."""
    best: dict[str, Room] = {}
    for one in run.reference:
        if one.headroom is None:
            continue
        room, seen = Room(one.model, one.latents, one.headroom), best.get(one.model)
        if seen is None or _tightness(room) < _tightness(seen):
            best[one.model] = room
    return sorted(best.values(), key=_tightness)


def _tightness(room: Room) -> float:
    return math.inf if room.headroom.tightest is None else room.headroom.tightest


def _outlook(run: RunResult, found: ModelReach) -> Outlook:
    if found.reach is None:
        return Outlook(found.model, found, (f"How far it looks was not measured: {found.reason}",))
    by_tiling: dict[tuple[str, int, float], list[CaseResult]] = {}
    for case in words.against_golden(words.judged(run)):
        tiling = case.plan.tiling
        if case.model == found.model and tiling is not None and case.plan.temporal is None and not _optional(case):
            by_tiling.setdefault((case.latents, tiling.tile, tiling.overlap), []).append(case)
    met = [_meeting(each, found.latents, by_tiling) for each in found.predictions]
    met.sort(key=lambda each: (not each.own, each.latents, each.tile, each.overlap))
    return Outlook(found.model, found, (*_said(found.reach), *_met(met, found.latents)), tuple(met))


def _optional(case: CaseResult) -> bool:
    return any(case.plan.options.values())


def _meeting(told: Prediction, own: str, cases: dict[tuple[str, int, float], list[CaseResult]]) -> Meeting:
    """Beside the plainest case of this tiling: fp32 before half precision, without slicing and offload."""
    found = sorted(
        cases.get((told.latents, told.tile, told.overlap), ()),
        key=lambda case: (case.plan.dtype != "fp32", case.plan.slicing, case.plan.offload != "none", case.id),
    )
    case = found[0] if found else None
    return Meeting(
        latents=told.latents,
        own=told.latents == own,
        tile=told.tile,
        overlap=told.overlap,
        predicted=told.rmse,
        measured=None if case is None else _pooled(case),
        seam=None if case is None else words.value(case, "tile_seam"),
        case=None if case is None else case.id,
    )


def _pooled(case: CaseResult) -> float | None:
    """RMSE over all items: its own value is the worst item's, and a prediction is of them all."""
    found = case.measurements.get("rmse")
    values = [] if found is None else [value for value in found.per_image if value is not None]
    if found is None or not values or len(values) != len(found.per_image):
        return None
    return math.sqrt(sum(value**2 for value in values) / len(values))


# ---------------------------------------------------------------- in words


def _said(found: Reach) -> list[str]:
    """What the reach means for whoever tiles."""
    last = len(found.pixel) - 1
    if found.is_global:
        said = [
            f"One latent pixel moves the whole picture, {words.number(found.pixel[last])} grey levels {last} latent "
            "pixels away: statistics or attention are global, so tiling is never exact, whatever the overlap."
        ]
    else:
        said = ["One latent pixel moves its surroundings only: tiles with enough overlap are exact."]
    near = next((d for d, lost in enumerate(found.edge) if lost < found.edge[0] / 10), None)
    fades = "" if near is None else f" and less than a tenth of that {words.plural(near, 'latent pixel')} further in"
    said.append(
        f"At its cut edge a tile is wrong by {words.number(found.edge[0])} grey levels RMS for want of context{fades}: "
        "that is what an overlap hides."
    )
    if found.tone[0]:
        large, small = (f"{words.number(level)} in a tile of {side}" for level, side in zip(found.tone, found.sizes))
        said.append(
            f"Everywhere in it, it is wrong by its own statistics, by {large} and {small} latent pixels: no overlap "
            "removes that, only a larger tile."
        )
    return [*said, *_frames(found)]


def _frames(found: Reach) -> list[str]:
    if not found.before:
        return []
    before, after = (max(side[1:], default=0.0) for side in (found.before, found.after))
    if before < 1e-3:
        return [f"One latent frame moves none before it and {words.number(after)} grey levels after it: it is causal."]
    return [f"One latent frame moves {words.number(before)} grey levels before it, {words.number(after)} after it."]


def _met(met: list[Meeting], own: str) -> list[str]:
    """How good the prediction was, on its own latents and elsewhere."""
    said = []
    for here, where in ((True, f"on {own}"), (False, "on other latents, whose content it did not see")):
        ratios = [each.ratio for each in met if each.own is here and each.ratio is not None]
        if ratios:
            said.append(
                f"Predicted is {min(ratios):.2f} to {max(ratios):.2f} times the measured RMSE of all items {where} "
                f"({words.plural(len(ratios), 'tiling')})."
            )
    return said
