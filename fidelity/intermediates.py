"""The largest tensors that the modules of one decode give, by hooks on every module, and how large the latents are
beside them: what a decode blows up, and where.

What arises inside a module and never leaves it (scores of attention, a padded copy) is seen by a dispatch mode alone,
and told apart.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from fidelity.lazy import torch
from fidelity.optimizations.observe import dtype_name, tensors
from fidelity.records import Model
from fidelity.wording import in_units

if TYPE_CHECKING:
    from torch import Tensor, nn

SHOWN = 5


class Intermediate(Struct, frozen=True):
    """One tensor."""

    module: str
    """Dotted path in the autoencoder; empty: the autoencoder itself."""
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    times_latents: float
    """Its bytes over those of the latents."""
    operator: str = ""
    """That made it, of a tensor that no module gives."""


class Intermediates(Struct, frozen=True):
    """Of one decode of these latents."""

    latents: tuple[int, ...]
    latents_bytes: int
    largest: tuple[Intermediate, ...]
    """What modules give, of each module its largest; the five largest, equals in the order in which they came."""
    inside: Intermediate | None
    """The largest tensor that an operator makes, if it is larger than any that a module gives."""


def measure(model: Model, module: nn.Module, latents: Tensor) -> Intermediates:
    """Decode latents (B, C, [T,] H, W) on a module as it is (its plan applied) and keep the largest tensors."""
    size = _bytes(latents)
    given: dict[str, Intermediate] = {}
    running = [""]
    last: list[Any] = [None]

    def leave(path: str, output: Any) -> None:
        running.pop()
        for tensor in tensors(_plain(output)):
            if tensor is not last[0]:  # else a module passes on what the one inside it gave
                last[0] = tensor
                _keep(given, path, _told(path, tensor, size))

    with torch.no_grad(), ExitStack() as stack:
        for path, part in module.named_modules():
            before = part.register_forward_pre_hook(lambda *_, path=path: running.append(path), prepend=True)
            stack.callback(before.remove)
            after = part.register_forward_hook(lambda _, __, output, path=path: leave(path, output))
            stack.callback(after.remove)
        made = stack.enter_context(_makers()(running))
        model.family.decode(module, latents)
    found = sorted(given.values(), key=lambda one: -one.bytes)[:SHOWN]
    inside = None
    if made.largest is not None and (not found or made.largest[0] > found[0].bytes):
        count, path, operator, shape, dtype = made.largest
        inside = Intermediate(path, shape, dtype, count, count / size, operator)
    return Intermediates(tuple(latents.shape), size, tuple(found), inside)


def _keep(given: dict[str, Intermediate], path: str, one: Intermediate) -> None:
    """The largest of each module: it is called once a tile, a frame, a batch item."""
    if path not in given or one.bytes > given[path].bytes:
        given[path] = one


def _told(path: str, tensor: Tensor, latents_bytes: int) -> Intermediate:
    size = _bytes(tensor)
    return Intermediate(path, tuple(tensor.shape), dtype_name(tensor.dtype), size, size / latents_bytes)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _plain(output: Any) -> Any:
    """What a module gives as nested tuples: diffusers has outputs with named fields."""
    return tuple(output.values()) if hasattr(output, "values") and not isinstance(output, torch.Tensor) else output


@cache
def _makers() -> type[Any]:
    # made at first use: a class that inherits from torch's cannot stand at module level without importing torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Makers(TorchDispatchMode):
        """Keeps the largest storage that an operator made."""

        def __init__(self, running: list[str]) -> None:
            super().__init__()
            self.running = running
            self.largest: tuple[int, str, str, tuple[int, ...], str] | None = None

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in tensors(out):
                size = tensor.untyped_storage().nbytes()
                if self.largest is None or size > self.largest[0]:
                    self.largest = (size, self.running[-1], func.overloadpacket.__name__, tuple(tensor.shape),
                                    dtype_name(tensor.dtype))  # fmt: skip
            return out

    return Makers


def lines(found: Intermediates) -> list[str]:
    """What was found in words, a line each."""
    latents = f"{'×'.join(map(str, found.latents))} latents ({found.latents_bytes / 2**10:,.0f} KiB)"
    out = [f"largest       {_said(one)}{f' of {latents}' if not index else ''}"
           for index, one in enumerate(found.largest)]  # fmt: skip
    if found.inside is not None:
        out.append(f"  inside      {_said(found.inside)}, made by {found.inside.operator}: no module gives it")
    return out


def _said(one: Intermediate) -> str:
    where = one.module or "the autoencoder"
    return f"{in_units(one.bytes)} at {where} {'×'.join(map(str, one.shape))} {one.dtype}, {one.times_latents:,.0f}×"
