"""Why a decode is not finite: decoded once more with every module watched, the one that made it so is named."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fidelity.errors import in_one_line
from fidelity.lazy import torch
from fidelity.optimizations import activations
from fidelity.records import DecodePlan, Reason
from fidelity.runner import Runner

if TYPE_CHECKING:
    from torch import Tensor

    from fidelity.runner import Decode

NAME = "first_overflow"


def reasons(
    runner: Runner, latents: Tensor, plan: DecodePlan, sample: Tensor, decode: Decode | None = None
) -> list[Reason]:
    """Name the first module that gave a value that is not finite, and the batch items; empty where `sample` is finite.

    `sample` (B, C, [T,] H, W) is what `plan` gave, or `decode`, if it is somebody's own.
    """
    if bool(torch.isfinite(sample).all()):
        return []
    try:
        again = runner.decode(latents, plan, decode=decode, trace=False, watch=True)
    except Exception as error:  # it went well a moment ago; a decode may raise anything
        said = f"decoded again, with every module watched, it raised {in_one_line(error)}"
        return [Reason(NAME, said, diagnosis=("nondeterministic",))]
    if bool(torch.isfinite(again.sample).all()):
        said = "decoded again, with every module watched, it was finite: the same plan gives different values"
        return [Reason(NAME, said, diagnosis=("nondeterministic",))]
    return [Reason(NAME, activations.explain(again.activations, again.sample), diagnosis=("non_finite",))]
