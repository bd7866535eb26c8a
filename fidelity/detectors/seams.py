"""The seam family: defects that have a place, because the tile grid is known.

All work on candidate − golden in grey levels (255 = the declared range), with the grid of the receipts, and report an
effect beyond what seamless positions of the same picture show (0: not significant), with its place and the detection
limit on that image. docs/design/seam-detectors.md has the statistics and their calibration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fidelity.detectors.bands import band_places, corner_places, gathered
from fidelity.detectors.grid import Layout, layout
from fidelity.detectors.steps import steps
from fidelity.detectors.tone import tones
from fidelity.records import DecodePlan, Measurement, Receipts
from fidelity.registry import detector
from fidelity.signal import GREY_LEVELS, DataRange, Pair

if TYPE_CHECKING:
    from torch import Tensor

GREY = "grey levels"
Look = Callable[[Pair, Sequence[int], Layout], "list[Any] | str"]
"""Finds one image's worst defect each, with `value`, `limit`, `where` and `details`; or a reason why it cannot."""


@detector("tile_step", unit=GREY, better="lower", needs="tiling", diagnosis=("seam",))
def tile_step(
    candidate: Tensor, golden: Tensor, *, plan: DecodePlan, receipts: Receipts, data_range: DataRange
) -> Measurement:
    """The largest step across a tile border or an edge of a blend band, beyond those at like places without one.

    Tensors (B, C, [T,] H, W), fp32. `where`: image, axis ("x": a vertical line), position, tile, x, y. Raises
    EvaluationError if the samples do not fit.
    """

    def look(pair: Pair, images: Sequence[int], tiles: Layout) -> Any:
        return steps(pair.grey(images), tiles)

    return measure(Pair(candidate, golden, data_range), plan, receipts, look)


@detector("tile_tone", unit=GREY, better="lower", needs="tiling", diagnosis=("tone_drift",))
def tile_tone(
    candidate: Tensor, golden: Tensor, *, plan: DecodePlan, receipts: Receipts, data_range: DataRange
) -> Measurement:
    """The largest offset or gain of one tile against the others, where blending hides the edge and leaves the shift.

    Tensors (B, C, [T,] H, W), fp32. A gain is given as what it moves at one standard deviation of the tile's tones.
    `where`: image, tile (row, column), channel, x, y. Raises EvaluationError if the samples do not fit.
    """

    def look(pair: Pair, images: Sequence[int], tiles: Layout) -> Any:
        return tones(pair.grey(images), pair.unit(pair.golden, images) * GREY_LEVELS, tiles)

    return measure(Pair(candidate, golden, data_range), plan, receipts, look)


@detector("tile_band", unit=GREY, better="lower", needs="tiling", diagnosis=("band",))
def tile_band(
    candidate: Tensor, golden: Tensor, *, plan: DecodePlan, receipts: Receipts, data_range: DataRange
) -> Measurement:
    """Error gathered in a blend band, beyond that of strips of the same width without blending.

    Tensors (B, C, [T,] H, W), fp32. 0 where the plan has no overlap. Raises EvaluationError if the samples do not fit.
    """

    def look(pair: Pair, images: Sequence[int], tiles: Layout) -> Any:
        return gathered(pair.grey(images), tiles, band_places(tiles))

    def bare(tiles: Layout) -> str | None:
        return None if tiles.grid.rows.band or tiles.grid.cols.band else "the plan has no overlap: there are no bands"

    return measure(Pair(candidate, golden, data_range), plan, receipts, look, bare)


@detector("tile_corner", unit=GREY, better="lower", needs="tiling", diagnosis=("corner",))
def tile_corner(
    candidate: Tensor, golden: Tensor, *, plan: DecodePlan, receipts: Receipts, data_range: DataRange
) -> Measurement:
    """Error gathered where four tiles meet, beyond that along the borders between two.

    Tensors (B, C, [T,] H, W), fp32. 0 where no four tiles meet. Raises EvaluationError if the samples do not fit.
    """

    def look(pair: Pair, images: Sequence[int], tiles: Layout) -> Any:
        return gathered(pair.grey(images), tiles, corner_places(tiles))

    def bare(tiles: Layout) -> str | None:
        both = tiles.grid.rows.edges and tiles.grid.cols.edges
        return None if both else "the tiles lie in one row: no four of them meet"

    return measure(Pair(candidate, golden, data_range), plan, receipts, look, bare)


@detector("tile_chroma", unit=GREY, better="lower", needs="tiling", diagnosis=("chroma",))
def tile_chroma(
    candidate: Tensor, golden: Tensor, *, plan: DecodePlan, receipts: Receipts, data_range: DataRange
) -> Measurement:
    """The largest step, tile offset or gain in colour alone: the difference of each channel from that of their mean.

    Tensors (B, 3, [T,] H, W), fp32. Linear in the channels and not in Lab, which makes twenty levels of one in the
    dark. Raises EvaluationError if the samples do not fit.
    """

    def look(pair: Pair, images: Sequence[int], tiles: Layout) -> Any:
        if pair.candidate.shape[1] != 3:
            return f"{pair.candidate.shape[1]} channels have no colour: 3 expected"
        difference, other = _colour(pair.grey(images)), pair.unit(pair.golden, images) * GREY_LEVELS
        found: tuple[Any, Any] = steps(difference, tiles), tones(difference, other, tiles, _colour(other))
        reasons = [reason for reason in found if isinstance(reason, str)]
        return reasons[0] if reasons else [max(both, key=lambda each: each.value) for both in zip(*found)]

    return measure(Pair(candidate, golden, data_range), plan, receipts, look)


def _colour(images: Tensor) -> Tensor:
    return images - images.mean(1, keepdim=True)


def measure(
    pair: Pair,
    plan: DecodePlan,
    receipts: Receipts,
    look: Look,
    bare: Callable[[Layout], str | None] = lambda tiles: None,
) -> Measurement:
    """Find the grid, look at every finite image, and tell the worst image's story. `bare`: why there is nothing."""
    tiles = layout(pair.candidate, plan, receipts)
    if isinstance(tiles, str):
        return pair.summarise([None] * pair.count, "lower", reason=tiles)
    nothing = bare(tiles)
    if nothing is not None:
        return pair.measure(lambda images: [0.0] * len(images), "lower", details={"note": nothing})
    found = look(pair, pair.good, tiles) if pair.good else []
    if isinstance(found, str):
        return pair.summarise([None] * pair.count, "lower", reason=found)
    return located(pair, dict(zip(pair.good, found)))


def located(pair: Pair, found: dict[int, Any]) -> Measurement:
    """The Measurement of one finding an image (`value`, `limit`, `where`, `details` with a `p_value`)."""
    values = [found[i].value if i in found else None for i in range(pair.count)]
    measured = pair.summarise(values, "lower")
    if measured.value is None:
        return measured
    # where nothing is significant all values are 0: then the story is that of the image nearest to an alarm
    told = max(found, key=lambda i: (found[i].value, -found[i].details["p_value"]))
    return Measurement(
        value=measured.value,
        per_image=measured.per_image,
        where=pair.place(told) | found[told].where,
        exact=pair.exact,
        detection_limit=max(each.limit for each in found.values()),
        details={**measured.details, **found[told].details},
    )


# ---------------------------------------------------------------- the family

FAMILY = ("tile_step", "tile_tone", "tile_band", "tile_chroma", "tile_corner")
DIAGNOSIS = {"tile_step": "seam", "tile_tone": "tone_drift", "tile_band": "band", "tile_chroma": "chroma",
             "tile_corner": "corner"}  # fmt: skip


def seam_family(measurements: dict[str, Measurement]) -> Measurement | None:
    """`tile_seam`: the worst of the family in grey levels, or None where no tiles were looked at.

    `details.member` names whose value it is, `details.diagnosis` what to blame, `details.not_measured` who could not
    look. Steps must have been measured: without them the family has no value.
    """
    family = {name: measurements[name] for name in FAMILY if name in measurements}
    if not family:
        return None
    about: dict[str, Any] = {"name": "tile_seam", "unit": GREY, "better": "lower"}
    missing = {name: each.reason for name, each in family.items() if each.value is None}
    step = family.get("tile_step")
    if step is None or step.value is None:
        reason = "tile_step was not measured" if step is None else step.reason
        return Measurement(value=None, reason=reason, details={"not_measured": missing}, **about)
    name = max((n for n in family if n not in missing), key=lambda n: family[n].value)  # type: ignore[arg-type,return-value]
    worst = family[name]
    details = {"member": name, "diagnosis": [DIAGNOSIS[name]], "not_measured": missing, **worst.details}
    return Measurement(
        value=worst.value,
        per_image=worst.per_image,
        where=worst.where,
        exact=worst.exact,
        detection_limit=worst.detection_limit,
        details=details,
        **about,
    )
