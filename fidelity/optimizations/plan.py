"""A whole plan at once: applied in ascending order, undone in descending order, whatever the decode does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from operator import sub
from typing import TYPE_CHECKING, Any

from fidelity.records import Chunk, DecodePlan, Model, Observation, Optimization, Proof, TileAxis, TileGrid
from fidelity.registry import OPTIMIZATIONS

if TYPE_CHECKING:
    from torch import nn


def settings(plan: DecodePlan) -> list[tuple[str, Any, Optimization]]:
    """The plan's settings in the order in which they are applied. Raises UnknownName for one that nobody registered."""
    found = [(name, value, OPTIMIZATIONS.get(name)) for name, value in plan.settings.items()]
    return sorted(found, key=lambda setting: (setting[2].order, setting[0]))


def inapplicable(plan: DecodePlan, model: Model, shape: tuple[int, ...]) -> str | None:
    """Why this plan cannot apply to latents of this shape: the first reason, or None. Imports no torch.

    Raises UnknownName.
    """
    reasons = (optimization.inapplicable(value, plan, model, shape) for _, value, optimization in settings(plan))
    return next((reason for reason in reasons if reason), None)


def tile_grid(plan: DecodePlan, model: Model, shape: tuple[int, ...]) -> TileGrid | None:
    """Where the tiles of this plan lie in the sample of latents of this shape; None where it cuts none.

    Raises IllegalTiling.
    """
    laws = ((getattr(optimization, "grid", None), value) for _, value, optimization in settings(plan))
    return next((law(value, model, shape) for law, value in laws if law is not None), None)


def frame_chunks(plan: DecodePlan, model: Model, shape: tuple[int, ...]) -> tuple[Chunk, ...]:
    """The chunks of latent frames that this plan cuts latents of this shape into; none where it cuts none.

    Raises IllegalTiling.
    """
    laws = ((getattr(optimization, "chunks", None), value) for _, value, optimization in settings(plan))
    return next((law(value, model, shape) for law, value in laws if law is not None), ())


def frame_axis(plan: DecodePlan, model: Model, shape: tuple[int, ...]) -> TileAxis | None:
    """Where those chunks lie in the sample: as the family's class joins them, else each where the last one ends."""
    if plan.temporal is not None:
        return model.family.frame_axis(model.geometry, shape[2], plan.temporal)
    chunks, frames = frame_chunks(plan, model, shape), model.geometry.sample_frames
    if not chunks:
        return None
    ends = [frames(chunk.stop) for chunk in chunks]
    starts = (0, *ends[:-1])
    return TileAxis(starts=starts, band=0, tile=max(map(sub, ends, starts)), size=ends[-1])


@contextmanager
def apply_plan(module: nn.Module, plan: DecodePlan, *, model: Model, device: str) -> Iterator[dict[str, Proof]]:
    """Apply every setting of the plan to the module; on exit restore it, even if the decode raised.

    Yields one proof for each setting, to be called after the decode and before the exit.
    Raises UnknownName before anything is touched.
    """
    with ExitStack() as stack:
        proofs: dict[str, Proof] = {}
        for name, value, optimization in settings(plan):
            prove = stack.enter_context(optimization.apply(module, value, plan=plan, model=model, device=device))
            proofs[name] = _closed(name, prove)
        yield proofs


def _closed(name: str, prove: Proof) -> Proof:
    """The same proof, failing closed: a receipt that does not say whether the option engaged says that it did not."""

    def closed(seen: Observation) -> dict[str, Any]:
        receipt = {"requested": True, "reason": None, **prove(seen)}
        if receipt.get("engaged", False) not in (True, False, None) or "engaged" not in receipt:
            receipt |= {"engaged": False, "reason": f"the proof of {name!r} does not say whether it engaged"}
        return receipt

    return closed
