"""Blur, banding, luma and saturation."""

from __future__ import annotations

import pytest
import torch

from tests.metrics.samples import measure, noisy, picture


def test_detail_loss_of_a_blur_by_hand():
    golden = picture()
    assert measure("detail_loss", golden.clone(), golden).value == pytest.approx(0, abs=1e-6)
    blurred = torch.nn.functional.avg_pool2d(golden, 3, 1, 1, count_include_pad=False)
    assert 0.3 < measure("detail_loss", blurred, golden).value < 1
    half = golden - 0.5 * (golden - torch.nn.functional.avg_pool2d(golden, 5, 1, 2))
    assert measure("detail_loss", half[..., 2:-2, 2:-2], golden[..., 2:-2, 2:-2]).value == pytest.approx(0.5, abs=0.1)


def test_noise_is_no_loss_of_detail_and_sharpening_is_less_than_none():
    golden = picture()
    assert abs(measure("detail_loss", noisy(golden, 0.1), golden).value) < 0.05
    sharper = golden + 0.5 * (golden - torch.nn.functional.avg_pool2d(golden, 5, 1, 2))
    assert measure("detail_loss", sharper, golden).value < -0.2


def test_a_flat_golden_has_no_detail_to_lose():
    golden = torch.zeros(1, 3, 32, 32)
    assert measure("detail_loss", noisy(golden, 0.1), golden).value == 0


def test_banding_of_whole_levels_on_a_gradient():
    golden = torch.linspace(-0.5, 0.0, 512).expand(1, 3, 16, 512).contiguous()
    assert measure("banding", golden.clone(), golden).value == 0
    rounded = (golden * 127.5).round() / 127.5
    slope = 0.5 / 511 * 127.5
    assert measure("banding", rounded, golden).value == pytest.approx(1 - slope, abs=0.01)


def test_luma_shift_is_that_of_rec_601():
    golden = picture()
    candidate = golden.clone()
    candidate[1, 1] -= 10 / 127.5
    result = measure("luma_shift", candidate, golden)
    assert result.value == pytest.approx(5.87, abs=1e-3)
    assert result.details["signed"] == pytest.approx((0.0, -5.87), abs=1e-3)


def test_saturation_shift_of_half_the_colour():
    golden = picture().clamp(-0.6, 0.6)
    grey = golden.mean(1, keepdim=True)
    result = measure("saturation_shift", grey + 0.5 * (golden - grey), golden)
    assert result.value == pytest.approx(50, abs=8)
    assert measure("saturation_shift", golden.clone(), golden).value == 0
