"""The settings of one decode."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

DTypeName = Literal["fp32", "bf16", "fp16"]
OffloadName = Literal["none", "model", "sequential", "group_block", "group_leaf", "disk"]
DTYPES: tuple[DTypeName, ...] = ("fp32", "bf16", "fp16")
OFFLOADS: tuple[OffloadName, ...] = ("none", "model", "sequential", "group_block", "group_leaf", "disk")
STREAM = "offload_stream"
"""The option beside a group offload by which the next group comes in while one runs."""


class Tiling(Struct, frozen=True, forbid_unknown_fields=True):
    """Spatial tiling: `tile` in latent pixels, `overlap` a fraction of the tile in [0, 1)."""

    tile: int
    overlap: float

    def __str__(self) -> str:
        return f"t{self.tile}o{self.overlap:g}"


class Temporal(Struct, frozen=True, forbid_unknown_fields=True):
    """Temporal tiling: `tile` in latent frames, `overlap` a fraction of the tile in [0, 1)."""

    tile: int
    overlap: float

    def __str__(self) -> str:
        return f"f{self.tile}o{self.overlap:g}"


class DecodePlan(Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of one decode. `options` holds further optimizations by name; a false value is the same as none."""

    dtype: DTypeName = "fp32"
    force_upcast: bool = False
    slicing: bool = False
    tiling: Tiling | None = None
    temporal: Temporal | None = None
    offload: OffloadName = "none"
    options: dict[str, Any] = {}

    @property
    def id(self) -> str:
        """A readable, stable id: `bf16-upcast0-slice1-t16o0.25-disk`."""
        parts = [self.dtype, f"upcast{self.force_upcast:d}", f"slice{self.slicing:d}", str(self.tiling or "t0")]
        if self.temporal is not None:
            parts.append(str(self.temporal))
        parts.append(self.offload)
        extra = (
            f"+{name}" if value is True else f"+{name}={value}" for name, value in sorted(self.options.items()) if value
        )
        return "-".join(parts) + "".join(extra)

    @property
    def settings(self) -> dict[str, Any]:
        """Every optimization that this plan turns on, by its registered name, in no particular order."""
        built_in = {
            "precision": self.dtype if self.dtype != "fp32" else None,
            "force_upcast": self.force_upcast,
            "slicing": self.slicing,
            "tiling": self.tiling,
            "temporal": self.temporal,
            "offload": self.offload if self.offload != "none" else None,
        }
        return {name: value for name, value in {**built_in, **self.options}.items() if value}

    def __hash__(self) -> int:
        return hash(self.id)
