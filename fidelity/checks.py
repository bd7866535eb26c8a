"""Metamorphic checks: two decodes that must give the same, so that neither a golden nor its limits are needed.

    @check("batch_order", diagnosis=("order",))
    def batch_order(runner, latents, plan):
        "A batch in another order gives the same items in that order."
        return runner.decode(latents.flip(0), plan).flip(0), runner.decode(latents, plan)

A check gets a Subject in the runner's place: one instance, decoded again and again without being compared, restored or
replaced in between, so that what sticks to it is there to be found. Every decode still proves that its options ran.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from fidelity import oracles
from fidelity.errors import EvaluationError, IllegalTiling
from fidelity.lazy import torch
from fidelity.optimizations import inapplicable
from fidelity.records import DTYPES, OFFLOADS, DecodePlan, Limit, Measurement, Model, Reason, Receipts, Temporal, Tiling
from fidelity.registry import Check, check

if TYPE_CHECKING:
    from torch import Tensor

    from fidelity.runner import Runner

NAME = "check_max_abs"
LIMIT = Limit(
    max=0.01,
    origin="noise floor: both sides decode the same batch shapes in the same dtype, bit-equal where measured",
)
"""Grey levels. tests/test_checks.py holds honest decodes to the bit; a suite may set its own `check_max_abs`."""
COUNTED = Limit(max=0.0, origin="calls are counted, so nothing rounds")
KNOB_SIZE = 8
"""Latent pixels a side of what `knobs` decodes, two items at most: state is at stake there, not pixels."""


class Subject:
    """One loaded instance under one check. `receipts` are those of all proved decodes, the first bad one of each."""

    def __init__(self, runner: Runner):
        self.runner = runner
        self.receipts: Receipts = {}

    @property
    def model(self) -> Model:
        return self.runner.model

    @property
    def module(self) -> Any:
        return self.runner.module

    @contextmanager
    def applied(self, plan: DecodePlan) -> Iterator[Callable[..., Tensor]]:
        """Yield `decode(latents, prove=True)`, for several decodes under one application of `plan`.

        Latents (B, C, [T,] H, W) fp32 in, the sample in fp32 on the CPU out. `prove=False` keeps no receipts: for
        latents of another size, where options may have nothing to do.
        """
        with self.runner.applied(plan) as run:

            def decode(latents: Tensor, prove: bool = True) -> Tensor:
                sample, receipts = run(latents)
                if prove:
                    self._keep(receipts)
                return sample

            yield decode

    def decode(self, latents: Tensor, plan: DecodePlan, prove: bool = True) -> Tensor:
        """One decode under an application of its own."""
        with self.applied(plan) as decode:
            return decode(latents, prove)

    def tile_calls(self, latents: Tensor, plan: DecodePlan) -> list[tuple[int, int, int]]:
        """Height and width in latent pixels of the tiles that the decoder saw, and how often."""
        with self.runner.applied(plan) as run:
            _, receipts = run(latents)
        return [(shape[-3], shape[-2], shape[-1]) for shape in receipts["tiling"]["shapes"]]

    def _keep(self, receipts: Receipts) -> None:
        for name, receipt in receipts.items():
            if self.receipts.get(name, {}).get("engaged") is not False:
                self.receipts[name] = receipt


# ---------------------------------------------------------------- judging the two samples


def limit(check: Check) -> Limit:
    """The bound of a check that its suite says nothing about."""
    return LIMIT if in_grey_levels(check) else COUNTED


def in_grey_levels(check: Check) -> bool:
    """Whether the two samples are pictures; those of the others are counts."""
    return check.unit == "grey levels"


def measure(
    check: Check, candidate: Tensor, expected: Tensor, data_range: tuple[float, float]
) -> dict[str, Measurement]:
    """`check_max_abs`, the largest absolute difference in the check's unit with its place, and `nonfinite_share`.

    Two samples that are NaN in the same places are equal, but prove nothing: the share, of both together, fails them.
    """
    both = [candidate.flatten(), expected.flatten()]
    broken = sum(int((~side.isfinite()).sum()) for side in both)
    share = broken / max(1, sum(side.numel() for side in both))
    span = data_range if in_grey_levels(check) else (0.0, 255.0)
    apart = oracles.compare(candidate, expected, data_range=span)
    return {
        "nonfinite_share": Measurement("nonfinite_share", share, "share", "lower"),
        NAME: msgspec.structs.replace(apart, name=NAME, unit=check.unit),
    }


def shape_reason(check: Check, candidate: Tensor, expected: Tensor) -> Reason | None:
    """Why the two cannot be compared at all: they differ in shape, which is the check's to blame."""
    if candidate.shape == expected.shape:
        return None
    seen, want = ("×".join(map(str, tensor.shape)) for tensor in (candidate, expected))
    return Reason("shape", f"{check.name}: the sample is {seen}, expected {want}", diagnosis=check.diagnosis)


# ---------------------------------------------------------------- options that change nothing


def _replace(plan: DecodePlan, **settings: Any) -> DecodePlan:
    return msgspec.structs.replace(plan, **settings)


def _one_item(shape: tuple[int, ...]) -> str | None:
    return "a batch of one has no order" if shape[0] == 1 else None


@check("slicing_alone", diagnosis=("not_as_specified",), needs="slicing")
def slicing_alone(runner: Subject, latents: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """A sliced batch gives what each item gives when it is decoded alone."""
    unsliced = _replace(plan, slicing=False)
    return runner.decode(latents, plan), torch.cat([runner.decode(item, unsliced) for item in latents.split(1)])


@check("offload_plain", diagnosis=("not_as_specified",), needs="offload")
def offload_plain(runner: Subject, latents: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """Offloaded weights give what weights that stay give."""
    return runner.decode(latents, plan), runner.decode(latents, _replace(plan, offload="none"))


@check("batch_order", diagnosis=("order",), inapplicable=_one_item)
def batch_order(runner: Subject, latents: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """A batch in another order gives the same items in that order."""
    moved = latents.roll(1, 0)  # leaves no item in its place, as a reversal does with the one in the middle
    if torch.equal(moved, latents):
        raise EvaluationError("batch_order: all items are alike, so their order cannot be told; name other latents")
    return runner.decode(moved, plan).roll(-1, 0), runner.decode(latents, plan)


@check("tile_holds_image", diagnosis=("geometry",), sets="tiling")
def tile_holds_image(runner: Subject, latents: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """Tiling by a tile that holds the whole picture is the full decode, though its stride is shorter than that."""
    height, width = latents.shape[-2:]
    tile = -(-max(height, width) // 4) * 4  # a quarter of it is whole
    tiling = Tiling(tile, 0.25)
    runner.model.family.tile_grid(runner.model.geometry, (height, width), tiling)
    # nothing to prove of the tiling: that it stays idle is the very point
    return runner.decode(latents, _replace(plan, tiling=tiling), prove=False), runner.decode(latents, plan)


# ---------------------------------------------------------------- state that a decode leaves behind


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
        *(_replace(plan, dtype=dtype, force_upcast=False) for dtype in DTYPES if dtype != plan.dtype),
        _replace(plan, dtype="fp16", force_upcast=True),
        _replace(plan, slicing=not plan.slicing),
        *(_replace(plan, offload=offload) for offload in OFFLOADS if offload != plan.offload),
        _replace(plan, tiling=None if plan.tiling else _some_tiling(model, shape)),
        _replace(plan, temporal=None if plan.temporal else _some_chunks(model, shape)),
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


# ---------------------------------------------------------------- geometry


@check("transposed", diagnosis=("geometry",), unit="calls", needs="tiling")
def transposed(runner: Subject, latents: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """Transposed latents are cut into the transposed tiles, at sizes about the tile and its stride."""
    assert plan.tiling is not None
    runner.decode(latents, plan)  # proves that it tiles here
    tile = plan.tiling.tile
    stride = max(1, round(tile * (1 - plan.tiling.overlap)))
    between = (stride + tile + 1) // 2
    # one side about the tile and its stride, the other longer than a tile; and both below it, one above its stride
    sizes = [(side, tile + 4) for side in (stride, between, tile, tile + 1)] + [(max(1, stride // 2), between)]
    item = latents[:1] if latents.shape[-1] >= latents.shape[-2] else latents[:1].transpose(-1, -2)
    cut: list[dict[tuple[int, int], int]] = [{}, {}]
    for size in dict.fromkeys(sizes):
        piece = item[..., : size[0], : size[1]]
        for seen, turned in zip(cut, (False, True)):
            for high, broad, times in runner.tile_calls(piece.transpose(-1, -2) if turned else piece, plan):
                key = (broad, high) if turned else (high, broad)
                seen[key] = seen.get(key, 0) + times
    return _counts(cut[1], cut), _counts(cut[0], cut)


def _counts(seen: dict[tuple[int, int], int], all_seen: Iterable[dict[tuple[int, int], int]]) -> Tensor:
    """(1, 1, H, W): how often a tile of y × x latent pixels was seen, at (y, x)."""
    keys = [key for one in all_seen for key in one]
    table = torch.zeros(1, 1, 1 + max(high for high, _ in keys), 1 + max(wide for _, wide in keys))
    for (high, wide), times in seen.items():
        table[0, 0, high, wide] = times
    return table
