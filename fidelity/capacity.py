"""Whether a decode fits into what a device has left, before any of it is allocated."""

from __future__ import annotations

from fidelity import predict
from fidelity.admission import Rule
from fidelity.errors import RequestError
from fidelity.lazy import torch
from fidelity.records import DecodePlan, Model
from fidelity.wording import in_units


def expected(
    model: Model,
    shape: tuple[int, ...],
    plan: DecodePlan,
    device: str,
    *,
    count: int = 1,
    resident: int = 0,
    copies: int = 1,
) -> Rule | None:
    """What `count` decodes of latents (B, C, [T,] H, W) must find free, as predicted; None where no prediction is
    possible: of a decoder of somebody's own, or one whose code asks for values."""
    try:
        one = predict.of_shape(model, shape, plan, torch.device(device).type)
    except Exception:  # somebody's own code may raise anything without data; what it takes is then measured alone
        return None
    return predict.rule_of(one, count, resident, copies)


def refuse_beyond(reserve: Rule | None, available: int | None, device: str) -> None:
    """Raise RequestError where more must be free than there is; nothing where either is not known."""
    if reserve is None or available is None or reserve.reserve_bytes <= available:
        return
    shared = reserve.weights_bytes if reserve.copies == 1 else 0
    each = reserve.each_bytes + (reserve.weights_bytes if reserve.copies > 1 else 0)
    fit = max(0, (available - reserve.resident_bytes - shared) // each)
    decodes = f"{reserve.count} decodes at once" if reserve.count > 1 else "one decode"
    raise RequestError(f"{decodes} may take {in_units(reserve.reserve_bytes)} and {device} has {in_units(available)} "
                       f"left: {fit} fit")  # fmt: skip
