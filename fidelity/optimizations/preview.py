"""Preview: a small distilled decoder in place of the full one, on the same latents."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from fidelity.errors import EvaluationError
from fidelity.lazy import torch
from fidelity.records import DecodePlan, Model, Observation, Proof, Scaling
from fidelity.registry import MODELS, optimization

if TYPE_CHECKING:
    from torch import Tensor, nn

KNOWN: Mapping[str, str] = {"reference-kl": "reference-tiny", "reference-kl-hot": "reference-tiny"}
"""The preview decoder that `preview = true` means, by model."""


def _unlike(value: Any, plan: DecodePlan, model: Model, shape: tuple[int, ...]) -> str | None:
    name = KNOWN.get(model.name) if value is True else value
    if name is None:
        return f"preview: none is known of {model.name}: name a registered model that takes its latents"
    if not isinstance(name, str) or name not in MODELS:
        return f"preview: {name!r} is no registered model (fidelity ls models)"
    own, full = MODELS.get(name).geometry, model.geometry
    if own != full:
        return f"preview: {name} decodes other latents (f {own.spatial}, c {own.latent_channels}) than {model.name}"
    return None


@optimization("preview", order=5, inapplicable=_unlike)  # first: precision, tiles, slices and offload then apply to it
def preview(module: Any, value: Any, *, plan: DecodePlan, model: Model, device: str) -> Iterator[Proof]:
    """A small distilled decoder in place of the full one, on the same latents: true, or a registered model's name."""
    reason = _unlike(value, plan, model, ())
    if reason is not None:
        raise EvaluationError(reason)
    small = MODELS.get(KNOWN[model.name] if value is True else value)
    if torch._guards.detect_fake_mode() is not None:
        raise EvaluationError(f"a preview needs what its own decode needs: fidelity predict {small.name}")
    full, stand_in = model.family.decoder(module), _stand_in()(small, model).to(device)
    calls: dict[str, list[int]] = {"small": [], "full": []}
    with _heard(full, calls["full"]), _heard(stand_in, calls["small"]), _replaced(module, full, stand_in, device):
        yield partial(_proof, calls=calls, decoder=small.name, weights=sum(w.numel() for w in stand_in.weights()))


def _proof(seen: Observation, *, calls: dict[str, list[int]], decoder: str, weights: int) -> dict[str, Any]:
    small, full = (sum(when >= seen.started_ns for when in calls[which]) for which in ("small", "full"))
    reason = None
    if full or not small or small != seen.calls:
        reason = f"of {seen.calls} decoder calls {small} were the preview's, and {full} the full decoder's"
    return {"engaged": reason is None, "reason": reason, "decoder": decoder, "calls": small, "full_calls": full,
            "weights": weights}  # fmt: skip


@contextmanager
def _heard(part: nn.Module, calls: list[int]) -> Iterator[None]:
    """Note when a module is called."""
    hook = part.register_forward_pre_hook(lambda *_: calls.append(time.perf_counter_ns()))
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _replaced(module: Any, full: nn.Module, stand_in: nn.Module, device: str) -> Iterator[None]:
    """Put the stand-in where the full decoder is, which waits in main memory; what prepares latents for the full one
    (`post_quant_conv`) is left out. Raises EvaluationError where the decoder is no part of the module."""
    path = next((path for path, part in module.named_modules() if part is full), "")
    if not path:
        raise EvaluationError(
            f"preview: the decoder of {type(module).__name__} is no part of it that could be replaced"
        )
    parent, _, key = path.rpartition(".")
    places = [(module.get_submodule(parent)._modules, key, stand_in)]
    if isinstance(getattr(module, "post_quant_conv", None), torch.nn.Module):
        places.append((module._modules, "post_quant_conv", torch.nn.Identity()))
    before = [table[name] for table, name, _ in places]
    away = torch.device(device).type != "cpu"
    for table, name, other in places:
        table[name] = other
    try:
        if away:
            full.to("cpu")
        yield
    finally:
        if away:
            full.to(device)
        for (table, name, _), own in zip(places, before):
            table[name] = own


@cache
def _stand_in() -> type[Any]:
    # made at first use: a class that inherits from torch's cannot stand at module level without importing torch
    class StandIn(torch.nn.Module):
        """A preview model where a full decoder was: takes the full one's latents, gives the full one's range."""

        def __init__(self, small: Model, full: Model):
            super().__init__()
            self.model, self.small, self.full = small.load(), small, full

        @property
        def mid_block(self) -> nn.Module:
            return self.small.family.middle(self.model)

        def weights(self) -> list[Tensor]:
            return list(self.small.family.decoder(self.model).parameters())

        def forward(self, latents: Tensor, *_: Any, **__: Any) -> Tensor:
            sample = self.small.family.decode(self.model, _restated(latents, self.full.scaling, self.small.scaling))
            (low, high), (own_low, own_high) = self.full.data_range, self.small.data_range
            if (low, high) == (own_low, own_high):
                return sample
            return (sample - own_low) * ((high - low) / (own_high - own_low)) + low

    return StandIn


def _restated(latents: Tensor, full: Scaling, small: Scaling) -> Tensor:
    """Latents as the full decoder takes them, as the small one does: both conventions scale the same denoiser's."""
    gain, offset = _affine(full, latents)
    own_gain, own_offset = _affine(small, latents)
    return (latents - offset) / gain * own_gain + own_offset


def _affine(scaling: Scaling, latents: Tensor) -> tuple[Any, Any]:
    """Gain and offset of a convention: decoder units = denoiser units · gain + offset."""

    def by_channel(values: tuple[float, ...]) -> Tensor:
        return torch.tensor(values, dtype=latents.dtype, device=latents.device).view(1, -1, *[1] * (latents.ndim - 2))

    gain: Any = 1.0 if scaling.std is None else by_channel(scaling.std)
    offset: Any = by_channel(scaling.mean) if scaling.mean is not None else scaling.shift or 0.0
    return gain / (scaling.factor or 1.0), offset
