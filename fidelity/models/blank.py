"""An instance of a model's class without weights: on no device, so that a large one costs nothing."""

from __future__ import annotations

from typing import Any

from fidelity.lazy import torch
from fidelity.records import Model


def blank(model: Model) -> Any:
    """The class of the model's config as its family settles it, on the meta device. Raises ModelError."""
    import diffusers

    # its module is imported first: constants that it makes must be on a device; `build` says if there is none
    getattr(diffusers, model.family.name, None)
    with torch.device("meta"):
        return model.family.build(model.config)
