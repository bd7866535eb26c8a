"""Slicing: each batch item through the decoder alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fidelity.optimizations.attributes import attributes_kept
from fidelity.records import DecodePlan, Model, Observation, Proof
from fidelity.registry import optimization


def _nothing_to_slice(value: bool, plan: DecodePlan, model: Model, shape: tuple[int, ...]) -> str | None:
    if "slicing" in model.family.lacks:
        return f"slicing: {model.family.name} does not slice"
    return "slicing: a batch of one has nothing to slice" if shape[0] == 1 else None


@optimization("slicing", order=20, inapplicable=_nothing_to_slice)
def slicing(module: Any, value: bool, *, plan: DecodePlan, model: Model, device: str) -> Iterator[Proof]:
    """Decode a batch one item at a time, by the class's enable_slicing."""
    missing = None
    with attributes_kept(module, ("use_slicing",)):
        try:
            module.enable_slicing()
        except (AttributeError, NotImplementedError) as error:
            missing = f"{type(module).__name__} cannot slice: {error}"

        def prove(seen: Observation) -> dict[str, Any]:
            reason = missing or _unsliced(seen)
            return {"engaged": reason is None, "reason": reason, "calls": seen.calls, "batches": batches(seen)}

        yield prove


def batches(seen: Observation) -> list[int]:
    """The batch sizes that the decoder saw."""
    return sorted({shape[0] for shape in seen.shapes})


def _unsliced(seen: Observation) -> str | None:
    """Why the calls seen are not those of a sliced decode, or None if they are."""
    tiles = (seen.grid.count if seen.grid else 1) * len(seen.call_frames)
    expected = seen.batch * tiles
    if not seen.calls:
        return "the decoder was never called"
    if batches(seen) != [1]:
        return f"the decoder saw batches of {', '.join(map(str, batches(seen)))}, expected 1 at a time"
    if seen.calls != expected:
        return f"expected {expected} decoder calls ({seen.batch} items × {tiles} tiles and chunks), saw {seen.calls}"
    return None
