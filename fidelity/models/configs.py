"""Autoencoders known by their configuration alone: enough to describe one, and to predict what it needs.

`fidelity/data/configs/autoencoders.json` has the configurations of well-known models with their sources; no weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fidelity.errors import IllegalTiling, ModelError, UnknownName
from fidelity.models.base import FamilyBase
from fidelity.models.load import _family, _read_json
from fidelity.records import Geometry, Model, TileGrid, Tiling
from fidelity.registry import FAMILIES, unknown

if TYPE_CHECKING:
    from torch import nn

FILE = Path(__file__).resolve().parent.parent / "data" / "configs" / "autoencoders.json"


class UntiledFamily(FamilyBase):
    """A diffusers class that no family describes: its decoder can run, its tiling law is not known here."""

    def __init__(self, name: str, geometry: Geometry):
        self.name, self.summary, self._geometry = name, f"{name}, by its configuration alone", geometry

    def geometry(self, config: Mapping[str, Any]) -> Geometry:
        return self._geometry

    def will_tile(self, latent_size: tuple[int, int], tiling: Tiling) -> bool:
        return True

    def tile_grid(self, geometry: Geometry, latent_size: tuple[int, int], tiling: Tiling) -> TileGrid:
        raise IllegalTiling(f"{self.name}: how this class tiles is not known here: leave tiling out")

    def set_tiling(self, module: Any, geometry: Geometry, tiling: Tiling) -> None:
        raise IllegalTiling(f"{self.name}: how this class tiles is not known here: leave tiling out")

    def tiling_attributes(self) -> tuple[str, ...]:
        return ()


def known() -> dict[str, str]:
    """Names of the configurations that ship, and where each comes from."""
    return {name: entry["source"] for name, entry in _entries().items()}


def from_name(name: str) -> Model:
    """The Model of a configuration that ships. Its `load` raises: there are no weights. Raises UnknownName."""
    if name not in _entries():
        raise UnknownName(unknown("configuration", name, _entries()))
    entry = _entries()[name]
    config = entry["config"]
    cls = config["_class_name"]
    family: Any = FAMILIES.get(cls) if cls in FAMILIES else UntiledFamily(cls, Geometry(**entry["geometry"]))
    return _described(name, family, config, entry["source"])


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
    return json.loads(FILE.read_text(encoding="utf-8"))
