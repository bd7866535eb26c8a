"""The allocated peak of one decode by stage: what the decode and its weights really held at the worst instant.

Weights count where they are resident on the decode's device at the start, those that an offload keeps in main memory
included when that is where the decode runs. The latents handed in, and fp32 masters of cast weights, do not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from fidelity.lazy import torch
from fidelity.memory import cuda, interruption, profiler
from fidelity.memory.events import Recording
from fidelity.memory.interruption import Interrupted, interrupted
from fidelity.memory.resident import Resident, resident_peak
from fidelity.memory.running import Running, described, running
from fidelity.memory.traced import CPU_METHOD, Traced, findings, transfers
from fidelity.records import MemoryTrace, Stage

if TYPE_CHECKING:
    from torch import Tensor, nn

T = TypeVar("T")

EMULATED = "emulated fp16: its temporaries are fp32, so it has no memory figure of its own"


def trace(
    decode: Callable[[], T],
    *,
    module: nn.Module,
    device: str,
    decoder: nn.Module | None = None,
    convert: Callable[[T], Any] | None = None,
) -> tuple[T, MemoryTrace]:
    """Run a decode and measure its peak; `convert` then runs on its result as a stage of its own.

    `allocated_peak_bytes` is the largest sum alive at one instant of it all. Stages: `decode` (the whole of it), `tile`
    (the worst call of `decoder`, with everything that was alive beside it), `assemble` (outside of those calls, where
    there are several), `onload` (while an offload moved weights), `convert`. A decode that has no figure of its own has
    a reason instead. What the decode raises passes through, and `interrupted(error)` tells what lived then.
    """
    inside = decoder if decoder is not None else getattr(module, "decoder", None)
    weights = weights_sizes(module, device)
    if torch.device(device).type == "cuda":
        return cuda.trace(decode, module=module, weights=weights, device=device, decoder=inside, convert=convert)
    if any(weight.dtype is torch.float16 for weight in module.parameters()):
        return decode(), MemoryTrace(weights_bytes=sum(weights), reason=EMULATED)
    recording, seen = Recording(), Running()
    try:
        with (
            profiler.record(operators=True) as recording,
            running(module, inside, lambda name: profiler.span(f"fidelity:{name}")) as seen,
        ):
            with profiler.span("fidelity:decode"):
                result = decode()
            seen.sample = described(result)
            if convert is not None:
                with profiler.span("fidelity:convert"):
                    seen.stages.append("convert")
                    convert(result)
    except Exception as error:
        interruption.tell(error, recording, seen, weights)
        raise
    return result, Traced(recording, seen, weights).memory()


def load(build: Callable[[], T], device: str) -> tuple[T, Stage]:
    """Load a model and measure it as the stage `load`: the allocator's peak, and by how much the process grew."""
    start = time.perf_counter()
    with resident_peak("cpu") as resident:
        if torch.device(device).type == "cuda":
            (result, peak), reason = cuda.peak(build, device), None
        elif torch.autograd._profiler_enabled():
            result, peak, reason = build(), None, "a profiler was running already"
        else:
            with profiler.record() as recording:
                result = build()
            peak, reason = max(recording.alive, default=0), None
    seconds = time.perf_counter() - start
    return result, Stage(
        "load", peak, resident_bytes=resident.rise_bytes, seconds=seconds, reason=reason or resident.reason
    )


def resident_weights(module: nn.Module, device: str) -> int:
    """Bytes of weights and buffers that lie on the device, each storage once, an offload's own copies included."""
    return sum(weights_sizes(module, device))


def weights_sizes(module: nn.Module, device: str) -> list[int]:
    """The same by storage."""
    kind = torch.device(device).type
    storages = {}
    for tensor in _weights(module):
        if tensor.device.type == kind:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return list(storages.values())


def _weights(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
    for part in module.modules():
        hook = part.__dict__.get("_hf_hook")
        for one in getattr(hook, "hooks", (hook,)):  # accelerate: names in a dict or in files
            held = getattr(getattr(one, "weights_map", None), "dataset", None)
            if isinstance(held, dict):
                yield from held.values()
        registry = part.__dict__.get("_diffusers_hook")
        group_hook = registry.get_hook("group_offloading") if registry is not None else None
        if group_hook is not None:  # diffusers: pinned copies, where streams are used
            yield from getattr(group_hook.group, "cpu_param_dict", {}).values()


__all__ = [
    "CPU_METHOD",
    "EMULATED",
    "Interrupted",
    "Resident",
    "Traced",
    "findings",
    "interrupted",
    "load",
    "resident_peak",
    "resident_weights",
    "trace",
    "transfers",
]
