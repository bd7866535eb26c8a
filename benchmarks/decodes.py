"""Clean decodes to calibrate on and to injure: the reference model's, with the honest error of bf16 and fp16.

Crops of scikit-image's photographs at many places, scales and exposures, and films panned and zoomed over them, each
encoded and decoded in fp32 (the golden) and again in a lower precision (the candidate). Seeded: the same count gives
the same decodes on the same machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch

from fidelity import registry
from fidelity.optimizations.plan import apply_plan
from fidelity.records import DecodePlan, Model
from tests.doctored.videos import shoot

PHOTOGRAPHS = ("astronaut", "coffee", "chelsea", "rocket", "camera", "retina", "hubble_deep_field")
NOISES = ("bf16", "fp16")
SIZES = ((256, 256), (192, 256), (256, 320))
CONTENTS = ("flat", "textured", "dark")
FRAMES, FILM = 17, 48
"""Frames of a film and pixels along their sides: small frames have the noisier means."""


@dataclass(frozen=True)
class Decode:
    """A seamless candidate and its golden, (1, 3, [T,] H, W) in [-1, 1], with what they show and the error's origin."""

    golden: torch.Tensor
    candidate: torch.Tensor
    noise: str
    content: str
    photograph: str


@cache
def photograph(name: str) -> torch.Tensor:
    """(1, 3, H, W) in [-1, 1]."""
    import skimage.data

    array = torch.from_numpy(getattr(skimage.data, name)())
    array = array[..., None].expand(*array.shape, 3) if array.ndim == 2 else array
    return array.permute(2, 0, 1)[None].float() / 127.5 - 1


def crop(chance: random.Random, name: str, size: tuple[int, int], dark: bool) -> torch.Tensor:
    """A random window of the photograph at a random scale, mirrored or not; `dark`: underexposed by two stops."""
    picture = photograph(name)
    height, width = picture.shape[-2:]
    scale = chance.uniform(1.0, max(1.0, min(height / size[0], width / size[1], 3.0)))
    tall, wide = min(height, int(size[0] * scale)), min(width, int(size[1] * scale))
    top, left = chance.randint(0, height - tall), chance.randint(0, width - wide)
    window = picture[..., top : top + tall, left : left + wide]
    window = torch.nn.functional.interpolate(window, size=size, mode="bilinear", antialias=True)
    window = window.flip(-1) if chance.random() < 0.5 else window
    return (window + 1) * 0.25 - 1 if dark else window


def content(golden: torch.Tensor) -> str:
    """Dark below a mean of 70 levels; else flat or textured by the mean difference of neighbouring pixels."""
    levels = (golden + 1) * 127.5
    if levels.mean() < 70:
        return "dark"
    return "flat" if (levels[..., 1:] - levels[..., :-1]).abs().mean() < 5 else "textured"


def decodes(count: int, seed: int) -> Iterator[Decode]:
    """`count` decodes of pictures, alternating photographs, sizes, exposures and noises."""
    chance = random.Random(seed)
    for index in range(count):
        name, size = PHOTOGRAPHS[index % len(PHOTOGRAPHS)], SIZES[index // 2 % len(SIZES)]
        noise = NOISES[index % 2]
        golden, candidate = _decoded(crop(chance, name, size, dark=index % 4 == 3), noise)
        yield Decode(golden, candidate, noise, content(golden), name)


def films(count: int, seed: int, frames: int = FRAMES, size: int = FILM) -> Iterator[Decode]:
    """`count` decodes of films, each frame by itself: views that pan by up to three pixels a frame, and zoom."""
    chance = random.Random(seed)
    for index in range(count):
        name, noise = PHOTOGRAPHS[index % len(PHOTOGRAPHS)], NOISES[index % 2]
        window = crop(chance, name, (4 * size, 4 * size), dark=index % 4 == 3)
        move, zoom = (chance.uniform(-6, 6), chance.uniform(-3, 3)), chance.uniform(0.985, 1.015)
        golden, candidate = _decoded(shoot(window, frames, size, move, zoom, chance.uniform(1, 2.5)), noise)
        yield Decode(_film(golden), _film(candidate), noise, content(golden), name)


def _film(frames: torch.Tensor) -> torch.Tensor:
    return frames.transpose(0, 1)[None].contiguous()


@cache
def _reference() -> tuple[Model, torch.nn.Module]:
    registry.load_plugins()
    model = registry.MODELS.get("reference-kl")
    return model, model.load()


def _decoded(pictures: torch.Tensor, noise: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Through the autoencoder in fp32, and its decoder in that precision: golden and candidate, (N, 3, H, W)."""
    model, module = _reference()
    with torch.inference_mode():
        latents = model.family.encode(module, pictures)
        golden = model.family.decode(module, latents).clone()
        with apply_plan(module, DecodePlan(dtype=noise), model=model, device="cpu"):
            candidate = model.family.decode(module, latents.to(getattr(torch, HALF[noise]))).float()
    return golden, candidate


HALF = {"bf16": "bfloat16", "fp16": "float16"}
