"""Temporal tiling: a video in overlapping chunks of latent frames, as the family's class cuts it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from fidelity.errors import EvaluationError
from fidelity.optimizations.attributes import attributes_kept
from fidelity.records import Chunk, DecodePlan, Model, Observation, Proof, Temporal
from fidelity.registry import optimization

if TYPE_CHECKING:
    from torch import nn


def _not_shorter(value: Temporal, plan: DecodePlan, model: Model, shape: tuple[int, ...]) -> str | None:
    if not model.geometry.video:
        return "temporal: an image autoencoder has no frames"
    if not model.family.temporal_attributes():
        return f"temporal: {model.family.name} does not cut a video into chunks"
    if shape[2] <= value.tile:
        return f"temporal tile {value.tile} is not smaller than the {shape[2]} latent frames"
    return None


def _chunks(value: Temporal, model: Model, shape: tuple[int, ...]) -> tuple[Chunk, ...]:
    return model.family.chunks(model.geometry, shape[2], value)


@optimization("temporal", order=40, inapplicable=_not_shorter, chunks=_chunks)
def temporal(module: nn.Module, value: Temporal, *, plan: DecodePlan, model: Model, device: str) -> Iterator[Proof]:
    """Decode a video in chunks of `tile` latent frames that overlap by a fraction."""
    family = model.family
    if not model.geometry.video:
        raise EvaluationError("temporal: an image autoencoder has no frames")
    if not any(hasattr(module, name) for name in family.temporal_attributes()):
        raise EvaluationError(
            f"temporal: {type(module).__name__} has none of {', '.join(family.temporal_attributes())}: it is no "
            f"{family.name}, or this version of diffusers does not cut its videos"
        )
    with attributes_kept(module, family.temporal_attributes()):
        family.set_temporal(module, model.geometry, value)
        yield partial(receipt, plan=plan, temporal=model.geometry.temporal)


def receipt(seen: Observation, *, plan: DecodePlan, temporal: int) -> dict[str, Any]:
    """The proof of any cut in time: the decoder's calls and their frames against the plan's chunks."""
    reason = _uncut(seen, plan)
    return {
        "engaged": reason is None,
        "reason": reason,
        # it did cut, but not as asked
        "diagnosis": ["geometry"] if reason and len({shape[-3] for shape in seen.shapes}) > 1 else None,
        "calls": seen.calls,
        "frames": [shape[-3] for shape in seen.shapes],
        "grid": msgspec.to_builtins(seen.frames),
        "period": temporal,
    }


def _uncut(seen: Observation, plan: DecodePlan) -> str | None:
    """Why the calls seen are not those that the chunks ask for, or None if they are."""
    each = (seen.grid.count if seen.grid else 1) * (seen.batch if plan.slicing else 1)
    expected = Counter(seen.call_frames)
    lengths = Counter(shape[-3] for shape in seen.shapes)
    if seen.calls != len(seen.call_frames) * each:
        return f"expected {len(seen.call_frames) * each} decoder calls for {len(seen.chunks)} chunks, saw {seen.calls}"
    if lengths != Counter({frames: times * each for frames, times in expected.items()}):
        return f"expected chunks of {_words(expected)} latent frames, saw {_words(lengths)}"
    return None


def _words(lengths: Counter[int]) -> str:
    return ", ".join(f"{times}× {frames}" for frames, times in sorted(lengths.items()))
