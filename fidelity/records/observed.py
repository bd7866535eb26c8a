"""What an optimization is, and what hooks saw of a decode under it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from fidelity.records.models import Chunk, Model, TileAxis, TileGrid
from fidelity.records.plans import DecodePlan

if TYPE_CHECKING:
    from torch import nn


Receipts = dict[str, dict[str, Any]]
"""What really happened, by option: each has `requested`, `engaged` (True, False, or None where nothing can be proved),
`reason` (None, or why it did not engage), and what was seen. Keys besides the options: `decoder` (calls, shapes),
`dtype` (weights, middle_layer, output, emulated), `state` (restored, leaks)."""


Proof = Callable[["Observation"], dict[str, Any]]


@dataclass
class Observation:
    """What hooks saw during the judged decode. Filled by the runner, read by the optimizations' proofs."""

    calls: int = 0
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    """Input shape of each call of the decoder, in order."""
    call_dtypes: set[str] = field(default_factory=set)
    middle_dtypes: set[str] = field(default_factory=set)
    weight_devices: set[str] = field(default_factory=set)
    weight_dtypes: set[str] = field(default_factory=set)
    """Floating point dtypes of the decoder's weights and buffers while it was called."""
    started_ns: int = 0
    """`time.perf_counter_ns()` when watching began: what fired before belongs to another decode."""
    output_dtype: str = ""
    grid: TileGrid | None = None
    """The grid that the plan asks for, None where it asks for none."""
    chunks: tuple[Chunk, ...] = ()
    """The chunks of latent frames that the plan asks for, none where it asks for none."""
    frames: TileAxis | None = None
    """Where those chunks lie in the sample."""
    call_frames: tuple[int, ...] = (1,)
    """The latent frames that the decoder should see in each call for one item and tile, in order."""
    batch: int = 0
    activations: Any = None
    """What each module gave, where the decode was watched for that."""


class Optimization(Protocol):
    """Applies one setting to a module, proves that it ran, and restores. Nothing survives it."""

    @property
    def name(self) -> str: ...

    @property
    def summary(self) -> str: ...

    @property
    def order(self) -> int:
        """Applied in ascending order, undone in descending order: precision 10, slicing 20, tiling 30, offload 90."""

    def inapplicable(self, value: Any, plan: DecodePlan, model: Model, shape: tuple[int, ...]) -> str | None:
        """Why this setting cannot apply to latents of this shape, or None. A pure function; imports no torch."""

    def apply(
        self, module: nn.Module, value: Any, *, plan: DecodePlan, model: Model, device: str
    ) -> AbstractContextManager[Proof]:
        """Apply on entry, restore on exit. Yields the proof: Observation -> receipt (`engaged`, `reason`, …)."""
