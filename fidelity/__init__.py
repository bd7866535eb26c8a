"""fidelity: what did slicing, tiling, offload and half precision do to the picture?

The public names, loaded when first used, so that `import fidelity` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "fidelity.records": ("CaseResult", "DecodePlan", "Geometry", "Latents", "Limit", "Measurement", "Model", "Reason",
                         "RunResult", "Scaling", "Tiling"),
    "fidelity.errors": ("EvaluationError", "FidelityError", "RequestError"),
    "fidelity.registry": ("detector", "metric", "optimization"),
    "fidelity.models.own": ("decoder", "weights"),
    "fidelity.api": ("check", "evaluate"),
}  # fmt: skip
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fidelity' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
