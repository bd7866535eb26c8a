"""A prediction over sizes: the law by which the peak grows, and the largest picture that fits a budget.

    law = law_of(model, plan, shape, found, at)
    largest(model, plan, shape, law, found, budget, at)

`at(shape)` predicts one decode. The law is fitted to a few small pictures and only says where to look: what is said to
fit was predicted at its own size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from fidelity import optimizations
from fidelity.prediction import Fits, Prediction
from fidelity.records import DecodePlan, Model
from fidelity.simulation import law as law_
from fidelity.simulation.law import Law
from fidelity.wording import in_units

At = Callable[[tuple[int, ...]], Prediction]
Shape = tuple[int, ...]

WHOLE, CUT = (1 / 2, 2 / 3, 2.0, 3.0), (3 / 2, 2.0, 3.0, 1 / 2)
"""Sides of the pictures that a law is fitted to, over those asked for. Tiles wait to be put together, and one or two of
them do not show the law of many: tiled pictures are larger."""
FITTED = 3
TRIES = 8
MOST_VALUES = 2**40
"""Values of the largest sample that is predicted: torch counts bytes in 63 bits, and no machine holds so much."""
CLOSE = 64
"""The largest picture is found to a 64th of its height, or to a latent pixel."""


def law_of(model: Model, plan: DecodePlan, shape: Shape, found: Prediction, at: At) -> Law:
    """Fitted to this prediction and to two pictures of the same proportions that the plan cuts as well."""
    peaks = {_pixels(model, shape): _stages(found)}
    least = _least(plan, model, shape)
    for share in CUT if least > 1 else WHOLE:
        other = (*shape[:-2], *(max(least, round(side * share)) for side in shape[-2:]))
        if len(peaks) < FITTED and _pixels(model, other) not in peaks:
            peaks[_pixels(model, other)] = _stages(at(other))
    return law_.fit_stages(peaks)


def largest(model: Model, plan: DecodePlan, shape: Shape, law: Law, found: Prediction, budget: int, at: At) -> Fits:
    """The largest picture of this shape's proportions whose peak is within a budget for one decode, and whether
    that of `found` is."""
    fits = found.allocated_peak_bytes <= budget
    height, width = shape[-2:]
    least = _least(plan, model, shape)
    low, high, best = 0, _beyond(model, shape), None
    aim = _rows(law.pixels(budget), shape, model)
    for _ in range(TRIES):
        rows = max(aim, low + 1, math.ceil(least * height / min(height, width)))
        if high:
            rows = min(rows, high - 1)
        if rows <= low or (high and high - low <= max(1, low // CLOSE)):
            break
        if not law.pixels(budget) and not low:
            break  # the constants alone do not fit
        tried = at((*shape[:-2], rows, max(1, round(width * rows / height))))
        need = tried.allocated_peak_bytes
        if need <= budget:
            low, best = rows, tried
        else:
            high = rows
        aim = round(rows * _share(law, rows, shape, model, need, budget))
        if aim == rows:
            aim += 1 if need <= budget else -1
        if high and not low < aim < high:
            aim = (low + high) // 2
    if best is None:
        return Fits(budget, fits, None, None, None, reason=_too_large(law, budget, least))
    size = _pixels(model, best.latents)
    return Fits(budget, fits, *size, best.allocated_peak_bytes, law.peak(*size))


def only(found: Prediction, budget: int) -> Fits:
    """What a budget allows of a class that decodes one size alone, that of `found`."""
    need, (height, width) = found.allocated_peak_bytes, found.sample[-2:]
    if need <= budget:
        return Fits(budget, True, height, width, need, reason="the only size that the class decodes")
    return Fits(
        budget, False, None, None, None, reason=f"a decode needs {in_units(need)} of it, and has one size alone"
    )


def _beyond(model: Model, shape: Shape) -> int:
    """Rows of latents of this shape's proportions from which on nothing is predicted."""
    return math.ceil(shape[-2] * math.sqrt(MOST_VALUES / values(model, shape)))


def values(model: Model, shape: Shape) -> int:
    """Values of the sample that latents of this shape decode to."""
    geometry = model.geometry
    frames = geometry.sample_frames(shape[2]) if geometry.video else 1
    return shape[0] * geometry.sample_channels * frames * math.prod(_pixels(model, shape))


def _share(law: Law, rows: int, shape: Shape, model: Model, needed: int, budget: int) -> float:
    """By how much to change the sides: the law's growth from what was needed."""
    height, width = rows * model.geometry.spatial, rows * shape[-1] / shape[-2] * model.geometry.spatial
    pixels = height * width
    line = max(law.stages.values(), key=lambda each: each.peak(round(pixels)))
    if line.bytes_per_pixel <= 0:
        return 2.0 if needed <= budget else 0.5
    return math.sqrt(max(0.01, min(4.0, 1 + (budget - needed) / line.bytes_per_pixel / pixels)))


def _too_large(law: Law, budget: int, least: int) -> str:
    if not law.pixels(budget):
        constant = min(line.constant_bytes for line in law.stages.values() if line.constant_bytes > 0)
        return f"not even the smallest picture: {in_units(constant)} do not depend on its size"
    return f"not even the smallest picture of this plan, {least} latent pixels each way"


def _rows(pixels: int, shape: Shape, model: Model) -> int:
    height, width = shape[-2:]
    return int(math.sqrt(pixels * height / width) / model.geometry.spatial)


def _stages(found: Prediction) -> dict[str, int]:
    """The peaks that grow by a line each: a decode's, or of one in tiles their own and their assembly's."""
    peaks = {stage.name: stage.peak_bytes for stage in found.stages if stage.peak_bytes is not None}
    names = ("tile", "assemble", "convert") if "assemble" in peaks else ("decode", "convert")
    return {name: peaks[name] for name in names if name in peaks}  # type: ignore[index]


def _least(plan: DecodePlan, model: Model, shape: Shape) -> int:
    """Latent pixels of a side that the plan cuts; 1 where it cuts none."""
    return max([1, *(side + 1 for side in _tiles(plan, model, shape))])


def _tiles(plan: DecodePlan, model: Model, shape: Shape) -> Iterator[int]:
    grid = optimizations.tile_grid(plan, model, shape)
    if grid is not None:
        yield max(grid.rows.tile, grid.cols.tile) // model.geometry.spatial


def _pixels(model: Model, shape: Shape) -> tuple[int, int]:
    return shape[-2] * model.geometry.spatial, shape[-1] * model.geometry.spatial
