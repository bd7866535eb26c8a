"""Autoencoders known by their configuration alone: enough to describe one, and to predict what it needs.

`fidelity/data/configs/<class>.json` has configurations of that class by name. One with a `source` is that of a
published model, without weights; one with a `seed` is a small instance whose weights are drawn from it
(`fidelity/models/small.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fidelity.errors import ModelError, UnknownName
from fidelity.models.base import FamilyBase
from fidelity.models.load import _family, _read_json
from fidelity.records import Model
from fidelity.registry import unknown

if TYPE_CHECKING:
    from torch import nn

FOLDER = Path(__file__).resolve().parent.parent / "data" / "configs"


def known() -> dict[str, str]:
    """Names of the configurations that ship, and where each comes from."""
    return {name: entry["source"] for name, entry in entries("source").items()}


def from_name(name: str) -> Model:
    """The Model of a configuration that ships. Its `load` raises: there are no weights. Raises UnknownName."""
    published = entries("source")
    if name not in published:
        raise UnknownName(unknown("configuration", name, published))
    config = published[name]["config"]
    return _described(name, _family(name, config, FOLDER), config, published[name]["source"])


def from_config(name: str, path: str | Path) -> Model:
    """The Model of a config.json, of the folder that holds one, or of a pipeline's folder (its `vae/`).

    Weights need not be there. Raises ModelError.
    """
    path = Path(path).expanduser()
    candidates = (path,) if path.suffix == ".json" else (path / "config.json", path / "vae" / "config.json")
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        raise ModelError(f"model {name!r}: no config.json at {path}: name a diffusers folder or its config.json")
    config = _read_json(file, f"model {name!r}")
    return _described(name, _family(name, config, file), config, str(file))


def _described(name: str, family: FamilyBase, config: Mapping[str, Any], source: str) -> Model:
    model = family.describe(name, config, partial(_no_weights, name))
    return replace(model, summary=f"{family.name} of {source}, without weights", source=source)


def _no_weights(name: str) -> nn.Module:
    raise ModelError(f"model {name!r} is a configuration without weights: give --model {name}=PATH to decode")


@cache
def _entries() -> dict[str, dict[str, Any]]:
    files = sorted(FOLDER.glob("*.json"))
    return {name: entry for file in files for name, entry in json.loads(file.read_text(encoding="utf-8")).items()}


def entries(key: str) -> dict[str, dict[str, Any]]:
    """The entries that have `key`, by name: `source` or `seed`."""
    return {name: entry for name, entry in _entries().items() if key in entry}
