"""What torch's profiler recorded of the CPU allocator: each allocation with its birth, its death and who made it.

The profiler's tree has allocations below the operators and named ranges in which they were made. It is walked once, in
the order of time: an *instant* is the number of an event, so that the same decode gives the same instants.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Literal

from fidelity.lazy import torch

PREFIX = "fidelity:"
MODULE = "fidelity:module:"
_MEMORY, _REFUSED = "[memory]", "[OutOfMemory]"
LOOKED_AT = 400
"""Operators after a birth that are asked for the tensor's shape: it is the input of one of the next, or of none."""


@dataclass(eq=False)
class Call:
    """A stretch of the recording: a stage or a module of ours, or an operator as Python called it."""

    kind: Literal["stage", "module", "operator"]
    name: str
    start: int
    """The first instant inside; `stop` is the first one after it."""
    stop: int
    parent: Call | None = None
    stage: Call | None = None
    """The innermost stage, itself included; so are the module and the operator."""
    module: Call | None = None
    operator: Call | None = None

    def __post_init__(self) -> None:
        above = self.parent
        self.stage = self if self.kind == "stage" else above and above.stage
        self.module = self if self.kind == "module" else above and above.module
        self.operator = self if self.kind == "operator" else above and above.operator


@dataclass(eq=False)
class Allocation:
    """Bytes that the allocator handed out, from one instant to another."""

    bytes: int
    pointer: int
    born: int
    call: Call | None
    is_tensor: bool
    """Whether an operator was ever given it: what a kernel keeps to itself is no tensor."""
    node: int
    """The number of operators begun before it."""
    gone: int | None = None
    """None: it outlived the recording."""


@dataclass
class Recording:
    """The events of one block, filled when it ends. Bytes are counted from zero at its start."""

    allocations: list[Allocation] = field(default_factory=list)
    changes: list[tuple[int, int]] = field(default_factory=list)
    """By instant: which allocation, and its bytes, negative where it is given back. (−1, 0): one of before."""
    totals: list[int] = field(default_factory=list)
    """By instant: what the allocator itself counted as alive."""
    calls: dict[str, list[Call]] = field(default_factory=dict)
    """Our stages and modules, by name, in order."""
    refused: list[tuple[int, Call | None]] = field(default_factory=list)
    """When the allocator could not give what it was asked for, and where."""
    reason: str | None = None
    """Why the events could not be read."""
    operators: list[Any] = field(default_factory=list)
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

    def at(self, instant: int) -> list[Allocation]:
        """What was alive from this instant on, in the order of births."""
        return [one for one in self.allocations if one.born <= instant and (one.gone is None or one.gone > instant)]

    def tensor(self, one: Allocation) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of the tensor that fills an allocation; empty where no operator was given one."""
        if not one.is_tensor:
            return (), ""
        for node in self.operators[max(0, one.node - 1) : one.node + LOOKED_AT]:
            for seen in _inputs(node.extra_fields.inputs):
                if seen.storage_data_ptr == one.pointer and _bytes(seen) == one.bytes:
                    return tuple(seen.sizes), str(seen.dtype).removeprefix("torch.")
        return (), ""

    def fill(self, roots: list[Any]) -> None:
        """Walk the profiler's tree of events."""
        filling = _Filling(self)
        stack: list[tuple[Iterator[Any], Call | None, bool]] = [(iter(roots), None, False)]
        while stack:
            nodes, call, opened = stack[-1]
            node = next(nodes, None)
            if node is None:
                stack.pop()
                if opened and call is not None:
                    call.stop = len(self.changes)
                continue
            inside = filling.take(node, node.name, call)
            children = node.children
            if children or inside is not call:
                stack.append((iter(children), inside, inside is not call))
        self.alive = list(accumulate(change for _, change in self.changes))


class _Filling:
    """What is known while the tree is walked."""

    def __init__(self, recording: Recording):
        self.to = recording
        self.living: dict[int, int] = {}
        self.counted: int | None = None
        """The allocator's total before the first event, less what it released of before."""
        self.elsewhere = torch.cuda.is_initialized()  # else every event is the CPU's

    def take(self, node: Any, name: str, call: Call | None) -> Call | None:
        """Book one event. Returns the call in which its children happen."""
        if name == _MEMORY:
            self._change(node.extra_fields, call)
        elif name == _REFUSED:
            self.to.refused.append((len(self.to.changes), call))
        elif name.startswith(PREFIX):
            kind: Any = "module" if name.startswith(MODULE) else "stage"
            short = name.removeprefix(MODULE).removeprefix(PREFIX)
            opened = self._open(kind, short, call)
            self.to.calls.setdefault(name, []).append(opened)
            return opened
        else:
            self.to.operators.append(node)
            if call is None or call.operator is None:
                return self._open("operator", name.removeprefix("aten::"), call)
        return call

    def _open(self, kind: Any, name: str, call: Call | None) -> Call:
        now = len(self.to.changes)
        return Call(kind, name, now, now, call)

    def _change(self, event: Any, call: Call | None) -> None:
        if self.elsewhere and event.device.type != "cpu":
            return
        pointer, size, to = event.ptr, event.alloc_size, self.to
        now = len(to.changes)
        if self.counted is None:
            self.counted = event.total_allocated - size
        if size > 0:
            if pointer in self.living:  # its release was not seen; the check of the sums will say so
                to.allocations[self.living[pointer]].gone = now
            self.living[pointer] = len(to.allocations)
            to.changes.append((len(to.allocations), size))
            tensor = event.id is not None
            to.allocations.append(Allocation(size, pointer, now, call, tensor, len(to.operators)))
        else:
            number = self.living.pop(pointer, -1)
            if number < 0:  # allocated in an earlier recording and given back in this one
                self.counted += size
            else:
                to.allocations[number].gone = now
            to.changes.append((number, -to.allocations[number].bytes if number >= 0 else 0))
        to.totals.append(event.total_allocated - self.counted)


def _inputs(inputs: Any) -> Iterator[Any]:
    for one in inputs:
        if isinstance(one, list):
            yield from _inputs(one)
        elif hasattr(one, "storage_data_ptr"):
            yield one


def _bytes(seen: Any) -> int:
    count = 1
    for size in seen.sizes:
        count *= size
    return count * seen.dtype.itemsize
