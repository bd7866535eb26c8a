"""How many bytes a device has left for whoever asks now."""

from __future__ import annotations

from pathlib import Path

from fidelity.lazy import torch

_MEMINFO, _GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def available_bytes(device: str) -> int | None:
    """What the machine, and the control group that this process is in (v2), would still give; of CUDA, what the driver
    would. None where neither says."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    known = [left for left in (_of_machine(), _of_group()) if left is not None]
    return min(known) if known else None


def _of_machine() -> int | None:
    lines = _MEMINFO.read_text().splitlines() if _MEMINFO.is_file() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def _of_group() -> int | None:
    limit, used = _GROUP / "memory.max", _GROUP / "memory.current"
    if not (limit.is_file() and used.is_file()) or limit.read_text().strip() == "max":
        return None
    return max(0, int(limit.read_text()) - int(used.read_text()))
