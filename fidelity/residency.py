"""Weights that come and go: whoever moves them says so here, and whoever measures memory listens.

An offload's hooks and a memory trace know nothing of one another. A move is announced around the work itself, so that
what is allocated meanwhile can be told from the decode's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal


@dataclass
class Move:
    """Weights brought in or sent away by one call of a hook. Its figures stand when the call has returned."""

    direction: Literal["in", "out"]
    bytes: int = 0
    """What came from elsewhere, or left: 0 where weights lay where they were wanted."""
    before: int = 0
    """Bytes of the model's weights on the execution device before the call."""
    after: int = 0
    seconds: float = 0.0
    at_ns: int = 0
    """`time.perf_counter_ns()` when the call returned."""


Listener = Callable[[Move], AbstractContextManager[Any]]
"""Enters a context around each move."""

_LISTENERS: ContextVar[tuple[Listener, ...]] = ContextVar("listeners", default=())


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Have the listener told of every move in this block (and this thread)."""
    token = _LISTENERS.set((*_LISTENERS.get(), listener))
    try:
        yield
    finally:
        _LISTENERS.reset(token)


@contextmanager
def announced(move: Move) -> Iterator[Move]:
    """Do a move within the listeners' contexts, and take its time. The caller fills in what was moved."""
    with ExitStack() as stack:
        for listener in _LISTENERS.get():
            stack.enter_context(listener(move))
        start = time.perf_counter_ns()
        try:
            yield move
        finally:
            move.at_ns = time.perf_counter_ns()
            move.seconds = (move.at_ns - start) / 1e9
