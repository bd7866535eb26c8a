"""Strides as kernels give them, where torch's shape-only versions give others.

A convolution takes its layout from the strides of its input, and with it its workspace: one wrong stride on the way
there and all that follows is predicted for kernels that are not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fidelity.lazy import torch

ARITHMETIC = frozenset(("add", "sub", "mul", "div"))
VIEWS = frozenset(("view", "_unsafe_view", "_reshape_alias"))
NHWC = {4: "channels_last", 5: "channels_last_3d"}


def as_made(func: Any, args: Any, out: Any) -> Any:
    """An operator's result with the strides of the real kernel."""
    name = func.overloadpacket.__name__
    if name == "native_group_norm" and args[0].device.type == "cpu" and is_nhwc(args[0]):
        return (torch.empty_like(out[0], memory_format=nhwc(out[0].ndim)), *out[1:])
    if name in VIEWS and 1 in out.shape:
        strides = view_strides(args[0].shape, args[0].stride(), out.shape)
        if strides is not None and strides != tuple(out.stride()):
            return out.as_strided(out.shape, strides)
    if name in ARITHMETIC and 1 in out.shape:  # operands of one layout give it to the result, whatever it is
        layouts = {arg.stride() for arg in args if isinstance(arg, torch.Tensor) and arg.shape == out.shape}
        if len(layouts) == 1 and _is_dense(out.shape, *layouts) and out.stride() not in layouts:
            return torch.empty_strided(out.shape, *layouts, dtype=out.dtype, device=out.device)
    return out


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether strides, in some order of the axes, cover each value once and leave no gap."""
    expected = 1
    for stride, size in sorted(zip(strides, shape)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def view_strides(old: Sequence[int], strides: Sequence[int], new: Sequence[int]) -> tuple[int, ...] | None:
    """The strides of a view of another shape, also along dimensions of one, where any would do; None where there is no
    such view. As aten/src/ATen/TensorUtils.cpp `computeStride`."""
    if 0 in old or not old:
        return None
    found = [0] * len(new)
    at, base, run, covered = len(new) - 1, strides[-1], 1, 1
    for axis in reversed(range(len(old))):
        run *= old[axis]
        if axis and (old[axis - 1] == 1 or strides[axis - 1] == run * base):
            continue  # the axis before continues this stretch of memory
        while at >= 0 and (covered < run or new[at] == 1):
            found[at] = covered * base
            covered *= new[at]
            at -= 1
        if covered != run:
            return None
        if axis:
            base, run, covered = strides[axis - 1], 1, 1
    return tuple(found) if at == -1 else None


def is_nhwc(tensor: Any) -> bool:
    """Whether torch takes the strides for channels_last (c10 `suggest_memory_format`).

    Where a dimension is one, strides can fit both layouts, and this rule decides.
    """
    from torch._prims_common import suggest_memory_format

    return tensor.ndim in NHWC and suggest_memory_format(tensor) == nhwc(tensor.ndim)


def nhwc(rank: int) -> Any:
    """torch's name for channels_last of this rank."""
    return getattr(torch, NHWC[rank])
