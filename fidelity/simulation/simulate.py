"""A decode without data: its operators run on shapes alone, and what they would hold is booked.

Under torch's FakeTensorMode a tensor has a shape, a dtype, strides and a device, and no memory. A dispatch mode books
each storage that an operator makes and follows it by a weak reference until Python lets go of it, which is the instant
at which the allocator would take it back. What kernels allocate for themselves (`workspace`, `attention`) and when
weights are resident (`schedule`) is booked beside it.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from fidelity.errors import ModelError
from fidelity.lazy import torch
from fidelity.simulation import attention, layouts, repeat, schedule, workspace
from fidelity.simulation.constants import Constants, tensors
from fidelity.simulation.ledger import Holding, Ledger

if TYPE_CHECKING:
    from torch import Tensor, nn

Decode = Callable[["nn.Module", "Tensor"], "Tensor"]
ROUND = {"cpu": 1, "cuda": 512}
"""Allocators hand out multiples of this many bytes (c10's CPU allocator what was asked for)."""


def simulate(
    build: Callable[[], nn.Module],
    decode: Decode,
    shape: Sequence[int],
    *,
    dtype: torch.dtype,
    device: str,
    keep_fp32: Callable[[nn.Module, str], bool],
    offload: str = "none",
    stream: bool = False,
    memo: repeat.Memo | None = None,
    decoder: Callable[[nn.Module], nn.Module] | None = None,
    applied: Callable[[nn.Module], Any] | None = None,
    convert: Callable[[Tensor], Any] | None = None,
) -> tuple[Ledger, tuple[int, ...], int]:
    """Run a decode of latents of `shape` on shapes alone. Returns its ledger, the sample's shape, and bytes of weights.

    `build` makes the module without weights; floating weights are of `dtype` but for those for which `keep_fp32(module,
    name)`; `applied(module)` is a context in which slicing and tiling are on; `decoder(module)` is the submodule whose
    calls are the stage `tile`; `convert` runs on the sample as a stage of its own; `stream`: groups are prefetched; a
    `memo` is what decodes of other sizes, all else being equal, have shown of calls. The latents themselves are not
    counted. `device` is `cpu` or `cuda`; neither is needed. Raises what the decode raises on these shapes.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    ledger = Ledger()
    fake = FakeTensorMode()
    with _by_shapes_alone(), fake, torch.no_grad(), ExitStack() as stack:
        # weights may be made of constants of the class's file, which are real; a decode that meets such hides some
        fake.allow_non_fake_inputs = True
        with _drawing_nothing():
            module = build()
        fake.allow_non_fake_inputs = False
        place(module, dtype, device, keep_fp32)
        weights = schedule.weights_bytes(module)
        latents = torch.empty(tuple(shape), dtype=dtype, device=device)
        stack.enter_context(applied(module) if applied is not None else ExitStack())
        stack.enter_context(schedule.residency(module, offload, device, ledger, stream=stream))
        modules = stack.enter_context(_where(module))
        stack.enter_context(_uncollected())
        stack.enter_context(attention.kernels(device))
        follower = stack.enter_context(_follower()(ledger, modules, device))
        inner = decoder(module) if decoder is not None else None
        stack.enter_context(repeat.few_rows(module))
        stack.enter_context(repeat.replayed(module, inner, ledger, follower, memo))
        with ledger.span("decode"), _tiles(inner, ledger):
            sample = decode(module, latents)
        if convert is not None:
            with ledger.span("convert"):
                convert(sample)
        return ledger, tuple(sample.shape), weights


@contextmanager
def _by_shapes_alone() -> Iterator[None]:
    """Raise ModelError, in one line, where a model asks for a value, which a fake tensor does not have."""
    from torch._subclasses.fake_tensor import DataDependentOutputException

    try:
        yield
    except DataDependentOutputException as error:
        said = f"the model's code asks for a tensor's value ({error})"
        raise ModelError(f"{said}, so shapes alone do not tell what it needs: decode it to measure") from error
    except RuntimeError as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if not any(word in line for word in ("CUDA", "NVIDIA")):
            raise
        said = f"the model's code asks the device itself ({line})"
        raise ModelError(f"{said}, so shapes alone do not tell what it needs: decode it there to measure") from error


@contextmanager
def _drawing_nothing() -> Iterator[None]:
    """Initial weights are drawn until none is out of bounds, and asked for that; here there are none to ask."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Undrawn(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool:
                return False
            return func(*args, **(kwargs or {}))

    with Undrawn():
        yield


def place(module: nn.Module, dtype: torch.dtype, device: str, keep_fp32: Callable[[nn.Module, str], bool]) -> None:
    """Give a fake module's weights their dtype and device. (`module.to` writes through `.data`, which fakes refuse.)"""
    new: dict[int, Any] = {}  # a weight that two modules share stays one
    for prefix, part in module.named_modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in new:
                    full = f"{prefix}.{name}" if prefix else name
                    cast = tensor.is_floating_point() and not keep_fp32(module, full)
                    kind = dtype if cast else tensor.dtype
                    # not empty_like: of a constant that would ask the real device for it
                    data = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device=device)
                    new[id(tensor)] = (tensor, _same_kind(tensor, data))
                table[name] = new[id(tensor)][1]


def _same_kind(tensor: Tensor, data: Tensor) -> Tensor:
    return torch.nn.Parameter(data, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else data


@cache
def _follower() -> type[Any]:
    # made at first use: a class that inherits from torch's cannot stand at module level without importing torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Follower(TorchDispatchMode):
        """Books each new storage, and what the kernel that made it needs beside it."""

        def __init__(self, ledger: Ledger, modules: list[str], device: str):
            super().__init__()
            self.ledger, self.modules, self.device = ledger, modules, device
            self.kind = torch.device(device).type
            self.known: dict[int, int | None] = {}
            """Storages, and the numbers of those that an operator made here."""
            self.ends: dict[int, Any] = {}
            """What happens when Python lets go of a storage."""
            self.once = workspace.Once()
            self.constants = Constants()
            self.looks = True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if not self.looks:
                return func(*args, **kwargs)
            for tensor in tensors(args):  # what the decode was given, and what other modes made
                if _key(tensor) not in self.known:
                    self._know(tensor)
            out = layouts.as_made(func, args, self.constants.run(func, args, kwargs))
            made = [tensor for tensor in tensors(out) if self._is_new(tensor)]
            if not made:
                return out
            name, module = func.overloadpacket.__name__, self.modules[-1]
            phases = workspace.of(func, args, kwargs, out, kind=self.kind, once=self.once)
            for phase in phases.before:
                self.ledger.passing(*(Holding(size, what, module) for what, size in phase.items()))
            for tensor in made:
                if self._is_new(tensor):  # two outputs may share a storage
                    self.follow(tensor, self._holding(tensor, name, module))
            for phase in phases.beside:
                self.ledger.passing(*(Holding(size, what, module) for what, size in phase.items()))
            for what, size in phases.stays.items():
                self.ledger.hold(Holding(size, what))
            return out

        def _is_new(self, tensor: Any) -> bool:
            return tensor.device.type == self.kind and _key(tensor) not in self.known

        def _holding(self, tensor: Any, name: str, module: str) -> Holding:
            unit = ROUND[self.kind]
            size = -(-tensor.untyped_storage().nbytes() // unit) * unit
            return Holding(size, name, module, tuple(tensor.shape), str(tensor.dtype)[6:], self.ledger.stage)

        def follow(self, tensor: Any, holding: Holding) -> None:
            """Book a tensor and follow its storage until Python lets go of it."""
            self.adopt(tensor, self.ledger.made(holding))

        def adopt(self, tensor: Tensor, number: int) -> None:
            """Follow a tensor whose storage is booked under this number already."""
            storage, key = tensor.untyped_storage(), _key(tensor)
            self.known[key] = number
            self.ends[key] = end = weakref.finalize(storage, self._forget, key, number)
            end.atexit = False

        def disown(self, tensor: Tensor) -> None:
            """Follow it no longer: its release is booked by somebody else."""
            key = _key(tensor)
            self.ends.pop(key).detach()
            self._know(tensor)

        def _know(self, tensor: Tensor) -> None:
            """Remember a storage that is not booked, as long as it lives: another may have its address then."""
            key = _key(tensor)
            self.known[key] = None
            weakref.finalize(tensor.untyped_storage(), self.known.pop, key, None).atexit = False

        @contextmanager
        def looking_away(self) -> Iterator[None]:
            """A context in which operators are not booked."""
            self.looks = False
            try:
                yield
            finally:
                self.looks = True

        def _forget(self, key: int, number: int) -> None:
            self.known.pop(key, None)
            self.ends.pop(key, None)
            self.ledger.release(number)

        def number_of(self, tensor: Any) -> int | None:
            """The ledger's number of a tensor's storage."""
            return self.known.get(_key(tensor))

    attention.unfused(Follower)
    return Follower


def _key(tensor: Any) -> int:
    """The identity of a storage: as long as it lives, no other has it."""
    return tensor.untyped_storage()._cdata


@contextmanager
def _where(module: nn.Module) -> Iterator[list[str]]:
    """The dotted paths of the modules that are running, the innermost last."""
    running = [""]
    handles = []

    def leave(*_: Any) -> None:
        running.pop()

    for path, part in module.named_modules():
        handles.append(part.register_forward_pre_hook(lambda *_, path=path: running.append(path), prepend=True))
        handles.append(part.register_forward_hook(leave, always_call=True))
    try:
        yield running
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _tiles(decoder: nn.Module | None, ledger: Ledger) -> Iterator[None]:
    """Each call of the decoder is a span `tile`; what lies between them, before and after is a span `assemble`."""
    with ExitStack() as stack:
        now = ExitStack()
        now.enter_context(ledger.span("assemble"))
        stack.callback(now.close)
        if decoder is not None:

            def enter(*_: Any) -> None:
                now.close()
                now.enter_context(ledger.span("tile"))

            def leave(*_: Any) -> None:
                now.close()
                now.enter_context(ledger.span("assemble"))

            stack.callback(decoder.register_forward_pre_hook(enter, prepend=True).remove)
            stack.callback(decoder.register_forward_hook(leave, always_call=True).remove)
        yield


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the garbage collector still, as a measured decode does: what is freed is what Python lets go of."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
