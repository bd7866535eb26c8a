"""The models that ship: `reference-kl`, trained on photographs, and its twin that overflows in fp16.

Figures, training script, images and licences: `fidelity/data/reference_kl/README.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fidelity.lazy import torch
from fidelity.models.load import from_path
from fidelity.registry import MODELS

if TYPE_CHECKING:
    from torch import nn

FOLDER = Path(__file__).resolve().parent.parent / "data" / "reference_kl"
STREAM = ("up_blocks.2.upsamplers.0.conv", "up_blocks.3.resnets.0.conv2", "up_blocks.3.resnets.1.conv2")
"""The three convolutions that write the residual stream of the last decoder block."""


def overflow_twin(module: Any, factor: float = 256.0) -> Any:
    """Multiply what writes the stream of the last decoder block, in place, and declare `force_upcast`.

    The GroupNorms that read the stream divide the factor out again, so the sample stays the same in fp32, while the
    stream passes 65504, the largest finite fp16, on every latents that ships (105,890 at least, see the README).
    """
    with torch.no_grad():
        for name in STREAM:
            for parameter in module.decoder.get_submodule(name).parameters():
                parameter.mul_(factor)
    module.register_to_config(force_upcast=True)
    return module


class _HotLoad:
    """Loads the twin; a class, so that the Model can be sent to a worker process."""

    def __init__(self, load: Callable[[], nn.Module]):
        self.load = load

    def __call__(self) -> nn.Module:
        return overflow_twin(self.load())


reference_kl = replace(
    from_path("reference-kl", FOLDER),
    summary="small AutoencoderKL trained on photographs: f=8, 4 channels, 2.2 M weights, ships with fidelity",
)
reference_kl_hot = replace(
    reference_kl,
    name="reference-kl-hot",
    summary="reference-kl with activations beyond fp16, so it needs force_upcast, as SDXL's does",
    config={**reference_kl.config, "force_upcast": True},
    load=_HotLoad(reference_kl.load),
    force_upcast=True,
)
MODELS.add(reference_kl.name, reference_kl)
MODELS.add(reference_kl_hot.name, reference_kl_hot)
