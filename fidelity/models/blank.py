"""An instance of a model's class without weights: on no device, so that a large one costs nothing."""

from __future__ import annotations

from typing import Any

from fidelity.errors import ModelError
from fidelity.lazy import torch
from fidelity.records import Model


def blank(model: Model) -> Any:
    """The class of the model's config as its family settles it, on the meta device. Raises ModelError."""
    import diffusers

    # its module is imported first: constants that it makes must be on a device
    if getattr(diffusers, model.family.name, None) is None:
        raise ModelError(f"diffusers {diffusers.__version__} has no {model.family.name}: install a later one")
    with torch.device("meta"):
        return model.family.build(model.config)
