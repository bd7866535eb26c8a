"""State that a decode leaves behind on its instance."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from fidelity.checks.subject import Subject
from fidelity.errors import EvaluationError, IllegalTiling
from fidelity.lazy import torch
from fidelity.optimizations import inapplicable
from fidelity.records import DTYPES, OFFLOADS, DecodePlan, Model, Temporal, Tiling
from fidelity.registry import check

if TYPE_CHECKING:
    from torch import Tensor

KNOB_SIZE = 8
"""Latent pixels a side of what `knobs` decodes, two items at most: state is at stake there, not pixels."""


@check("second_decode", diagnosis=("nondeterministic",))
def second_decode(runner: Subject, latents: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """A second decode gives the bits of the first."""
    with runner.applied(plan) as decode:
        first = decode(latents)
        return decode(latents), first


@check("after_exception", diagnosis=("state_leak",))
def after_exception(runner: Subject, latents: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """A decode after one that raised inside the decoder gives the bits of the one before."""
    with runner.applied(plan) as decode:
        calls = _Interruption()
        with calls.at(runner):
            first = decode(latents)
        # in the second call where there are several: caches are half filled then
        raising = _Interruption(number=min(2, calls.seen))
        try:
            with raising.at(runner):
                decode(latents, prove=False)
        except _Interrupted:
            return decode(latents), first
    raise EvaluationError("after_exception: the decode never reached the middle layer, so nothing could raise there")


@check("a_b_a", diagnosis=("state_leak",))
def a_b_a(runner: Subject, latents: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """Latents decoded before and after others of another size give the same bits."""
    height = latents.shape[-2]
    other = -latents[:1].flip(-1)[..., : max(1, height * 3 // 4), :]
    with runner.applied(plan) as decode:
        first = decode(latents)
        decode(other, prove=False)
        return decode(latents), first


@check("knobs", diagnosis=("state_leak",))
def knobs(runner: Subject, latents: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """Every setting on, off, on in a seeded random order returns to the first bits (on a corner, for speed)."""
    side = max(KNOB_SIZE, plan.tiling.tile + 4 if plan.tiling else 0)
    corner = latents[:2, ..., :side, :side]
    turned = list(_knobs(runner.model, plan, tuple(corner.shape))) * 2
    if not turned:
        raise EvaluationError("knobs: no other setting applies to this plan, so there is nothing to turn")
    random.Random(plan.id).shuffle(turned)  # another order for another plan, the same one each time
    first = runner.decode(corner, plan)
    before: dict[DecodePlan, Tensor] = {}
    pairs: list[tuple[Tensor, Tensor]] = []
    for knob in turned:
        on = runner.decode(corner, knob)
        pairs.append((on, before.setdefault(knob, on)))
        pairs.append((runner.decode(corner, plan), first))
    return next((pair for pair in pairs if not torch.equal(*pair)), pairs[-1])


def _knobs(model: Model, plan: DecodePlan, shape: tuple[int, ...]) -> Iterator[DecodePlan]:
    """The plan with one setting turned to another value, each that can apply."""
    turned = [
        *(replace(plan, dtype=dtype, force_upcast=False) for dtype in DTYPES if dtype != plan.dtype),
        replace(plan, dtype="fp16", force_upcast=True),
        replace(plan, slicing=not plan.slicing),
        *(replace(plan, offload=offload) for offload in OFFLOADS if offload != plan.offload),
        replace(plan, tiling=None if plan.tiling else _some_tiling(model, shape)),
        replace(plan, temporal=None if plan.temporal else _some_chunks(model, shape)),
    ]
    for knob in dict.fromkeys(turned):
        if knob != plan and inapplicable(knob, model, shape) is None:
            yield knob


def _some_tiling(model: Model, shape: tuple[int, ...]) -> Tiling | None:
    """The largest tile of at most half the shorter side that the class decodes faithfully with overlap 0.25."""
    size = (shape[-2], shape[-1])
    for tile in range(max(size) // 2, 1, -1):
        try:
            model.family.tile_grid(model.geometry, size, Tiling(tile, 0.25))
        except IllegalTiling:
            continue
        return Tiling(tile, 0.25)
    return None


def _some_chunks(model: Model, shape: tuple[int, ...]) -> Temporal | None:
    """Chunks of half the video that abut, where the class cuts videos."""
    if len(shape) != 5 or shape[2] < 2 or not model.family.temporal_attributes():
        return None
    return Temporal(shape[2] // 2, 0.0)


class _Interrupted(Exception):
    """Raised inside a decoder on purpose."""


class _Interruption:
    """Counts the calls of the decoder's middle layer, and raises in call `number`, the first being 1."""

    def __init__(self, number: int | None = None):
        self.number, self.seen = number, 0

    def __call__(self, *_: Any) -> None:
        self.seen += 1
        if self.seen == self.number:
            raise _Interrupted

    @contextmanager
    def at(self, runner: Subject) -> Iterator[None]:
        handle = runner.model.family.middle(runner.module).register_forward_pre_hook(self)
        try:
            yield
        finally:
            handle.remove()
