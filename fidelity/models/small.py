"""Small instances of every class, `small-…`: seeded weights, a few hundred thousand at most, decoded in every option.

They give no pictures, and exaggerate what tiles cost; what they have is each class's real geometry, caches, hooks and
arithmetic. Their configurations stand in `fidelity/data/configs/` beside the published ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fidelity.lazy import torch
from fidelity.models import configs
from fidelity.models.base import FamilyBase
from fidelity.records import Model
from fidelity.registry import FAMILIES, MODELS

if TYPE_CHECKING:
    from torch import nn


def seeded(module: Any, seed: int, gain: Mapping[str, float] | None = None) -> Any:
    """Fill a module with the same weights on every machine: normal with the gain of its fan-in, biases 0, norms 1.

    `gain` multiplies weights, by the beginning of their names, so that the sample's spread is that of a picture. A
    parameter without dimensions is a constant of its class, and stays. Normal by inverse distribution in fp64 on a grid
    of 2⁻¹², as torch.randn's bits differ between CPUs.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(module.named_parameters()):
            if weight.ndim == 0:
                continue
            if name.endswith("bias"):
                weight.zero_()
                continue
            if weight[0].numel() == 1:  # a norm's gain
                weight.fill_(1.0)
                continue
            uniform = torch.rand(weight.shape, generator=generator, dtype=torch.float64) + 2.0**-54
            normal = torch.special.ndtri(uniform).mul(4096).round().div(4096)
            weight.copy_(normal / weight[0].numel() ** 0.5)
            for part, factor in (gain or {}).items():
                weight.mul_(factor if name.startswith(part) else 1.0)
    return module


def load(family: FamilyBase, config: Mapping[str, Any], seed: int, gain: Mapping[str, float] | None) -> nn.Module:
    return seeded(family.build(config), seed, gain)


def small(name: str, entry: Mapping[str, Any]) -> Model:
    """The Model of one seeded entry. Raises ModelError, UnknownName."""
    config = entry["config"]
    family: Any = FAMILIES.get(config["_class_name"])
    model = family.describe(name, config, partial(load, family, config, entry["seed"], entry.get("gain")))
    return replace(model, summary=f"small {family.name}: {entry.get('summary', 'seeded weights, no pictures')}")


for _name, _entry in configs.entries("seed").items():
    MODELS.add(_name, small(_name, _entry))
