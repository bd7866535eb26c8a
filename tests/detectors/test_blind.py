"""Grids found blind, and seams that show without a golden."""

from __future__ import annotations

import pytest
import torch

from fidelity.records import DecodePlan
from fidelity.registry import DETECTORS
from tests.doctored import pictures as p


def periodic(candidate, golden):
    return DETECTORS.get("periodic")(candidate, golden, plan=DecodePlan(), receipts={}, data_range=(-1, 1))


def lined(golden, pitch, amplitude, phase=None):
    """Every other column of tiles lighter: steps of one sign and the other at each border."""
    out = golden.clone()
    first = pitch if phase is None else phase
    for start in range(first, golden.shape[-1], 2 * pitch):
        out[..., start : start + pitch] += amplitude / 127.5
    return out


@pytest.mark.parametrize(("pitch", "phase"), [(64, 64), (48, 48), (56, 24), (100, 36)])
def test_pitch_and_phase_of_an_unknown_grid(pitch, phase):
    golden = p.golden(2, size=(256, 320))
    found = periodic(p.noise(lined(golden, pitch, 1.5, phase), 0.2), golden)
    assert found.value > 0.5
    assert found.where["axis"] == "x"
    assert (found.where["pitch"], found.where["phase"] % pitch) == (pitch, phase % pitch)


def test_rows_too():
    golden = p.golden(2, size=(320, 256))
    found = periodic(p.noise(lined(golden.mT, 64, 1.5).mT.contiguous(), 0.2), golden)
    assert (found.where["axis"], found.where["pitch"]) == ("y", 64)
    assert found.value > 0.5


@pytest.mark.parametrize("kind", p.MUST_NOT_FAIL)
def test_clean_decodes_have_no_grid(kind):
    golden = p.golden(12)
    assert periodic(p.MUST_NOT_FAIL[kind](golden), golden).value <= 0.1


def test_the_decoder_s_own_sixteen_pixels_are_no_grid():
    golden = p.golden(3)
    candidate = p.noise(golden, 0.3)
    candidate[..., ::16] += 0.5 / 127.5
    found = periodic(candidate, golden)
    assert found.value <= 0.3, found.where


def test_too_small_says_so():
    golden = p.golden(size=(48, 48))
    found = periodic(golden + 0.01, golden)
    assert found.value is None
    assert "smaller" in found.reason


def test_a_seam_shows_in_the_picture_itself():
    golden = p.golden(0)
    tiles = p.grid(0.0)
    seamless = p.measure("visibility", golden, golden, tiles)
    assert seamless.value == 0
    doctored = p.offset(golden, tiles, 4 * seamless.detection_limit)
    # not even a golden that has the same seam hides it
    assert p.measure("visibility", doctored, doctored.clone(), tiles).value > seamless.detection_limit


def test_visibility_does_not_look_at_the_golden():
    golden = p.golden(0)
    tiles = p.grid(0.0)
    doctored = p.offset(golden, tiles, 60.0)
    assert p.measure("visibility", doctored, torch.zeros_like(golden), tiles).value == pytest.approx(
        p.measure("visibility", doctored, golden, tiles).value
    )
