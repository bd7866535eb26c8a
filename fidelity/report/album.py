"""The pictures of a run, each embedded once in the page, by the digest of its bytes.

All are lossless WebP, a fifth smaller than their PNG. A candidate is stored as its difference from its golden, modulo
256, which halves it again; the page adds the golden to it and has the very pixels back.
"""

from __future__ import annotations

import base64
import hashlib
import io
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

PNG = b"\x89PNG\r\n\x1a\n"
Ref = dict[str, str]
"""`digest` of an embedded picture, with `base`, the digest of the one to add to it; or `missing`: why there is none."""


class Album:
    """The run's pictures, each embedded once, until the budget (characters of base64) is spent."""

    def __init__(self, folder: Path, budget: int):
        self.folder, self.left = folder.resolve(), budget
        self.embedded: dict[str, str] = {}
        """Base64 of each distinct picture, or of its difference from its base, by digest of its PNG."""
        self._bases: dict[str, str | None] = {}
        self._known: dict[str, Ref] = {}
        self._paths: dict[str, Path] = {}

    def add(self, name: str, base: Ref | None = None) -> Ref:
        """Embed `name` (relative to the run's folder), as a difference from `base` if that is embedded as it is."""
        if name not in self._known:
            self._known[name] = self._load(name, (base or {}).get("digest"))
        return self._known[name]

    def _load(self, name: str, base: str | None) -> Ref:
        try:
            path = (self.folder / name).resolve()
            if not path.is_relative_to(self.folder):
                return {"missing": f"{name} lies outside the run's folder and was not embedded"}
            data = path.read_bytes()
        except (OSError, ValueError) as error:
            return {"missing": f"{name} cannot be read: {getattr(error, 'strerror', None) or error}"}
        if not data.startswith(PNG):
            return {"missing": f"{name} is not a PNG"}
        digest = hashlib.blake2b(data, digest_size=12).hexdigest()
        if digest not in self.embedded:
            try:
                packed, on = self._pack(path, base)
            except (OSError, SyntaxError, ValueError) as error:  # what Pillow says of a damaged file
                return {"missing": f"{name} is damaged: {error}"}
            text = base64.b64encode(packed).decode()
            if len(text) > self.left:
                return {"missing": f"{name} was left out to keep this file small; it lies beside the report"}
            self.left -= len(text)
            self.embedded[digest], self._bases[digest], self._paths[digest] = text, on, path
        on = self._bases[digest]
        return {"digest": digest} | ({"base": on} if on is not None else {})

    def _pack(self, path: Path, base: str | None) -> tuple[bytes, str | None]:
        """The picture as WebP, or its difference from `base` and `base` itself."""
        from PIL import ImageChops

        picture = _pixels(path)
        if base is None or self._bases.get(base, base) is not None:
            return _webp(picture), None
        under = _pixels(self._paths[base])
        if under.size != picture.size:
            return _webp(picture), None
        return _webp(ImageChops.subtract_modulo(picture, under)), base


def _pixels(path: Path) -> Image:
    from PIL import Image

    with Image.open(path) as picture:
        return picture.convert("RGB")


def _webp(picture: Image) -> bytes:
    packed = io.BytesIO()
    picture.save(packed, "WEBP", lossless=True, method=2, quality=20)
    return packed.getvalue()
