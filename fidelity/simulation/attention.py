"""Which attention kernel a CUDA device takes.

Without a device torch falls back to plain products, which hold the whole matrix of scores (65536² at 2048 × 2048); on
one it takes a fused kernel, which never makes that matrix. So the choice is made here as torch makes it on a device
(aten/src/ATen/native/transformers/cuda/sdp_utils.cpp): flash up to 256 channels a head in half precision without a
mask, else the memory-efficient kernel, else plain products, where channels are not aligned to 16 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from fidelity.lazy import torch

FLASH_CHANNELS = 256
ALIGNED_BYTES = 16


DIRECT = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
"""torch's switch by which flex_attention outside of torch.compile is not traced first: the operators are the same."""


@contextmanager
def kernels(device: str) -> Iterator[None]:
    """A context in which attention on fake CUDA tensors goes to the kernel that a device would take."""
    import torch.nn.attention.flex_attention as flex

    before = getattr(flex, DIRECT, False)
    setattr(flex, DIRECT, True)
    try:
        if torch.device(device).type == "cuda":
            with _mode()():
                yield
        else:
            yield
    finally:
        setattr(flex, DIRECT, before)


def choose(query: Any, value: Any, mask: Any) -> str:
    """`flash`, `efficient` or `math` for (B, heads, length, channels)."""
    half = query.element_size() == 2
    if half and mask is None and query.shape[-1] <= FLASH_CHANNELS and query.shape[-1] == value.shape[-1]:
        return "flash"
    aligned = all(tensor.shape[-1] * tensor.element_size() % ALIGNED_BYTES == 0 for tensor in (query, value))
    return "efficient" if aligned and query.ndim == 4 else "math"


def unfused(mode: type[Any]) -> None:
    """Have flex_attention, where this dispatch mode is on, run as it does on any device without torch.compile: its
    scores in full. (An operator of higher order asks each mode for a rule.)"""
    from torch._higher_order_ops.flex_attention import flex_attention, sdpa_dense

    @flex_attention.py_impl(mode)
    def dense(active: Any, *args: Any, **kwargs: Any) -> Any:
        with active:
            return sdpa_dense(*args, **kwargs)


@cache
def _mode() -> type[Any]:
    # made at first use: a class that inherits from torch's cannot stand at module level without importing torch
    from torch.overrides import TorchFunctionMode

    class Kernels(TorchFunctionMode):
        """Sends attention to the chosen kernel's own operator."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func is torch.nn.functional.scaled_dot_product_attention:
                return _attend(func, args, kwargs)
            return func(*args, **kwargs)

    return Kernels


def _attend(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args)), **kwargs}
    query, key, value, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
    if given.get("enable_gqa") or query.device.type != "cuda":
        return func(*args, **kwargs)
    chosen = choose(query, value, mask)
    if chosen == "flash":
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]
    if chosen == "efficient":
        bias = None if mask is None else mask.expand(*query.shape[:-1], key.shape[-2])
        return torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, bias, False)[0]
    return func(*args, **kwargs)
