"""The preview decoder that ships: `reference-tiny`, an AutoencoderTiny distilled from `reference-kl`.

Figures, training script and licences: `fidelity/data/reference_tiny/README.md`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fidelity.models.load import from_path, load
from fidelity.models.reference import reference_kl
from fidelity.models.tiny import TinyFamily
from fidelity.registry import MODELS

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = Path(__file__).resolve().parent.parent / "data" / "reference_tiny"


class PreviewFamily(TinyFamily):
    """AutoencoderTiny's class with pictures encoded by the model whose latents it previews, as in a pipeline."""

    def encode(self, module: Any, image: Tensor) -> Tensor:
        """Latents of `reference-kl`, scaled as a denoiser gives them."""
        factor = reference_kl.scaling.factor
        assert factor is not None
        return reference_kl.family.encode(_teacher(), image) * factor


@cache
def _teacher() -> Any:
    return reference_kl.load()


_found = from_path("reference-tiny", FOLDER)
_family = PreviewFamily()
reference_tiny = replace(
    _found,
    summary="preview decoder of reference-kl's latents, distilled from it: soft, no seams, ships with fidelity",
    family=_family,
    load=partial(load, "reference-tiny", _family, _found.config, (FOLDER / "diffusion_pytorch_model.safetensors",)),
)
MODELS.add(reference_tiny.name, reference_tiny)
