"""torch, numpy and friends, imported at first use, so that `fidelity --help`, `ls` and `validate` answer at once.

from fidelity.lazy import torch
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
else:

    class _Lazy:
        """Stands for a module until an attribute of it is asked for."""

        def __init__(self, name: str):
            self._name = name
            self._loaded: ModuleType | None = None

        def __getattr__(self, attribute: str) -> Any:
            return getattr(self._loaded or self._module(), attribute)

        def _module(self) -> ModuleType:
            self._loaded = importlib.import_module(self._name)
            return self._loaded

        def __repr__(self) -> str:
            return f"<lazy module {self._name!r}>"

    torch = _Lazy("torch")
    np = _Lazy("numpy")

__all__ = ["np", "torch"]
