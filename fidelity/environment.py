"""Where a decode ran: device, kernels, library versions; and the switches that make it repeatable.

Two runs are bit-comparable only within one environment class: kernels are chosen by instruction set, CPU model, thread
count and torch release (EVIDENCE: another instruction set moves an fp32 decode by 2e-5 and a bf16 one by a grey level).
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

from fidelity.errors import RequestError
from fidelity.lazy import torch

LIBRARIES = ("torch", "diffusers", "accelerate", "lpips", "torchmetrics", "scikit-image", "safetensors", "numpy")


def versions() -> dict[str, str]:
    """Installed versions of everything that a figure may depend on; imports none of it."""
    found = {"python": platform.python_version(), "fidelity": importlib.metadata.version("fidelity")}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def cores() -> int:
    """How many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu() -> dict[str, Any]:
    """The CPU's model and flags that choose kernels, from /proc/cpuinfo; what cannot be read is "unknown"."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(errors="replace") if path.is_file() else ""

    def entry(key: str) -> str:
        found = re.search(rf"^{key}\s*:\s*(.*)$", text, re.MULTILINE)
        return found.group(1).strip() if found else "unknown"

    flags = set(entry("flags").split())
    return {
        "machine": platform.machine(),
        "name": entry("model name") if text else platform.processor() or "unknown",
        "vendor": entry("vendor_id"),
        "family": entry("cpu family"),
        "model": entry("model"),
        "bf16": bool(flags & {"avx512_bf16", "amx_bf16", "avx10_2"}),
    }


def check_device(device: str) -> None:
    """Raise RequestError unless `device` is cpu, or a CUDA device that is here."""
    if device == "cpu":
        return
    if not re.fullmatch(r"cuda(:\d+)?", device):
        raise RequestError(f"--device {device!r}: known are cpu, cuda and cuda:N")
    count = torch.cuda.device_count()
    if int(device.partition(":")[2] or 0) >= count:
        raise RequestError(f"--device {device!r}: torch sees {count} CUDA devices here; use --device cpu")


def native_bf16(device: str) -> bool:
    """Whether bf16 arithmetic has instructions of its own here; without them it is right but slow."""
    if device.startswith("cuda"):
        return bool(torch.cuda.is_bf16_supported())
    return bool(cpu()["bf16"]) and "ONEDNN_MAX_CPU_ISA" not in os.environ


def environment_class(device: str) -> str:
    """A short name under which decodes repeat bit for bit: `cpu-AuthenticAMD-25-17-AVX512-torch2.14-1t`."""
    release = ".".join(torch.__version__.split(".")[:2])
    if device.startswith("cuda"):
        return f"cuda-{torch.cuda.get_device_name(device).replace(' ', '_')}-torch{release}"
    about = cpu()
    capped = os.environ.get("ONEDNN_MAX_CPU_ISA")
    parts = [
        "cpu",
        about["vendor"],
        about["family"],
        about["model"],
        torch.backends.cpu.get_cpu_capability(),
        *([f"onednn_{capped}"] if capped else []),
        f"torch{release}",
        f"{torch.get_num_threads()}t",
    ]
    return "-".join(parts)


def fingerprint(device: str) -> dict[str, Any]:
    """Everything about this process that a figure may depend on, for results.json."""
    return {
        "class": environment_class(device),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else cpu()["name"],
        "threads": torch.get_num_threads(),
        "native_bf16": native_bf16(device),
        "fp16": "native" if device.startswith("cuda") else "emulated",
        "platform": platform.platform(),
        "versions": versions(),
    }


def make_deterministic(threads: int) -> None:
    """Fix the thread count, cuDNN's choice of kernels and TF32, so that the same decode gives the same bits."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
