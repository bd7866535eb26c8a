"""What a model is: geometry, scaling, legal tiles, round trip, largest tensors, how far its decoder looks, and its room
in fp16."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from fidelity import drawn as drawn_
from fidelity import intermediates as intermediates_
from fidelity import reach as reach_
from fidelity import scaling as scaling_
from fidelity.errors import IllegalTiling, LatentsError
from fidelity.intermediates import Intermediates
from fidelity.lazy import torch
from fidelity.models import legal_tiles
from fidelity.optimizations import activations
from fidelity.records import DecodePlan, Headroom, LatentSource, Model, Reach, Tiling
from fidelity.registry import METRICS
from fidelity.runner import Runner
from fidelity.scaling import Expected
from fidelity.tiles import ranges

if TYPE_CHECKING:
    from torch import Tensor

CEILING = ("psnr", "ssim", "lpips_alex")
"""What a round trip is measured by."""
OVERLAPS = (0.0, 0.125, 0.25, 0.375, 0.5)
ERRORS = (1.0, 0.5, 0.1)
"""Grey levels RMS for which an overlap is predicted."""
PREDICTED = (16, 32)
"""Latent pixels: tiles whose error is predicted for a picture of four such tiles each way."""


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
    predicted: dict[str, dict[str, float]]
    """By tile, then by overlap: RMSE in grey levels of a tiled decode of four tiles each way, from the reach."""
    headroom: Headroom
    ceiling: dict[str, dict[str, float | None]] = {}
    """By picture, photographs and drawn ones: `psnr`, `ssim`, `lpips_alex` of the round trip, the worst item's."""
    latents: Expected | None = None
    """What the encoder makes of photographs; None where the model takes none."""
    intermediates: Intermediates | None = None
    """The largest tensors of one decode of the latents that the reach was probed with."""


def inspect(model: Model, photographs: list[LatentSource], device: str = "cpu") -> Inspection:
    """Load and decode what is needed. Raises ModelError, LatentsError."""
    runner = Runner(model, device)
    weights = list(model.family.decoder(runner.module).parameters())
    count = sum(weight.numel() for weight in weights)
    trips, first = {}, None
    ceiling: dict[str, dict[str, float | None]] = {}
    for source in photographs:
        try:
            made = source.make(model, runner.module)
        except LatentsError:  # a video model takes no photographs: the profile below then uses seeded latents
            continue
        if first is None and min(made.tensor.shape[-2:]) >= reach_.LEAST:
            first = made.tensor[:1]
        if made.image is not None:
            back = _decode(runner, made.tensor)
            trips[source.name] = _psnr(back, made.image, model.data_range)
            ceiling[source.name] = _ceiling(back, made.image, model.data_range)
    known = scaling_.expected(model, runner.module, photographs) if trips else None
    for name, drawn in _drawn(runner).items() if trips else ():
        ceiling[name] = drawn
    latents = first if first is not None else _seeded(model)
    found = reach_.probe(runner, latents)
    watched = runner.decode(latents, model.reference_plan, trace=False, watch=True)
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
        reach=found,
        predicted={str(tile): _predicted(model, found, tile) for tile in PREDICTED},
        headroom=activations.headroom(watched.activations, model.force_upcast),
        ceiling=ceiling,
        latents=known,
        intermediates=intermediates_.measure(model, runner.module, latents.to(device)),
    )


def _predicted(model: Model, found: Reach, tile: int) -> dict[str, float]:
    out = {}
    for overlap in OVERLAPS:
        try:
            grid = model.family.tile_grid(model.geometry, (4 * tile, 4 * tile), Tiling(tile, overlap))
        except IllegalTiling:
            continue  # `legal_tiles` says which are
        out[f"{overlap:g}"] = reach_.predict(found, grid, model.geometry.spatial)
    return out


def _decode(runner: Runner, latents: Tensor) -> Tensor:
    with torch.no_grad():
        return runner.model.family.decode(runner.module, latents.to(runner.device)).float().cpu()


def _seeded(model: Model) -> Tensor:
    frames = (reach_.MOST_FRAMES,) if model.geometry.video else ()
    shape = (1, model.geometry.latent_channels, *frames, 32, 32)
    spread = 1.0 / model.scaling.factor if model.scaling.factor else 1.0
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * spread


def _drawn(runner: Runner) -> dict[str, dict[str, float | None]]:
    """The round trip of what photographs lack."""
    low, high = runner.model.data_range
    out = {}
    for name, draw in drawn_.PICTURES.items():
        image = draw() * (high - low) + low
        with torch.no_grad():
            latents = runner.model.family.encode(runner.module, image.to(runner.device))
        out[name] = _ceiling(_decode(runner, latents), image, (low, high))
    return out


def _ceiling(sample: Tensor, image: Tensor, data_range: tuple[float, float]) -> dict[str, float | None]:
    return {
        name: METRICS.get(name)(sample, image, plan=DecodePlan(), receipts={}, data_range=data_range).value
        for name in CEILING
    }


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
    out += [f"tiles o={overlap:<5} {ranges(tiles)}" for overlap, tiles in found.legal_tiles.items()]
    out += [f"round trip    {name}: {psnr:.2f} dB{_beside(found, name)}" for name, psnr in found.round_trip.items()]
    out += [f"round trip    {name}: {_number(each['psnr'], '.2f')} dB{_beside(found, name)}"
            for name, each in found.ceiling.items() if name not in found.round_trip]  # fmt: skip
    out += scaling_.lines(found.latents)
    largest = intermediates_.lines(found.intermediates) if found.intermediates is not None else []
    return [*out, *largest, *_reach_lines(found), *_headroom_lines(found.headroom)]


def _beside(found: Inspection, name: str) -> str:
    each = found.ceiling.get(name)
    if each is None:
        return ""
    return f" · SSIM {_number(each['ssim'], '.3f')} · LPIPS {_number(each['lpips_alex'], '.3f')}"


def _number(value: float | None, form: str) -> str:
    return "not measured" if value is None else format(value, form)


def _reach_lines(found: Inspection) -> list[str]:
    probe, out = found.reach, []
    reaches = reach_.radius(probe)
    if reaches is None:
        far = probe.pixel[-1]
        out.append(f"one latent px moves the whole picture ({far:.2g} grey levels {len(probe.pixel) - 1} latent pixels "
                   "away): tiling is never exact, statistics or attention are global")  # fmt: skip
    else:
        out.append(f"one latent px reaches {reaches} latent pixels: tiling is exact beyond that")
    if probe.frames_reason != reach_.PICTURES:
        out.append(f"one latent frame {_frames(probe)}")
    steps = [d for d in (0, 1, 2, 3, 4, 6, 8) if d < len(probe.edge)]
    profile = " · ".join(f"{probe.edge[d]:.2f} at {d}" for d in steps)
    out.append(f"cut edge      {profile}  (RMS grey levels at latent px from it: lost context)")
    sizes = " · ".join(f"{level:.2f} in a tile of {side}" for level, side in zip(probe.tone, probe.sizes))
    out.append(f"tone          {sizes}  (RMS grey levels everywhere in it: its own statistics)")
    for error in ERRORS:
        needed = reach_.overlap(probe, error)
        what = "no overlap is enough" if needed is None else f"{needed} latent pixels"
        out.append(f"overlap for {error:g} grey level RMS at a tile's inner edge: {what}")
    for tile, costs in found.predicted.items():
        row = " · ".join(f"{cost:.2f} at {overlap}" for overlap, cost in costs.items()) or "no legal overlap"
        out.append(f"tile {tile:<8} {row}  (predicted RMSE, grey levels, by overlap)")
    return out


def _frames(probe: Reach) -> str:
    """What one latent frame reaches, in words."""
    if probe.frames_reason is not None:
        return f"was not moved: {probe.frames_reason}"
    reached = [max((d for d, change in enumerate(side) if change > reach_.EXACT), default=0)
               for side in (probe.before, probe.after)]  # fmt: skip
    ends = ["" if far < len(side) - 1 else " or more" for far, side in zip(reached, (probe.before, probe.after))]
    if reach_.causal(probe):
        return f"moves none before it and {reached[1]}{ends[1]} after it: causal"
    return f"moves {reached[0]}{ends[0]} before it and {reached[1]}{ends[1]} after it"


def _headroom_lines(room: Headroom) -> list[str]:
    if room.tightest is None:
        return [f"fp16 headroom not measured: {room.reason}"]
    out = [f"fp16          {room.words}"]
    for layer in room.layers[:5]:
        seen = "not finite" if layer.max_abs is None else f"{layer.max_abs:,.6g}"
        times = "0" if layer.headroom is None else f"{layer.headroom:.3g}"
        out.append(f"  headroom {times:>8}×  {layer.name} ({layer.kind}), at most {seen}")
    return out
