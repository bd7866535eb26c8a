"""Offload: weights elsewhere until they are needed, by accelerate's and diffusers' own mechanisms.

Without an accelerator the execution device is the CPU. All five modes work there and are bit-equal to a plain decode,
but only sequential and disk then move weights; the others are proved by their hooks. See docs/design/offload-on-cpu.md.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from fidelity.errors import EvaluationError, SuiteError
from fidelity.lazy import torch
from fidelity.optimizations.weights import in_main_memory, named_tensors
from fidelity.records import STREAM, DecodePlan, Model, Observation, Proof
from fidelity.registry import optimization
from fidelity.residency import Move, announced

if TYPE_CHECKING:
    from torch import Tensor, nn

Direction = Literal["in", "out"]
GROUP = "group_offloading"  # the name under which diffusers registers its hook
MOVES_ON_CPU = ("sequential", "disk")
STAYS = "nothing moves: weights wait in main memory, where the CPU executes"
_OWNED = ("_hf_hook", "_old_forward", "_diffusers_hook", "forward", "to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa")
"""Instance attributes that accelerate and diffusers set on a module that they hook."""


@dataclass
class Tally:
    """Each time that a hook brought weights in or sent them away, and where they were then."""

    device: torch.device
    resident: int
    """Bytes of the module's weights that lie on the device."""
    moves: list[Move] = field(default_factory=list)
    devices: set[str] = field(default_factory=set)
    sizes: dict[tuple[int, int], int] = field(default_factory=dict)
    """Of each weight that came at all, by its owner and its place there, the bytes."""
    _watched: list[tuple[Any, str]] = field(default_factory=list)

    def watch(self, owner: Any, name: str, direction: Direction, weights: Callable[..., list[Tensor]]) -> None:
        """Count each call of the owner's method that brings in, or sends away, `weights(*args)`."""
        method = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            here = [self._is_here(weight) for weight in weights(*args)]
            with announced(Move(direction, before=self.resident)) as move:
                result = method(*args, **kwargs)
                now = weights(*args)
                moved = {at: weight for at, weight in enumerate(now) if self._is_here(weight) is not here[at]}
                arrived = {(id(owner), at): size_of(each) for at, each in moved.items() if self._is_here(each)}
                self.sizes |= arrived
                came = sum(arrived.values())
                left = sum(map(size_of, moved.values())) - came
                self.resident += came - left
                move.bytes, move.after = came if direction == "in" else left, self.resident
            self.moves.append(move)
            if direction == "in":
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

    def since(self, started_ns: int) -> list[Move]:
        """What was moved from then on."""
        return [move for move in self.moves if move.at_ns >= started_ns]

    def _is_here(self, weight: Tensor) -> bool:
        return weight.device == self.device


def _often(moved: int, once: int, calls: int) -> str | None:
    """That weights came more often than each call of the decoder needs; None where they did not."""
    if moved <= once * max(calls, 1):
        return None
    return (
        f"weights came {moved / once:.3g} times over, {moved / 2**20:.1f} MiB for {once / 2**20:.1f} MiB of them, in "
        f"{calls} calls of the decoder: once a call is enough"
    )


def size_of(weight: Tensor) -> int:
    return weight.numel() * weight.element_size()


def _refused(value: str, plan: DecodePlan, model: Model, shape: tuple[int, ...]) -> str | None:
    if value.startswith("group_") and "group_offload" in model.family.lacks:
        return f"offload: {model.family.name} says of itself that it does not support group offload"
    return None


def _no_groups(value: Any, plan: DecodePlan, model: Model, shape: tuple[int, ...]) -> str | None:
    if value is not True:
        raise SuiteError(f"{STREAM} is {value!r}: write true, so that groups are brought in on a stream, or false")
    return None if plan.offload.startswith("group_") else f"{STREAM}: {plan.offload} offload brings no groups in"


@optimization(
    STREAM, order=89, inapplicable=_no_groups, exact=True,
    accelerator="a stream copies to an accelerator while it computes; weights of a CPU are where it computes",
)  # fmt: skip
def offload_stream(module: nn.Module, value: bool, *, plan: DecodePlan, model: Model, device: str) -> Iterator[Proof]:
    """Of a group offload: bring the next group in on a stream of its own, from pinned copies, while this one runs."""
    if torch.device(device).type == "cpu":
        raise EvaluationError(f"{STREAM}: streams need an accelerator: leave it out on a CPU")

    def prove(seen: Observation) -> dict[str, Any]:
        groups = _groups_of(module)
        without = sum(group.stream is None for group in groups)
        reason = f"{without} of {len(groups)} groups have no stream" if without or not groups else None
        return {"engaged": reason is None, "reason": reason, "groups": len(groups)}

    yield prove


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
    with (
        tempfile.TemporaryDirectory(prefix="fidelity-offload-") as folder,
        in_main_memory(module),
        _unhooked_afterwards(module),
        ExitStack() as stack,
    ):
        attach(module, execution, folder, bool(plan.options.get(STREAM)))
        tally = Tally(
            execution, sum(size_of(weight) for _, weight in named_tensors(module) if weight.device == execution)
        )
        stack.callback(tally.release)
        _count(module, tally)

        def prove(seen: Observation) -> dict[str, Any]:
            moves = tally.since(seen.started_ns)
            came, left = ([move for move in moves if move.direction == way] for way in ("in", "out"))
            hooks, moved = len(came), sum(move.bytes for move in came)
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
                "returned_bytes": sum(move.bytes for move in left),
                "resident_bytes": max((move.after for move in moves), default=tally.resident),
                "waiting_bytes": waiting_bytes(module),
                "seconds": sum(move.seconds for move in moves),
                "devices": sorted(tally.devices),
                "note": STAYS if stays else _often(moved, sum(tally.sizes.values()), seen.calls),
            }

        yield prove


# ---------------------------------------------------------------- the five mechanisms


def _model(module: nn.Module, execution: torch.device, folder: str, stream: bool) -> None:
    from accelerate import cpu_offload_with_hook

    cpu_offload_with_hook(module, execution)


def _sequential(module: nn.Module, execution: torch.device, folder: str, stream: bool) -> None:
    from accelerate import cpu_offload

    cpu_offload(module, execution)


def _disk(module: nn.Module, execution: torch.device, folder: str, stream: bool) -> None:
    from accelerate import disk_offload

    disk_offload(module, folder, execution)


def _group_block(module: nn.Module, execution: torch.device, folder: str, stream: bool) -> None:
    _group(module, execution, offload_type="block_level", num_blocks_per_group=1, use_stream=stream)


def _group_leaf(module: nn.Module, execution: torch.device, folder: str, stream: bool) -> None:
    _group(module, execution, offload_type="leaf_level", use_stream=stream)


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
    """Wrap what moves weights: accelerate's pre_forward and post_forward, the groups' onload_ and offload_. It all dies
    with the offload."""
    for part in module.modules():
        for hook in _accelerate_hooks(part):
            if getattr(hook, "offload", True):  # AlignDevicesHook that only moves inputs has offload=False
                whole = not hasattr(hook, "weights_map") or hook.place_submodules
                tally.watch(hook, "pre_forward", "in", _weights_of(whole))
                if hasattr(hook, "weights_map"):  # the hook of a whole model leaves it where it was brought
                    tally.watch(hook, "post_forward", "out", _weights_of(whole))
    for group in _groups_of(module):
        tally.watch(group, "onload_", "in", _group_weights(group))
        tally.watch(group, "offload_", "out", _group_weights(group))


def _groups_of(module: nn.Module) -> list[Any]:
    """diffusers' groups, each once."""
    registries = [part.__dict__.get("_diffusers_hook") for part in module.modules()]
    hooks = [registry.get_hook(GROUP) for registry in registries if registry is not None]
    return list({id(hook.group): hook.group for hook in hooks if hook is not None}.values())


def waiting_bytes(module: nn.Module) -> int:
    """What the libraries keep of the weights in main memory, whatever is resident: accelerate's map of them, and
    diffusers' pinned copies of a stream; each storage once. Weights in files are not in memory."""
    kept: list[Any] = []
    for part in module.modules():
        for hook in _accelerate_hooks(part):
            held = getattr(getattr(hook, "weights_map", None), "dataset", None)
            kept += held.values() if isinstance(held, dict) else ()
    for group in _groups_of(module):
        kept += group.cpu_param_dict.values()
    storages = [tensor.untyped_storage() for tensor in kept if tensor.device.type == "cpu"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


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
