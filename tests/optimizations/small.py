"""A small seeded AutoencoderKL (f=2) and what the tests do with it."""

from __future__ import annotations

from dataclasses import replace

import torch

from fidelity import registry
from fidelity.optimizations import apply_plan, observe
from fidelity.records import DecodePlan

registry.load_plugins()

CONFIG = {
    "block_out_channels": (32, 64), "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2, "latent_channels": 4, "norm_num_groups": 8, "sample_size": 32,
    "force_upcast": False,
}  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build(seed: int = 0):
    import diffusers

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return diffusers.AutoencoderKL(**CONFIG).eval().requires_grad_(False)


MODEL = registry.FAMILIES.get("AutoencoderKL").describe("small", CONFIG, build)


def latents(batch=2, height=12, width=16, seed=1):
    return torch.randn(batch, 4, height, width, generator=torch.Generator().manual_seed(seed)) * 3


def model_with(**methods):
    """The small model, its family changed."""
    family = type("Changed", (type(MODEL.family),), methods)()
    return replace(MODEL, family=family)


@torch.no_grad()
def decode(module, plan=DecodePlan(), z=None, *, model=MODEL, before=None):  # noqa: B008 - frozen
    """Apply the plan, decode as the runner does, and return the sample with the receipts."""
    z = latents() if z is None else z
    with apply_plan(module, plan, model=model, device="cpu") as proofs:
        if before is not None:
            before(module)
        with observe(module, model) as seen:
            seen.batch = z.shape[0]
            if plan.tiling is not None:
                seen.grid = model.family.tile_grid(model.geometry, (z.shape[-2], z.shape[-1]), plan.tiling)
            sample = model.family.decode(module, z.to(torch.float32 if plan.force_upcast else DTYPES[plan.dtype]))
            seen.output_dtype = str(sample.dtype).removeprefix("torch.")
        return sample, {name: prove(seen) for name, prove in proofs.items()}
