"""A limit on CUDA: what this process's caching allocator may reserve, as a share of the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fidelity.lazy import torch


def share(allocated: int, limit: int, total: int) -> float:
    """The share of `total` bytes at which `limit` more than the `allocated` ones may be had; 1 at most."""
    return min(1.0, (allocated + limit) / total)


def available() -> bool:
    """Whether there is a device at all; who asks for one that is not there is told elsewhere."""
    return bool(torch.cuda.is_available())


def total_bytes(device: str) -> int:
    """What the device has, whoever uses it."""
    return int(torch.cuda.get_device_properties(device).total_memory)


@contextmanager
def held(limit: int, device: str) -> Iterator[None]:
    """Refuse what goes beyond `limit` bytes more than is allocated now. The share that held before is put back.

    The cache is emptied first: blocks that are kept from earlier decodes count as this process's.
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)  # torch >= 2.8
    allowed = share(torch.cuda.memory_allocated(device), limit, total_bytes(device))
    torch.cuda.set_per_process_memory_fraction(min(before, allowed), device)
    try:
        yield
        torch.cuda.synchronize(device)
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
