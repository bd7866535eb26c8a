"""Autoencoders: one family (a diffusers class) a file, the models that ship, and models from a path.

Importing this registers the families in `FAMILIES` and the embedded models in `MODELS`, without torch or diffusers.
"""

from __future__ import annotations

from fidelity.models import (  # isort: skip  (families register before models need them; a line each)
    allegro,
    asymmetric,
    cogvideox,
    consistency,
    cosmos,
    dc,
    flux2,
    hunyuan_image,
    hunyuan_image_refiner,
    hunyuan_video,
    hunyuan_video15,
    kandinsky6_sr,
    kl,
    kvae,
    kvae_video,
    ltx2_diffusion,
    ltx2_video,
    ltx_video,
    magvit,
    minimax_h3,
    mochi,
    qwen_image,
    qwen_image21,
    rae,
    temporal_decoder,
    tiny,
    vidtok,
    vq,
    wan,
)
from fidelity.models import reference, small, tiny_reference, video  # isort: skip
from fidelity.models.base import legal_tiles
from fidelity.models.load import from_path
from fidelity.models.reference import overflow_twin

__all__ = [
    "allegro", "asymmetric", "cogvideox", "consistency", "cosmos", "dc", "flux2", "from_path", "hunyuan_image",
    "hunyuan_image_refiner", "hunyuan_video", "hunyuan_video15", "kandinsky6_sr", "kl", "kvae", "kvae_video",
    "legal_tiles", "ltx2_diffusion", "ltx2_video", "ltx_video", "magvit", "minimax_h3", "mochi", "overflow_twin",
    "qwen_image", "qwen_image21", "rae", "reference", "small", "temporal_decoder", "tiny", "tiny_reference", "video",
    "vidtok", "vq", "wan",
]  # fmt: skip
