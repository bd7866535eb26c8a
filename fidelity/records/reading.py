"""The records' lossless JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec


def to_json(record: Any) -> bytes:
    """Encode a record as indented JSON. Raises ValueError on NaN or infinity: a number that is none has a reason."""
    built = msgspec.to_builtins(record)
    _refuse_non_finite(built, "$")
    return msgspec.json.format(msgspec.json.encode(built), indent=1)


def from_json(data: bytes | str, kind: type[Any]) -> Any:
    """Decode a record of `kind`. Raises msgspec.ValidationError with the path of what does not fit."""
    return msgspec.json.decode(data, type=kind)


def _refuse_non_finite(node: Any, path: str) -> None:
    if isinstance(node, float) and not math.isfinite(node):
        raise ValueError(f"{path} is {node}: store null and a reason")
    if isinstance(node, Mapping):
        for key, value in node.items():
            _refuse_non_finite(value, f"{path}.{key}")
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            _refuse_non_finite(value, f"{path}[{index}]")
