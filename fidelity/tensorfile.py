"""What a safetensors file holds, read from its header: names, dtypes and shapes, without torch or numpy.

Format: https://github.com/huggingface/safetensors#format — eight bytes of header length, a JSON header, the data.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

from fidelity.errors import RequestError

BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
         "U16": 2, "U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16")
"""The dtypes that are latents or weights as they are; 8-bit floats need scales that lie elsewhere."""


class TensorInfo(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path, error: type[RequestError]) -> dict[str, TensorInfo]:
    """Tensors of the safetensors file `path` by name.

    Raises `error`, in one line, if the file is missing, is no safetensors file, or is shorter or longer than its
    header says (a download that broke off).
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            raw = file.read(length) if 8 + length <= size else b""
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror or problem}") from None
    try:
        entries = json.loads(raw)
        entries.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        found = {name: TensorInfo(entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}
        sizes = {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise error(f"{path} is no safetensors file: its header cannot be read ({size} bytes)") from None
    if 8 + length + end != size:
        raise error(f"{path} is damaged: {size} bytes long, its header says {8 + length + end}: fetch it again")
    for name, info in found.items():
        if info.dtype in BYTES and sizes[name] != BYTES[info.dtype] * math.prod(info.shape):
            raise error(f"{path} is damaged: tensor {name!r} has {sizes[name]} bytes, its shape says otherwise")
    return found
