"""The instance under a check, to be set and called at will, as a user would: what those checks share.

Such a check makes diffusers' own calls, and the instance gets every attribute back afterwards.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fidelity.checks.subject import Subject
from fidelity.errors import EvaluationError
from fidelity.lazy import torch
from fidelity.records import DecodePlan, Model
from fidelity.snippet import Script, program

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
CORNER, FRAMES = (8, 10), 4
"""Latent pixels and frames of what these checks decode, where the latents have as many: sizes are at stake."""


def corner(latents: Tensor, items: int = 1) -> Tensor:
    """The corner of the first items, of videos in the first frames."""
    first = latents[:items, :, :FRAMES] if latents.ndim == 5 else latents[:items]
    return first[..., : CORNER[0], : CORNER[1]].contiguous()


def corner_shape(shape: Shape, items: int = 1) -> Shape:
    """The shape of that corner."""
    frames = tuple(min(frames, FRAMES) for frames in shape[2:-2])
    return (min(items, shape[0]), shape[1], *frames, min(shape[-2], CORNER[0]), min(shape[-1], CORNER[1]))


Write = Callable[[Script, DecodePlan, Shape], None]
"""Writes down what a check does, for latents of this shape."""


def cornered(write: Write, items: int = 1) -> Callable[[Model, DecodePlan, Shape], str]:
    """What `code` of a check may be: the program of what `write` says, on a corner of the first items."""

    def code(model: Model, plan: DecodePlan, shape: Shape) -> str:
        cut = corner_shape(shape, items)
        return program(model, cut, lambda script: write(script, plan, cut))

    return code


def half(model: Model, shape: Shape) -> int:
    """Half the corner's shorter side, in sample pixels: a tile that cuts it both ways."""
    return max(1, min(corner_shape(shape)[-2:]) // 2) * model.geometry.spatial


@contextmanager
def no_longer(runner: Subject, latents: Tensor) -> Iterator[None]:
    """Bound the block by 20 times what a plain decode of these latents computes, and two seconds."""
    start = time.process_time()
    decode(runner, latents)
    with bounded(2 + 20 * (time.process_time() - start)):
        yield


@contextmanager
def instance(runner: Subject) -> Iterator[Any]:
    """The instance, to be set at will: it and its parts get all their own attributes back."""
    before = [(part, dict(vars(part))) for part in runner.module.modules()]
    try:
        with torch.no_grad():
            yield runner.module
    finally:
        for part, own in before:
            vars(part).clear()
            vars(part).update(own)


def decode(runner: Subject, latents: Tensor) -> Tensor:
    """The sample of the instance as it is set now, fp32 on the CPU."""
    fed = latents.to(runner.runner.device)
    return runner.model.family.decode(runner.module, fed).detach().to("cpu", torch.float32).clone()


def encode(runner: Subject, sample: Tensor) -> Tensor:
    """The latents of a sample by the instance as it is set now, fp32 on the CPU."""
    fed = sample.to(runner.runner.device)
    return runner.model.family.encode(runner.module, fed).detach().to("cpu", torch.float32).clone()


class EndlessError(Exception):
    """A decode that took many times as long as the plain one, and was ended."""


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """End the block when this process has computed for so long: a loop without an end must not hold up a run.

    Where no signal can come (off the main thread, on Windows) there is no bound. Raises EndlessError.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGVTALRM"):
        yield
        return

    def end(*_: Any) -> None:
        raise EndlessError(f"no end after {seconds:.0f} s of computing")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def counted(runner: Subject, latents: Tensor) -> tuple[Tensor, int]:
    """The sample, and how often the decoder was called for it. Raises EvaluationError if it never was."""
    seen: list[None] = []
    handle = runner.model.family.decoder(runner.module).register_forward_hook(lambda *_: seen.append(None))
    try:
        sample = decode(runner, latents)
    finally:
        handle.remove()
    if not seen:
        raise EvaluationError("the decoder submodule was never called: how it is cut cannot be told")
    return sample, len(seen)


def numbers(*values: float) -> Tensor:
    """(1, 1, 1, n) counts, to be compared one by one."""
    return torch.tensor([float(value) for value in values]).view(1, 1, 1, -1)


def by(sample: Tensor) -> str:
    """A shape in words: 1×3×9×64×80."""
    return "×".join(map(str, sample.shape))
