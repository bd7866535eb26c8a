"""Temporal tiling: a video in chunks of latent frames. No class of this version takes it, and the reason says so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fidelity.errors import EvaluationError
from fidelity.records import DecodePlan, Model, Proof, Temporal
from fidelity.registry import optimization

if TYPE_CHECKING:
    from torch import nn


def _no_frames(value: Temporal, plan: DecodePlan, model: Model, shape: tuple[int, ...]) -> str | None:
    if not model.geometry.video:
        return "temporal: an image autoencoder has no frames"
    return f"temporal: not supported for {model.family.name}"


@optimization("temporal", order=40, inapplicable=_no_frames)
def temporal(module: nn.Module, value: Temporal, *, plan: DecodePlan, model: Model, device: str) -> Iterator[Proof]:
    """Decode a video in chunks of latent frames (not applicable to any class that is known so far)."""
    raise EvaluationError(_no_frames(value, plan, model, ()))
    yield  # a generator, as every optimization is
