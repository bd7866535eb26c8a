"""Modules and tensors of shapes alone: what a prediction runs on, under torch's FakeTensorMode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fidelity.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor, nn


@contextmanager
def really() -> Iterator[Any]:
    """Load real weights even where shapes alone are asked for; yields torch's mode for those, or None."""
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    fake = detect_fake_mode()
    if fake is None:
        yield None
        return
    with unset_fake_temporarily():
        yield fake


def on_shapes(module: nn.Module) -> nn.Module:
    """The module with weights of the same shapes and no data; to be called where shapes alone are asked for."""
    new: dict[int, Any] = {}
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in new:
                    data = torch.empty(tuple(tensor.shape), dtype=tensor.dtype)
                    is_weight = isinstance(tensor, torch.nn.Parameter)
                    new[id(tensor)] = tensor, torch.nn.Parameter(data, requires_grad=False) if is_weight else data
                table[name] = new[id(tensor)][1]
    return module


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and no data."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)
