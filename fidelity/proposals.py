"""Plans for a budget from predictions alone: nothing is decoded, no weights are needed, fidelity is not measured.

Each plan is ranked by three things that are known beforehand: its predicted peak, its work (pixels decoded, what
overlaps decode again included), and the weights that an offload moves. Tiles are those whose middle sees all that it
would see in the full decode, as far as the decoder's convolutions reach.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from fidelity import optimizations, predict
from fidelity.errors import EvaluationError, FidelityError, IllegalTiling, RequestError, in_one_line
from fidelity.offers import Advice, Budget, Offer, code
from fidelity.prediction import Prediction
from fidelity.receptive import Reach, reach_of
from fidelity.records import STREAM, DecodePlan, DTypeName, Model, OffloadName, Temporal, Tiling
from fidelity.simulation.repeat import Memo
from fidelity.wording import in_units

OVERLAP = 0.25
"""What diffusers' classes take where nothing is said."""
DTYPES: tuple[DTypeName, ...] = ("fp32", "bf16")
SHARES = (2, 3, 4, 8)
"""Tiles are about these shares of the larger side."""
MOVES: dict[str, tuple[OffloadName, ...]] = {
    "cpu": ("disk",),
    "cuda": ("model", "group_block", "group_leaf", "sequential"),
}
"""Offloads by which a device holds fewer weights, those that move least first."""
CHUNKS = (2, 4)
"""Chunks of a video are about these shares of its latent frames."""
SEGMENT = 2
"""Latent frames that a class with a causal cache is given after another."""


Memos = dict[tuple[str, str, str], Memo]
"""What is known of the decoder's calls, by dtype, offload and options."""


class Proposal(Struct, frozen=True):
    """A plan, and what is known of it beforehand."""

    predicted: Prediction
    work: float
    """Pixels decoded over pixels of the picture: 1 without tiles, more where overlaps are decoded again."""

    @property
    def plan(self) -> DecodePlan:
        return self.predicted.plan

    @property
    def need(self) -> int:
        """Bytes of the reserved peak, where the device reserves, else of the allocated."""
        reserved = self.predicted.reserved_peak_bytes
        return reserved if reserved is not None else self.predicted.allocated_peak_bytes

    @property
    def moved(self) -> int:
        """Bytes of weights that an offload brings in: all of them once, or at each call of the decoder."""
        if self.plan.offload in ("none", "model"):
            return self.predicted.weights_bytes if self.plan.offload == "model" else 0
        calls = next((stage.calls for stage in self.predicted.stages if stage.name == "tile"), 1)
        return self.predicted.weights_bytes * calls

    @property
    def waited(self) -> int:
        """Those that the decode waits for: blocks that a stream prefetches come while others run, but for the first
        call, which shows their order."""
        return self.predicted.weights_bytes if self.plan.options.get(STREAM) else self.moved

    @property
    def cost(self) -> tuple[int, float, int, int]:
        return self.need, self.work, self.waited, len(self.plan.settings)

    def covers(self, other: Proposal) -> bool:
        """Whether it needs no more, works no more and moves no more than another of its dtype."""
        alike = self.plan.dtype == other.plan.dtype
        return alike and self.need <= other.need and self.work <= other.work and self.waited <= other.waited


def propose(
    model: Model,
    size: tuple[int, int],
    budget: Budget,
    *,
    frames: int | None = None,
    batch: int = 1,
    device: str = "cpu",
    overlap: float = OVERLAP,
) -> Advice:
    """Plans whose predicted peak fits the budget, least peak first: the Pareto front of peak, work and bytes moved, for
    each dtype; without `frames`, of the fewest that the class decodes. Raises RequestError for a size or batch that
    cannot be, or an overlap that no tile of the class has."""
    if not 0 <= overlap < 1:
        raise RequestError(f"--overlap {overlap:g}: a share of the tile, at least 0 and below 1, as in 0.25")
    shape = predict.latents_shape(model, size, frames, batch)
    reach = reach_of(model)
    tilings = list(_tilings(model, shape, overlap, reach))
    found: list[Proposal] = []
    memos: Memos = {}
    for plan in _plans(model, shape, tilings, overlap):
        found.append(_predicted(model, shape, plan, device, memos))
        found += _offloaded(model, shape, found[-1], budget.limit, device, memos)
    fitting = [each for each in found if each.need <= budget.limit]
    best = front(fitting)
    nearest = min(found, key=lambda each: each.cost)
    kind = "reserved" if device == "cuda" else "allocated"
    return Advice(
        model=model.name,
        source="prediction",
        budget=budget,
        limit_bytes=budget.limit,
        offers=tuple(_offer(model, each, best, device) for each in best),
        nearest=None if best else _offer(model, nearest, [], device),
        reason=None if best else f"none of {len(found)} predicted plans fits {in_units(budget.limit)}",
        basis=(
            f"memory is PREDICTED for latents {'×'.join(map(str, shape))} on {device} ({kind} peak); fidelity was NOT "
            "measured: judge a plan with `fidelity run --plan …` before you take it",
            f"{len(found)} plans predicted, {len(fitting)} fit, {len(best)} are on the Pareto front of peak, work and "
            "weights moved, dtype by dtype; fp16 needs what bf16 needs, if it does not overflow",
            *_about_tiles(model, reach, tilings, overlap),
        ),
    )


# ---------------------------------------------------------------- which plans


def _plans(model: Model, shape: tuple[int, ...], tilings: list[Tiling], overlap: float) -> Iterator[DecodePlan]:
    """Every dtype with every tile and with none, sliced and not; chunks of a video with the smallest tile and none."""
    cuts: list[dict[str, Any]] = [{"tiling": tiling} for tiling in (None, *tilings)]
    for temporal in _chunks(model, shape, overlap):
        cuts += [{"tiling": tiling, "temporal": temporal} for tiling in (None, *tilings[-1:])]
    if model.geometry.video and model.family.streams:
        cuts.append({"options": {"streaming": SEGMENT}})
    for dtype in DTYPES:
        for cut in cuts:
            for slicing in (False, True):
                plan = DecodePlan(dtype=dtype, slicing=slicing, **cut)
                if optimizations.inapplicable(plan, model, shape) is None:
                    yield plan


def _chunks(model: Model, shape: tuple[int, ...], overlap: float) -> Iterator[Temporal]:
    """Legal chunks of about a half and a quarter of a video's latent frames."""
    if not model.geometry.video or not model.family.temporal_attributes():
        return
    taken = set()
    for share in CHUNKS:
        for tile in sorted(range(1, shape[2]), key=lambda each: (abs(each - shape[2] / share), each)):
            temporal = Temporal(tile, 0.0 if model.family.carries else overlap)
            try:
                several = len(model.family.chunks(model.geometry, shape[2], temporal)) > 1
            except IllegalTiling:
                continue
            if several and tile not in taken:
                taken.add(tile)
                yield temporal
                break


def _tilings(model: Model, shape: tuple[int, ...], overlap: float, reach: Reach) -> Iterator[Tiling]:
    """Legal tiles of about each share of the larger side, none below the decoder's reach."""
    side, taken = max(shape[-2:]), set()
    for share in SHARES:
        for tile in sorted(range(reach.least_tile, side), key=lambda each: (abs(each - side / share), each)):
            if abs(tile - side / share) > side / share / 3:
                break
            if tile not in taken and _is_legal(model, shape, Tiling(tile, overlap)):
                taken.add(tile)
                yield Tiling(tile, overlap)
                break


def _is_legal(model: Model, shape: tuple[int, ...], tiling: Tiling) -> bool:
    family, size = model.family, (shape[-2], shape[-1])
    try:
        return family.tile_grid(model.geometry, size, tiling).count > 1
    except IllegalTiling:
        return False


def _predicted(model: Model, shape: tuple[int, ...], plan: DecodePlan, device: str, memos: Memos) -> Proposal:
    memo = memos.setdefault((plan.dtype, plan.offload, str(plan.options)), {})
    try:
        return Proposal(predict.of_shape(model, shape, plan, device, memo), work(model, shape, plan))
    except FidelityError:
        raise
    except Exception as error:  # a decode that asks for values, or keeps tensors beyond itself, has no shapes alone
        raise EvaluationError(
            f"{model.name} under {plan.id} cannot be predicted: {in_one_line(error)}; measure "
            "it: fidelity run --plan …, then fidelity recommend DIR"
        ) from error


def work(model: Model, shape: tuple[int, ...], plan: DecodePlan) -> float:
    """Pixels that a plan decodes of latents of this shape, frames included, over those of the sample."""
    again = 1.0
    if plan.temporal is not None:
        chunks = model.family.chunks(model.geometry, shape[2], plan.temporal)
        again = sum(chunk.stop - chunk.start for chunk in chunks) / shape[2]
    if plan.tiling is None:
        return again
    grid = model.family.tile_grid(model.geometry, (shape[-2], shape[-1]), plan.tiling)
    return again * math.prod(
        sum(min(axis.tile, axis.size - start) for start in axis.starts) / axis.size for axis in (grid.rows, grid.cols)
    )


def _offloaded(
    model: Model, shape: tuple[int, ...], plain: Proposal, limit: int, device: str, memos: Memos
) -> list[Proposal]:
    """The same plan with the offload that moves least, where it does not fit without and may fit with one.

    An offload saves at most the weights: what is above the limit by more is not predicted again.
    """
    found: list[Proposal] = []
    if plain.need <= limit or plain.predicted.allocated_peak_bytes - plain.predicted.weights_bytes > limit:
        return found
    for mode in MOVES[device]:
        plan = replace(plain.plan, offload=mode)
        if optimizations.inapplicable(plan, model, shape) is not None:
            continue
        try:
            found.append(_predicted(model, shape, plan, device, memos))
        except RequestError:  # weights that come with a call that a decode never makes: it would crash
            continue
        if found[-1].need <= limit:
            ahead = replace(plan, options={**plan.options, STREAM: True})
            calls = any(stage.name == "tile" and stage.calls > 1 for stage in found[-1].predicted.stages)
            if mode == "group_block" and calls and optimizations.inapplicable(ahead, model, shape) is None:
                found.append(_predicted(model, shape, ahead, device, memos))
            break
    return found


def front(found: list[Proposal]) -> list[Proposal]:
    """Those that no other covers, least peak first; of those alike in all, the one with the fewest settings."""
    kept: list[Proposal] = []
    for each in sorted(found, key=lambda one: one.cost):
        if not any(other.covers(each) for other in kept):
            kept.append(each)
    return kept


def _offer(model: Model, found: Proposal, best: list[Proposal], device: str) -> Offer:
    lines, reason = code(model, found.plan, device)
    merits = {
        "least memory": bool(best) and found.need == min(each.need for each in best),
        "least work": bool(best) and found.work == min(each.work for each in best) and not found.moved,
    }
    return Offer(found.plan, found.need, lines, reason, tuple(name for name, so in merits.items() if so),
                 work=found.work, moved_bytes=found.moved)  # fmt: skip


def _about_tiles(model: Model, reach: Reach, tilings: list[Tiling], overlap: float) -> Iterator[str]:
    tiles = ", ".join(str(tiling.tile) for tiling in tilings)
    if not tiles and model.family.tile_controls == "none":
        yield f"{model.family.name} does not tile"
        return
    why = (
        f"at which the middle of a tile sees all that its convolutions reach ({reach.radius} latent pixels each way, "
        "summed over the modules)"
        if reach.reason is None
        else f"as the decoder's reach is not known ({reach.reason})"
    )
    kind = f"tiles of {tiles} latent pixels with" if tiles else "no tile with"
    yield f"{kind} overlap {overlap:g}; none below {reach.least_tile}, {why}"
    if tiles and reach.everywhere:
        yield (
            f"{' and '.join(reach.everywhere)} look at all of a tile, whatever its size: tiles change the picture, by "
            "how much is not predicted"
        )
