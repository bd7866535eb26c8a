"""What a machine can do at best, measured: bytes a second to and from memory, and FLOPs a second in one dtype."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fidelity.lazy import torch

RUNS = 5
"""The best of so many counts: whatever else the machine does only slows it."""
FLOATS = {"cpu": 2**26, "cuda": 2**28}
"""fp32 values of each of the three buffers: 256 MiB, and 1 GiB on a GPU, several times any cache."""
PRODUCT = {"cpu": 1024, "cuda": 8192}
"""Side of the square matrices."""
CONVOLUTION = {"cpu": (128, 96), "cuda": (512, 256)}
"""Channels and side of the picture of a 3×3 convolution, batch 1."""


def bandwidth(device: str) -> tuple[float, str]:
    """GB/s (10⁹ bytes) of a triad `a = b + s · c`, which reads two buffers and writes one, and how it was measured."""
    kind = torch.device(device).type
    a, b, c = (torch.full((FLOATS[kind],), value, device=device) for value in (0.0, 1.0, 2.0))
    seconds = best(lambda: torch.add(b, c, alpha=3.0, out=a), device)
    size = a.numel() * a.element_size()
    return (
        3 * size / seconds / 1e9,
        f"measured here: a triad over three buffers of {size // 2**20} MiB, {_runs(device)}",
    )


def compute(device: str, dtype: torch.dtype) -> tuple[float, str]:
    """GFLOP/s (10⁹) of a matrix product or of a 3×3 convolution in `dtype`, whichever is faster, and which it was."""
    kind = torch.device(device).type
    found = [(*_product(PRODUCT[kind], device, dtype),), (*_convolution(*CONVOLUTION[kind], device, dtype),)]
    rate, what = max(found)
    return rate, f"measured here: {what} in {str(dtype).removeprefix('torch.')}, {_runs(device)}"


def _runs(device: str) -> str:
    threads = torch.get_num_threads()
    with_ = "" if torch.device(device).type == "cuda" else f" by {threads} thread{'s' if threads > 1 else ''}"
    return f"best of {RUNS}{with_}"


def _product(side: int, device: str, dtype: torch.dtype) -> tuple[float, str]:
    left, right = (torch.ones(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / best(lambda: left @ right, device) / 1e9, f"a product of matrices of {side}×{side}"


def _convolution(channels: int, side: int, device: str, dtype: torch.dtype) -> tuple[float, str]:
    picture = torch.ones(1, channels, side, side, device=device, dtype=dtype)
    kernel = torch.ones(channels, channels, 3, 3, device=device, dtype=dtype)
    seconds = best(lambda: torch.nn.functional.conv2d(picture, kernel, padding=1), device)
    flops = 2 * 9 * channels**2 * side**2
    return flops / seconds / 1e9, f"a 3×3 convolution of {channels} to {channels} channels at {side}×{side}"


def best(run: Callable[[], Any], device: str) -> float:
    """The shortest of a few runs in seconds, after one that warms up."""
    with torch.no_grad():
        run()
        times = []
        for _ in range(RUNS):
            start = clock(device)
            run()
            times.append(clock(device) - start)
    return min(times)


def clock(device: str) -> float:
    """Seconds, when all that was asked of the device is done."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
