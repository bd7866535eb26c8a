"""How far a decoder looks by its modules alone, without weights: a bound for tiles that nobody has tried yet.

`fidelity.reach` measures it of real weights; this adds up what each convolution adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from fidelity.errors import in_one_line
from fidelity.lazy import torch
from fidelity.records import Model

if TYPE_CHECKING:
    from torch import nn

PROBE = 16
"""Latent pixels each way of the small decode that shows a decoder's reach."""


class Reach(Struct, frozen=True):
    """How far a decoder looks by its modules alone: an upper bound, in latent pixels each way."""

    radius: int | None
    """By convolutions; None where that cannot be told, and `reason` says why."""
    everywhere: tuple[str, ...] = ()
    """Classes of modules that look at everything they are given: a tile has statistics of its own."""
    reason: str | None = None

    @property
    def least_tile(self) -> int:
        """The smallest tile whose middle pixel sees all that convolutions would show it; PROBE where that is not
        known."""
        return PROBE if self.radius is None else 2 * self.radius + 1


def reach_of(model: Model) -> Reach:
    """How far one output pixel looks into the latents, summed over the convolutions that a small decode runs.

    Each kernel of k adds (k − 1) / 2 of its dilated steps, at the scale at which it runs; branches that join are added
    too, so that this bounds from above. Shapes alone are run: no weights.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    geometry = model.geometry
    frames = (max(2, model.family.least_frames),) if geometry.video else ()
    size = geometry.size or (PROBE, PROBE)
    steps: dict[str, float] = {}
    everywhere: dict[str, None] = {}
    try:
        with FakeTensorMode(), torch.no_grad():
            module = model.family.build(model.config)
            for name, part in model.family.decoder(module).named_modules():
                part.register_forward_hook(_noted(name, part, size[1], steps, everywhere))
            model.family.decode(module, torch.empty((1, geometry.latent_channels, *frames, *size)))
    except Exception as error:  # a decode may raise anything; then its reach is not known
        return Reach(None, reason=in_one_line(error))
    if not steps:
        return Reach(None, tuple(everywhere), reason="it has no convolutions")
    return Reach(math.ceil(sum(steps.values())), tuple(everywhere))


def _noted(
    name: str, part: nn.Module, wide: int, steps: dict[str, float], everywhere: dict[str, None]
) -> Callable[..., None]:
    def note(_: Any, given: tuple[Any, ...], out: Any) -> None:
        if isinstance(part, torch.nn.modules.conv._ConvNd) and part.kernel_size[-1] > 1:
            scale = max(1.0, max(out.shape[-1], given[0].shape[-1]) / wide)
            steps[name] = (part.kernel_size[-1] - 1) / 2 * part.dilation[-1] / scale
        kind = type(part).__name__
        if isinstance(part, torch.nn.GroupNorm) or ("Attention" in kind and "Processor" not in kind):
            everywhere[kind] = None

    return note
