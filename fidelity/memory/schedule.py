"""When weights are resident: all the time, or, under an offload, while the modules that need them run.

Each mode is a rule over the order in which modules run, as accelerate and diffusers implement it:

| mode          | a weight is on the device                                                                       |
|---------------|-------------------------------------------------------------------------------------------------|
| `none`        | always                                                                                          |
| `model`       | from the first call of the whole module on (`cpu_offload_with_hook`)                            |
| `sequential`  | while the module that owns it runs (`cpu_offload`; buffers: always); `disk` the same, from files |
| `group_block` | while its block runs: each child of a list; the rest of a block that the class names, with it   |
| `group_leaf`  | while the module that owns it runs, buffers too                                                 |

On a CPU the weights of every mode but `disk` wait in main memory, where the decode runs: nothing comes or goes. Those
of `disk` are mapped from files: they belong to the page cache and are never the allocator's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fidelity.errors import EvaluationError
from fidelity.lazy import torch
from fidelity.memory.ledger import Holding, Ledger

if TYPE_CHECKING:
    from torch import Tensor, nn

Group = tuple[str, "nn.Module", list["Tensor"]]
"""Path, module, and the weights that are there while it runs."""
MODES = ("none", "model", "sequential", "group_block", "group_leaf", "disk")
GRANULE = 512
"""CUDA's caching allocator hands out multiples of this many bytes."""


def weights_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers, each storage once."""
    return sum(_sizes(_own(module, recurse=True), unit=1))


@contextmanager
def residency(module: nn.Module, mode: str, device: str, ledger: Ledger) -> Iterator[None]:
    """Book weights in the ledger when and as long as they are resident. Raises EvaluationError for an unknown mode."""
    if mode not in MODES:
        raise EvaluationError(f"offload: unknown mode {mode!r}; known: {', '.join(MODES)}")
    on_cpu = torch.device(device).type == "cpu"
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
    handles = [handle for path, part, tensors in groups if part is not module
               for handle in _watch(path, part, _sizes(tensors, unit), ledger)]  # fmt: skip
    # a decode calls `decode`, not the module: what comes with the module itself stays away
    away = {id(tensor) for _, part, tensors in groups if part is module for tensor in tensors}
    handles += [part.register_forward_pre_hook(_refusal(path, mode)) for path, part in module.named_modules()
                if any(id(tensor) in away for tensor in part.parameters(recurse=False))]  # fmt: skip
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


def _watch(path: str, part: nn.Module, sizes: list[int], ledger: Ledger) -> list[Any]:
    """Hooks that hold weights of these sizes while `part` runs."""
    held: list[int] = []

    def onload(*_: Any) -> None:
        held.extend(ledger.hold(Holding(size, "weights", path)) for size in sizes)

    def offload(*_: Any) -> None:
        while held:
            ledger.release(held.pop())

    return [part.register_forward_pre_hook(onload), part.register_forward_hook(offload, always_call=True)]


def _groups(module: nn.Module, mode: str) -> tuple[list[Group], list[Tensor]]:
    """Which weights come and go with which module, and which stay."""
    if mode == "group_block":
        named = set(getattr(module, "_group_offload_block_modules", None) or ())
        return _blocks("", module, named), []
    parts = [(path, part) for path, part in module.named_modules() if _own(part)]
    if mode == "group_leaf":
        return [(path, part, _own(part)) for path, part in parts], []
    buffers = [buffer for _, part in parts for buffer in part.buffers(recurse=False)]  # accelerate leaves them there
    return [(path, part, list(part.parameters(recurse=False))) for path, part in parts], buffers


def _blocks(path: str, module: nn.Module, named: set[str]) -> list[Group]:
    """The groups of `enable_group_offload` at block level: the children of each list, what is in the blocks that the
    class names, and the rest, which comes with the module itself."""
    groups: list[Group] = []
    prefix = f"{path}." if path else ""
    for name, child in module.named_children():
        if name in named:
            groups += _blocks(f"{prefix}{name}", child, named)
        elif isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential)):
            groups += [(f"{prefix}{name}.{i}", part, _own(part, recurse=True)) for i, part in child.named_children()]
    taken = {id(tensor) for _, _, tensors in groups for tensor in tensors}
    rest = [tensor for tensor in _own(module, recurse=True) if id(tensor) not in taken]
    return [*groups, (path, module, rest)] if rest else groups


def _own(module: nn.Module, *, recurse: bool = False) -> list[Tensor]:
    return [*module.parameters(recurse=recurse), *module.buffers(recurse=recurse)]


def _sizes(tensors: Iterable[Tensor], unit: int) -> list[int]:
    """Bytes of each storage once, in multiples of `unit`."""
    sizes = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return [-(-size // unit) * unit for size in sizes.values()]
