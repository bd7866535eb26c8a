"""Causal streaming, which carries the class's cache from segment to segment of a video, and restarts, which do not.

`streaming = N` decodes N latent frames after another: a causal decoder that keeps what its convolutions saw last must
give what all frames at once give, so it is held to the full decode. `restarts = N` decodes the same segments, each
alone; it is what a program without the cache does, and shows what the cache is worth.

A causal decoder gives its first latent frame one frame and each later one f_t. A segment that begins anew would lose
f_t − 1 frames there and shift all that follow, which the picture's size alone gives away. So a restart takes the one
latent frame before its segment along and drops its frame again, as AutoencoderKLHunyuanVideo's own chunks do; what it
lacks is the cache, and nothing else. Where the class's frames add up without that, no frame is taken along.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

from fidelity.errors import EvaluationError, IllegalTiling, SuiteError
from fidelity.lazy import torch
from fidelity.optimizations.attributes import attributes_kept
from fidelity.optimizations.outputs import output_of, sample_of, with_sample
from fidelity.optimizations.temporal import receipt
from fidelity.records import Chunk, DecodePlan, Geometry, Model, Proof
from fidelity.registry import optimization

if TYPE_CHECKING:
    from torch import Tensor, nn


def segments(name: str, value: Any, frames: int) -> tuple[Chunk, ...]:
    """`value` latent frames after another, the last fewer. Raises SuiteError unless it is a whole number from 1."""
    if type(value) is not int or value < 1:
        raise SuiteError(f"{name} is {value!r}: write a whole number of latent frames a segment, at least 1")
    return tuple(Chunk(start, min(start + value, frames)) for start in range(0, frames, value))


def restarted(name: str, value: Any, geometry: Geometry, frames: int) -> tuple[Chunk, ...]:
    """The same segments, each with the latent frame before it where it would lack frames without, and what to drop.

    Raises SuiteError as `segments`, IllegalTiling where no such frame makes them add up to the whole.
    """
    count, plain = geometry.sample_frames, segments(name, value, frames)
    found = [plain[0]]
    for part in plain[1:]:
        due, alone = count(part.stop) - count(part.start), count(part.stop - part.start)
        more = count(part.stop - part.start + 1) - due  # with the latent frame before them
        if alone != due and more < 0:
            gives = (
                f"latent frames {part.start} to {part.stop - 1} give {alone} frames alone, {due + more} with the one"
            )
            raise IllegalTiling(f"{name} = {value}: {gives} before, and {due} are due: leave it out")
        found.append(part if alone == due else Chunk(part.start - 1, part.stop, drop=more))
    return tuple(found)


def _nothing_to_cut(name: str, value: Any, plan: DecodePlan, model: Model, shape: tuple[int, ...]) -> str | None:
    if not model.geometry.video:
        return f"{name}: an image autoencoder has no frames"
    segments(name, value, shape[2])
    others = [other for other in ("temporal", "streaming", "restarts") if other in plan.settings and other != name]
    if others:
        return f"{name}: {others[0]} cuts the frames already"
    if shape[2] <= value:
        return f"{name}: a segment of {value} is not shorter than the {shape[2]} latent frames"
    return None


# ---------------------------------------------------------------- with the cache


def _no_cache(value: Any, plan: DecodePlan, model: Model, shape: tuple[int, ...]) -> str | None:
    reason = _nothing_to_cut("streaming", value, plan, model, shape)
    if reason is None and not model.family.streams:
        return f"streaming: {model.family.name} carries no causal cache from one part of a video to the next"
    if reason is None and plan.tiling is not None:
        return "streaming: each tile has a cache of its own, which tiling does not carry on: leave one of the two out"
    return reason


def _streamed(value: Any, model: Model, shape: tuple[int, ...]) -> tuple[Chunk, ...]:
    return segments("streaming", value, shape[2])


@optimization("streaming", order=25, inapplicable=_no_cache, chunks=_streamed, exact=True)
def streaming(module: nn.Module, value: int, *, plan: DecodePlan, model: Model, device: str) -> Iterator[Proof]:
    """Decode so many latent frames after another, the class's causal cache carried over: exact."""
    from diffusers.utils.accelerate_utils import apply_forward_hook

    if not model.family.streams:
        raise EvaluationError(f"streaming: {model.family.name} carries no causal cache")

    def decode(module: Any, latents: Tensor, return_dict: bool = True, **kwargs: Any) -> Any:
        items = latents.split(1) if plan.slicing else (latents,)
        parts = (torch.cat(list(model.family.segments(module, item, value)), dim=2) for item in items)
        return output_of(torch.cat(list(parts)), return_dict)

    with attributes_kept(module, ("decode",)):
        # the class's own decode starts an offloaded module's hook; so does this one
        module.decode = MethodType(apply_forward_hook(decode), module)  # type: ignore[assignment]
        yield partial(receipt, plan=plan, temporal=model.geometry.temporal)


# ---------------------------------------------------------------- without it


def _alone(value: Any, plan: DecodePlan, model: Model, shape: tuple[int, ...]) -> str | None:
    return _nothing_to_cut("restarts", value, plan, model, shape)


def _restarted(value: Any, model: Model, shape: tuple[int, ...]) -> tuple[Chunk, ...]:
    return restarted("restarts", value, model.geometry, shape[2])


@optimization("restarts", order=25, inapplicable=_alone, chunks=_restarted)
def restarts(module: nn.Module, value: int, *, plan: DecodePlan, model: Model, device: str) -> Iterator[Proof]:
    """Decode so many latent frames after another, each segment alone, without a cache: what streaming is worth."""
    whole = getattr(module, "decode", None)
    if whole is None:
        raise EvaluationError(f"restarts: {type(module).__name__} has no decode to call segment by segment")

    def decode(latents: Tensor, *args: Any, **kwargs: Any) -> Any:
        samples, output = [], None
        for chunk in _restarted(value, model, tuple(latents.shape)):
            output = whole(latents[:, :, chunk.start : chunk.stop], *args, **kwargs)
            samples.append(sample_of(output)[:, :, chunk.drop :])
        return with_sample(output, torch.cat(samples, dim=2))

    with attributes_kept(module, ("decode",)):
        module.decode = decode  # type: ignore[assignment]
        yield partial(receipt, plan=plan, temporal=model.geometry.temporal)
