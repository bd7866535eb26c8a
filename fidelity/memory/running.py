"""What runs at each instant of a decode: its stages, modules and moves of weights, as ranges of the recording."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from fidelity import residency
from fidelity.lazy import torch
from fidelity.residency import Move

if TYPE_CHECKING:
    from torch import nn

Span = Callable[[str], AbstractContextManager[Any]]
"""Opens a stage (`tile`, `onload`, …) or a module (`module:decoder.conv_in`)."""


class Given(NamedTuple):
    """A tensor that was given back: the address of its storage, and what it is."""

    pointer: int
    bytes: int
    shape: tuple[int, ...]
    dtype: str


@dataclass
class Running:
    """What was seen of a decode while it ran."""

    stages: list[str] = field(default_factory=list)
    """Open ones, the innermost last. What a decode that raised left open is where it raised; so are the modules."""
    modules: list[str] = field(default_factory=list)
    given: list[tuple[Given, ...]] = field(default_factory=list)
    """Of each call of a module, in the order in which they began, the tensors that it was given …"""
    gave: list[tuple[Given, ...]] = field(default_factory=list)
    """… and gave; none where it raised."""
    results: list[tuple[Given, ...]] = field(default_factory=list)
    """Of each call of the decoder, the tensors it gave."""
    sample: tuple[Given, ...] = ()
    """What the decode gave."""
    moves: list[Move] = field(default_factory=list)


@contextmanager
def running(module: nn.Module, decoder: nn.Module | None, span: Span) -> Iterator[Running]:
    """Open a span for each call of the decoder, each call of a module, and each move of weights, in this block.

    An exception closes spans from the inside out, and leaves the names of those that were open.
    """
    seen = Running()
    watcher = _Watcher(span)
    handles = [handle for path, part in module.named_modules() if path
               for handle in watcher.watch(part, f"module:{path}", path, seen.modules, seen)]  # fmt: skip
    if decoder is not None:  # last, so that it opens first and closes last
        handles += watcher.watch(decoder, "tile", "tile", seen.stages)
        handles.append(decoder.register_forward_hook(lambda _, __, output: seen.results.append(described(output))))

    @contextmanager
    def moving(move: Move) -> Iterator[None]:
        name = "onload" if move.direction == "in" else "offload"
        depth = len(seen.stages)
        seen.moves.append(move)
        seen.stages.append(name)
        with span(name):
            yield
        del seen.stages[depth:]

    try:
        with residency.listening(moving):
            yield seen
    finally:
        for handle in handles:
            handle.remove()
        watcher.close()


class _Open(NamedTuple):
    """A span that is open, and how to leave it."""

    key: object
    context: AbstractContextManager[Any]
    names: list[str]
    depth: int
    number: int
    """Of the module's call."""


class _Watcher:
    """Keeps a span open while a module runs."""

    def __init__(self, span: Span):
        self.span = span
        self.open: list[_Open] = []

    def watch(self, part: nn.Module, span: str, name: str, names: list[str], seen: Running | None = None) -> list[Any]:
        """Hooks outside of all that are there already. While the part runs, its name is in `names`; what it is given
        and gives is told to `seen`."""
        key = object()

        def enter(_: Any, args: Any) -> None:
            context = self.span(span)
            self.open.append(_Open(key, context, names, len(names), len(seen.given) if seen is not None else 0))
            names.append(name)
            if seen is not None:
                seen.given.append(described(args))
                seen.gave.append(())
            context.__enter__()

        def leave(_: Any, __: Any, output: Any) -> None:
            while self.open:  # first what raised inside, if the class went on
                left = self.open.pop()
                left.context.__exit__(None, None, None)
                del left.names[left.depth :]
                if left.key is key:
                    if seen is not None:
                        seen.gave[left.number] = described(output)
                    return

        return [part.register_forward_pre_hook(enter, prepend=True), part.register_forward_hook(leave)]

    def close(self) -> None:
        """End what an exception left open; the names stay."""
        while self.open:
            self.open.pop().context.__exit__(None, None, None)


def described(tree: Any) -> tuple[Given, ...]:
    """Every tensor in nested tuples, lists, dictionaries and outputs of diffusers."""
    if isinstance(tree, torch.Tensor):
        storage = tree.untyped_storage()
        return (Given(storage.data_ptr(), tree.nbytes, tuple(tree.shape), str(tree.dtype).removeprefix("torch.")),)
    inside = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else ()
    return tuple(given for part in inside for given in described(part))
