"""By how much the process's resident memory rose at most, from the kernel's high-water mark."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_HIGH_WATER_MARK = "5"  # proc(5): clear_refs


@dataclass
class Resident:
    """The rise in bytes, known on exit; None where it could not be measured, and then `reason` says why."""

    rise_bytes: int | None = None
    reason: str | None = None


@contextmanager
def resident_peak(device: str = "cpu") -> Iterator[Resident]:
    """Measure the rise of the resident high-water mark over the resident size at the start. Linux, CPU decodes.

    What the C library keeps of memory freed before is handed back first, or the decode would reuse it unseen.
    """
    resident = Resident()
    if not device.startswith("cpu"):
        resident.reason = f"the decode's memory is on {device}; its reserved peak is recorded instead"
        yield resident
        return
    try:
        _trim()
        _CLEAR.write_text(_RESET_HIGH_WATER_MARK)
        before = _status("VmRSS")
    except (OSError, KeyError) as error:
        resident.reason = f"the kernel's high-water mark cannot be reset here: {type(error).__name__}: {error}"
        yield resident
        return
    yield resident
    resident.rise_bytes = max(0, _status("VmHWM") - before)


def _status(name: str) -> int:
    """A figure of /proc/self/status in bytes. Raises KeyError where the kernel does not give it."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
