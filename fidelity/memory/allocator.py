"""The allocated peak of one decode by stage: what the decode and its weights really held at the worst instant.

Weights count where they are resident on the decode's device at the start, those that an offload keeps in main memory
included when that is where the decode runs. The latents handed in, and fp32 masters of cast weights, do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from fidelity.lazy import torch
from fidelity.memory import cuda, profiler
from fidelity.memory.resident import Resident, resident_peak
from fidelity.records import MemoryTrace, Stage

if TYPE_CHECKING:
    from torch import Tensor, nn

T = TypeVar("T")

CPU_METHOD = "allocator events of the torch profiler + resident weights"
CUDA_METHOD = "torch.cuda peak counters, read and reset at each stage"
TIMELINE_SHARES = 128
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
    there are several), `convert`. A decode that has no figure of its own has a reason instead.
    """
    weights = resident_weights(module, device)
    inside = decoder if decoder is not None else getattr(module, "decoder", None)
    if torch.device(device).type == "cuda":
        return _on_cuda(decode, weights, device, inside, convert)
    if any(weight.dtype is torch.float16 for weight in module.parameters()):
        return decode(), MemoryTrace(weights_bytes=weights, reason=EMULATED)
    with profiler.record() as timeline:
        with profiler.span("fidelity:decode"), _each_call(inside, lambda: profiler.span("fidelity:tile")):
            result = decode()
        with profiler.span("fidelity:convert"):
            if convert is not None:
                convert(result)
    if not timeline.times:
        return result, MemoryTrace(weights_bytes=weights, reason="the profiler reported no allocator events")
    return result, _of_timeline(timeline, weights, converted=convert is not None)


def _of_timeline(timeline: profiler.Timeline, weights: int, *, converted: bool) -> MemoryTrace:
    (begin, end), tiles = timeline.ranges["fidelity:decode"][0], timeline.ranges.get("fidelity:tile", [])
    peaks = {"decode": [timeline.peak(begin, end)]}
    if tiles:
        peaks["tile"] = [timeline.peak(*tile) for tile in tiles]
    if len(tiles) > 1:
        borders = [begin, *(border for tile in tiles for border in tile), end]
        peaks["assemble"] = [timeline.peak(*gap) for gap in zip(borders[::2], borders[1::2])]
    if converted:
        peaks["convert"] = [timeline.peak(*timeline.ranges["fidelity:convert"][0])]
    return MemoryTrace(
        allocated_peak_bytes=weights + max(max(found) for found in peaks.values()),
        weights_bytes=weights,
        method=CPU_METHOD,
        stages=_stages({name: [weights + peak for peak in found] for name, found in peaks.items()}),
        timeline=tuple(weights + held for held in timeline.shares(TIMELINE_SHARES)),
    )


def _on_cuda(
    decode: Callable[[], T], weights: int, device: str, decoder: nn.Module | None, convert: Callable[[T], Any] | None
) -> tuple[T, MemoryTrace]:
    meter = cuda.Meter(device)
    meter.start(weights)
    with meter.stage("assemble"), _each_call(decoder, lambda: meter.stage("tile")):
        result = decode()
    if convert is not None:
        with meter.stage("convert"):
            convert(result)
    peaks = dict(meter.allocated)
    peaks["decode"] = [max(peak for name in ("assemble", "tile") for peak in peaks.get(name, [0]))]
    if len(peaks.get("tile", [])) < 2:
        peaks.pop("assemble", None)
    return result, MemoryTrace(
        allocated_peak_bytes=max(max(found) for found in peaks.values()),
        reserved_peak_bytes=meter.reserved,
        weights_bytes=weights,
        method=CUDA_METHOD,
        stages=_stages(peaks),
    )


def _stages(peaks: dict[str, list[int]]) -> tuple[Stage, ...]:
    order = ("decode", "tile", "assemble", "convert")
    calls = {name: len(peaks.get(name, ())) if name == "tile" else 1 for name in order}
    return tuple(Stage(name, max(peaks[name]), calls[name]) for name in order if peaks.get(name))  # type: ignore[arg-type]


@contextmanager
def _each_call(decoder: nn.Module | None, stage: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Put each call of the decoder into a stage of its own."""
    if decoder is None:
        with nullcontext():
            yield
        return
    running: list[AbstractContextManager[Any]] = []

    def enter(*_: Any) -> None:
        running.append(stage())
        running[-1].__enter__()

    def leave(*_: Any) -> None:
        running.pop().__exit__(None, None, None)

    handles = [
        decoder.register_forward_pre_hook(enter, prepend=True),
        decoder.register_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def resident_weights(module: nn.Module, device: str) -> int:
    """Bytes of weights and buffers that lie on the device, each storage once, an offload's own copies included."""
    kind = torch.device(device).type
    storages = {}
    for tensor in _weights(module):
        if tensor.device.type == kind:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


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


__all__ = ["Resident", "resident_peak", "resident_weights", "trace"]
