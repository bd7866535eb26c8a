"""Each optimization applies one setting, proves that it ran, and restores; `apply_plan` applies a whole plan.

with apply_plan(module, plan, model=model, device="cpu") as proofs, observe(module, model) as seen:
    sample = model.family.decode(module, latents)
    receipts = {name: prove(seen) for name, prove in proofs.items()}
"""

from __future__ import annotations

from fidelity.optimizations import (
    encode,
    offload,
    precision,
    preview,
    ramp_tiling,
    slicing,
    state,
    streaming,
    temporal,
    tiling,
)
from fidelity.optimizations.observe import observe
from fidelity.optimizations.plan import apply_plan, frame_axis, frame_chunks, inapplicable, tile_grid

__all__ = [
    "apply_plan",
    "encode",
    "frame_axis",
    "frame_chunks",
    "inapplicable",
    "observe",
    "offload",
    "precision",
    "preview",
    "ramp_tiling",
    "slicing",
    "state",
    "streaming",
    "temporal",
    "tile_grid",
    "tiling",
]
