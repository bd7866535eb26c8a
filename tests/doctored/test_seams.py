"""Every seam detector against a doctored decode it must catch and clean ones it must not."""

from __future__ import annotations

import pytest
import torch

import fidelity.detectors  # noqa: F401 (registers)
from tests.doctored import pictures as p

TILE = ["tile_step", "tile_tone", "tile_band", "tile_chroma", "tile_corner"]
HARD, BLENDED = p.grid(0.0), p.grid(0.25)
NOISES = {"oracle": 0.0, "fp16": 0.03, "bf16": 0.3}
LIMIT = 0.3
"""Grey levels: the limit under which the doctored decodes of a level and more must stand out."""


def candidate(doctored, noise):
    return p.noise(doctored, noise) if noise else doctored


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("seed", range(3))
class TestMustFail:
    def test_line_of_one_level_at_a_border(self, noise, seed):
        golden = p.golden(seed)
        found = p.measure("tile_step", candidate(p.line(golden, 1.0), NOISES[noise]), golden, HARD)
        assert found.value > LIMIT
        assert (found.where["axis"], found.where["position"]) == ("x", 128)

    def test_hard_tile_offset_of_one_level(self, noise, seed):
        golden = p.golden(seed)
        doctored = candidate(p.offset(golden, HARD, 1.0), NOISES[noise])
        step, tone = (p.measure(name, doctored, golden, HARD) for name in ("tile_step", "tile_tone"))
        assert step.value > LIMIT
        assert tone.value > LIMIT
        assert tone.where["tile"] == [1, 0]
        assert tone.details["kind"] == "offset"
        assert tone.details["effect"] == pytest.approx(1, abs=0.2)

    def test_blended_offset_of_two_levels(self, noise, seed):
        golden = p.golden(seed)
        found = p.measure("tile_tone", candidate(p.offset(golden, BLENDED, 2.0), NOISES[noise]), golden, BLENDED)
        assert found.value > LIMIT
        assert found.where["tile"] == [1, 0]
        assert found.details["effect"] == pytest.approx(2, abs=0.5)

    def test_hue_offset_of_one_level(self, noise, seed):
        golden = p.golden(seed)
        found = p.measure("tile_chroma", candidate(p.hue(golden, HARD, 1.0), NOISES[noise]), golden, HARD)
        assert found.value > LIMIT

    def test_gain_of_one_tile(self, noise, seed):
        golden = p.golden(seed)
        found = p.measure("tile_tone", candidate(p.gain(golden, HARD, 1.05), NOISES[noise]), golden, HARD)
        assert found.value > LIMIT
        assert found.where["tile"] == [0, 1]
        assert found.details["kind"] == "gain"

    def test_error_in_one_band(self, noise, seed):
        golden = p.golden(seed)
        found = p.measure("tile_band", candidate(p.band(golden, BLENDED, 2.0), NOISES[noise]), golden, BLENDED)
        assert found.value > LIMIT
        assert 96 <= found.where["x"] < 128

    def test_error_at_one_corner(self, noise, seed):
        golden = p.golden(seed)
        found = p.measure("tile_corner", candidate(p.corner(golden, BLENDED, 2.0), NOISES[noise]), golden, BLENDED)
        assert found.value > LIMIT
        assert (found.where["x"], found.where["y"]) == (112, 112)

    def test_line_at_the_far_edge_of_a_band(self, noise, seed):
        golden = p.golden(seed)
        found = p.measure("tile_step", candidate(p.line(golden, 1.0, x=128), NOISES[noise]), golden, BLENDED)
        assert found.value > LIMIT
        assert (found.where["position"], found.where["line"]) == (128, "band end")


@pytest.mark.parametrize("name", TILE)
@pytest.mark.parametrize("kind", p.MUST_NOT_FAIL)
@pytest.mark.parametrize("overlap", [0.0, 0.25])
def test_must_not_fail(name, kind, overlap):
    golden = p.golden(11)
    found = p.measure(name, p.MUST_NOT_FAIL[kind](golden), golden, p.grid(overlap))
    assert found.value is not None, found.reason
    assert found.value <= 0.1, (found.where, found.details)


@pytest.mark.parametrize("name", TILE)
def test_size_that_calibration_did_not_see(name):
    tiles = p.grid(0.25, size=(200, 328))
    golden = p.golden(5, size=(200, 328))
    assert p.measure(name, p.noise(golden, 0.3, seed=9), golden, tiles).value <= 0.1


def test_seam_in_a_short_last_tile_only():
    tiles = p.grid(0.0, size=(256, 272))  # the last tile is 16 px wide
    golden = p.golden(3, size=(256, 272))
    doctored = p.noise(p.offset(golden, tiles, 1.0, tile=(0, 2)), 0.1)
    found = p.measure("tile_step", doctored, golden, tiles)
    assert found.value > LIMIT
    assert found.where["position"] == 256
    assert found.where["tile"] == [0, 2]


def test_the_worst_image_of_a_batch_is_named():
    golden = p.golden(2, batch=3)
    doctored = p.noise(golden, 0.2)
    doctored[1] = p.line(doctored[1:2], 2.0)[0]
    found = p.measure("tile_step", doctored, golden, HARD)
    assert found.where["image"] == 1
    assert found.per_image[0] == found.per_image[2] == 0
    assert found.per_image[1] == found.value > 1


def test_a_frame_of_a_video_is_named():
    golden = torch.stack([p.golden(seed)[0] for seed in range(3)], dim=1)[None]
    doctored = golden.clone()
    doctored[0, :, 2, :, 128] += 2 / 127.5
    found = p.measure("tile_step", doctored, golden, HARD)
    assert (found.where["image"], found.where["frame"]) == (0, 2)
