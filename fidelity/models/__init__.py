"""Autoencoders: one family (a diffusers class) a file, the models that ship, and models from a path.

Importing this registers the families in `FAMILIES` and the embedded models in `MODELS`, without torch or diffusers.
"""

from __future__ import annotations

from fidelity.models import (  # isort: skip  (families register before models need them; a line each)
    hunyuan_video,
    kl,
    wan,
)
from fidelity.models import reference, small, video  # isort: skip
from fidelity.models.base import legal_tiles
from fidelity.models.load import from_path
from fidelity.models.reference import overflow_twin

__all__ = [
    "from_path", "hunyuan_video", "kl", "legal_tiles", "overflow_twin", "reference", "small", "video", "wan",
]  # fmt: skip
