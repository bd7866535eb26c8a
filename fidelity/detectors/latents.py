"""How far the latents themselves moved, where the encoder is what a plan changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fidelity.records import DecodePlan, Measurement, Receipts
from fidelity.registry import detector
from fidelity.signal import DataRange

if TYPE_CHECKING:
    from torch import Tensor


@detector("latents_rmse", unit="share", better="lower", needs="encode")
def latents_rmse(
    candidate: Tensor, golden: Tensor, *, plan: DecodePlan, receipts: Receipts, data_range: DataRange
) -> Measurement:
    """RMS difference of the latents from those of the picture encoded whole, as a share of their spread.

    Read from the receipt `encode`, where the encoder's decode left it; the samples are not looked at.
    """
    receipt: dict[str, Any] = receipts.get("encode", {})
    moved = tuple(receipt.get("latents_rmse") or ())
    if not moved:
        seen, whole = ("×".join(map(str, receipt.get(side, ()))) or "unknown" for side in ("latents", "whole"))
        return Measurement(reason=f"the latents differ in size: {seen}, encoded whole {whole}")
    index, _ = Measurement.worst(moved, "lower")
    reason = "the latents of an item are not finite" if None in moved else None
    return Measurement(per_image=moved, where={"image": index}, reason=reason)
