"""Pictures for people, as lossless PNG named by their content: golden, candidate, and the difference ×8 around grey."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from fidelity.lazy import torch
from fidelity.runner import image_of
from fidelity.signal import fold

if TYPE_CHECKING:
    from torch import Tensor

AMPLIFY = 8.0


def save(
    candidate: Tensor, golden: Tensor, data_range: tuple[float, float], folder: Path
) -> dict[str, tuple[str, ...]]:
    """Write one PNG a batch item, of a video one a frame, to `folder`/images, each picture once.

    Returns paths relative to `folder`, item after item: frame t of item b stands at b · T + t.
    """
    pictures = {
        "golden": image_of(golden, data_range),
        "candidate": image_of(candidate, data_range),
        "difference": difference(candidate, golden, data_range),
    }
    return {name: tuple(_write(item, folder) for item in fold(batch)) for name, batch in pictures.items()}


def difference(candidate: Tensor, golden: Tensor, data_range: tuple[float, float]) -> Tensor:
    """(candidate − golden) × 8 around middle grey, uint8; non-finite values are white."""
    low, high = data_range
    grey = (candidate - golden) * (255.0 / (high - low)) * AMPLIFY + 128.0
    return torch.nan_to_num(grey, nan=255.0, posinf=255.0, neginf=255.0).clamp(0, 255).round().to(torch.uint8)


def _write(image: Tensor, folder: Path) -> str:
    from PIL import Image

    array = image.movedim(0, -1).contiguous().numpy()
    digest = hashlib.blake2b(array.tobytes() + repr(array.shape).encode(), digest_size=8).hexdigest()
    path = folder / "images" / f"{digest}.png"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        grey = array[..., 0] if array.shape[-1] == 1 else array[..., :3]
        partial = path.with_suffix(f".{id(image)}.tmp")
        Image.fromarray(grey).save(partial, format="PNG")
        partial.replace(path)
    return f"images/{path.name}"
