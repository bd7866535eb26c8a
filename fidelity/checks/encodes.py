"""Encoding under the same options: what image-to-image and first-frame conditioning go through."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fidelity import snippet
from fidelity.checks.instance import Shape, by, corner, cornered, decode, encode, instance, numbers
from fidelity.checks.outputs import lacking
from fidelity.checks.subject import Subject
from fidelity.errors import EvaluationError
from fidelity.lazy import torch
from fidelity.models.interface import interface
from fidelity.records import DecodePlan, Model
from fidelity.registry import check
from fidelity.snippet import Script

if TYPE_CHECKING:
    from torch import Tensor

CLEARLY = 0.8
"""A shift in space is one where its error is at most this share of the error without it."""
MOST = 1
"""Latent pixels that a tile is looked for about its place."""


def _picture(runner: Subject, latents: Tensor) -> Tensor:
    low, high = runner.model.data_range
    return decode(runner, latents).clamp(low, high)


def _no_slicing(model: Model) -> str | None:
    found = interface(model.family.name)
    return None if "use_slicing" in found.attributes else f"{model.family.name} cannot slice"


def _one_item(shape: Shape) -> str | None:
    return None if shape[0] > 1 else "a batch of one has nothing to slice"


@check("encode_sliced", diagnosis=("not_as_specified",), unit="latent values", inapplicable=_one_item, sets="slicing",
       lacks=_no_slicing)  # fmt: skip
def encode_sliced(runner: Subject, latents: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """A sliced batch of pictures gives the latents that each gives when it is encoded alone."""
    with instance(runner) as vae:
        pictures = torch.cat([_picture(runner, item) for item in corner(latents, items=2).split(1)])
        alone = torch.cat([encode(runner, picture) for picture in pictures.split(1)])
        vae.enable_slicing()
        return encode(runner, pictures), alone


def _encoded(script: Script, shape: Shape) -> str:
    """The expression of the latents of the plain decode of latents of this shape."""
    geometry = script.model.geometry
    frames = tuple(geometry.sample_frames(frames) for frames in shape[2:-2])
    size = (side * geometry.spatial for side in shape[-2:])
    return script.encode((shape[0], geometry.sample_channels, *frames, *size), "full.clamp(-1, 1)")


def _size_lines(script: Script, plan: DecodePlan, shape: Shape) -> None:
    script.say(f"encoded = {_encoded(script, shape)}")
    script.say('print("latents", *latents.shape, "encoded again", *encoded.shape)')


@check("encode_size", diagnosis=("geometry",), unit="latent pixels and frames", code=cornered(_size_lines),
       lacks=lacking("encode"))  # fmt: skip
def encode_size(runner: Subject, latents: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """A decoded picture or video is encoded to latents of the shape that it was decoded from."""
    item = corner(latents)
    with instance(runner):
        encoded = encode(runner, _picture(runner, item))
    runner.say(f"latents {by(item)} were encoded again to {by(encoded)}")
    return numbers(*encoded.shape), numbers(*item.shape)


@check("decode_after_encode", diagnosis=("state_leak",), lacks=lacking("encode"))
def decode_after_encode(runner: Subject, latents: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """A decode after an encode gives the bits of the one before."""
    item = corner(latents)
    with instance(runner):
        first = decode(runner, item)
        encode(runner, _picture(runner, item))
        return decode(runner, item), first


def _tiled_lines(script: Script, plan: DecodePlan, shape: Shape) -> None:
    script.say(f"plain = {_encoded(script, shape)}")
    snippet.apply(script, plan)
    script.say(
        f"tiled = {_encoded(script, shape)}",
        'print("plain", *plain.shape, "tiled", *tiled.shape)',
        'print("relative RMSE", ((tiled - plain).square().mean().sqrt() / plain.std()).item())',
    )


@check("encode_tiled", diagnosis=("geometry",), unit="latent pixels", needs="tiling", code=cornered(_tiled_lines),
       lacks=lacking("tiled_encode"))  # fmt: skip
def encode_tiled(runner: Subject, latents: Tensor, plan: DecodePlan) -> tuple[Tensor, Tensor]:
    """A picture that is encoded in tiles keeps its size, and each part of it its place."""
    item = corner(latents)
    with instance(runner):
        picture = _picture(runner, item)
        plain = encode(runner, picture)
    with runner.applied(plan) as run:
        run(item)  # proves that the plan is in force
        tiled = encode(runner, picture)
    if tiled.shape != plain.shape:
        runner.say(f"latents {by(plain)} became {by(tiled)}")
        return numbers(*tiled.shape), numbers(*plain.shape)
    if torch.equal(tiled, plain):
        raise EvaluationError("encode_tiled: the latents are those of a plain encode: it was not cut into tiles")
    down, right = _shift(tiled, plain)
    runner.say(f"the lower right quarter lies {down} rows and {right} columns beside its place")
    return numbers(down, right), numbers(0, 0)


def _shift(tiled: Tensor, plain: Tensor) -> tuple[int, int]:
    """By how much the lower right quarter lies beside its place: rows and columns, 0 unless clearly better there."""
    top, left = (size // 2 for size in plain.shape[-2:])
    inner = tiled[..., top:-MOST, left:-MOST]
    errors = {}
    for down in range(-MOST, MOST + 1):
        for right in range(-MOST, MOST + 1):
            high, wide = inner.shape[-2:]
            there = plain[..., top + down : top + down + high, left + right : left + right + wide]
            errors[down, right] = float((inner - there).square().mean())
    best = min(errors, key=lambda place: errors[place])
    return best if errors[best] < CLEARLY**2 * errors[0, 0] else (0, 0)
