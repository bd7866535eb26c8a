"""fp16 on a CPU: each operator computes in fp32 and its result is rounded to fp16, overflow to infinity.

That is what an accelerator with fp32 accumulation does inside one kernel. Native half convolutions on a CPU take
minutes for the decode that takes this half a second. Tensors stay fp16 between operators, so that whoever looks at
dtypes sees what an accelerator would show. Why and how near: docs/design/fp16-emulation.md.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

from fidelity.lazy import torch

# Results are copies of inputs, or their dtype is the caller's business: the native kernels are exact in half.
_EXACT = """
_to_copy copy_ copy clone contiguous lift_fresh set_ resize_ _pin_memory is_pinned equal _local_scalar_dense
empty empty_like new_empty empty_strided new_empty_strided zeros_like ones_like new_zeros new_ones full_like new_full
fill_ zero_ cat stack constant_pad_nd reflection_pad2d replication_pad2d replication_pad3d repeat roll flip
index index_select gather select_scatter slice_scatter where masked_fill masked_fill_ index_put index_put_
upsample_nearest1d upsample_nearest2d upsample_nearest3d pixel_shuffle pixel_unshuffle
"""
EXACT = frozenset(_EXACT.split())

# Kernels that refuse operands of different dtypes. A block left in half precision has to crash here as it does there.
_ONE_DTYPE = """
convolution _convolution convolution_overrideable mkldnn_convolution
mm addmm bmm baddbmm addbmm mv addmv dot linear
_scaled_dot_product_attention_math _scaled_dot_product_efficient_attention
_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
native_group_norm native_layer_norm native_batch_norm
_native_batch_norm_legit _native_batch_norm_legit_no_training
"""
ONE_DTYPE = frozenset(_ONE_DTYPE.split())
SOFTMAX = frozenset(("_softmax", "_log_softmax"))  # (self, dim, half_to_float)


def half() -> AbstractContextManager[Any]:
    """A context in which operators on fp16 CPU tensors compute in fp32 and round to fp16.

    Operators without an fp16 operand are untouched. Raises RuntimeError where a native kernel refuses mixed dtypes.
    """
    return _mode()()


@cache
def _mode() -> type[Any]:
    # made at first use: a class that inherits from torch's cannot stand at module level without importing torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class HalfEmulation(TorchDispatchMode):
        """Widen, compute, round."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            operands = [*_tensors(args), *_tensors(kwargs.values())]
            if _is_exact(func) or not any(_is_half(tensor) for tensor in operands):
                return func(*args, **kwargs)
            return _emulate(func, args, kwargs, operands)

    return HalfEmulation


def _emulate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Any]) -> Any:
    rounds = _rounds(func, operands, args, kwargs)
    widened: dict[int, Any] = {}  # one fp32 copy of each operand, so that an operand given twice stays one
    wide_args = tuple(_widen(arg, widened) for arg in args)
    wide_kwargs = {key: _widen(value, widened) for key, value in kwargs.items()}
    if kwargs.get("dtype") is torch.float16:
        wide_kwargs["dtype"] = torch.float32
    if func.overloadpacket.__name__ in SOFTMAX:
        wide_args = (*wide_args[:2], False)  # half_to_float: its operand is fp32 already
    result = func(*wide_args, **wide_kwargs)

    written = {}
    for original in _written(func, args, kwargs):
        if _is_half(original):
            original.copy_(widened[id(original)])
            written[id(widened[id(original)])] = original
    return _narrow(result, written, rounds)


# Not closures of _emulate: one that calls itself is a cycle, which would keep each operator's fp32 copies until the
# garbage collector comes by (400 MiB of them in a decode that needs 60).


def _widen(value: Any, widened: dict[int, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        if not _is_half(value):
            return value
        if id(value) not in widened:
            widened[id(value)] = value.to(torch.float32)
        return widened[id(value)]
    if isinstance(value, (list, tuple)):
        return type(value)(_widen(part, widened) for part in value)
    return value


def _narrow(value: Any, written: dict[int, Any], rounds: bool) -> Any:
    if isinstance(value, torch.Tensor):
        if id(value) in written:
            return written[id(value)]
        return value.to(torch.float16) if rounds and value.dtype is torch.float32 else value
    if isinstance(value, (list, tuple)):
        return type(value)(_narrow(part, written, rounds) for part in value)
    return value


def _rounds(func: Any, operands: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the native result would be fp16: torch's type promotion, or what the caller asked for."""
    name = func.overloadpacket.__name__
    floating = [tensor for tensor in operands if tensor.is_floating_point()]
    if name in ONE_DTYPE:
        found = sorted({str(tensor.dtype) for tensor in floating})
        if len(found) > 1:
            raise RuntimeError(f"{name} got operands of different dtypes: {', '.join(found)}")
        return True
    if kwargs.get("dtype") is not None:
        return kwargs["dtype"] is torch.float16
    if name in SOFTMAX:
        return not args[2]
    shaped = [tensor for tensor in floating if tensor.dim()] or floating
    return all(_is_half(tensor) for tensor in shaped)


@cache
def _is_exact(func: Any) -> bool:
    """Views, and operators whose half kernels only move values."""
    views = any(out.alias_info is not None and not out.alias_info.is_write for out in func._schema.returns)
    return views or func.overloadpacket.__name__ in EXACT


@cache
def _written_slots(func: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that this operator writes to: `self` in place, and `out`."""
    values = [args[index] if index < len(args) else kwargs.get(name) for index, name in _written_slots(func)]
    return _tensors(values)


def _tensors(values: Any) -> list[Any]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(_tensors(value))
    return found


def _is_half(tensor: Any) -> bool:
    return tensor.dtype is torch.float16 and tensor.device.type == "cpu"
