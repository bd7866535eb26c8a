"""Plain attributes of a module that are saved and put back, those that did not exist before included."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@contextmanager
def attributes_kept(module: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Put these attributes of the instance back on exit; one that it did not have of its own is deleted."""
    held = module.__dict__
    before = {name: held[name] for name in names if name in held}
    absent = [name for name in names if name not in held]
    try:
        yield
    finally:
        held.update(before)
        for name in absent:
            held.pop(name, None)
