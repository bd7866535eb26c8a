"""The work of one decode by the parts of its decoder: FLOPs, bytes moved, seconds.

FLOPs are counted by torch's own counter: of convolutions, matrix products and attention, by their shapes; norms,
activations and sums count for none. Bytes are those of each operator's tensors, read once and written once; a view
moves none. That is what an operator has to move by itself: what stays in a cache between two operators makes it less,
and what a kernel reads again, or copies into a layout of its own, makes it more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from statistics import median
from typing import TYPE_CHECKING, Any

from fidelity import optimizations
from fidelity.errors import ModelError
from fidelity.lazy import torch
from fidelity.optimizations.observe import tensors
from fidelity.optimizations.weights import kept_in_fp32
from fidelity.records import DecodePlan, Model
from fidelity.roofline.machine import clock
from fidelity.simulation.simulate import place

if TYPE_CHECKING:
    from torch import Tensor, nn

AROUND, BETWEEN = "around the decoder", "between the decoder's parts"
"""Where operators run that are of no part: projections before the decoder, cutting and blending of tiles, clamps."""
RUNS = 3
NOTHING_MOVED = ("empty", "new_empty")
WRITTEN_ONLY = ("copy_", "fill_", "zero_")
Operators = tuple[tuple[int, int], ...]
"""FLOPs and bytes of each operator that has any, in their order."""


@contextmanager
def by_part(decoder: nn.Module, border: Callable[[str], None] = lambda part: None) -> Iterator[list[str]]:
    """Yield the parts of the decoder that run, the innermost last; `border(part)` is told when another one goes on than
    `part`, which has run until now. The hooks are gone afterwards."""
    running = [AROUND]

    def enter(part: str) -> None:
        border(running[-1])
        running.append(part)

    def leave() -> None:
        border(running.pop())

    with ExitStack() as stack:
        for name, part in ((BETWEEN, decoder), *parts(decoder)):
            before = part.register_forward_pre_hook(lambda *_, name=name: enter(name), prepend=True)
            stack.callback(before.remove)
            stack.callback(part.register_forward_hook(lambda *_: leave(), always_call=True).remove)
        yield running
        border(running[-1])


def parts(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """The decoder's children by name; each member of a list of blocks, and of a chain that is all there is."""
    found: list[tuple[str, nn.Module]] = []
    children = [(name, child) for name, child in module.named_children() if next(child.parameters(), None) is not None]
    for name, child in module.named_children():
        alone = isinstance(child, torch.nn.Sequential) and [name] == [other for other, _ in children]
        if isinstance(child, torch.nn.ModuleList) or alone:
            found += parts(child, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", child))
    return found


# ---------------------------------------------------------------- FLOPs and bytes


def counted(model: Model, module: nn.Module, latents: Tensor) -> dict[str, Operators]:
    """The operators of one decode by part, of a module as it is (its plan applied), real or of shapes alone."""
    from torch.utils.flop_counter import FlopCounterMode

    flops = FlopCounterMode(display=False, custom_mapping=_missing())
    # the counter takes some operators apart: bytes are read off before it does
    with (
        torch.no_grad(),
        by_part(model.family.decoder(module)) as running,
        flops,
        _traffic()(running, flops) as traffic,
    ):
        model.family.decode(module, latents)
    return {name: tuple(each) for name, each in traffic.found.items()}


def on_shapes(model: Model, shape: Sequence[int], plan: DecodePlan, dtype: torch.dtype) -> dict[str, Operators]:
    """The same without weights and without data. Raises ModelError where the model's code asks for a value."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    fake = FakeTensorMode()
    try:
        with fake, torch.no_grad():
            fake.allow_non_fake_inputs = True  # constants of the class's file, which are real
            module = model.family.build(model.config)
            fake.allow_non_fake_inputs = False
            place(module, dtype, "cpu", kept_in_fp32)
            with optimizations.apply_plan(module, plan, model=model, device="cpu"):
                return counted(model, module, torch.empty(tuple(shape), dtype=dtype))
    except DataDependentOutputException as error:
        said = (
            f"{model.name}: the model's code asks for a tensor's value ({error}), so shapes alone do not tell its work"
        )
        raise ModelError(f"{said}: give its weights as NAME=PATH") from error


def moved_bytes(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Bytes that one operator reads and writes, each tensor once; 0 for one that only gives another view."""
    name = func.overloadpacket.__name__
    if name.startswith(NOTHING_MOVED):
        return 0
    given, gave = tensors((args, kwargs)), tensors(out)
    written = _written(func, args, kwargs)
    known = {_storage(tensor) for tensor in given}
    made = [tensor for tensor in gave if _storage(tensor) not in known]
    if not made and not written:
        return 0
    overwritten = {id(tensor) for tensor in written if name in WRITTEN_ONLY or func._overloadname.endswith("out")}
    read = {id(tensor): tensor for tensor in given if id(tensor) not in overwritten}
    return sum(map(_size, (*read.values(), *made, *written)))


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The tensors among the arguments that the operator's schema says it writes to."""
    named = [(argument, args[index] if index < len(args) else kwargs.get(argument.name))
             for index, argument in enumerate(func._schema.arguments)]  # fmt: skip
    marked = [value for argument, value in named if argument.alias_info is not None and argument.alias_info.is_write]
    return tensors(marked)


def _size(tensor: Tensor) -> int:
    """Bytes of the values that there are: one that is spread over an axis is one."""
    values = 1
    for length, stride in zip(tensor.shape, tensor.stride()):
        values *= length if stride or not length else 1
    return values * tensor.element_size()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@cache
def _traffic() -> type[Any]:
    # made at first use: a class that inherits from torch's cannot stand at module level without importing torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Traffic(TorchDispatchMode):
        """Keeps what each operator moves, and what the counter below it counts meanwhile."""

        def __init__(self, running: list[str], counter: Any) -> None:
            super().__init__()
            self.running, self.counter = running, counter
            self.found: dict[str, list[tuple[int, int]]] = {}

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            before = self.counter.get_total_flops()
            out = func(*args, **(kwargs or {}))
            work = self.counter.get_total_flops() - before, moved_bytes(func, args, kwargs or {}, out)
            if any(work):
                self.found.setdefault(self.running[-1], []).append(work)
            return out

    return Traffic


def _missing() -> dict[Any, Any]:
    """The CPU's attention kernel, for which torch's counter has no entry, by torch's own formula for the others."""
    from torch.utils.flop_counter import flop_registry, sdpa_flop_count

    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return sdpa_flop_count(query, key, value)

    return {} if kernel in flop_registry else {kernel: attention}


# ---------------------------------------------------------------- seconds


def timed(model: Model, module: nn.Module, latents: Tensor, runs: int = RUNS) -> dict[str, float]:
    """Seconds of one decode by part: of each the median of a few runs, after one that warms up."""
    device = str(latents.device)
    found: list[dict[str, float]] = []
    with torch.no_grad():
        for _ in range(runs + 1):
            taken, last = {AROUND: 0.0}, [clock(device)]

            def border(part: str, taken: dict[str, float] = taken, last: list[float] = last) -> None:
                now = clock(device)
                taken[part] = taken.get(part, 0.0) + now - last[0]
                last[0] = now

            with by_part(model.family.decoder(module), border):
                model.family.decode(module, latents)
            found.append(taken)
    return {name: median(run[name] for run in found[1:]) for name in found[-1]}
