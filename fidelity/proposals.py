"""Plans for a budget from predictions alone: nothing is decoded, no weights are needed, fidelity is not measured.

Each plan is ranked by three things that are known beforehand: its predicted peak, its work (pixels decoded, what
overlaps decode again included), and the weights that an offload moves. Tiles are those whose middle sees all that it
would see in the full decode, as far as the decoder's convolutions reach.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from fidelity import optimizations, predict
from fidelity.errors import EvaluationError, FidelityError, IllegalTiling, RequestError, in_one_line
from fidelity.lazy import torch
from fidelity.prediction import Prediction, in_units
from fidelity.recommend import Advice, Budget, Offer, code
from fidelity.records import DecodePlan, DTypeName, Model, OffloadName, Tiling

if TYPE_CHECKING:
    from torch import nn

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
PROBE = 16
"""Latent pixels each way of the small decode that shows a decoder's reach."""


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
    def cost(self) -> tuple[int, float, int, int]:
        return self.need, self.work, self.moved, len(self.plan.settings)

    def covers(self, other: Proposal) -> bool:
        """Whether it needs no more, works no more and moves no more than another of its dtype."""
        alike = self.plan.dtype == other.plan.dtype
        return alike and self.need <= other.need and self.work <= other.work and self.moved <= other.moved


class Reach(Struct, frozen=True):
    """How far a decoder looks by its modules alone: an upper bound, in latent pixels each way."""

    radius: int | None
    """By convolutions; None where that cannot be told, and `reason` says why."""
    everywhere: tuple[str, ...] = ()
    """Classes of modules that look at everything they are given: a tile has statistics of its own."""
    reason: str | None = None

    @property
    def least_tile(self) -> int:
        """The smallest tile whose middle pixel sees all that convolutions would show it; PROBE where that is not
        known."""
        return PROBE if self.radius is None else 2 * self.radius + 1


def propose(
    model: Model,
    size: tuple[int, int],
    budget: Budget,
    *,
    frames: int = 1,
    batch: int = 1,
    device: str = "cpu",
    overlap: float = OVERLAP,
) -> Advice:
    """Plans whose predicted peak fits the budget, least peak first: the Pareto front of peak, work and bytes moved, for
    each dtype. Raises RequestError for a size or batch that cannot be, or an overlap that no tile of the class has."""
    if not 0 <= overlap < 1:
        raise RequestError(f"--overlap {overlap:g}: a share of the tile, at least 0 and below 1, as in 0.25")
    shape = predict.latents_shape(model, size, frames, batch)
    reach = reach_of(model)
    tilings = list(_tilings(model, shape, overlap, reach))
    found: list[Proposal] = []
    for plan in _plans(model, shape, tilings):
        found.append(_predicted(model, shape, plan, device))
        found += _offloaded(model, shape, found[-1], budget.limit, device)
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


def _plans(model: Model, shape: tuple[int, ...], tilings: list[Tiling]) -> Iterator[DecodePlan]:
    for dtype in DTYPES:
        for tiling in (None, *tilings):
            for slicing in (False, True):
                plan = DecodePlan(dtype=dtype, slicing=slicing, tiling=tiling)
                if optimizations.inapplicable(plan, model, shape) is None:
                    yield plan


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


def _predicted(model: Model, shape: tuple[int, ...], plan: DecodePlan, device: str) -> Proposal:
    try:
        return Proposal(predict.of_shape(model, shape, plan, device), work(model, shape, plan))
    except FidelityError:
        raise
    except Exception as error:  # a decode that asks for values, or keeps tensors beyond itself, has no shapes alone
        raise EvaluationError(
            f"{model.name} under {plan.id} cannot be predicted: {in_one_line(error)}; measure "
            "it: fidelity run --plan …, then fidelity recommend DIR"
        ) from error


def work(model: Model, shape: tuple[int, ...], plan: DecodePlan) -> float:
    """Pixels that a plan decodes of latents of this shape, over pixels of the picture."""
    if plan.tiling is None:
        return 1.0
    grid = model.family.tile_grid(model.geometry, (shape[-2], shape[-1]), plan.tiling)
    return math.prod(
        sum(min(axis.tile, axis.size - start) for start in axis.starts) / axis.size for axis in (grid.rows, grid.cols)
    )


def _offloaded(model: Model, shape: tuple[int, ...], plain: Proposal, limit: int, device: str) -> list[Proposal]:
    """The same plan with the offload that moves least, where it does not fit without and may fit with one.

    An offload saves at most the weights: what is above the limit by more is not predicted again.
    """
    found: list[Proposal] = []
    if plain.need <= limit or plain.predicted.allocated_peak_bytes - plain.predicted.weights_bytes > limit:
        return found
    for mode in MOVES[device]:
        plan = replace(plain.plan, offload=mode)
        if optimizations.inapplicable(plan, model, shape) is None:
            found.append(_predicted(model, shape, plan, device))
            if found[-1].need <= limit:
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


# ---------------------------------------------------------------- how far the decoder looks


def reach_of(model: Model) -> Reach:
    """How far one output pixel looks into the latents, summed over the convolutions that a small decode runs.

    Each kernel of k adds (k − 1) / 2 of its dilated steps, at the scale at which it runs; branches that join are added
    too, so that this bounds from above. Shapes alone are run: no weights.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    geometry = model.geometry
    frames = (max(2, model.family.least_frames),) if geometry.video else ()
    size = geometry.size or (PROBE, PROBE)
    steps: dict[str, float] = {}
    everywhere: dict[str, None] = {}
    try:
        with FakeTensorMode(), torch.no_grad():
            module = model.family.build(model.config)
            for name, part in model.family.decoder(module).named_modules():
                part.register_forward_hook(_noted(name, part, size[1], steps, everywhere))
            model.family.decode(module, torch.empty((1, geometry.latent_channels, *frames, *size)))
    except Exception as error:  # a decode may raise anything; then its reach is not known
        return Reach(None, reason=in_one_line(error))
    if not steps:
        return Reach(None, tuple(everywhere), reason="it has no convolutions")
    return Reach(math.ceil(sum(steps.values())), tuple(everywhere))


def _noted(
    name: str, part: nn.Module, wide: int, steps: dict[str, float], everywhere: dict[str, None]
) -> Callable[..., None]:
    def note(_: Any, given: tuple[Any, ...], out: Any) -> None:
        if isinstance(part, torch.nn.modules.conv._ConvNd) and part.kernel_size[-1] > 1:
            scale = max(1.0, max(out.shape[-1], given[0].shape[-1]) / wide)
            steps[name] = (part.kernel_size[-1] - 1) / 2 * part.dilation[-1] / scale
        kind = type(part).__name__
        if isinstance(part, torch.nn.GroupNorm) or ("Attention" in kind and "Processor" not in kind):
            everywhere[kind] = None

    return note


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
