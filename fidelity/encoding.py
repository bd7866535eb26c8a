"""A Runner whose decode is a round trip: a picture encoded under the plan, and its latents decoded plainly.

What a case is judged by is then a sample like any other; why that is the way is told in `optimizations/encode.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fidelity.errors import EvaluationError
from fidelity.lazy import torch
from fidelity.optimizations.encode import NAME, EncoderView, view
from fidelity.optimizations.observe import observe
from fidelity.records import Decoded, DecodePlan, Receipts
from fidelity.runner import Runner

if TYPE_CHECKING:
    from torch import Tensor

    from fidelity.runner import Decode


class RoundTrip(Runner):
    """An encoder under plan after plan; `plain` is the Runner that decodes what it gives.

    Takes pictures (B, 3, [T,] H, W) in the model's range where a Runner takes latents. Memory, seconds and state are
    the encoder's. Raises as Runner does.
    """

    def __init__(self, plain: Runner):
        self.plain = plain
        self._whole: tuple[Tensor, Tensor] | None = None
        super().__init__(view(plain.model), plain.device)

    def decode(
        self,
        latents: Tensor,
        plan: DecodePlan,
        *,
        decode: Decode | None = None,
        trace: bool = True,
        watch: bool = False,
        memory_limit: int | None = None,
    ) -> Decoded:
        """Encode a picture under `plan`, decode the outcome plainly: the sample, with the encoder's receipts."""
        if decode is not None:
            raise EvaluationError("encode: a decode of one's own has no encoder to judge: leave encode out of its plan")
        whole = self.whole(latents)
        encoded = super().decode(latents, plan, trace=trace, watch=watch, memory_limit=memory_limit)
        sample = self._shown(encoded.sample)
        return replace(encoded, sample=sample, receipts=self._told(encoded.receipts, encoded.sample, whole))

    @contextmanager
    def applied(self, plan: DecodePlan) -> Iterator[Callable[[Tensor], tuple[Tensor, Receipts]]]:
        with super().applied(plan) as run:

            def trip(picture: Tensor) -> tuple[Tensor, Receipts]:
                encoded, receipts = run(picture)
                return self._shown(encoded), receipts

            yield trip

    def expected(self, latents: Tensor, plan: DecodePlan) -> Tensor:
        """The plain decode of the latents that the oracle puts together."""
        return self._shown(super().expected(latents, plan))

    def whole(self, picture: Tensor) -> Tensor:
        """The picture's latents, encoded whole in fp32; the frames of each call of the encoder are kept for proofs."""
        if self._whole is None or self._whole[0] is not picture:
            with torch.no_grad(), observe(self.module, self.model) as seen:
                latents = self.model.family.decode(self.module, self._feed(picture, DecodePlan())).cpu()
            family: Any = self.model.family
            assert isinstance(family, EncoderView)
            if picture.ndim == 5:
                family.calls[picture.shape[2]] = tuple(shape[2] for shape in seen.shapes)
            self._whole = (picture, latents)
        return self._whole[1]

    def _shown(self, latents: Tensor) -> Tensor:
        with self.plain.applied(self.plain.model.reference_plan) as decode:
            return decode(latents)[0]

    def _told(self, receipts: Receipts, latents: Tensor, whole: Tensor) -> Receipts:
        """The receipts in the words of an encoder, with the latents' shape and how far each item's moved."""
        told = {("encoder" if name == "decoder" else name): _reworded(one) for name, one in receipts.items()}
        if "grid" in told.get("tiling", {}):
            told["tiling"]["period"] = self.plain.model.geometry.spatial  # the picture's phase is the decoder's
        if NAME in told:
            moved = relative_rmse(latents, whole)
            told[NAME] |= {"latents": list(latents.shape), "whole": list(whole.shape), "latents_rmse": moved}
        return told


def relative_rmse(latents: Tensor, whole: Tensor) -> list[float | None]:
    """RMS difference of each item over the spread of its latents encoded whole; None where it is not a number, none at
    all where the two differ in shape."""
    if latents.shape != whole.shape:
        return []
    error = (latents.double() - whole.double()).flatten(1).square().mean(1).sqrt()
    share = error / whole.double().flatten(1).std(1, correction=0)
    return [float(value) if bool(value.isfinite()) else None for value in share]


def _reworded(receipt: dict[str, Any]) -> dict[str, Any]:
    reason = receipt.get("reason")
    return {**receipt, "reason": reason.replace("decoder", "encoder")} if isinstance(reason, str) else dict(receipt)


__all__ = ["RoundTrip", "relative_rmse"]
