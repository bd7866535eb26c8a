"""Slicing and batches: FAULTS.md 12 to 16."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKL
from diffusers.models.autoencoders.vae import AutoencoderMixin, DecoderOutput
from torch import Tensor

from tests.faults.record import Fault
from tests.faults.upstream import method, plain_decode, sliced

SLICED = ("fp32,slicing", "bf16,slicing", "slicing,tile=16,overlap=0.25")


@method("decode")
def tiling_first(original: Any, vae: Any, z: Tensor, return_dict: bool = True, generator: Any = None) -> Any:
    """#9342: the tiling branch before the slicing branch."""
    if vae.use_tiling and max(z.shape[-2:]) > vae.tile_latent_min_size:
        return vae.tiled_decode(z)
    return original(vae, z, return_dict)


@sliced
def whole_batch(vae: Any, z: Tensor) -> Tensor:
    """#6850: the comprehension passes the whole batch."""
    return torch.cat([vae._decode(z).sample for _ in z.split(1)])


@sliced
def reordered(vae: Any, z: Tensor) -> Tensor:
    return torch.cat([vae._decode(part).sample for part in z.split(1)][::-1])


@sliced
def first_repeated(vae: Any, z: Tensor) -> Tensor:
    parts = z.split(1)
    return torch.cat([vae._decode(parts[0]).sample for _ in parts])


@sliced
def last_lost(vae: Any, z: Tensor) -> Tensor:
    return torch.cat([vae._decode(part).sample for part in z.split(1)[:-1]])


@sliced
def bare_tensor(vae: Any, z: Tensor) -> Tensor:
    """#12343: `_decode(return_dict=False)` gives a tuple, and `.sample` is read from it."""
    return torch.cat([vae._decode(part, return_dict=False).sample for part in z.split(1)])


@sliced
def bleeding(vae: Any, z: Tensor, share: float = 0.05) -> Tensor:
    """A buffer of the last item is mixed into the next."""
    samples = torch.cat([vae._decode(part).sample for part in z.split(1)])
    return torch.lerp(samples, samples.roll(1, 0), share)


@sliced
def chunked_by_two(vae: Any, z: Tensor) -> Tensor:
    """Slices of two where one was asked."""
    return torch.cat([vae._decode(part).sample for part in z.split(2)])


@method("enable_slicing", AutoencoderMixin)
def slicing_swallowed(original: Any, vae: Any) -> None:
    """A wrapper that swallows the call."""


@method("enable_slicing", AutoencoderMixin)
def flag_elsewhere(original: Any, vae: Any) -> None:
    """The flag is set on the decoder, which nobody asks."""
    vae.decoder.__dict__["use_slicing"] = True


@method("_decode")
def tiling_swallowed(original: Any, vae: Any, z: Tensor, return_dict: bool = True) -> Any:
    """A decode that never looks at the flag."""
    return plain_decode(vae, z)


@method("_decode")
def fallback(original: Any, vae: Any, z: Tensor, return_dict: bool = True) -> Any:
    """A wrapper whose tiled decode raises, and which then decodes at once in silence."""
    try:
        if vae.use_tiling:
            raise RuntimeError("no tiled kernel")
        return original(vae, z, return_dict)
    except RuntimeError:
        return plain_decode(vae, z)


@method("decode")
def batch_reversed(original: Any, vae: Any, z: Tensor, return_dict: bool = True, generator: Any = None) -> Any:
    """Items come back in another order, with or without slicing."""
    return DecoderOutput(sample=original(vae, z, return_dict).sample.flip(0))


assert AutoencoderKL.enable_slicing is AutoencoderMixin.enable_slicing

FAULTS = (
    Fault(
        "tiling before slicing",
        "12",
        tiling_first,
        ("not_engaged",),
        ("slicing,tile=16,overlap=0.25", "bf16,slicing,tile=16,overlap=0.5"),
        ("pair", "trio"),
    ),
    Fault("whole batch for each slice", "13", whole_batch, ("geometry",), SLICED, ("pair", "trio")),
    Fault("slices in another order", "14", reordered, ("order",), SLICED, ("pair", "trio")),
    Fault("first slice repeated", "14", first_repeated, ("order",), SLICED, ("pair", "trio")),
    Fault("last slice lost", "14+", last_lost, ("geometry",), SLICED, ("pair", "trio")),
    Fault(
        "batch in another order",
        "14+",
        batch_reversed,
        ("order",),
        ("fp32", "bf16", "tile=16,overlap=0.25"),
        ("pair", "trio"),
    ),
    Fault("sample read from a bare tensor", "15", bare_tensor, ("crash",), SLICED, ("pair", "trio")),
    Fault(
        "an item bleeds into the next",
        "14+",
        bleeding,
        ("ghost",),
        SLICED[:2],
        ("pair", "trio"),
        amounts={"share": (0.02, 0.1)},
    ),
    Fault("slices of two", "16+", chunked_by_two, ("not_engaged",), SLICED[:2], ("trio", "pair")),
    Fault("slicing swallowed", "16", slicing_swallowed, ("not_engaged",), SLICED, ("pair", "trio")),
    Fault("slicing flag on another object", "16", flag_elsewhere, ("not_engaged",), SLICED, ("pair", "trio")),
    Fault(
        "tiling swallowed",
        "16",
        tiling_swallowed,
        ("not_engaged",),
        ("tile=16,overlap=0.25", "tile=16,overlap=0.0", "bf16,tile=16,overlap=0.5"),
    ),
    Fault(
        "tiling falls back in silence",
        "16",
        fallback,
        ("not_engaged",),
        ("tile=16,overlap=0.25", "fp16,tile=16,overlap=0.25"),
    ),
)
