"""What each module of one decode gave: the largest |activation|, and the first module that made a value not finite.

Hooks on every module see what it was given and what it gave, after the emulation's own rounding where there is one.
What happens inside a fused kernel (attention's scores, a norm's sum of squares) is not seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fidelity.lazy import torch
from fidelity.optimizations.observe import tensors
from fidelity.records import Headroom, Layer, Model

if TYPE_CHECKING:
    from torch import Tensor, nn

FP16_MAX = 65504.0
"""The largest finite fp16 number (IEEE 754 binary16)."""
TIGHTEST = 10
"""Layers that a Headroom lists."""


@dataclass(frozen=True)
class Overflow:
    """A module that gave the first value that is not finite of some batch items."""

    module: str
    gave: str
    """`inf` or `nan`."""
    given: float | None
    """The largest |input| of these items; None where the input was not finite before any module gave such a value."""
    weights: bool
    """Whether the module's own weights are not finite."""
    items: tuple[int, ...]
    """Of the batch, or of the call until the decode has ended."""
    call: int = 0
    """Which call of the decoder, from 0."""
    size: int = 1
    """Items in that call."""


@dataclass
class Activations:
    """What the modules of one decode gave. Filled while it runs."""

    batch: int
    calls: int = 0
    """Calls of the decoder."""
    peaks: dict[str, float] = field(default_factory=dict)
    """Largest |output| of each module over all calls, inf where not finite; in the order of the first calls' ends."""
    kinds: dict[str, str] = field(default_factory=dict)
    seen: list[Overflow] = field(default_factory=list)

    @property
    def overflows(self) -> list[Overflow]:
        """For each batch item the module that gave its first value that is not finite, in the order of the calls."""
        found: dict[str, Overflow] = {}
        known: set[int] = set()
        for one in self.seen:
            chunks = max(1, self.batch // one.size)  # a sliced decode calls chunk by chunk, a tiled one tile by tile
            start = one.call * chunks // max(1, self.calls) * one.size
            items = tuple(start + item for item in one.items if start + item not in known)
            known.update(items)
            if items:
                first = found.setdefault(one.module, replace(one, items=()))
                found[one.module] = replace(first, items=tuple(sorted((*first.items, *items))))
        return list(found.values())


@contextmanager
def watch(module: nn.Module, model: Model, batch: int) -> Iterator[Activations]:
    """Watch one decode of `batch` items. Yields the Activations that fill while it runs; the hooks are gone afterwards.

    Modules inside the decoder are named from there (`up_blocks.3.resnets.0.conv2`), others from the autoencoder.
    """
    watcher = _Watcher(Activations(batch))
    decoder = model.family.decoder(module)
    prefix = next((f"{name}." for name, part in module.named_modules() if part is decoder and name), "")
    handles = [
        decoder.register_forward_pre_hook(watcher.enter_decoder, with_kwargs=True),
        *(
            part.register_forward_hook(watcher.leaving(name.removeprefix(prefix)), with_kwargs=True)
            for name, part in module.named_modules()
        ),
        decoder.register_forward_hook(watcher.leave_decoder),
    ]
    try:
        yield watcher.found
    finally:
        for handle in handles:
            handle.remove()


class _Watcher:
    """The hooks, and where in the decode they are."""

    def __init__(self, found: Activations):
        self.found, self.inside, self.size = found, False, 0
        self.marked: set[tuple[int, int]] = set()
        self.last: Any = None

    def enter_decoder(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        given = tensors((args, kwargs))
        self.size = given[0].shape[0] if given else 0
        self.inside = True
        self.found.calls += 1

    def leave_decoder(self, *_: Any) -> None:
        self.inside = False

    def leaving(self, name: str) -> Any:
        def leave(called: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = _floating((args, kwargs))
            gave = [t for t in _floating(output) if t is not self.last and not any(t is each for each in given)]
            if not gave or self._spent():
                return  # it passes on what another module gave, or nothing of this call is finite any more
            self.last = gave[-1]
            peak = max(map(_peak, gave))
            self.found.kinds[name] = type(called).__name__
            self.found.peaks[name] = max(self.found.peaks.get(name, 0.0), peak)
            if not math.isfinite(peak):
                self._overflowed(name, called, given, gave)

        return leave

    def _spent(self) -> bool:
        call = self.found.calls - 1
        return self.inside and self.size > 0 and all((call, item) in self.marked for item in range(self.size))

    def _overflowed(self, name: str, called: nn.Module, given: list[Tensor], gave: list[Tensor]) -> None:
        """Keep the items whose first value that is not finite this is."""
        call = self.found.calls - 1 if self.inside else self.found.calls
        size = self.size if self.inside else gave[0].shape[0]
        bad = {item for tensor in gave for item in _bad_items(tensor, size)}
        fresh = sorted(item for item in bad if (call, item) not in self.marked)
        if not fresh:
            return
        self.marked.update((call, item) for item in fresh)
        peak = max((_peak(_of_items(tensor, fresh, size)) for tensor in given), default=0.0)
        own = [w for w in called.parameters(recurse=False) if w.device.type != "meta"]
        kind = "nan" if any(bool(torch.isnan(tensor).any()) for tensor in gave) else "inf"
        weights = not all(bool(torch.isfinite(weight).all()) for weight in own)
        start = peak if math.isfinite(peak) else None
        self.found.seen.append(Overflow(name, kind, start, weights, tuple(fresh), call, size))


def _floating(tree: Any) -> list[Tensor]:
    return [tensor for tensor in tensors(tree) if tensor.is_floating_point() and tensor.numel()]


def _peak(tensor: Tensor) -> float:
    """Largest |value|; inf where one is not finite."""
    wide = tensor.detach()
    wide = wide.float() if wide.dtype is torch.float16 else wide
    low, high = torch.aminmax(wide)
    peak = max(-float(low), float(high))
    return peak if math.isfinite(peak) else math.inf


def _bad_items(tensor: Tensor, size: int) -> list[int]:
    """Items of a call of `size` that are not finite; all of them where rows do not divide into items."""
    if size < 1 or tensor.dim() < 1 or tensor.shape[0] % size:
        return list(range(max(1, size)))
    return [item for item, fine in enumerate(torch.isfinite(tensor.reshape(size, -1)).all(1).tolist()) if not fine]


def _of_items(tensor: Tensor, items: list[int], size: int) -> Tensor:
    divides = size > 0 and tensor.dim() > 0 and tensor.shape[0] % size == 0
    return tensor.reshape(size, -1)[items] if divides else tensor


# ---------------------------------------------------------------- in words


def explain(found: Activations, sample: Tensor) -> str:
    """One line: which module gave the first value that is not finite, and which items of `sample` are not finite."""
    bad = [item for item in range(sample.shape[0]) if not bool(torch.isfinite(sample[item]).all())]
    told = [_told(one, found.batch) for one in found.overflows]
    if not told:
        around = "it arose around them, where tiles or items are put together"
        told = [f"none of the {len(found.peaks)} modules that were watched gave a value that is not finite: {around}"]
    if len(told) > 3:
        told = [*told[:3], f"{len(told) - 3} more modules"]
    verb = "is" if len(bad) == 1 else "are"
    return f"{'; '.join(told)}; {_items(bad)} of the batch of {sample.shape[0]} {verb} not finite"


def _told(one: Overflow, batch: int) -> str:
    of = f" in {_items(list(one.items))}" if len(one.items) < batch else ""
    if one.weights:
        return f"{one.module} gave {one.gave} first{of}: its own weights are not finite"
    if one.given is None:
        return f"the input of {one.module} was not finite before any module gave such a value{of}"
    return f"{one.module} gave {one.gave} first{of}, from inputs of at most {one.given:,.6g}"


def _items(items: list[int]) -> str:
    listed = ", ".join(map(str, items[:8])) + ("…" if len(items) > 8 else "")
    return f"item{'' if len(items) == 1 else 's'} {listed}" if items else "no item"


# ---------------------------------------------------------------- headroom


def headroom(found: Activations, force_upcast: bool) -> Headroom:
    """65504 / max |activation| by layer, the tightest first. `force_upcast` is what the model's config declares."""
    layers = [
        Layer(name, found.kinds[name], peak, FP16_MAX / peak)
        if math.isfinite(peak)
        else Layer(name, found.kinds[name], None, None)
        for name, peak in found.peaks.items()
        if peak > 0
    ]
    layers.sort(key=lambda layer: layer.headroom or 0.0)
    reason = None if layers else f"none of the {len(found.peaks)} modules that were watched gave a value other than 0"
    return Headroom(tuple(layers[:TIGHTEST]), len(found.peaks), force_upcast, reason)
