"""Precision: FAULTS.md 17 to 21."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from diffusers import AutoencoderKL
from diffusers.models.attention_processor import Attention
from diffusers.models.autoencoders.vae import Decoder, DecoderOutput
from diffusers.models.unets.unet_2d_blocks import UNetMidBlock2D
from torch import Tensor

from fidelity.optimizations import precision
from tests.faults.record import Fault
from tests.faults.upstream import method

UPCAST = "fp16,upcast"


@method("forward", UNetMidBlock2D)
def overflow(original: Any, block: Any, hidden: Tensor, *args: Any, item: int = 0, **kwargs: Any) -> Tensor:
    """One item of the batch leaves the range of fp16 in the middle block."""
    out = original(block, hidden, *args, **kwargs).clone()
    item %= out.shape[0]
    out[item] = (out[item] * 1e6).to(out.dtype) / 1e6
    return out


@method("decode")
def upcast_stays(original: Any, vae: Any, z: Tensor, *args: Any, dtype: str = "float16", **kwargs: Any) -> Any:
    """#4796: the decode changes the model's dtype for itself and leaves it so."""
    vae.to(getattr(torch, dtype))
    return DecoderOutput(sample=original(vae, z.to(getattr(torch, dtype))).sample)


@contextmanager
def cast_stays() -> Iterator[None]:
    """#6653: the upcast is never undone."""

    @contextmanager
    def cast(module: Any, dtype: Any) -> Iterator[None]:
        for weight in [*module.parameters(), *module.buffers()]:
            weight.data = weight.data.to(dtype)
        yield

    with patch.object(precision, "cast", cast):
        yield


@method("forward", UNetMidBlock2D)
def middle_in_half(original: Any, block: Any, hidden: Tensor, *args: Any, dtype: str = "float16", **kw: Any) -> Tensor:
    """#12512: the upcast leaves the middle block in half precision, and casts around it."""
    half, before = getattr(torch, dtype), hidden.dtype
    if before is not torch.float32:
        return original(block, hidden, *args, **kw)
    data = [(weight, weight.data) for weight in block.parameters()]
    try:
        for weight, _ in data:
            weight.data = weight.data.to(half)
        return original(block, hidden.to(half), *args, **kw).to(before)
    finally:
        for weight, kept in data:
            weight.data = kept


@contextmanager
def middle_left_behind() -> Iterator[None]:
    """#12619: the upcast leaves the middle block's weights in half precision, and nothing casts around it."""
    original = precision.cast

    @contextmanager
    def cast(module: Any, dtype: Any) -> Iterator[None]:
        with original(module, dtype):
            kept = [(weight, weight.data) for weight in module.decoder.mid_block.parameters()]
            for weight, data in kept:
                weight.data = data.to(torch.float16)
            try:
                yield
            finally:
                for weight, data in kept:
                    weight.data = data

    with patch.object(precision, "cast", cast):
        yield


@method("decode")
def promoted(original: Any, vae: Any, z: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The output is promoted to fp32."""
    return DecoderOutput(sample=original(vae, z, *args, **kwargs).sample.float())


@contextmanager
def another_dtype(dtype: str = "bfloat16") -> Iterator[None]:
    """The dtype asked is not the one used: weights and latents are cast to another."""
    original = AutoencoderKL.decode

    def decode(vae: Any, z: Tensor, *args: Any, **kwargs: Any) -> Any:
        kept = [(weight, weight.data) for weight in vae.parameters()]
        try:
            for weight, data in kept:
                weight.data = data.to(getattr(torch, dtype))
            sample = original(vae, z.to(getattr(torch, dtype)), *args, **kwargs).sample
            return DecoderOutput(sample=sample.to(z.dtype))
        finally:
            for weight, data in kept:
                weight.data = data

    with patch.object(AutoencoderKL, "decode", decode):
        yield


@method("forward", Decoder)
def half_norm(original: Any, decoder: Any, z: Tensor, *args: Any, dtype: str = "bfloat16", **kwargs: Any) -> Tensor:
    """#13316: normalisation computed in half precision."""
    half, exact = getattr(torch, dtype), torch.nn.functional.group_norm

    def norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return exact(x.to(half), groups, weight.to(half), bias.to(half), eps).to(x.dtype)

    with patch.object(torch.nn.functional, "group_norm", norm):
        return original(decoder, z, *args, **kwargs)


@method("forward", Decoder)
def half_attention(original: Any, decoder: Any, z: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Attention rounds its input to bf16: a faster kernel that takes nothing else."""
    exact = Attention.forward

    def attend(attention: Any, hidden: Tensor, *rest: Any, **more: Any) -> Tensor:
        return exact(attention, hidden.to(torch.bfloat16).to(hidden.dtype), *rest, **more)

    with patch.object(Attention, "forward", attend):
        return original(decoder, z, *args, **kwargs)


@method("forward", Decoder)
def output_rounded(
    original: Any, decoder: Any, sample: Tensor, *args: Any, dtype: str = "bfloat16", **kw: Any
) -> Tensor:
    """The output goes through half precision on its way out."""
    out = original(decoder, sample, *args, **kw)
    return out.to(getattr(torch, dtype)).to(out.dtype)


@method("forward", Decoder)
def small_tiles_crash(
    original: Any, decoder: Any, sample: Tensor, *args: Any, smallest: int = 8, **kwargs: Any
) -> Tensor:
    """#10595: a kernel that has no bf16 for very small tiles."""
    if sample.dtype is torch.bfloat16 and min(sample.shape[-2:]) < smallest:
        raise RuntimeError("upsample_nearest2d_out_frame not implemented for 'BFloat16' at this size")
    return original(decoder, sample, *args, **kwargs)


FAULTS = (
    Fault(
        "one item overflows",
        "17",
        overflow,
        ("non_finite",),
        ("fp16", "fp16,slicing", "fp16,tile=16,overlap=0.25"),
        ("pair", "trio"),
        amounts={"item": (0,)},
    ),
    Fault(
        "needs its upcast",
        "17",
        lambda: patch.object(torch, "_nothing", None, create=True),
        ("non_finite",),
        ("fp16", "fp16,tile=16,overlap=0.25"),
        model="reference-kl-hot",
    ),
    Fault(
        "decode leaves another dtype",
        "18",
        upcast_stays,
        ("state_leak",),
        ("fp32", "fp32,slicing"),
        ("pair",),
        amounts={"dtype": ("bfloat16",)},
    ),
    Fault("upcast is not undone", "18", cast_stays, ("state_leak",), ("bf16", "fp16", "bf16,tile=16,overlap=0.25")),
    Fault(
        "middle block in half",
        "19",
        middle_in_half,
        ("dtype",),
        ("fp32", UPCAST, "fp16,upcast,tile=16,overlap=0.25"),
        amounts={"dtype": ("float16", "bfloat16")},
    ),
    Fault(
        "middle block left behind",
        "19",
        middle_left_behind,
        ("crash", "dtype"),
        (UPCAST, "fp16,upcast,slicing"),
        ("pair",),
    ),
    Fault("output promoted to fp32", "20", promoted, ("dtype",), ("bf16", "fp16", "bf16,tile=16,overlap=0.25")),
    Fault("another dtype used", "20", another_dtype, ("dtype",), ("fp32", "fp32,tile=16,overlap=0.25", "fp32,disk")),
    Fault(
        "normalisation in half",
        "20",
        half_norm,
        ("dtype",),
        ("fp32", UPCAST),
        amounts={"dtype": ("bfloat16", "float16")},
    ),
    Fault("attention's input rounded", "20+", half_attention, ("dtype",), ("fp32", UPCAST)),
    Fault(
        "output rounded to half",
        "20+",
        output_rounded,
        ("dtype",),
        ("fp32", "fp32,tile=16,overlap=0.25"),
        amounts={"dtype": ("bfloat16", "float16")},
    ),
    Fault(
        "bf16 crashes at small tiles",
        "21",
        small_tiles_crash,
        ("crash",),
        ("bf16,tile=16,overlap=0.25", "bf16,tile=16,overlap=0.5"),
        ("face-short", "cat-short"),
    ),
)
