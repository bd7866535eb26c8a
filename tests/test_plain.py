"""What plain decodes cost, and when tiles or slices saved nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fidelity import registry
from fidelity.plain import SAVED, Plain
from fidelity.records import DecodePlan, Tiling
from fidelity.registry import MODELS

registry.load_plugins()
PEAK = 1_000_000


def plain() -> Plain:
    runner: Any = SimpleNamespace(model=MODELS.get("reference-kl"), peak_bytes=lambda latents, plan: PEAK)
    latents = torch.zeros(2, 4, 24, 32)
    return Plain(runner, latents, latents)


@pytest.mark.parametrize(
    ("peak", "saved"),
    [
        (None, True),
        (PEAK // 2, True),
        (PEAK - PEAK * SAVED - 1, True),
        (PEAK - PEAK * SAVED, False),
        (PEAK - 16, False),
        (PEAK, False),
        (PEAK + 1, False),
    ],
)
def test_a_peak_that_is_not_lower_by_more_than_noise_saved_nothing(peak: int | None, saved: bool) -> None:
    reasons = plain().peak_reasons(DecodePlan(tiling=Tiling(16, 0.25)), peak)
    assert [reason.diagnosis for reason in reasons] == ([] if saved else [("memory",)])


def test_offloads_and_plain_decodes_are_not_asked_what_tiles_saved() -> None:
    asked = plain()
    assert asked.peak_reasons(DecodePlan(), 2 * PEAK) == []
    assert asked.peak_reasons(DecodePlan(tiling=Tiling(16, 0.25), offload="disk"), 2 * PEAK) == []
