"""What a convolution on CUDA allocates for itself.

cuDNN's tensor-core kernels (fp16, bf16, and fp32 as TF32, torch's default for convolutions) compute on NHWC with
channels in eights. Handed NCHW they convert the input and the weights into their workspace, write the result there, and
convert it back: the workspace is input + weights + output, once each. Handed channels_last, they read and write in
place, and torch makes the weights channels_last by a copy of its own.
"""

from __future__ import annotations

import math
from typing import Any

from fidelity.lazy import torch

Sizes = dict[str, int]
EIGHT = 8


def convolution(args: tuple[Any, ...], out: Any) -> tuple[tuple[Sizes, ...], tuple[Sizes, ...]]:
    """Bytes alive before the output is made, and beside it, of `aten.convolution(*args) -> out` on CUDA."""
    source, weight, groups = args[0], args[1], args[8]
    if groups == source.shape[1] and groups > 1 and source.ndim == 4:
        return (), ()  # depthwise: torch's own kernel, on the plain layout
    if not out.is_contiguous():
        nhwc = torch.channels_last if out.ndim == 4 else torch.channels_last_3d
        copies = {"NHWC weights": _size(weight)} if not weight.is_contiguous(memory_format=nhwc) else {}
        if not source.is_contiguous(memory_format=nhwc):
            copies["NHWC input"] = _size(source)
        return (), (copies,)
    filters = _padded(weight, 1) if groups == 1 else _size(weight)
    beside = {"NHWC input, weights and output": _padded(source, 1) + filters + _padded(out, 1)}  # one allocation
    if not source.is_contiguous():
        beside["contiguous input"] = _size(source)
    return (), (beside,)


def _padded(tensor: Any, axis: int) -> int:
    """Bytes with this axis rounded up to a multiple of eight."""
    width = tensor.shape[axis]
    return math.prod(tensor.shape) // width * (-(-width // EIGHT) * EIGHT) * tensor.element_size()


def _size(tensor: Any) -> int:
    return tensor.numel() * tensor.element_size()
