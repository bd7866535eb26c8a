"""A limit on the memory of one decode, so that running out of it is tried for real.

On the CPU it is a soft limit on the process's address space: its size when the decode begins, and the limit beside it.
What the allocators are refused then is what a smaller machine would refuse. Two habits of glibc would spoil the figure:
what was freed before stays in its heap, where a decode would find it for nothing, so it is taken first; and further
threads may have heaps of their own, 64 MiB of addresses reserved ahead, to which the others turn once they were
refused: a process that is to hold to a limit starts with `ENVIRONMENT`, which allows one. On CUDA it is a share of the
device (`memory.fraction`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from fidelity.errors import EvaluationError
from fidelity.memory import fraction

T = TypeVar("T")

ENVIRONMENT = {"MALLOC_ARENA_MAX": "1"}
"""What a process must be started with that is to hold to a limit on the CPU: read by glibc before anything else."""
PIECE = 64 * 1024
"""Bytes from which on an allocation is a mapping of its own while a limit holds, to be counted by the page."""
CODE = 256 * 2**20
"""Bytes more that a rehearsal may take: oneDNN keeps 256 KiB for the code of each kernel and shape that it meets first
(measured: 6 MiB of a small decode in fp32, 35 in tiles of bf16)."""
_M_MMAP_THRESHOLD = -3  # mallopt(3)
_LARGEST_THRESHOLD = 32 * 2**20  # glibc's own upper bound, to which its moving threshold goes under such decodes


def refusal(limit: int, device: str) -> str | None:
    """Why a limit of so many bytes cannot be held to on this device and machine, or None."""
    if device.startswith("cuda"):
        return _too_large(limit, fraction.total_bytes(device), f"{device} has") if fraction.available() else None
    if not device.startswith("cpu"):
        return f"a memory limit holds on cpu and cuda, not on {device}"
    if sys.platform != "linux":
        return (f"a memory limit on the CPU is one on the process's address space, which {sys.platform} does not hold "
                "a process to: run it on Linux")  # fmt: skip
    return _too_large(limit, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine has")


def _too_large(limit: int, total: int, who: str) -> str | None:
    if limit < total:
        return None
    return f"it is no limit: {who} {total} bytes in all, and {limit} are allowed"


def rehearse(run: Callable[..., Any], arguments: Sequence[Any], limit: int, device: str) -> None:
    """Let the kernels write their code, which is made once and is no memory of the decode's: decode once before it
    counts, held to the limit and `CODE`. What that raises is left to the decode that counts. Nothing on CUDA, where
    code lies outside of what the allocator hands out."""
    if device.startswith("cpu"):
        with suppress(Exception), held(limit + CODE, device):
            run(*arguments)


def around(run: Callable[..., T], limit: int | None, device: str) -> Callable[..., T]:
    """`run`, held to `limit` bytes beyond what the process has when it is called; as it is where there is no limit."""
    if limit is None:
        return run

    def limited(*arguments: Any) -> T:
        with held(limit, device):
            return run(*arguments)

    return limited


@contextmanager
def held(limit: int, device: str = "cpu") -> Iterator[None]:
    """Refuse the block more than `limit` bytes beyond what the process has now; what held before is put back, however
    the block ends.

    A refusal is what allocators raise: RuntimeError, MemoryError, torch.OutOfMemoryError. Raises EvaluationError where
    the process, started without `ENVIRONMENT`, or the system does not hold to the limit. One block at a time.
    """
    if device.startswith("cuda"):
        with fraction.held(limit, device):
            yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    with _nothing_for_free():
        allowed = _address_space() + limit
        bounds = [allowed, *(bound for bound in before if bound != resource.RLIM_INFINITY)]
        resource.setrlimit(resource.RLIMIT_AS, (min(bounds), before[1]))
        try:
            _refuse_unheld(limit)
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


def _refuse_unheld(limit: int) -> None:
    """Ask for more than is allowed: a system that gives it holds nobody to anything."""
    with suppress(OSError, MemoryError), mmap.mmap(-1, limit + mmap.PAGESIZE):
        raise EvaluationError(f"memory limit: the system gave {limit + mmap.PAGESIZE} bytes where {limit} are allowed")


# ---------------------------------------------------------------- glibc's heap


@contextmanager
def _nothing_for_free() -> Iterator[None]:
    """Take what is free in the C library's heap, and have each larger allocation mapped by itself. glibc only: another
    library's heap may give a decode more than the limit says."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mallinfo2"):
        yield
        return
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.mallinfo2.restype = _Mallinfo
    _refuse_arenas(libc)
    libc.malloc_trim(0)
    libc.mallopt(_M_MMAP_THRESHOLD, PIECE)
    taken: list[int] = []
    try:
        mapped = libc.mallinfo2().hblks
        while libc.mallinfo2().hblks == mapped:  # each piece from the heap, until one had to be mapped
            piece = libc.malloc(PIECE)
            if piece is None:
                break
            taken.append(piece)
        if taken:
            libc.free(taken.pop())
        yield
    finally:
        for piece in taken:
            libc.free(piece)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD)


def _refuse_arenas(libc: Any) -> None:
    """Raise EvaluationError if there is a second heap in this process."""
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    libc.open_memstream.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    heaps = (text.value or b"").count(b"<heap nr=")
    libc.free(text)
    if heaps != 1:
        said = " ".join(f"{name}={value}" for name, value in ENVIRONMENT.items())
        raise EvaluationError(f"memory limit: the C library keeps {heaps} heaps in this process, and what one refuses "
                              f"is taken from another: start it with {said}")  # fmt: skip


class _Mallinfo(ctypes.Structure):
    """mallinfo2(3)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
                     "keepcost")
    )  # fmt: skip
