"""Every allocation of the CPU allocator during a block, and its release, from torch's profiler.

A tracker of tensors misses what kernels allocate for themselves: 384 MiB seen of a decode whose convolutions' workspace
made it 449, and whose resident peak rose by 450. The allocator's own events have both.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from fidelity.lazy import torch
from fidelity.memory.events import Recording

_ONE_AT_A_TIME = threading.Lock()  # the profiler is one for the process, and so is file descriptor 2
_LOG_LINE = re.compile(rb"[A-Z]+:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \d+:\d+ \w+\.\w+:\d+\] ")


@contextmanager
def record(*, operators: bool = False, device: str = "cpu") -> Iterator[Recording]:
    """Record a device's allocator's events of this thread. The Recording is filled on exit; `span` adds ranges to it.

    With `operators`, who made an allocation is recorded too; that costs more. Releases of what was allocated before are
    no events. The garbage collector rests meanwhile: when it runs depends on what the process did before, and the same
    decode must have the same peak.
    """
    recording = Recording(device=device)
    collects = gc.isenabled()
    with _ONE_AT_A_TIME, nullcontext() if operators else _memory_events_only():
        profile = torch.autograd.profiler.profile(profile_memory=True)
        with _quiet():
            profile.__enter__()
        gc.disable()
        try:
            yield recording
        finally:
            try:
                with _quiet():
                    profile.__exit__(None, None, None)
                if profile.kineto_results is not None:
                    recording.fill(profile.kineto_results.experimental_event_tree())
            except (AttributeError, TypeError, RuntimeError, MemoryError) as error:  # another torch, or no room to read
                recording.reason = f"the profiler's events could not be read: {type(error).__name__}: {error}"
            finally:
                if collects:
                    gc.enable()


def span(name: str) -> AbstractContextManager[Any]:
    """A named range of the recording. Raises nothing outside of one."""
    fast = getattr(torch._C._profiler, "_RecordFunctionFast", None)
    return fast(name) if fast is not None else torch.autograd.profiler.record_function(name)


@contextmanager
def _memory_events_only() -> Iterator[None]:
    """Record no operators: only our ranges beside the memory events, which makes tracing a tiled decode cheap.

    torch offers the choice below its Python profiler only. Where that has moved, everything is recorded, more slowly.
    """
    home = torch.autograd.profiler
    enable = getattr(home, "_enable_profiler", None)
    scope = getattr(getattr(torch._C._profiler, "RecordScope", None), "USER_SCOPE", None)
    if enable is None or scope is None:
        yield
        return
    home._enable_profiler = partial(enable, scopes={scope})
    try:
        yield
    finally:
        home._enable_profiler = enable


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the profiler's own C++ lines off file descriptor 2; whatever else was written there is passed on."""
    if sys.stderr is not None and not sys.stderr.closed:
        sys.stderr.flush()
    try:
        console = os.dup(2)
    except OSError:  # no file descriptor 2: nothing to keep quiet
        yield
        return
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(console, 2)
            caught.seek(0)
            for line in caught:
                if not _LOG_LINE.match(line):
                    os.write(console, line)
            os.close(console)
