"""Whether latents come in the units that the decoder takes: their spread, and whether they survive a round trip.

Latents of a picture, decoded and encoded again, come back nearly as they were (5 to 11 % off with `reference-kl`). At a
wrong scale they do not: the picture is too flat, or clipped. So each way in which a pipeline gets the units wrong is
undone in turn, and one under which the latents survive far better than as they are is what happened. Spread alone tells
less: of pictures it varies by a factor of five by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from fidelity.errors import LatentsError
from fidelity.latents import unscale
from fidelity.lazy import torch
from fidelity.records import LatentSource, Model, Scaling

if TYPE_CHECKING:
    from torch import Tensor

LEAST, MOST = 0.25, 2.5
"""Spread in denoiser units (convention: about 1) of anything that is decoded: those that ship have 0.27 to 2.0."""
BETTER = 1.8
"""How many times better the latents survive when a fault is undone. Honest ones: 1.0 at most, but for `contrast`."""
CEILING = 1.1
"""A picture's latents survive at most this many times worse than the worst photograph's."""
OCTAVES = 1.0
"""By which a channel's share of the spread of a picture's latents differs from photographs'. Those that ship differ by
0.9 at most, drawn latents by 1.1 and more: of such, nothing is said but their spread."""
ORIGIN = 2.0
"""A picture's latents that are lost this many times as much as the worst photograph's are of another encoder."""
LEAST_GAIN = 1.25
"""A gain nearer to 1 is not looked for: see the guide for what is seen of which picture."""
ALIKE = 1.2
"""Explanations under which the latents survive this nearly as well are told apart by the spread that they give."""
CROP = 16
"""Latent pixels a side of what makes a round trip."""
CENTRE, SHARE = (0.5, 2.0), 0.35
"""Spread of all photographs together that a right scaling_factor gives; and the largest part of a photograph's latents
that an encoder and a decoder which belong together lose in a round trip."""
FACTORS = {"Stable Diffusion 1": 0.18215, "SDXL": 0.13025, "Stable Diffusion 3": 1.5305, "FLUX.1": 0.3611,
           "HunyuanVideo": 0.476986}  # fmt: skip
"""scaling_factor of models whose latents are taken for another's."""


class Expected(Struct, frozen=True):
    """What a model's own encoder makes of photographs, as the decoder takes it."""

    mean: tuple[float, ...]
    """By channel."""
    std: tuple[float, ...]
    spread: float
    """Of all of them together, in denoiser units."""
    least: float
    """Of the picture with the least."""
    most: float
    lost: float
    """The part of a latent that the worst photograph loses in a round trip, of its spread."""

    @property
    def findings(self) -> tuple[str, ...]:
        """What is wrong with the model's own scaling; empty where nothing is."""
        found = []
        if not CENTRE[0] <= self.spread <= CENTRE[1]:
            found.append(f"photographs have a spread of {self.spread:.3g} in denoiser units, where 1 is the convention "
                         f"and {CENTRE[0]:g} to {CENTRE[1]:g} plausible: compare scaling_factor, mean and std with "
                         "the model's card")  # fmt: skip
        if self.lost > SHARE:
            found.append(f"a photograph loses {self.lost:.0%} of its latents when decoded and encoded again, at "
                         f"most {SHARE:.0%} is plausible: encoder and decoder do not belong together")  # fmt: skip
        return tuple(found)


class Explanation(Struct, frozen=True):
    """A fault that explains latents, and how much better they survive when it is undone."""

    words: str
    gain: float
    """Of the latents, against what the decoder takes."""
    offset: float
    """Their mean's shift, in spreads."""
    lost: float
    """The part lost in a round trip as they are."""
    undone: float
    """The same with the fault undone."""
    spread: float
    """In denoiser units, with the fault undone."""


def scale(latents: Tensor, scaling: Scaling) -> Tensor:
    """From decoder units to denoiser units: the inverse of `latents.unscale`."""
    shape = (1, -1) + (1,) * (latents.ndim - 2)
    if scaling.mean is not None:
        latents = latents - torch.tensor(scaling.mean, dtype=latents.dtype).view(shape)
    elif scaling.shift is not None:
        latents = latents - scaling.shift
    if scaling.factor is not None:
        latents = latents * scaling.factor
    return latents if scaling.std is None else latents / torch.tensor(scaling.std, dtype=latents.dtype).view(shape)


def spread(latents: Tensor, scaling: Scaling) -> float:
    """RMS of latents about zero in denoiser units."""
    return float(scale(latents.double(), scaling).square().mean().sqrt())


def lost(model: Model, module: Any, latents: Tensor) -> float:
    """The part of the latents (B, C, [T,] H, W) that is gone when they are decoded, clipped and encoded again: RMS
    difference over RMS of the latents about their channels' means. Infinite where nothing comes back."""
    low, high = model.data_range
    apart, power = 0.0, 0.0
    with torch.no_grad():
        for whole in latents.split(1):
            item = _middle(whole)
            sample = model.family.decode(module, item).clamp(low, high)
            again = model.family.encode(module, sample)
            apart += float((again - item).double().square().sum())
            power += float(_centred(item).double().square().sum())
    return (apart / power) ** 0.5 if power else float("inf")


def expected(model: Model, module: Any, photographs: Sequence[LatentSource]) -> Expected | None:
    """Encode photographs. None where the model takes none of them (videos, or pictures without three channels)."""
    items: list[Tensor] = []
    for source in photographs:
        try:
            items += source.make(model, module).tensor.split(1)
        except LatentsError:  # not of a shape that this model takes
            continue
    if not items:
        return None
    values = torch.cat([item.transpose(0, 1).flatten(1) for item in items], dim=1).double()
    spreads = [spread(item, model.scaling) for item in items]
    power = sum(each**2 * item.numel() for each, item in zip(spreads, items)) / sum(item.numel() for item in items)
    return Expected(
        mean=tuple(values.mean(1).tolist()),
        std=tuple(values.std(1).tolist()),
        spread=power**0.5,
        least=min(spreads),
        most=max(spreads),
        lost=max(lost(model, module, item) for item in items),
    )


def explain(model: Model, module: Any, latents: Tensor, known: Expected) -> Explanation | None:
    """The fault in the units of these latents that explains them far better than none, or None.

    Latents (B, C, H, W), fp32, as they would be given to the decoder.
    """
    as_is = lost(model, module, latents)
    tried = []
    for words, undone in faults(latents, model.scaling):
        if not _is_shared_as(undone, known):
            continue
        left = lost(model, module, undone)
        if left <= CEILING * known.lost and as_is >= BETTER * left:
            gain = float(_centred(latents).square().mean().sqrt() / _centred(undone).square().mean().sqrt())
            apart = (latents - undone).mean((0, *range(2, latents.ndim)))
            offset = float(apart.abs().amax() / _centred(undone).square().mean().sqrt())
            tried.append(Explanation(words, gain, offset, as_is, left, spread(undone, model.scaling)))
    best = min((each.undone for each in tried), default=0.0)
    alike = [each for each in tried if each.undone <= ALIKE * best]
    return min(alike, key=lambda each: abs(math.log(each.spread / known.spread)), default=None)


def outside(latents: Tensor, scaling: Scaling) -> str | None:
    """Why latents of this spread are in no unit that a decoder takes, picture or not; None where they may be."""
    found = spread(latents, scaling)
    if LEAST <= found <= MOST:
        return None
    return f"spread {found:.3g} in denoiser units, outside {LEAST:g} to {MOST:g}: compare scaling_factor, mean and std"


def faults(latents: Tensor, scaling: Scaling) -> Iterator[tuple[str, Tensor]]:
    """What goes wrong with units, each with the latents as they should have been if it did."""
    if scaling == Scaling():
        return
    yield "the denoiser's latents were never unscaled", unscale(latents, scaling)
    yield "the latents were unscaled twice", scale(latents, scaling)
    if scaling.shift:
        yield "shift_factor was forgotten", latents + scaling.shift
        yield "shift_factor was subtracted, or left in twice", latents - scaling.shift
    if scaling.mean is not None:
        centre = torch.tensor(scaling.mean).view(1, -1, *(1,) * (latents.ndim - 2))
        yield "latents_mean was forgotten", latents + centre
        yield "latents_mean was added twice", latents - centre
    if scaling.std is not None:
        std = torch.tensor(scaling.std).view(1, -1, *(1,) * (latents.ndim - 2))
        shift = torch.tensor(scaling.mean or (0.0,) * len(scaling.std)).view_as(std)
        yield "latents_std was forgotten", (latents - shift) * std + shift
        yield "latents_std was applied twice", (latents - shift) / std + shift
    if scaling.factor is not None:
        for name, factor in FACTORS.items():
            gain = factor / scaling.factor
            if max(gain, 1 / gain) >= LEAST_GAIN:
                yield f"the scaling_factor was {name}'s {factor:g} for {scaling.factor:g}", latents * gain


def _is_shared_as(latents: Tensor, known: Expected) -> bool:
    """Whether the channels share the spread as those of photographs do, as far as pictures differ."""
    found = latents.transpose(0, 1).flatten(1).double().std(1).log2() - torch.tensor(known.std).double().log2()
    return bool(((found - found.mean()).abs() <= OCTAVES).all())  # NaN, of channels without spread, is not


def _middle(latents: Tensor) -> Tensor:
    top, left = (max(0, (side - CROP) // 2) for side in latents.shape[-2:])
    return latents[..., top : top + CROP, left : left + CROP]


def _centred(latents: Tensor) -> Tensor:
    """Without the mean of each item's channel."""
    return latents - latents.mean(tuple(range(2, latents.ndim)), keepdim=True)


def lines(found: Expected | None) -> list[str]:
    """The statistics and what they say, a line each."""
    if found is None:
        return ["latents       not measured: the model takes no photographs"]
    channels = " · ".join(f"{mean:+.2f} ± {std:.2f}" for mean, std in zip(found.mean[:4], found.std[:4]))
    more = f" · and {len(found.mean) - 4} more" if len(found.mean) > 4 else ""
    out = [
        f"latents       of photographs, by channel: {channels}{more}",
        f"spread        {found.spread:.2f} in denoiser units, 1 by convention, {found.least:.2f} to {found.most:.2f} "
        "by picture: a scaling_factor that is wrong by less than a factor of two does not show",
        f"round trip    loses at most {found.lost:.0%} of a photograph's latents",
    ]
    return out + [f"scaling wrong {each}" for each in found.findings]
