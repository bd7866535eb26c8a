"""Decodes that run side by side, as a server's requests do: in threads that share one instance, or in processes.

Each request is a decode and its conversion to an image, after which nothing of it is left but the bits for comparison,
which lie outside torch's allocator. All begin at one barrier.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fidelity.errors import RequestError, WorkerDied, in_one_line
from fidelity.lazy import np, torch
from fidelity.memory import resident, threads
from fidelity.runner import image_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fidelity.records import DecodePlan, Model

Stage = Callable[[str], AbstractContextManager[Any]]
CONVERT = "fidelity:convert"
NOTHING = threads.Changes(reason="not recorded")


@dataclass(frozen=True)
class Served:
    """One request's end: what it gave, when it ran (seconds of the machine's clock), what it allocated."""

    bits: Any
    """The sample as bytes (numpy, uint8); None where the decode raised."""
    start: float
    end: float
    changes: threads.Changes
    error: str | None = None
    rise_bytes: int | None = None
    """Of the process's resident memory, where it has one of its own."""


def request(
    module: nn.Module, model: Model, latents: Tensor, *, recorded: bool = False, stage: Stage | None = None
) -> Served:
    """Decode latents as they are and convert the sample to uint8, in this thread, on a stream of its own on CUDA.

    `recorded`: with what this thread allocates on the CPU. `stage("decode")` and `stage("convert")` go around them.
    """
    on_cuda = latents.device.type == "cuda"
    stage = stage or (lambda name: torch.autograd.profiler.record_function(f"fidelity:{name}"))
    stream = torch.cuda.stream(torch.cuda.Stream(latents.device)) if on_cuda else nullcontext()
    bits, error = None, None
    with torch.no_grad(), stream, threads.record() if recorded and not on_cuda else nullcontext(NOTHING) as changes:
        start = time.perf_counter()
        try:
            with stage("decode"):
                sample = model.family.decode(module, latents)
            with stage("convert"):
                image_of(sample, model.data_range)
            if on_cuda:
                torch.cuda.current_stream(latents.device).synchronize()
            end = time.perf_counter()
            bits = sample.contiguous().cpu().view(torch.uint8).numpy().copy()
            del sample
        except Exception as raised:  # what a decode raises beside others is what is looked for
            end, error = time.perf_counter(), in_one_line(raised)
    return Served(bits, start, end, changes, error)


def in_threads(serve: Callable[[Tensor], Served], latents: Sequence[Tensor]) -> list[Served]:
    """One thread for each, all of this process, begun together."""
    barrier = threading.Barrier(len(latents))

    def run(one: Tensor) -> Served:
        barrier.wait()
        return serve(one)

    with ThreadPoolExecutor(len(latents)) as pool:
        return [each.result() for each in [pool.submit(run, one) for one in latents]]


def check_portable(model: Model) -> None:
    """Raise RequestError for a model that cannot be handed to another process."""
    try:
        pickle.dumps(model)
    except Exception as error:  # whatever its parts raise: pickle has no one error for it
        raise RequestError(f"{model.name}: its loader cannot be handed to another process ({in_one_line(error)}): "
                           "measure threads, or give the model as NAME=PATH") from error  # fmt: skip


class Processes:
    """Worker processes, each with an instance of its own under the plan, kept until `close`."""

    def __init__(self, model: Model, plan: DecodePlan, device: str, count: int, plugins: Sequence[str]):
        context = multiprocessing.get_context("spawn")
        self.count = count
        self._pool = ProcessPoolExecutor(
            count, context, _begin, (model, plan, device, tuple(plugins), context.Barrier(count), os.getpid())
        )

    def serve(self, latents: Sequence[Tensor], *, recorded: bool) -> list[Served]:
        """One request a process, begun together: as many as there are processes."""
        plain = [(str(one.dtype).removeprefix("torch."), one.cpu().float().numpy()) for one in latents]
        try:
            waiting: list[Future[Served]] = [self._pool.submit(_serve, *one, recorded) for one in plain]
            return [each.result() for each in waiting]
        except BrokenProcessPool as error:
            raise WorkerDied(f"one of {self.count} worker processes ended under its decode: {error}; "
                             "ask for fewer, or for a smaller size") from error  # fmt: skip

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


_OWN: dict[str, Any] = {}
"""A worker process's model, module, device and barrier."""


def _begin(model: Model, plan: DecodePlan, device: str, plugins: tuple[str, ...], barrier: Any, parent: int) -> None:
    from fidelity import optimizations, registry
    from fidelity.environment import make_deterministic
    from fidelity.worker import end_with

    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    registry.load_plugins(plugins)
    make_deterministic(1)
    module = model.load().to(device)
    stack = ExitStack()  # as long as the process
    with torch.no_grad():
        stack.enter_context(optimizations.apply_plan(module, plan, model=model, device=device))
    _OWN.update(model=model, module=module, device=device, barrier=barrier, stack=stack)


def _serve(dtype: str, latents: Any, recorded: bool) -> Served:
    fed = torch.from_numpy(latents).to(_OWN["device"], getattr(torch, dtype))
    _OWN["barrier"].wait(timeout=600)
    with resident.resident_peak(_OWN["device"]) as risen:
        served = request(_OWN["module"], _OWN["model"], fed, recorded=recorded)
    return Served(served.bits, served.start, served.end, served.changes, served.error, risen.rise_bytes)


def wall(served: Sequence[Served]) -> float:
    """Seconds from the first start to the last end."""
    return max(one.end for one in served) - min(one.start for one in served)


def difference(bits: Any, expected: Any, dtype: str) -> float | None:
    """The largest difference of two samples' values; None where they are equal bit for bit, inf where one is no number
    or their shapes differ."""
    if bits.shape == expected.shape and np.array_equal(bits, expected):
        return None
    if bits.shape != expected.shape:
        return float("inf")
    mine, theirs = (torch.from_numpy(each).view(getattr(torch, dtype)).float() for each in (bits, expected))
    largest = float((mine - theirs).abs().max())
    return largest if largest == largest else float("inf")
