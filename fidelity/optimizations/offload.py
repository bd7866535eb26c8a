"""Offload: weights elsewhere until they are needed, by accelerate's and diffusers' own mechanisms.

Without an accelerator the execution device is the CPU. All five modes work there and are bit-equal to a plain decode,
but only sequential and disk then move weights; the others are proved by their hooks. See docs/design/offload-on-cpu.md.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fidelity.errors import EvaluationError
from fidelity.lazy import torch
from fidelity.optimizations.weights import in_main_memory
from fidelity.records import DecodePlan, Model, Observation, Proof
from fidelity.registry import optimization

if TYPE_CHECKING:
    from torch import Tensor, nn

GROUP = "group_offloading"  # the name under which diffusers registers its hook
MOVES_ON_CPU = ("sequential", "disk")
_OWNED = ("_hf_hook", "_old_forward", "_diffusers_hook", "forward", "to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa")
"""Instance attributes that accelerate and diffusers set on a module that they hook."""


@dataclass
class Tally:
    """Each time that a hook brought weights in: when, how many bytes came from elsewhere, and where they are now."""

    device: torch.device
    onloads: list[tuple[int, int]] = field(default_factory=list)
    devices: set[str] = field(default_factory=set)
    _watched: list[tuple[Any, str]] = field(default_factory=list)

    def watch(self, owner: Any, name: str, weights: Callable[..., list[Tensor]]) -> None:
        """Count each call of the owner's method that brings in `weights(*args)`."""
        onload = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            away = [index for index, weight in enumerate(weights(*args)) if weight.device != self.device]
            result = onload(*args, **kwargs)
            now = weights(*args)
            arrived = [now[index] for index in away if now[index].device == self.device]
            moved = sum(weight.numel() * weight.element_size() for weight in arrived)
            self.onloads.append((time.perf_counter_ns(), moved))
            self.devices |= {str(weight.device) for weight in now}
            return result

        setattr(owner, name, counted)
        self._watched.append((owner, name))

    def release(self) -> None:
        """Give the owners their own methods back. A hook that holds its own wrapper would be a reference cycle, which
        keeps weights in memory until the garbage collector comes by."""
        for owner, name in self._watched:
            owner.__dict__.pop(name, None)
        self._watched.clear()

    def since(self, started_ns: int) -> tuple[int, int]:
        """Hooks fired and bytes moved from then on."""
        moved = [moved for when, moved in self.onloads if when >= started_ns]
        return len(moved), sum(moved)


def _refused(value: str, plan: DecodePlan, model: Model, shape: tuple[int, ...]) -> str | None:
    if value.startswith("group_") and "group_offload" in model.family.lacks:
        return f"offload: {model.family.name} says of itself that it does not support group offload"
    return None


@optimization("offload", order=90, inapplicable=_refused)
def offload(module: nn.Module, value: str, *, plan: DecodePlan, model: Model, device: str) -> Iterator[Proof]:
    """Keep weights in main memory or on disk until needed: model, sequential, group_block, group_leaf or disk."""
    attach = ATTACH.get(value)
    if attach is None:
        raise EvaluationError(f"offload: unknown mode {value!r}; known: none, {', '.join(ATTACH)}")
    _refuse_hooked(module)
    if next(module.parameters(), None) is None:  # a callable of somebody's own, whose weights nobody sees
        reason = f"{model.name} shows no weights that could be elsewhere: load it as a module"
        yield lambda seen: {"engaged": False, "reason": reason, "hooks": 0, "moved_bytes": 0}
        return
    execution = _indexed(device)
    tally = Tally(execution)
    with (
        tempfile.TemporaryDirectory(prefix="fidelity-offload-") as folder,
        in_main_memory(module),
        _unhooked_afterwards(module),
        ExitStack() as stack,
    ):
        attach(module, execution, folder)
        stack.callback(tally.release)
        _count(module, tally)

        def prove(seen: Observation) -> dict[str, Any]:
            hooks, moved = tally.since(seen.started_ns)
            stays = execution.type == "cpu" and value not in MOVES_ON_CPU
            reason = None
            if not hooks:
                reason = "the decode bypassed the hooks: none fired"
            elif not moved and not stays:
                reason = f"{hooks} hooks fired, but no weights moved to {execution}"
            elif tally.devices - {str(execution)}:
                reason = f"after their hooks fired, weights were on {', '.join(sorted(tally.devices))}"
            return {
                "engaged": reason is None,
                "reason": reason,
                "hooks": hooks,
                "moved_bytes": moved,
                "devices": sorted(tally.devices),
                "note": "nothing moves: weights wait in main memory, where the CPU executes" if stays else None,
            }

        yield prove


# ---------------------------------------------------------------- the five mechanisms


def _model(module: nn.Module, execution: torch.device, folder: str) -> None:
    from accelerate import cpu_offload_with_hook

    cpu_offload_with_hook(module, execution)


def _sequential(module: nn.Module, execution: torch.device, folder: str) -> None:
    from accelerate import cpu_offload

    cpu_offload(module, execution)


def _disk(module: nn.Module, execution: torch.device, folder: str) -> None:
    from accelerate import disk_offload

    disk_offload(module, folder, execution)


def _group_block(module: nn.Module, execution: torch.device, folder: str) -> None:
    _group(module, execution, offload_type="block_level", num_blocks_per_group=1)


def _group_leaf(module: nn.Module, execution: torch.device, folder: str) -> None:
    _group(module, execution, offload_type="leaf_level")


def _group(module: Any, execution: torch.device, **how: Any) -> None:
    if not hasattr(module, "enable_group_offload"):
        raise EvaluationError(f"offload: {type(module).__name__} has no enable_group_offload; diffusers' models have")
    module.enable_group_offload(onload_device=execution, offload_device=torch.device("cpu"), **how)


ATTACH = {
    "model": _model,
    "sequential": _sequential,
    "group_block": _group_block,
    "group_leaf": _group_leaf,
    "disk": _disk,
}


# ---------------------------------------------------------------- counting and undoing


def _count(module: nn.Module, tally: Tally) -> None:
    """Wrap what brings weights in: accelerate's pre_forward, and the groups' onload_. Both die with the offload."""
    groups = {}
    for part in module.modules():
        for hook in _accelerate_hooks(part):
            if getattr(hook, "offload", True):  # AlignDevicesHook that only moves inputs has offload=False
                whole = not hasattr(hook, "weights_map") or hook.place_submodules
                tally.watch(hook, "pre_forward", _weights_of(whole))
        registry = part.__dict__.get("_diffusers_hook")
        hook = registry.get_hook(GROUP) if registry is not None else None
        if hook is not None:
            groups[id(hook.group)] = hook.group
    for group in groups.values():
        tally.watch(group, "onload_", _group_weights(group))


def _accelerate_hooks(part: nn.Module) -> list[Any]:
    hook = part.__dict__.get("_hf_hook")
    return [] if hook is None else list(getattr(hook, "hooks", (hook,)))


def _weights_of(whole: bool) -> Callable[..., list[Tensor]]:
    def weights(part: nn.Module, *_: Any, **__: Any) -> list[Tensor]:
        return [*part.parameters(recurse=whole)]

    return weights


def _group_weights(group: Any) -> Callable[..., list[Tensor]]:
    def weights(*_: Any) -> list[Tensor]:
        inside = [tensor for part in group.modules for tensor in (*part.parameters(), *part.buffers())]
        return [*inside, *group.parameters, *group.buffers]

    return weights


@contextmanager
def _unhooked_afterwards(module: nn.Module) -> Iterator[None]:
    """Remove everything that the libraries set on the module and its parts.

    Not by the libraries' own removal: accelerate's reads all weights back into new Parameters and leaves a `forward`
    on every instance, and diffusers has none for groups.
    """
    parts = list(module.modules())
    before = [{name: part.__dict__[name] for name in _OWNED if name in part.__dict__} for part in parts]
    try:
        yield
    finally:
        for part, own in zip(parts, before):
            for name in _OWNED:
                part.__dict__.pop(name, None)
            part.__dict__.update(own)


def _refuse_hooked(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if "_hf_hook" in part.__dict__ or "_diffusers_hook" in part.__dict__:
            raise EvaluationError(
                f"offload: {name or type(module).__name__} carries an offload hook already, and a second would stack; "
                "load the module anew"
            )


def _indexed(device: str) -> torch.device:
    """The device as tensors report it: `cuda` is the current one."""
    asked = torch.device(device)
    if asked.type == "cuda" and asked.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return asked
