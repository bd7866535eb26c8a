"""Weights that go through a change and come back: the same Parameter objects, the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fidelity.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor, nn


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer once, by its full name."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def kept_in_fp32(module: nn.Module, name: str) -> bool:
    """Whether the class wants this tensor in fp32 whatever the dtype asked, by diffusers' `_keep_in_fp32_modules`."""
    pinned = getattr(module, "_keep_in_fp32_modules", None) or ()
    pinned = (pinned,) if isinstance(pinned, str) else pinned
    return any(part in pinned for part in name.split("."))


@contextmanager
def cast(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Cast floating weights and buffers to dtype, but for those that the class keeps in fp32; put the originals back.

    Off the CPU the originals wait in main memory, so that the device holds only what the decode would really hold.
    """

    def to_dtype(name: str, tensor: Tensor) -> Tensor:
        wanted = tensor.is_floating_point() and not kept_in_fp32(module, name)
        return tensor.data.to(dtype) if wanted else tensor.data

    with _swapped(module, to_dtype):
        yield


@contextmanager
def in_main_memory(module: nn.Module) -> Iterator[None]:
    """Move weights to the CPU; afterwards put objects and data back into every place that held them."""
    tables: list[dict[str, Any]] = [table for part in module.modules() for table in (part._parameters, part._buffers)]
    places = [(table, key, tensor) for table in tables for key, tensor in table.items()]
    with _swapped(module, lambda _, tensor: tensor.data.to("cpu")):
        try:
            yield
        finally:
            for table, key, tensor in places:
                table[key] = tensor


@contextmanager
def _swapped(module: nn.Module, change: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Give every weight other data for a while. The Parameter objects stay."""
    originals: list[tuple[Tensor, Tensor, torch.device]] = []
    try:
        for name, tensor in list(named_tensors(module)):
            changed = change(name, tensor)
            device = tensor.device
            if changed.data_ptr() != tensor.data_ptr() and device.type != "cpu":
                originals.append((tensor, tensor.data.to("cpu"), device))
            else:
                originals.append((tensor, tensor.data, device))
            tensor.data = changed
        yield
    finally:
        for tensor, data, device in originals:
            tensor.data = data.to(device)
