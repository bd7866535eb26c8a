"""In which floating dtypes a decode really computed, operator by operator.

Hooks see what goes into a layer and comes out of it; a layer that rounds inside itself shows only here. It slows a
decode down, so only red ones are asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from fidelity.lazy import torch
from fidelity.optimizations.observe import dtype_name
from fidelity.records import DecodePlan


@contextmanager
def dtypes() -> Iterator[dict[str, str]]:
    """Yields a dictionary that fills with each floating dtype that an operator gave, and the first such operator."""
    seen: dict[str, str] = {}
    with _mode()(seen):
        yield seen


def unasked(seen: dict[str, str], plan: DecodePlan) -> dict[str, str]:
    """The half precisions among them that the plan does not ask for."""
    asked = "float32" if plan.force_upcast else dtype_name(plan.dtype)
    return {name: operator for name, operator in seen.items() if name in ("float16", "bfloat16") and name != asked}


@cache
def _mode() -> type[Any]:
    # made at first use: a class that inherits from torch's cannot stand at module level without importing torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Witness(TorchDispatchMode):
        """Notes what each operator returns and changes nothing."""

        def __init__(self, seen: dict[str, str]):
            super().__init__()
            self.seen = seen

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for value in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    self.seen.setdefault(dtype_name(value.dtype), func.overloadpacket.__name__)
            return result

    return Witness
