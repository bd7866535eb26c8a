"""The pictures of a run, each embedded once in the page, by the digest of its bytes."""

from __future__ import annotations

import base64
import hashlib
import io
from pathlib import Path

PNG = b"\x89PNG\r\n\x1a\n"


class Album:
    """The run's pictures, each embedded once, until the budget (characters of base64) is spent."""

    def __init__(self, folder: Path, budget: int):
        self.folder, self.left = folder.resolve(), budget
        self.embedded: dict[str, str] = {}
        """Base64 of each distinct picture as lossless WebP, a fifth smaller than its PNG, by digest."""
        self._known: dict[str, dict[str, str]] = {}

    def add(self, name: str) -> dict[str, str]:
        """`{"digest": …}` of an embedded picture, or `{"missing": why}`; `name` is relative to the run's folder."""
        if name not in self._known:
            self._known[name] = self._load(name)
        return self._known[name]

    def _load(self, name: str) -> dict[str, str]:
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
                text = base64.b64encode(_webp(data)).decode()
            except (OSError, SyntaxError, ValueError) as error:  # what Pillow says of a damaged file
                return {"missing": f"{name} is damaged: {error}"}
            if len(text) > self.left:
                return {"missing": f"{name} was left out to keep this file small; it lies beside the report"}
            self.left -= len(text)
            self.embedded[digest] = text
        return {"digest": digest}


def _webp(png: bytes) -> bytes:
    from PIL import Image

    packed = io.BytesIO()
    with Image.open(io.BytesIO(png)) as picture:
        picture.save(packed, "WEBP", lossless=True, method=2, quality=20)
    return packed.getvalue()
