"""Options that change nothing: slicing, offload, the order of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from fidelity.checks.subject import Subject
from fidelity.errors import EvaluationError
from fidelity.lazy import torch
from fidelity.records import DecodePlan
from fidelity.registry import check

if TYPE_CHECKING:
    from torch import Tensor


def _one_item(shape: tuple[int, ...]) -> str | None:
    return "a batch of one has no order" if shape[0] == 1 else None


@check("slicing_alone", diagnosis=("not_as_specified",), needs="slicing")
def slicing_alone(runner: Subject, latents: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """A sliced batch gives what each item gives when it is decoded alone."""
    unsliced = replace(plan, slicing=False)
    return runner.decode(latents, plan), torch.cat([runner.decode(item, unsliced) for item in latents.split(1)])


@check("offload_plain", diagnosis=("not_as_specified",), needs="offload")
def offload_plain(runner: Subject, latents: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """Offloaded weights give what weights that stay give."""
    return runner.decode(latents, plan), runner.decode(latents, replace(plan, offload="none"))


@check("batch_order", diagnosis=("order",), inapplicable=_one_item)
def batch_order(runner: Subject, latents: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """A batch in another order gives the same items in that order."""
    moved = latents.roll(1, 0)  # leaves no item in its place, as a reversal does with the one in the middle
    if torch.equal(moved, latents):
        raise EvaluationError("batch_order: all items are alike, so their order cannot be told; name other latents")
    return runner.decode(moved, plan).roll(-1, 0), runner.decode(latents, plan)
