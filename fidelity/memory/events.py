"""What torch's profiler recorded of the CPU allocator: each allocation with its birth, its death and who made it.

The profiler's tree has allocations below the operators and named ranges in which they were made. It is walked once, in
the order of time: an *instant* is the number of an event, so that the same decode gives the same instants.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from fidelity.lazy import torch
from fidelity.memory import sums

PREFIX = "fidelity:"
MODULE = "fidelity:module:"
_MEMORY, _REFUSED = "[memory]", "[OutOfMemory]"


class Call:
    """A stretch of the recording: a stage or a module of ours, or an operator as Python called it."""

    __slots__ = ("kind", "module", "name", "operator", "parent", "stage", "start", "stop")

    def __init__(self, kind: Literal["stage", "module", "operator"], name: str, start: int, parent: Call | None = None):
        self.kind, self.name, self.parent = kind, name, parent
        self.start = self.stop = start
        """The first instant inside; `stop` is the first one after it."""
        self.stage: Call | None = None
        """The innermost stage, itself included; so are the module and the operator."""
        self.module: Call | None = None
        self.operator: Call | None = None
        if parent is not None:
            self.stage, self.module, self.operator = parent.stage, parent.module, parent.operator
        setattr(self, kind, self)


@dataclass(eq=False, slots=True)
class Allocation:
    """Bytes that the allocator handed out, from one instant to another."""

    bytes: int
    pointer: int
    born: int
    call: Call | None
    gone: int | None = None
    """None: it outlived the recording."""


@dataclass
class Recording:
    """The events of one block, filled when it ends. Bytes are counted from zero at its start."""

    allocations: list[Allocation] = field(default_factory=list)
    changes: list[tuple[int, int]] = field(default_factory=list)
    """By instant: which allocation, and its bytes, negative where it is given back; −1: one of before."""
    totals: list[int] = field(default_factory=list)
    """By instant: what the allocator itself counted as alive."""
    calls: dict[str, list[Call]] = field(default_factory=dict)
    """Our stages, by name, in order."""
    refused: list[tuple[int, Call | None]] = field(default_factory=list)
    """When the allocator could not give what it was asked for, and where."""
    device: str = "cpu"
    """Whose allocator: `cpu` or `cuda`."""
    reason: str | None = None
    """Why the events could not be read."""
    modules: list[Call] = field(default_factory=list)
    """Calls of modules, in the order in which they began."""
    alive: list[int] = field(default_factory=list)
    """By instant: bytes alive from it on, by births and deaths."""

    def peak(self, start: int, stop: int) -> int:
        """The most that was alive from instant `start` up to `stop`, what was alive before included."""
        held = self.alive[start - 1] if start else 0
        return max([held, *self.alive[start:stop]])

    def shares(self, count: int) -> list[tuple[int, int]]:
        """At most `count` equal shares of the instants: (first, first of the next)."""
        events = len(self.alive)
        return list(pairwise(sorted({events * share // count for share in range(count + 1)})))

    def departed(self, instant: int) -> int:
        """Bytes from before the recording that were given back up to an instant: of weights that went away."""
        return -sum(change for number, change in self.changes[: instant + 1] if number < 0)

    def at(self, instant: int) -> list[Allocation]:
        """What was alive from this instant on, in the order of births."""
        return [one for one in self.allocations if one.born <= instant and (one.gone is None or one.gone > instant)]

    def fill(self, roots: list[Any]) -> None:
        """Walk the profiler's tree of events, in the order of time."""
        book, changes = _Book(self), self.changes
        stack: list[tuple[Iterator[Any], Call | None, bool]] = [(iter(roots), None, False)]
        while stack:
            nodes, call, opened = stack[-1]
            for node in nodes:
                name, inside = node.name, call
                if name == _MEMORY:
                    book.change(node.extra_fields, call)
                    continue
                if name == _REFUSED:
                    self.refused.append((len(changes), call))
                    continue
                children = node.children
                if name.startswith(PREFIX):
                    inside = book.ours(name, call)
                elif children and (call is None or call.operator is None):
                    inside = Call("operator", name.removeprefix("aten::"), len(changes), call)
                if children:
                    stack.append((iter(children), inside, inside is not call))
                    break
            else:
                stack.pop()
                if opened and call is not None:
                    call.stop = len(changes)
        lives = [(one.born, one.gone, one.bytes) for one in self.allocations]
        departed = [(instant, None, change) for instant, (number, change) in enumerate(changes) if number < 0]
        self.alive = sums.line([*lives, *departed], len(changes))


class _Book:
    """What is known while the tree is walked."""

    def __init__(self, recording: Recording):
        self.to = recording
        self.living: dict[int, int] = {}
        self.counted: int | None = None
        """The allocator's total before the first event, less what it released of before."""
        self.only = recording.device if torch.cuda.is_initialized() else None  # else every event is the CPU's

    def ours(self, name: str, call: Call | None) -> Call:
        """A stage or a module."""
        kind: Any = "module" if name.startswith(MODULE) else "stage"
        opened = Call(kind, name.removeprefix(MODULE).removeprefix(PREFIX), len(self.to.changes), call)
        (self.to.modules if kind == "module" else self.to.calls.setdefault(name, [])).append(opened)
        return opened

    def change(self, event: Any, call: Call | None) -> None:
        """Bytes that came or went."""
        if self.only is not None and event.device.type != self.only:
            return
        pointer, size, total, to = event.ptr, event.alloc_size, event.total_allocated, self.to
        now = len(to.changes)
        if self.counted is None:
            self.counted = total - size
        if size > 0:
            if pointer in self.living:
                lost = to.allocations[self.living[pointer]]
                lost.gone, to.reason = now, f"the release of {lost.bytes} bytes went unseen before event {now}"
            number = self.living[pointer] = len(to.allocations)
            to.changes.append((number, size))
            to.allocations.append(Allocation(size, pointer, now, call))
        elif pointer in self.living:
            number = self.living.pop(pointer)
            to.allocations[number].gone = now
            to.changes.append((number, -to.allocations[number].bytes))
        elif to.device == "cpu":  # allocated in an earlier recording: that allocator knows of none before the first
            self.counted += size
            to.changes.append((-1, 0))
        else:  # weights that go
            to.changes.append((-1, size))
        to.totals.append(total - self.counted)
