"""Autoencoders: one family (a diffusers class) a file, the models that ship, and models from a path.

Importing this registers the families in `FAMILIES` and the embedded models in `MODELS`, without torch or diffusers.
"""

from __future__ import annotations

from fidelity.models import (  # isort: skip  (families register before models need them; a line each)
    asymmetric,
    consistency,
    cosmos,
    dc,
    flux2,
    hunyuan_image,
    hunyuan_video,
    kl,
    kvae,
    ltx2_video,
    ltx_video,
    magvit,
    mochi,
    qwen_image,
    qwen_image21,
    rae,
    temporal_decoder,
    tiny,
    vq,
    wan,
)
from fidelity.models import reference, small, video  # isort: skip
from fidelity.models.base import legal_tiles
from fidelity.models.load import from_path
from fidelity.models.reference import overflow_twin

__all__ = [
    "asymmetric", "consistency", "cosmos", "dc", "flux2", "from_path", "hunyuan_image", "hunyuan_video", "kl",
    "kvae", "legal_tiles", "ltx2_video", "ltx_video", "magvit", "mochi", "overflow_twin", "qwen_image",
    "qwen_image21", "rae", "reference", "small", "temporal_decoder", "tiny", "video", "vq", "wan",
]  # fmt: skip
