"""The null: its quantiles against scipy, and its false alarms on noise that has no seam."""

from __future__ import annotations

import math
import random

import pytest
import torch
from scipy import stats

from fidelity.detectors.grid import Layout
from fidelity.detectors.null import ALPHA, FEWEST, excess, student, tail
from fidelity.detectors.steps import steps
from fidelity.detectors.tone import tile_weights, tones
from tests.doctored import pictures as p


@pytest.mark.parametrize("freedom", [10, 24, 60, 500])
@pytest.mark.parametrize("z", [2.3, 3.1, 4.0, 4.5])
def test_student_s_quantile_against_scipy(z, freedom):
    assert student(z, freedom) == pytest.approx(stats.t.ppf(stats.norm.cdf(z), freedom), rel=0.06)


def test_the_tail_of_a_lognormal_by_hand():
    chance = random.Random(0)
    found = tail([math.exp(chance.gauss(0.1, 0.2)) for _ in range(2000)], tests=1)
    assert found.critical == pytest.approx(math.exp(0.1 + 3.09 * 0.2), rel=0.02)
    assert found.median == pytest.approx(math.exp(0.1), rel=0.02)
    assert found.p_value(found.critical) == pytest.approx(ALPHA, rel=0.05)


def test_more_looks_and_fewer_or_shared_controls_ask_for_more():
    ratios = [0.8, 0.9, 1.0, 1.1, 1.2] * 8
    plain = tail(ratios, 1).critical
    assert tail(ratios, 50).critical > plain
    assert tail(ratios[:10], 1).critical > plain
    assert tail(ratios, 1, shared=4).critical > plain
    assert tail(ratios[: FEWEST - 1], 1) is None
    assert tail(ratios, 1, shared=6) is None


def test_excess_is_nothing_below_the_critical_value():
    assert excess(1.0, 1.0) == 0
    assert excess(0.9, 1.0) == 0
    assert excess(-5.0, 3.0) == pytest.approx(4.0)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.5])
@pytest.mark.parametrize("softness", [1, 5])
def test_false_alarms_on_noise_are_rare(overlap, softness):
    """White and soft noise, stronger where the picture is rough: at most two of 120 above nothing."""
    tiles = Layout(p.grid(overlap), 8)
    golden = (p.golden(4) + 1) * 127.5
    rough = torch.nn.functional.avg_pool2d((golden[..., 1:] - golden[..., :-1]).abs(), 9, 1, 4).mean(1, keepdim=True)
    scale = 0.05 + torch.nn.functional.pad(rough, (1, 0, 0, 0), mode="replicate") / 40
    generator = torch.Generator().manual_seed(7)
    noise = torch.randn(120, 3, 256, 256, generator=generator)
    noise = torch.nn.functional.avg_pool2d(noise, softness, 1, softness // 2) * scale
    assert sum(found.value > 0 for found in steps(noise, tiles)) <= 2
    assert sum(found.value > 0 for found in tones(noise, golden.expand(120, -1, -1, -1), tiles)) <= 2


@pytest.mark.parametrize("overlap", [0.0, 0.125, 0.25, 0.5])
def test_blend_weights_add_up_to_one(overlap):
    weights = tile_weights(p.grid(overlap, size=(200, 328)), 8)
    assert weights.shape[0] == 25 * 41
    assert torch.allclose(weights.sum(1), torch.ones(len(weights), dtype=weights.dtype))
    assert weights.min() >= 0


def test_a_tile_s_weight_is_that_of_a_blended_decode():
    tiles = p.grid(0.25)
    expected = torch.nn.functional.avg_pool2d(p.tile_weight(tiles, 1, 1)[None, None].double(), 8).flatten()
    assert torch.allclose(tile_weights(tiles, 8)[:, 1 * 3 + 1], expected)
