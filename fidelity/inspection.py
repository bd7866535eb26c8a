"""What a model is and how far its decoder looks: the facts behind a choice of tile and overlap.

`reach` answers two questions by decoding. How far does one latent pixel show (receptive field)? And how wrong is a tile
at which distance from its cut edge, compared with the full decode? The second is what an overlap has to hide.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from fidelity.errors import LatentsError
from fidelity.lazy import torch
from fidelity.models import legal_tiles
from fidelity.records import LatentSource, Model
from fidelity.runner import Runner

if TYPE_CHECKING:
    from torch import Tensor

OVERLAPS = (0.0, 0.125, 0.25, 0.5)
ERRORS = (1.0, 0.5, 0.1)
"""Grey levels RMS for which an overlap is predicted."""
EXACT = 1e-3
"""Grey levels: below this a change is rounding."""


class Reach(Struct, frozen=True):
    """How far a decoder looks, in latent pixels; profiles start at distance 0 and are in grey levels."""

    pixel: tuple[float, ...]
    """Largest change of the sample at each distance from one latent pixel that moved by one standard deviation."""
    edge: tuple[float, ...]
    """RMS error of a decode that was cut off, at each distance from the cut."""
    is_global: bool
    """Whether one pixel moves the whole picture (statistics or attention over all of it): tiling is never exact."""

    @property
    def radius(self) -> int | None:
        """The distance beyond which one latent pixel changes nothing; None if there is no such distance."""
        return None if self.is_global else 1 + max(d for d, change in enumerate(self.pixel) if change > EXACT)

    def overlap(self, error: float) -> int | None:
        """Latent pixels of overlap after which the error at a tile's inner edge is at most `error` grey levels RMS.

        Tiles lose the half of the overlap that lies nearer to their cut, where the blend weighs them less than half, so
        twice the distance is needed. None: it stays above at every distance (a tone shift that no overlap removes).
        """
        beyond = [distance for distance in range(len(self.edge)) if max(self.edge[distance:]) <= error]
        return 2 * beyond[0] if beyond else None


class Inspection(Struct, frozen=True):
    """Everything that `fidelity inspect` prints."""

    name: str
    family: str
    spatial: int
    temporal: int
    latent_channels: int
    compression: float
    scaling: dict[str, Any]
    force_upcast: bool
    reference: str
    legal_tiles: dict[str, tuple[int, ...]]
    """By overlap: tiles up to 128 latent pixels that the class decodes faithfully."""
    decoder_weights: int
    decoder_bytes: int
    """At fp32."""
    round_trip: dict[str, float]
    """PSNR in dB of each photograph through encoder and decoder: the ceiling of any decode."""
    reach: Reach


def inspect(model: Model, photographs: list[LatentSource], device: str = "cpu") -> Inspection:
    """Load and decode what is needed. Raises ModelError, LatentsError."""
    runner = Runner(model, device)
    weights = list(model.family.decoder(runner.module).parameters())
    count = sum(weight.numel() for weight in weights)
    trips, first = {}, None
    for source in photographs:
        try:
            made = source.make(model, runner.module)
        except LatentsError:  # a video model takes no photographs: the profile below then uses seeded latents
            continue
        first = made.tensor[:1] if first is None else first
        if made.image is not None:
            trips[source.name] = _psnr(_decode(runner, made.tensor), made.image, model.data_range)
    geometry, scaling = model.geometry, model.scaling
    return Inspection(
        name=model.name,
        family=model.family.name,
        spatial=geometry.spatial,
        temporal=geometry.temporal,
        latent_channels=geometry.latent_channels,
        compression=geometry.compression,
        scaling={"factor": scaling.factor, "shift": scaling.shift, "mean": scaling.mean, "std": scaling.std},
        force_upcast=model.force_upcast,
        reference=model.reference,
        legal_tiles={f"{overlap:g}": legal_tiles(model.family, geometry, overlap) for overlap in OVERLAPS},
        decoder_weights=count,
        decoder_bytes=4 * count,
        round_trip=trips,
        reach=reach(runner, first if first is not None else _seeded(model)),
    )


def reach(runner: Runner, latents: Tensor) -> Reach:
    """Probe with latents (1, C, [T,] H, W) of real content, at least 16 latent pixels each way."""
    f, full = runner.model.geometry.spatial, _decode(runner, latents)
    height, width = latents.shape[-2:]
    moved = latents.clone()
    moved[..., height // 2, width // 2] += latents.std()
    levels = 255.0 / (runner.model.data_range[1] - runner.model.data_range[0])
    change = (_decode(runner, moved) - full).abs().flatten(0, -3).amax(0) * levels
    rows = torch.arange(height * f) // f - height // 2
    cols = torch.arange(width * f) // f - width // 2
    distance = torch.maximum(rows.abs()[:, None], cols.abs()[None, :])
    farthest = min(height, width) // 2 - 1
    pixel = tuple(float(change[distance == d].max()) for d in range(farthest + 1))
    keep = width * 3 // 4
    error = (_decode(runner, latents[..., :keep]) - full[..., : keep * f]) * levels
    by_column = error.square().flatten(0, -2).mean(0).reshape(keep, f).mean(1).sqrt().flip(0)
    return Reach(pixel, tuple(by_column.tolist()), is_global=pixel[-1] > EXACT)


def _decode(runner: Runner, latents: Tensor) -> Tensor:
    with torch.no_grad():
        return runner.model.family.decode(runner.module, latents.to(runner.device)).float().cpu()


def _seeded(model: Model) -> Tensor:
    frames = (1,) if model.geometry.video else ()
    shape = (1, model.geometry.latent_channels, *frames, 32, 32)
    spread = 1.0 / model.scaling.factor if model.scaling.factor else 1.0
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * spread


def _psnr(sample: Tensor, image: Tensor, data_range: tuple[float, float]) -> float:
    error = float((sample - image).double().square().mean())
    return 10 * math.log10((data_range[1] - data_range[0]) ** 2 / error) if error else math.inf


def lines(found: Inspection) -> list[str]:
    """The inspection in words, a line each."""
    scaling = ", ".join(f"{key} {value}" for key, value in found.scaling.items() if value is not None) or "none"
    out = [
        f"{found.name} · {found.family}",
        f"geometry      f {found.spatial} · f_t {found.temporal} · c {found.latent_channels} · "
        f"compression {found.compression:g}×",
        f"scaling       {scaling}" + (" · force_upcast" if found.force_upcast else ""),
        f"reference     {found.reference}",
        f"decoder       {found.decoder_weights:,} weights, {found.decoder_bytes / 2**20:.1f} MiB at fp32",
    ]
    out += [f"tiles o={overlap:<5} {_ranges(tiles)}" for overlap, tiles in found.legal_tiles.items()]
    out += [f"round trip    {name}: {psnr:.2f} dB" for name, psnr in found.round_trip.items()]
    probe = found.reach
    if probe.radius is None:
        far = probe.pixel[-1]
        out.append(f"one latent px moves the whole picture ({far:.2g} grey levels {len(probe.pixel) - 1} latent pixels "
                   "away): tiling is never exact, statistics or attention are global")  # fmt: skip
    else:
        out.append(f"one latent px reaches {probe.radius} latent pixels: tiling is exact beyond that")
    steps = [d for d in (0, 1, 2, 4, 8, 12, 16) if d < len(probe.edge)]
    profile = " · ".join(f"{probe.edge[d]:.2f} at {d}" for d in steps)
    out.append(f"cut edge      {profile}  (RMS grey levels at latent px)")
    for error in ERRORS:
        needed = probe.overlap(error)
        what = "no overlap is enough" if needed is None else f"{needed} latent pixels"
        out.append(f"overlap for {error:g} grey level RMS at a tile's inner edge: {what}")
    return out


def _ranges(numbers: tuple[int, ...]) -> str:
    """`4, 8, … 128 (every 4)`, or the numbers themselves."""
    if not numbers:
        return "none"
    steps = {b - a for a, b in pairwise(numbers)}
    if len(numbers) > 3 and len(steps) == 1:
        return f"{numbers[0]}, {numbers[1]}, … {numbers[-1]} (every {steps.pop()})"
    return ", ".join(map(str, numbers))
