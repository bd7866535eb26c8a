"""What a convolution on a CPU allocates for itself: oneDNN's reordered operands, or the columns of im2col.

oneDNN computes on a blocked layout (nChw16c with AVX-512, nChw8c with AVX2), so a plain NCHW input is copied into it,
the weights and the result are made in it, and the result is then copied out. On NHWC (channels_last) it reads and
writes in place, and only the weights are copied, twice. Small convolutions take torch's own kernel instead, which
unrolls each window of the input into a column: k_h · k_w (· k_t) times the input. torch itself says which one it takes.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from fidelity.lazy import torch
from fidelity.simulation import layouts

Sizes = dict[str, int]
_ROW = 4096
"""Scratch of a thread's row buffer in the NHWC kernels, seen as 8216 bytes with one thread and 12336 with two."""


def convolution(args: tuple[Any, ...], out: Any) -> tuple[tuple[Sizes, ...], tuple[Sizes, ...]]:
    """Bytes alive before the output is made, and beside it, of `aten.convolution(*args) -> out` on the CPU."""
    source, weight, stride, padding, groups = args[0], args[1], args[3], args[4], args[8]
    name = _kernel(args)
    nhwc = not out.is_contiguous()
    if name.startswith("Slow"):
        return _columns(source, weight, out, nhwc, unrolled=_unrolls(weight, stride, padding))
    if not name.startswith("Mkldnn"):
        return (), ()
    if nhwc:
        return _nhwc(source, weight, groups)
    return _blocked(source, weight, out, groups)


def _kernel(args: tuple[Any, ...]) -> str:
    """torch's own choice. A CPU without half arithmetic would take minutes for fp16; one with it takes oneDNN."""
    source, weight, bias, stride, padding, dilation, transposed, output_padding, groups = args
    if source.dtype is torch.float16:
        return "Mkldnn"
    chosen = torch._C._select_conv_backend(
        source, weight, bias, stride, padding, dilation, transposed, output_padding, groups,
        list(bias.shape) if bias is not None else None,
    )  # fmt: skip
    return str(chosen).rsplit(".", 1)[-1]


def _nhwc(source: Any, weight: Any, groups: int) -> tuple[tuple[Sizes, ...], tuple[Sizes, ...]]:
    beside = {"blocked weights": _weights(weight, groups), "row buffers": _ROW * (1 + torch.get_num_threads())}
    if math.prod(weight.shape[2:]) > 1 and weight.is_contiguous():
        beside["NHWC weights"] = _size(weight)
    if not _reads_nhwc(source):
        beside["NHWC input"] = _size(source)
    return (), (beside,)


def _blocked(source: Any, weight: Any, out: Any, groups: int) -> tuple[tuple[Sizes, ...], tuple[Sizes, ...]]:
    block, pointwise = vector(), math.prod(weight.shape[2:]) == 1
    result = _size(out) // out.shape[1] * _up(out.shape[1], block)
    working = {"blocked weights": _weights(weight, groups), "blocked output": result}
    if pointwise or source.shape[1] >= block:  # else (latents, pictures) the plain layout is read
        working["blocked input"] = _size(source) // source.shape[1] * _up(source.shape[1], block)
    if not source.is_contiguous():
        working["contiguous input"] = _size(source)
    if pointwise and out.element_size() == 2 and groups == 1:  # summed in fp32 and rounded, image by image, per thread
        image = _up(out.shape[1], block) * math.prod(out.shape[2:])
        working["fp32 sums"] = 4 * image * torch.get_num_threads()
    return (working,), ({"blocked output": result},)


def _columns(
    source: Any, weight: Any, out: Any, nhwc: bool, *, unrolled: bool
) -> tuple[tuple[Sizes, ...], tuple[Sizes, ...]]:
    beside: Sizes = {}
    if unrolled:
        window = math.prod(weight.shape[1:])
        beside["columns of im2col"] = out.shape[0] * window * math.prod(out.shape[2:]) * out.element_size()
    if nhwc and out.ndim == 4 and math.prod(weight.shape[2:]) > 1:
        beside["NHWC weights"] = _size(weight)
    if not source.is_contiguous() and not (out.ndim == 4 and _reads_nhwc(source)):
        beside["contiguous input"] = _size(source)
    return (), (beside,)


def _unrolls(weight: Any, stride: list[int], padding: list[int]) -> bool:
    return math.prod(weight.shape[2:]) > 1 or any(step != 1 for step in stride) or any(padding)


def _weights(weight: Any, groups: int) -> int:
    if groups > 1:
        return _size(weight)
    block = vector()
    step = block * min(4, -(-weight.shape[0] // block))  # up to four vectors of output channels at a time
    return _size(weight) // weight.shape[0] * _up(weight.shape[0], step)


@cache
def vector() -> int:
    """fp32 values of one vector register, which is the block of channels."""
    return 16 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 8


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


def _size(tensor: Any) -> int:
    return tensor.numel() * tensor.element_size()


def _reads_nhwc(tensor: Any) -> bool:
    return tensor.ndim in layouts.NHWC and tensor.is_contiguous(memory_format=layouts.nhwc(tensor.ndim))
