"""Parts of the photographs that scikit-image ships in its wheel, for the suites to encode. Nothing is downloaded."""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fidelity.errors import LatentsError

if TYPE_CHECKING:
    from PIL import Image

SHA256 = {
    "astronaut.png": "88431cd9653ccd539741b555fb0a46b61558b301d4110412b5bc28b5e3ea6cb5",
    "brick.png": "7966caf324f6ba843118d98f7a07746d22f6a343430add0233eca5f6eaaa8fcf",
    "coffee.png": "cc02f8ca188b167c775a7101b5d767d1e71792cf762c33d6fa15a4599b5a8de7",
    "gravel.png": "c48615b451bf1e606fbd72c0aa9f8cc0f068ab7111ef7d93bb9b0f2586440c12",
    "hubble_deep_field.jpg": "3a19c5dd8a927a9334bb1229a6d63711b1c0c767fb27e2286e7c84a3e2c2f5f4",
    "text.png": "bd84aa3a6e3c9887850d45d606c96b2e59433fbef50338570b63c319e668e6d1",
}
"""As in `skimage.data`'s own registry."""


@dataclass(frozen=True)
class Photograph:
    """A part of a file of `skimage/data`: its place and size in pixels, and how many of them one pixel of it takes."""

    file: str
    top: int
    left: int
    height: int
    width: int
    shrink: int = 1

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of what is read, in pixels."""
        return self.height // self.shrink, self.width // self.shrink

    def read(self) -> Image.Image:
        """The part as an RGB picture. Raises LatentsError if the file is missing or is another one."""
        return self.moved(0, 0)

    def moved(self, down: int, right: int) -> Image.Image:
        """The same part moved by so many pixels, as a camera would. Raises LatentsError."""
        from PIL import Image

        spec = importlib.util.find_spec("skimage")
        folders = spec.submodule_search_locations if spec else None
        path = Path((folders or ["skimage"])[0]) / "data" / self.file
        if not path.is_file():
            raise LatentsError(f"photograph {path} is missing: reinstall scikit-image")
        if hashlib.sha256(path.read_bytes()).hexdigest() != SHA256[self.file]:
            raise LatentsError(f"photograph {path} is not the one the goldens were made of: reinstall scikit-image")
        with Image.open(path) as picture:
            top, left = self.top + down, self.left + right
            if min(top, left) < 0 or top + self.height > picture.height or left + self.width > picture.width:
                raise LatentsError(f"photograph {path}: the part at {top}, {left} reaches beyond the picture")
            part = picture.convert("RGB").crop((left, top, left + self.width, top + self.height))
        return part.reduce(self.shrink) if self.shrink > 1 else part


PHOTOGRAPHS: dict[str, tuple[str, tuple[Photograph, ...]]] = {
    "photo-pair": (
        "two photographs, a face and a cup with a shining spoon, 192×256",
        (Photograph("astronaut.png", 8, 96, 192, 256), Photograph("coffee.png", 130, 180, 192, 256)),
    ),
    "photo-512": (
        "one photograph, an astronaut in front of a flag, 512×512",
        (Photograph("astronaut.png", 0, 0, 512, 512),),
    ),
    "photo-text": (
        "handwriting on lined paper, 160×448",
        (Photograph("text.png", 6, 0, 160, 448),),
    ),
    "photo-texture": (
        "fine texture, a brick wall and gravel, 192×192",
        (Photograph("brick.png", 160, 128, 192, 192), Photograph("gravel.png", 160, 160, 192, 192)),
    ),
    "photo-night": (
        "night sky with galaxies, 192×256",
        (Photograph("hubble_deep_field.jpg", 320, 560, 192, 256),),
    ),
}
"""What each is of, and its parts, all of one size with sides that are multiples of 32.

Public domain or CC0 by the docstrings of `skimage.data`. `reference-kl` has not seen astronaut, coffee and text in its
training; it has seen brick, gravel and hubble_deep_field.
"""

PANS: dict[str, tuple[str, tuple[tuple[Photograph, tuple[int, int]], ...]]] = {
    "photo-pan": (
        "two videos, a camera moving over a face and a cup, 56×80",
        (
            (Photograph("astronaut.png", 8, 110, 168, 240, shrink=3), (0, 3)),
            (Photograph("coffee.png", 130, 180, 168, 240, shrink=3), (3, 3)),
        ),
    ),
}
"""Videos: where each begins, and how many pixels of the file it moves down and right with every frame."""
