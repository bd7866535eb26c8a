"""Scale, range and place of the whole picture: FAULTS.md 22 to 25."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.autoencoders.vae import DecoderOutput
from torch import Tensor

from tests.faults.record import Fault
from tests.faults.upstream import method

EXACT = ("fp32", "fp32,slicing", "bf16", "fp16")


@method("decode")
def latents_scaled(original: Any, vae: Any, z: Tensor, *args: Any, gain: float = 1.005, **kwargs: Any) -> Any:
    """Another scaling_factor than the model's: the latents come out too large by `gain`."""
    return original(vae, z * gain, *args, **kwargs)


@method("decode")
def latents_shifted(original: Any, vae: Any, z: Tensor, *args: Any, shift: float = 0.1159, **kwargs: Any) -> Any:
    """shift_factor forgotten, or added twice."""
    return original(vae, z + shift / 0.2447, *args, **kwargs)


@method("decode")
def channels_scaled(original: Any, vae: Any, z: Tensor, *args: Any, power: float = 1.0, **kwargs: Any) -> Any:
    """Per-channel std applied twice (power 1) or not at all (power -1)."""
    std = torch.tensor([1.10, 1.15, 1.08, 1.12], dtype=z.dtype).view(1, 4, 1, 1) ** power
    return original(vae, z * std, *args, **kwargs)


@method("decode")
def channels_shifted(original: Any, vae: Any, z: Tensor, *args: Any, sign: float = 1.0, **kwargs: Any) -> Any:
    """Per-channel mean added twice or not at all."""
    mean = torch.tensor([0.25, 0.2, -0.15, 0.3], dtype=z.dtype).view(1, 4, 1, 1) * sign
    return original(vae, z + mean, *args, **kwargs)


def after(change: Any) -> Any:
    """Injects `change(sample, **amounts)` behind `decode`."""

    @method("decode")
    def inject(original: Any, vae: Any, z: Tensor, *args: Any, **kwargs: Any) -> Any:
        return_dict = kwargs.pop("return_dict", True)
        return DecoderOutput(sample=change(original(vae, z, *args, return_dict=return_dict).sample, **kwargs))

    return inject


def _unit(x: Tensor) -> Tensor:
    return (x + 1) / 2


def _levels(x: Tensor) -> Tensor:
    return _unit(x).clamp(0, 1) * 255


twice = after(lambda x, clip=False: _unit(x).clamp(0, 1) if clip else _unit(x))
back_twice = after(lambda x, clip=False: (2 * x - 1).clamp(-1, 1) if clip else 2 * x - 1)
uint8_for_unit = after(lambda x: _levels(x) / 127.5)
truncated = after(lambda x: _levels(x).floor() / 127.5 - 1)
truncated_negative = after(lambda x: (_levels(x) - 0.5).floor().clamp_min(0) / 127.5 - 1)
swapped = after(lambda x, to="BGR": x[:, ["RGB".index(channel) for channel in to]])
clamped = after(lambda x, at=1.0: x.clamp(-at, at))
flipped = after(lambda x, axis=-1: x.flip(axis))
moved = after(lambda x, by=1, axis=-1: x.roll(by, axis))
gamma = after(lambda x, power=1.02: _unit(x).clamp(0, 1) ** power * 2 - 1)
posterised = after(lambda x, bits=6: (_unit(x).clamp(0, 1) * (2**bits - 1)).round() / (2**bits - 1) * 2 - 1)


def _blurred(x: Tensor, share: float = 0.5) -> Tensor:
    soft = torch.nn.functional.avg_pool2d(torch.nn.functional.pad(x, (1, 1, 1, 1), mode="replicate"), 3, 1)
    return torch.lerp(x, soft, share)


def _halved(x: Tensor) -> Tensor:
    small = torch.nn.functional.avg_pool2d(x, 2)
    return torch.nn.functional.interpolate(small, scale_factor=2, mode="bilinear")


blurred, halved = after(_blurred), after(_halved)

FAULTS = (
    Fault(
        "scaling_factor off by half a percent",
        "22",
        latents_scaled,
        ("scale",),
        EXACT,
        amounts={"gain": (1.005, 0.995)},
    ),
    Fault(
        "another model's scaling_factor",
        "23",
        latents_scaled,
        ("scale",),
        ("fp32", "bf16", "tile=16,overlap=0.25"),
        amounts={"gain": (0.18215 / 0.13025, 0.13025 / 0.18215, 0.2447, 1.1)},
    ),
    Fault(
        "shift_factor forgotten or doubled",
        "23",
        latents_shifted,
        ("shift",),
        ("fp32", "bf16", "fp32,slicing"),
        amounts={"shift": (0.1159, -0.0609, 0.02)},
    ),
    Fault(
        "per-channel std twice or never",
        "23",
        channels_scaled,
        ("scale",),
        ("fp32", "bf16"),
        amounts={"power": (1.0, -1.0)},
    ),
    Fault(
        "per-channel mean twice or never",
        "23",
        channels_shifted,
        ("shift",),
        ("fp32", "bf16"),
        amounts={"sign": (1.0, -1.0)},
    ),
    Fault(
        "normalised twice",
        "24",
        twice,
        ("double_normalised",),
        ("fp32", "bf16", "tile=16,overlap=0.25"),
        amounts={"clip": (False, True)},
    ),
    Fault(
        "denormalised twice",
        "24",
        back_twice,
        ("double_normalised",),
        ("fp32", "fp32,tile=16,overlap=0.25"),
        amounts={"clip": (False, True)},
    ),
    Fault("levels for a unit range", "24+", uint8_for_unit, ("scale", "shift", "double_normalised"), ("fp32", "bf16")),
    Fault("cut down to uint8", "25", truncated, ("truncation",), ("fp32", "fp16", "fp32,slicing")),
    Fault("cut down below uint8", "25+", truncated_negative, ("truncation",), ("fp32", "bf16")),
    Fault("fewer bits", "25+", posterised, ("truncation",), ("fp32", "bf16"), amounts={"bits": (6, 7)}),
    Fault(
        "channels in another order",
        "25",
        swapped,
        ("order",),
        ("fp32", "bf16", "tile=16,overlap=0.25"),
        amounts={"to": ("BGR", "GRB")},
    ),
    Fault("clamped", "9+", clamped, ("clipping",), ("fp32", "bf16"), amounts={"at": (1.0, 0.9)}),
    Fault("mirrored", "6+", flipped, ("geometry",), ("fp32", "tile=16,overlap=0.25"), amounts={"axis": (-1, -2)}),
    Fault(
        "moved by a pixel",
        "6+",
        moved,
        ("misaligned",),
        ("fp32", "bf16", "tile=16,overlap=0.25"),
        amounts={"by": (1, -2), "axis": (-1, -2)},
    ),
    Fault("gamma", "23+", gamma, ("scale", "shift"), ("fp32",), amounts={"power": (1.03, 0.9)}),
    Fault("soft as a preview", "9+", blurred, ("blur",), ("fp32", "bf16"), amounts={"share": (0.3, 0.8)}),
    Fault("decoded small and enlarged", "8+", halved, ("blur",), ("fp32", "bf16", "tile=16,overlap=0.25")),
)
