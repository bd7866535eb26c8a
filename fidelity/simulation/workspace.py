"""What a kernel allocates beside the tensors that it takes and returns, by operator and device.

A tracker of tensors does not see it, and it is most of the gap to what allocators report. Each figure is a layout or a
buffer that the kernel's source or its allocations show; none is fitted. Why and how near: docs/design/prediction.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from fidelity.lazy import torch
from fidelity.simulation import cudnn, onednn

Sizes = dict[str, int]
"""Bytes by what they are for."""


@dataclass(frozen=True)
class Phases:
    """What is alive at once, before the outputs are made and beside them, and what stays until the process ends."""

    before: tuple[Sizes, ...] = ()
    beside: tuple[Sizes, ...] = ()
    stays: Sizes = field(default_factory=dict)


@dataclass
class Once:
    """What happens only the first time."""

    blas: bool = False


NOTHING = Phases()
CUBLAS = 4096 * 1024 * 2 + 16 * 1024 * 8
"""The workspace that torch gives to cuBLAS at the first product and keeps (`:4096:2:16:8`; Hopper takes 32 MiB)."""
PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm"))


def of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, *, kind: str, once: Once) -> Phases:
    """The workspace of one operator call on tensors of device type `kind`; NOTHING for one that needs none."""
    name = func.overloadpacket.__name__
    if name == "convolution":
        return Phases(*(onednn if kind == "cpu" else cudnn).convolution(args, out))
    if kind == "cpu" and name == "_scaled_dot_product_flash_attention_for_cpu":
        return Phases(beside=(_cpu_attention(args[0], args[2]),))
    if kind == "cuda" and name == "_scaled_dot_product_efficient_attention":
        return Phases(beside=(_accumulator(out[0]),))
    if kind == "cuda" and name in PRODUCTS and not once.blas:
        once.blas = True
        return Phases(stays={"cuBLAS workspace": CUBLAS})
    return NOTHING


def _cpu_attention(query: Any, value: Any) -> Sizes:
    """Per thread a block of scores, its maxima and sums, and the output in fp32; of half inputs the scores again in
    half (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp)."""
    length, depth = query.shape[-2], value.shape[-1]
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    rows, columns = min(rows, length), min(512, value.shape[-2])
    each = 4 * (rows * columns + 2 * rows + rows * depth)
    if query.element_size() < 4:
        each += query.element_size() * rows * columns
    return {"attention blocks": each * torch.get_num_threads()}


def _accumulator(out: Any) -> Sizes:
    """Beyond 128 channels a head the memory-efficient kernel cannot keep its output in registers: of half inputs it is
    accumulated in a buffer of fp32 (pytorch_flash/mem_eff `kNeedsOutputAccumulatorBuffer`)."""
    if out.shape[-1] <= 128 or out.element_size() == 4:
        return {}
    return {"attention accumulator": 4 * math.prod(out.shape)}
