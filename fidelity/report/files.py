"""Files that are either whole or not there: written beside their place, flushed, then moved onto it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from fidelity.errors import OutputError


def write(path: Path, content: str | bytes) -> Path:
    """Put `content` (text as UTF-8; what UTF-8 cannot hold becomes `?`) at `path` atomically and durably.

    A reader, or a crash, sees the old file or the new one. Raises OutputError if the folder cannot be written.
    """
    data = content.encode("utf-8", "replace") if isinstance(content, str) else content
    partial: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(partial, 0o666 & ~_umask())  # mkstemp's 0600 would keep a report from whoever serves it
        os.replace(partial, path)
        partial = None
        _flush_folder(path.parent)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}: choose another --out") from error
    finally:
        if partial is not None and os.path.exists(partial):
            os.unlink(partial)
    return path


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _flush_folder(folder: Path) -> None:
    """Make the move itself durable, where the system can open folders (Windows cannot)."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
