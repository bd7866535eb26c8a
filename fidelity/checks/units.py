"""Whether latents are in the units that the decoder takes, and of this very model's encoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fidelity import scaling
from fidelity.checks.instance import instance
from fidelity.checks.subject import Subject
from fidelity.errors import EvaluationError
from fidelity.lazy import torch
from fidelity.records import DecodePlan, LatentSource, Model, Scaling
from fidelity.registry import LATENTS, check
from fidelity.scaling import Expected

if TYPE_CHECKING:
    from torch import Tensor


def photographs() -> list[LatentSource]:
    """The photographs whose latents tell what a decoder expects."""
    return [source for name, source in LATENTS.items() if name.startswith("photo-")]


def _no_pictures(model: Model) -> str | None:
    geometry = model.geometry
    if geometry.video or geometry.sample_channels != 3:
        return f"{model.name} takes no photographs, so what its decoder expects is not known"
    return None


def _no_units(model: Model) -> str | None:
    if model.scaling == Scaling():
        return f"{model.name} states no scaling: latents have no other units to be taken for"
    return _no_pictures(model)


def _expected(runner: Subject) -> Expected:
    found = scaling.expected(runner.model, runner.module, photographs())
    if found is None:
        raise EvaluationError(f"{runner.model.name} takes none of the photographs: nothing is known of its latents")
    if found.lost > scaling.SHARE:
        raise EvaluationError(f"{runner.model.name}: {found.findings[-1]}")
    return found


@check("latents_scale", diagnosis=("scale",), unit="times the right scale", lacks=_no_units)
def latents_scale(runner: Subject, latents: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """Latents come in decoder units: no scaling_factor, shift, mean or std forgotten, applied twice, or another's."""
    if plan.settings:
        raise EvaluationError("latents_scale: judges latents and no options: leave every option out of the plan")
    right = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
    with instance(runner):
        found = scaling.explain(runner.model, runner.module, latents, _expected(runner))
    if found is not None:
        runner.say(f"{found.words}: decoded and encoded again, {found.lost:.0%} of the latents are lost, and "
                   f"{found.undone:.0%} once that is undone")  # fmt: skip
        return torch.tensor([found.gain, found.offset]).view_as(right), right
    odd = scaling.outside(latents, runner.model.scaling)
    if odd is not None:
        runner.say(odd)
        return torch.tensor([scaling.spread(latents, runner.model.scaling), 0.0]).view_as(right), right
    return right, right


@check("latents_origin", diagnosis=("scale",), unit="share of the latents", lacks=_no_pictures)
def latents_origin(runner: Subject, latents: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """Latents of pictures survive the round trip as photographs do: they are this checkpoint's, in its own units."""
    if plan.settings:
        raise EvaluationError("latents_origin: judges latents and no options: leave every option out of the plan")
    with instance(runner):
        known = _expected(runner)
        left = max(scaling.lost(runner.model, runner.module, item) for item in latents.split(1))
    allowed = scaling.ORIGIN * known.lost
    runner.say(f"decoded and encoded again, {left:.0%} of them are lost, of photographs at most {known.lost:.0%}: "
               "they are another checkpoint's, in other units, or of no picture")  # fmt: skip
    over = max(0.0, left - allowed)
    return torch.tensor(over).view(1, 1, 1, 1), torch.zeros(1, 1, 1, 1)
