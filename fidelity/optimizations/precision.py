"""bf16 and fp16 weights and compute, and the upcast with which pipelines save an autoencoder that overflows in fp16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from fidelity.lazy import torch
from fidelity.optimizations import emulation
from fidelity.optimizations.observe import dtype_name
from fidelity.optimizations.weights import cast, kept_in_fp32, named_tensors
from fidelity.records import DecodePlan, Model, Observation, Proof
from fidelity.registry import optimization

if TYPE_CHECKING:
    from torch import nn


def compute_dtype(plan: DecodePlan) -> torch.dtype:
    """The dtype in which a plan decodes, and takes its latents."""
    if plan.force_upcast:
        return torch.float32
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[plan.dtype]


def is_emulated(plan: DecodePlan, device: str) -> bool:
    """Whether this plan computes in fp16 where half convolutions are too slow to use: on the CPU."""
    return plan.dtype == "fp16" and not plan.force_upcast and device.partition(":")[0] == "cpu"


@optimization("precision", order=10)
def precision(module: nn.Module, value: str, *, plan: DecodePlan, model: Model, device: str) -> Iterator[Proof]:
    """Decode in bf16 or fp16 (fp16 on a CPU is emulated: each operator's fp32 result is rounded)."""
    dtype = torch.float16 if value == "fp16" else torch.bfloat16
    emulated = is_emulated(plan, device)
    with cast(module, dtype), emulation.half() if emulated else nullcontext():
        kept = sorted({dtype_name(w.dtype) for w in _floating(module) if w.dtype is not dtype})
        rounded = all(w.dtype is dtype or kept_in_fp32(module, name) for name, w in _named_floating(module))

        def prove(seen: Observation) -> dict[str, Any]:
            # under force_upcast the compute is fp32 and force_upcast's own proof answers for it
            reason = None if rounded else f"weights in {', '.join(kept)}, asked {dtype_name(dtype)}"
            if not plan.force_upcast:
                reason = reason or unlike(dtype_name(dtype), seen)
            return {
                "engaged": reason is None,
                "reason": reason,
                "weights": sorted({dtype_name(dtype), *kept}),
                "middle_layer": sorted(seen.middle_dtypes),
                "output": dtype_name(seen.output_dtype),
                "emulated": emulated,
            }

        yield prove


def _only_fp16(value: bool, plan: DecodePlan, model: Model, shape: tuple[int, ...]) -> str | None:
    return None if plan.dtype == "fp16" else "force_upcast: the pipelines apply it to fp16 only"


@optimization("force_upcast", order=15, inapplicable=_only_fp16)
def force_upcast(module: nn.Module, value: bool, *, plan: DecodePlan, model: Model, device: str) -> Iterator[Proof]:
    """Upcast the fp16-rounded weights to fp32 for the decode, as SDXL's pipelines do."""
    before = {dtype_name(weight.dtype) for weight in _floating(module)}
    with cast(module, torch.float32):

        def prove(seen: Observation) -> dict[str, Any]:
            reason = unlike("float32", seen)
            if "float16" not in before:
                reason = f"weights came in {', '.join(sorted(before))}: not rounded to float16 before the upcast"
            return {
                "engaged": reason is None,
                "reason": reason,
                "weights": sorted(seen.weight_dtypes),
                "middle_layer": sorted(seen.middle_dtypes),
                "output": dtype_name(seen.output_dtype),
            }

        yield prove


def unlike(asked: str, seen: Observation) -> str | None:
    """The first place whose dtype is not the one asked, in words; None if all are. Nothing seen is nothing proved."""
    weights = seen.weight_dtypes - ({"float32"} if asked != "float32" else set())  # fp32 may be pinned by the class
    places = {
        "the decoder's input": seen.call_dtypes,
        "the middle layer": seen.middle_dtypes,
        "the decoder's weights": weights,
        "the output": {dtype_name(seen.output_dtype)} - {""},
    }
    for place, found in places.items():
        names = {dtype_name(dtype) for dtype in found}
        if names != {asked}:
            return f"{asked} asked, {place} was in {', '.join(sorted(names)) or 'nothing that was seen'}"
    return None


def _named_floating(module: nn.Module) -> list[tuple[str, Any]]:
    return [(name, tensor) for name, tensor in named_tensors(module) if tensor.is_floating_point()]


def _floating(module: nn.Module) -> list[Any]:
    return [tensor for _, tensor in _named_floating(module)]
