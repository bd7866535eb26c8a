"""State left behind, memory held, noise drawn: FAULTS.md 18 and 35 to 37."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from diffusers import AutoencoderKL
from diffusers.models.autoencoders.vae import Decoder, DecoderOutput
from torch import Tensor

from fidelity.optimizations import slicing as slicing_
from fidelity.optimizations import tiling as tiling_
from tests.faults.record import TILED, Fault
from tests.faults.upstream import Tiler, method, tiler


@contextmanager
def sizes_stay() -> Iterator[None]:
    """Disabling leaves the tile sizes behind."""
    with patch.object(tiling_, "attributes_kept", lambda module, names: nullcontext()):
        yield


@contextmanager
def slicing_stays() -> Iterator[None]:
    with patch.object(slicing_, "attributes_kept", lambda module, names: nullcontext()):
        yield


@method("decode")
def hooks_stack(original: Any, vae: Any, z: Tensor, *args: Any, **kwargs: Any) -> Any:
    """#7448: each decode adds a hook and removes none."""
    vae.decoder.register_forward_hook(lambda module, inputs, output: None)
    return original(vae, z, *args, **kwargs)


@method("decode")
def cache_stays(original: Any, vae: Any, z: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The last sample stays on the model."""
    output = original(vae, z, *args, **kwargs)
    vae.decoder.__dict__["last"] = output.sample
    return output


@method("decode")
def weights_drift(original: Any, vae: Any, z: Tensor, *args: Any, factor: float = 1.001, **kwargs: Any) -> Any:
    """Each decode folds a factor into a weight once more."""
    output = original(vae, z, *args, **kwargs)
    vae.decoder.conv_out.weight.data.mul_(factor)
    return output


@method("decode")
def train_mode(original: Any, vae: Any, z: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A decode that ends in training mode."""
    output = original(vae, z, *args, **kwargs)
    vae.train()
    return output


class KeepsTiles(Tiler):
    """Everything that the tiles made is kept until the end."""

    def __call__(self, z: Tensor) -> Tensor:
        kept: list[Any] = []
        handles = [
            part.register_forward_hook(lambda module, inputs, output: kept.append(output))
            for part in self.vae.decoder.modules()
            if not list(part.children())
        ]
        try:
            return super().__call__(z)
        finally:
            for handle in handles:
                handle.remove()


class FullFirst(Tiler):
    """The whole picture is decoded first, and the tiles after it."""

    def __call__(self, z: Tensor) -> Tensor:
        enabled, self.vae.use_tiling = self.vae.use_tiling, False
        try:
            self.vae._decode(z)
        finally:
            self.vae.use_tiling = enabled
        return super().__call__(z)


@method("decode")
def slices_kept(original: Any, vae: Any, z: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Activations of the slices are kept until all are joined."""
    kept: list[Any] = []
    parts = vae.decoder.modules() if vae.use_slicing and z.shape[0] > 1 else ()
    handles = [
        part.register_forward_hook(lambda module, inputs, output: kept.append(output))
        for part in parts
        if not list(part.children())
    ]
    try:
        return original(vae, z, *args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()


@method("forward", Decoder)
def noise_each_call(original: Any, decoder: Any, z: Tensor, *args: Any, levels: float = 1.0, **kwargs: Any) -> Tensor:
    """Noise drawn at each call, by the global generator."""
    out = original(decoder, z, *args, **kwargs)
    return out + torch.randn(out.shape, dtype=out.dtype) * (levels / 127.5)


class NoiseInTiles(Tiler):
    """Noise drawn for each tile."""

    def tile(self, z: Tensor, i: int, j: int) -> Tensor:
        own = super().tile(z, i, j)
        return own + torch.randn(own.shape, dtype=own.dtype) * (self.levels / 127.5)

    levels = 0.5


@method("decode")
def noise_on_latents(original: Any, vae: Any, z: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The posterior is sampled where its mode is meant."""
    return original(vae, z + 0.02 * torch.randn(z.shape, dtype=z.dtype), *args, **kwargs)


@contextmanager
def uninitialised() -> Iterator[None]:
    """A border that is never written: what was there before shows."""
    original = AutoencoderKL.decode
    calls = [0]

    def decode(vae: Any, z: Tensor, *args: Any, **kwargs: Any) -> Any:
        sample = original(vae, z, *args, **kwargs).sample.clone()
        calls[0] += 1
        sample[..., -1] = float(calls[0] % 7) / 7
        return DecoderOutput(sample=sample)

    with patch.object(AutoencoderKL, "decode", decode):
        yield


FAULTS = (
    Fault("tile sizes stay", "35", sizes_stay, ("state_leak",), TILED[:3]),
    Fault("slicing stays on", "35", slicing_stays, ("state_leak",), ("fp32,slicing", "bf16,slicing"), ("pair",)),
    Fault("hooks stack up", "35", hooks_stack, ("state_leak",), ("fp32", "tile=16,overlap=0.25", "fp32,disk")),
    Fault("a sample stays on the model", "35+", cache_stays, ("state_leak",), ("fp32", "bf16")),
    Fault(
        "weights drift by each decode",
        "35+",
        weights_drift,
        ("state_leak", "nondeterministic"),
        ("fp32", "fp32,slicing"),
        ("pair",),
        amounts={"factor": (1.001,)},
    ),
    Fault("training mode left on", "35+", train_mode, ("state_leak",), ("fp32", "fp16")),
    Fault(
        "tiles keep what they made",
        "36",
        tiler(KeepsTiles),
        ("memory",),
        ("tile=16,overlap=0.25", "tile=16,overlap=0.5", "bf16,tile=16,overlap=0.25"),
    ),
    Fault(
        "full decode before the tiles",
        "36",
        tiler(FullFirst),
        ("memory", "geometry"),
        ("tile=16,overlap=0.25", "bf16,tile=16,overlap=0.5"),
    ),
    Fault(
        "slices keep what they made", "36", slices_kept, ("memory",), ("fp32,slicing", "bf16,slicing"), ("pair", "trio")
    ),
    Fault(
        "noise at each call",
        "37",
        noise_each_call,
        ("nondeterministic",),
        ("fp32", "fp16", "bf16,slicing", "tile=16,overlap=0.25"),
        ("pair",),
        amounts={"levels": (0.1, 1.0)},
    ),
    Fault(
        "noise in each tile",
        "37",
        tiler(NoiseInTiles),
        ("nondeterministic",),
        (*TILED[:3], "fp16,tile=16,overlap=0.25"),
    ),
    Fault("noise on the latents", "37", noise_on_latents, ("nondeterministic",), ("fp32", "fp16")),
    Fault("memory that is never written", "37+", uninitialised, ("nondeterministic",), ("fp32", "fp16")),
)
