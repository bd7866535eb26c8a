"""Plans to take under a memory budget: as a record, as diffusers code to paste, and in words.

`fidelity.recommend` makes it from a run, `fidelity.proposals` from predictions alone.
"""

from __future__ import annotations

import re

from msgspec import Struct

from fidelity import snippet
from fidelity.errors import EvaluationError, RequestError
from fidelity.records import DecodePlan, Model
from fidelity.report import words
from fidelity.wording import in_units

HEADROOM = 0.1
PLACEHOLDER = "PATH"
ON_CPU = re.compile(f"(?<!offload_device=){re.escape(snippet.CPU)}")
"""Where an offload brings weights to; where they rest is the CPU on every device."""


class Budget(Struct, frozen=True):
    """Bytes that there are, and the share of them that a decode must leave free."""

    bytes: int
    headroom: float = HEADROOM

    @property
    def limit(self) -> int:
        """Bytes that a plan may need at most; met when equal."""
        return int(self.bytes * (1 - self.headroom))

    def least(self, need: int) -> int:
        """The smallest budget of this headroom that `need` bytes fit into."""
        found = int(need / (1 - self.headroom))
        while Budget(found, self.headroom).limit < need:
            found += 1
        return found


class Offer(Struct, frozen=True):
    """A plan to take. What was not measured, or not predicted, is None."""

    plan: DecodePlan
    need_bytes: int
    code: str | None
    """Lines of diffusers that load an autoencoder from PATH and configure it so; None where there are none."""
    code_reason: str | None = None
    merits: tuple[str, ...] = ()
    """In what it is the best of those offered."""
    case: str | None = None
    """Id of its case on the yardstick, in the run's results.json."""
    seconds: float | None = None
    rmse: float | None = None
    lpips: float | None = None
    seam: float | None = None
    work: float | None = None
    """Predicted: pixels decoded over pixels of the picture, 1.78 where overlaps are decoded again."""
    moved_bytes: int | None = None
    """Predicted: weights brought to the device in one decode."""


class Unmeasured(Struct, frozen=True):
    """A plan that passed its gates and has no memory of its own, as one of emulated fp16: what is predicted of it."""

    plan: DecodePlan
    predicted_peak_bytes: int
    case: str


class Advice(Struct, frozen=True):
    """What to take of one model's plans under one budget, cheapest (least memory) first; none where nothing fits."""

    model: str
    source: str
    """`run` or `prediction`."""
    budget: Budget
    limit_bytes: int
    offers: tuple[Offer, ...]
    nearest: Offer | None
    """Where nothing fits: the plan that needs least, of those that could be offered."""
    reason: str | None
    """Why nothing is offered."""
    basis: tuple[str, ...]
    """On what it rests, a sentence each."""
    unmeasured: tuple[Unmeasured, ...] = ()
    """Plans whose memory is predicted alone: they are on no front."""


# ---------------------------------------------------------------- code


def code(model: Model, plan: DecodePlan, device: str = "cpu") -> tuple[str | None, str | None]:
    """Lines that load an autoencoder of this class from PATH and configure it so; or None, and why there are none."""
    cls = model.family.name
    if model.config.get("_class_name") != cls:
        return None, f"{model.name} is no class of diffusers: there is no code of diffusers to paste"
    try:
        settings = snippet.settings(model, plan)
    except (EvaluationError, RequestError) as error:
        return None, str(error)
    lines = ON_CPU.sub(f'torch.device("{device}")', settings).splitlines()
    imports = [line for line in lines if line.startswith(("import ", "from "))]
    onto = [f'vae.to("{device}")'] if device != "cpu" and plan.offload == "none" else []
    half = plan.dtype != "fp32" and not plan.force_upcast
    feed = [f"# give it latents of its dtype: vae.decode(latents.to({snippet.DTYPES[plan.dtype]}))"] if half else []
    return "\n".join([
        "import torch",
        *imports,
        f"from diffusers import {cls}",
        "",
        f'vae = {cls}.from_pretrained("{PLACEHOLDER}").eval()  # in a pipeline: vae = pipe.vae',
        *(line for line in lines if line not in imports),
        *onto,
        *feed,
    ]), None  # fmt: skip


# ---------------------------------------------------------------- in words


def lines(advice: Advice) -> list[str]:
    """The advice in words, a line each; each plan's code set in by four spaces."""
    budget = advice.budget
    out = [
        f"{advice.model} · {advice.source} · budget {in_units(budget.bytes)}, {budget.headroom:.0%} of it kept free: "
        f"at most {in_units(advice.limit_bytes)}",
        *(f"  {sentence}" for sentence in advice.basis),
    ]
    if advice.reason is not None:
        out += ["", f"{advice.reason}"]
    for place, offer in enumerate(advice.offers, 1):
        out += ["", f"{place}. {_title(offer)}", *_told(offer)]
    if advice.unmeasured:
        out += [
            "",
            "predicted, not measured: emulated decodes have no memory or time of their own, and are on no front",
        ]
        out += [f"   {in_units(each.predicted_peak_bytes)} predicted · {words.plan(each.plan)} · case {each.case}"
                for each in advice.unmeasured]  # fmt: skip
    if advice.nearest is not None:
        need = advice.nearest.need_bytes
        needs = f"it needs {in_units(need)}, a budget of {in_units(budget.least(need))}"
        out += ["", f"nearest: {_title(advice.nearest)}: {needs}", *_told(advice.nearest)]
    return out


def _title(offer: Offer) -> str:
    return words.plan(offer.plan) + (f"  ({', '.join(offer.merits)})" if offer.merits else "")


def _told(offer: Offer) -> list[str]:
    figures = [in_units(offer.need_bytes)]
    if offer.seconds is not None:
        figures.append(words.duration(offer.seconds))
    for name, figure in (("RMSE", offer.rmse), ("LPIPS", offer.lpips), ("seam", offer.seam)):
        if figure is not None:
            figures.append(f"{name} {words.number(figure)}")
    if offer.work is not None:
        figures.append(f"decodes {offer.work:.2f}× the picture's pixels")
    if offer.moved_bytes:
        figures.append(f"moves {in_units(offer.moved_bytes)} of weights")
    out = [f"   {' · '.join(figures)}"]
    if offer.case is not None:
        out.append(f"   case {offer.case}")
    if offer.code is None:
        return [*out, f"   no code: {offer.code_reason}"]
    return [*out, "", *(f"    {line}".rstrip() for line in offer.code.splitlines())]


def parse_headroom(text: str) -> float:
    """The share of `10%`, or of `0.1`. Raises RequestError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*", text)
    share = float(found[1]) / (100 if found[2] else 1) if found else 1.0
    if not 0 <= share < 1:
        raise RequestError(f"--headroom {text!r}: write a share of the budget to keep free, at least 0 % and below "
                           "100 %, as in 10%")  # fmt: skip
    return share
