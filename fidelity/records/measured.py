"""What is measured of one decode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from fidelity.records.memory import MemoryTrace
from fidelity.records.observed import Receipts

if TYPE_CHECKING:
    import torch


Better = Literal["lower", "higher"]


class Measurement(Struct, frozen=True):
    """One number's whole story. `value` is the worst image's; None means "not measured", and then `reason` says why."""

    name: str = ""
    value: float | None = None
    unit: str = ""
    better: Better = "lower"
    per_image: tuple[float | None, ...] = ()
    where: dict[str, Any] | None = None
    """Place of the worst: `image`, `x`, `y` (pixels), and a detector's own keys (`axis`, `tile` …)."""
    reason: str | None = None
    exact: bool = False
    detection_limit: float | None = None
    """The smallest injected defect that this measurement would have caught on this image, in `unit`."""
    details: dict[str, Any] = {}

    @staticmethod
    def worst(per_image: Sequence[float | None], better: Better) -> tuple[int, float | None]:
        """Index and value of the worst image. A value that was not measured, or is not finite, is the worst of all."""
        for index, value in enumerate(per_image):
            if value is None or not math.isfinite(value):
                return index, None
        pick = max if better == "lower" else min
        index = pick(range(len(per_image)), key=lambda i: per_image[i])  # type: ignore[arg-type,return-value]
        return index, per_image[index]


@dataclass(frozen=True)
class Decoded:
    """What happened: the sample as fp32 on the CPU in the declared range, and the proof of how it was made."""

    sample: torch.Tensor
    seconds: dict[str, float]
    """`decode`: the judged decode, by itself; `memory`: the traced decode before it, where there was one."""
    receipts: Receipts
    memory: MemoryTrace
    repeat_exact: bool | None = None
    """Whether a second decode under the same plan gave the same bits; None if there was none."""
    activations: Any = None
    """What each module gave (`optimizations.activations.Activations`), where that was asked for."""
