"""When weights are resident: all the time, or, under an offload, while the modules that need them run.

Each mode is a rule over the order in which modules run, as accelerate and diffusers implement it:

| mode          | a weight is on the device                                                                       |
|---------------|-------------------------------------------------------------------------------------------------|
| `none`        | always                                                                                          |
| `model`       | from the first call of the whole module on (`cpu_offload_with_hook`)                            |
| `sequential`  | while the module that owns it runs (`cpu_offload`; buffers: always); `disk` the same, from files |
| `group_block` | while its block runs: each child of a list; the rest of a block that the class names, with it   |
| `group_leaf`  | while the module that owns it runs, buffers too                                                 |

With a stream (`offload_stream`) diffusers notes the order in which the groups of a parent ran when that parent's own
call ends, and from its next call on each group brings the one after it in before it runs: two at a time. A decode never
calls the autoencoder itself, whose end `group_leaf` waits for, so that nothing is prefetched there; the decoder's
blocks are, from its second call on. Weights wait in pinned copies in main memory.

On a CPU the weights of every mode but `disk` wait in main memory, where the decode runs: nothing comes or goes. Those
of `disk` are mapped from files: they belong to the page cache and are never the allocator's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from fidelity.errors import EvaluationError
from fidelity.lazy import torch
from fidelity.simulation.ledger import Holding, Ledger

if TYPE_CHECKING:
    from torch import Tensor, nn

MODES = ("none", "model", "sequential", "group_block", "group_leaf", "disk")
GRANULE = 512
"""CUDA's caching allocator hands out multiples of this many bytes."""


@dataclass(eq=False)
class Group:
    """Weights that come and go together."""

    path: str
    leader: nn.Module
    """While it runs, they are there."""
    tensors: list[Tensor]
    parent: nn.Module | None = None
    """At whose end the order of its groups is known; None: this group comes by itself."""
    sizes: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    after: Group | None = None
    """The group that this one brings in before it runs."""
    waits: bool = False
    """Whether another group brings this one in."""


Order = list[Group]
"""Groups in the order in which they ran."""


def weights_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers, each storage once."""
    return sum(_sizes(_own(module, recurse=True), unit=1))


def pinned_bytes(module: nn.Module, mode: str) -> int:
    """Bytes of the pinned copies that a group offload with a stream makes in main memory. torch's host allocator hands
    out powers of two (aten/src/ATen/core/CachingHostAllocator.h)."""
    groups = [group for group in _groups(module, mode)[0] if mode == "group_leaf" or group.leader is not group.parent]
    sizes = [size for group in groups for size in _sizes(group.tensors, unit=1)]
    return sum(1 << (size - 1).bit_length() for size in sizes if size)


@contextmanager
def residency(module: nn.Module, mode: str, device: str, ledger: Ledger, *, stream: bool = False) -> Iterator[None]:
    """Book weights in the ledger when and as long as they are resident; `stream`: groups are prefetched.

    Raises EvaluationError for an unknown mode, and for a stream where nothing is moved in groups.
    """
    if mode not in MODES:
        raise EvaluationError(f"offload: unknown mode {mode!r}; known: {', '.join(MODES)}")
    on_cpu = torch.device(device).type == "cpu"
    if stream and (on_cpu or not mode.startswith("group_")):
        raise EvaluationError(f"offload_stream with offload {mode} on {device}: a stream brings groups to a GPU: "
                              "choose group_block or group_leaf on cuda")  # fmt: skip
    if on_cpu and mode == "disk":
        yield
        return
    unit = 1 if on_cpu else GRANULE
    if on_cpu or mode in ("none", "model"):
        for size in _sizes(_own(module, recurse=True), unit):
            ledger.hold(Holding(size, "weights"))
        yield
        return
    groups, always = _groups(module, mode)
    for size in _sizes(always, unit):
        ledger.hold(Holding(size, "weights"))
    for group in groups:
        group.sizes = _sizes(group.tensors, unit)
    # a decode calls `decode`, not the module: what comes with the module itself stays away
    coming = [group for group in groups if group.leader is not module]
    away = {id(tensor) for group in groups if group.leader is module for tensor in group.tensors}
    handles = [part.register_forward_pre_hook(_refusal(path, mode)) for path, part in module.named_modules()
               if any(id(tensor) in away for tensor in part.parameters(recurse=False))]  # fmt: skip
    if stream:
        handles += _prefetching(coming, module)
    handles += [handle for group in coming for handle in _watch(group, ledger)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _refusal(path: str, mode: str) -> Any:
    def refuse(*_: Any) -> None:
        raise EvaluationError(
            f"offload {mode}: decode runs {path}, whose weights come only with a call of the whole module, which a "
            "decode never makes: choose group_leaf, sequential or model"
        )

    return refuse


def _watch(group: Group, ledger: Ledger) -> list[Any]:
    """Hooks that hold the group's weights while its leader runs, and bring in the next one's."""

    def onload(one: Group) -> None:
        if not one.held:
            one.held.extend(ledger.hold(Holding(size, "weights", one.path)) for size in one.sizes)

    def enter(*_: Any) -> None:
        onload(group)  # one that waits for another is brought in now, if that one never ran
        if group.after is not None and group.after.waits:
            onload(group.after)

    def leave(*_: Any) -> None:
        while group.held:
            ledger.release(group.held.pop())

    return [group.leader.register_forward_pre_hook(enter), group.leader.register_forward_hook(leave, always_call=True)]


def _prefetching(groups: list[Group], module: nn.Module) -> list[Any]:
    """Hooks by which each parent learns the order of its groups in its first call, and has it kept from then on
    (`LazyPrefetchGroupOffloadingHook`)."""
    handles = []
    by_parent: dict[int, list[Group]] = {}
    for group in groups:
        if group.parent is not None and group.parent is not module and group.leader is not group.parent:
            by_parent.setdefault(id(group.parent), []).append(group)
    leaders = {id(group.leader): group for group in groups}
    for inside in by_parent.values():
        parent, ran = inside[0].parent, []  # type: ignore[var-annotated]
        assert parent is not None
        trackers = [group.leader.register_forward_pre_hook(lambda *_, group=group, ran=ran: ran.append(group))
                    for group in inside]  # fmt: skip

        def learn(*_: Any, parent: nn.Module = parent, ran: Order = ran, trackers: list[Any] = trackers) -> None:
            if not trackers:
                return
            first = [leaders[id(parent)]] if id(parent) in leaders else []
            for one, other in pairwise([*first, *ran]):
                one.after, other.waits = other, True
            while trackers:
                trackers.pop().remove()

        handles += [*trackers, parent.register_forward_hook(learn)]
    return handles


def _groups(module: nn.Module, mode: str) -> tuple[list[Group], list[Tensor]]:
    """Which weights come and go with which module, and which stay."""
    if mode == "group_block":
        named = set(getattr(module, "_group_offload_block_modules", None) or ())
        return _blocks("", module, named), []
    parts = [(path, part) for path, part in module.named_modules() if _own(part)]
    if mode == "group_leaf":
        return [Group(path, part, _own(part), module) for path, part in parts], []
    buffers = [buffer for _, part in parts for buffer in part.buffers(recurse=False)]  # accelerate leaves them there
    return [Group(path, part, list(part.parameters(recurse=False))) for path, part in parts], buffers


def _blocks(path: str, module: nn.Module, named: set[str]) -> list[Group]:
    """The groups of `enable_group_offload` at block level: the children of each list, what is in the blocks that the
    class names, and the rest, which comes with the module itself."""
    groups: list[Group] = []
    prefix = f"{path}." if path else ""
    for name, child in module.named_children():
        if name in named:
            groups += _blocks(f"{prefix}{name}", child, named)
        elif isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential)):
            groups += [Group(f"{prefix}{name}.{i}", part, _own(part, recurse=True), module)
                       for i, part in child.named_children()]  # fmt: skip
    taken = {id(tensor) for group in groups for tensor in group.tensors}
    rest = [tensor for tensor in _own(module, recurse=True) if id(tensor) not in taken]
    return [*groups, Group(path, module, rest, module)] if rest else groups


def _own(module: nn.Module, *, recurse: bool = False) -> list[Tensor]:
    return [*module.parameters(recurse=recurse), *module.buffers(recurse=recurse)]


def _sizes(tensors: Iterable[Tensor], unit: int) -> list[int]:
    """Bytes of each storage once, in multiples of `unit`."""
    sizes = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return [-(-size // unit) * unit for size in sizes.values()]
