"""Autoencoders: one family (a diffusers class) a file, the models that ship, and models from a path.

Importing this registers the families in `FAMILIES` and the embedded models in `MODELS`, without torch or diffusers.
"""

from __future__ import annotations

from fidelity.models import kl as _kl  # registers before the models that need it
from fidelity.models import reference as _reference
from fidelity.models.base import legal_tiles
from fidelity.models.load import from_path
from fidelity.models.reference import overflow_twin

__all__ = ["from_path", "legal_tiles", "overflow_twin"]
