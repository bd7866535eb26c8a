"""Shortcuts that change no figure: what is done often and alike is done a few times and booked as often.

A tiled decode of 4096 × 4096 calls the decoder 121 times on four shapes, and blends its tiles row by row, each row like
the one before; a mask is written line by line. Running all of it on shapes would take minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from fidelity.simulation.ledger import Ledger
from fidelity.simulation.replay import Follower, Known, Replay

if TYPE_CHECKING:
    from torch import nn

BLENDS = ("blend_v", "blend_h", "blend_t")
LOOPS = (*BLENDS, "prepare_causal_attention_mask")
"""Methods whose loops write a tensor row by row: each row makes and frees the same temporaries, two stand for all."""
ROWS = 2


@contextmanager
def few_rows(module: nn.Module) -> Iterator[None]:
    """Write two rows instead of all, where the class writes row by row. (One that writes at once is left alone.)"""
    with ExitStack() as stack:
        for part in module.modules():
            for name in LOOPS:
                short = _shortened(part, name)
                if short is not None:
                    setattr(part, name, short)
                    stack.callback(part.__dict__.pop, name, None)
        yield


def _shortened(part: nn.Module, name: str) -> Callable[..., Any] | None:
    """The method of the same code, but for its `range`, which ends after two."""
    method = getattr(part, name, None)
    function = getattr(method, "__func__", method)
    code = getattr(function, "__code__", None)
    if not isinstance(function, FunctionType) or not isinstance(code, CodeType) or "range" not in code.co_names:
        return None
    own = {**function.__globals__, "range": lambda *bounds: range(*bounds)[:ROWS]}
    short = FunctionType(code, own, name, function.__defaults__, function.__closure__)
    short.__kwdefaults__ = function.__kwdefaults__
    return MethodType(short, part) if isinstance(method, MethodType) else short


Memo = dict[str, Known]
"""What is known of each function's calls, by its name."""


@contextmanager
def replayed(
    module: nn.Module, decoder: nn.Module | None, ledger: Ledger, follower: Follower, memo: Memo | None = None
) -> Iterator[None]:
    """Run the decoder, and each blend, a few times for each shape and state it is given; book that for the others."""
    memo = memo if memo is not None else {}
    with ExitStack() as stack:
        replay = Replay(ledger, follower)
        for name in BLENDS:
            blend = getattr(module, name, None)
            if blend is not None:
                own = module.__dict__.get(name)
                setattr(module, name, replay.of(blend, memo.setdefault(name, Known())))
                stack.callback(_put_back, module, name, own)
        if decoder is not None:
            decoder.forward = replay.of(decoder.forward, memo.setdefault("decoder", Known()), decoder)
            stack.callback(decoder.__dict__.pop, "forward", None)
        yield


def _put_back(module: nn.Module, name: str, own: Any) -> None:
    module.__dict__.pop(name, None)
    if own is not None:
        module.__dict__[name] = own
