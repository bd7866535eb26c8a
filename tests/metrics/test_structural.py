"""SSIM against scikit-image, MS-SSIM against torchmetrics."""

from __future__ import annotations

import pytest
import torch
from skimage.metrics import structural_similarity

from tests.metrics.samples import measure, noisy, picture, to_numpy


@pytest.mark.parametrize("amount", [0.001, 0.05, 0.5])
@pytest.mark.parametrize("size", [(64, 96), (11, 11), (13, 40)])
def test_ssim_against_scikit_image(amount, size):
    golden = picture(2, *size)
    candidate = noisy(golden, amount)
    how = {"channel_axis": 2, "gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
    pairs = [(to_numpy(g), to_numpy(c)) for c, g in zip(candidate, golden)]
    unit = [structural_similarity(g / 2 + 0.5, c / 2 + 0.5, data_range=1.0, **how) for g, c in pairs]
    assert measure("ssim", candidate, golden).per_image == pytest.approx(unit, abs=2e-4)
    if amount > 0.001:  # the mapping matters, so it is stated
        assert [structural_similarity(g, c, data_range=2.0, **how) for g, c in pairs] != pytest.approx(unit, abs=1e-5)


def test_ssim_sees_what_clipping_would_hide():
    golden = torch.full((1, 3, 32, 32), 1.0)
    candidate = golden.clone()
    candidate[..., ::2] = 1.5
    assert measure("ssim", candidate, golden).value < 0.5


def test_ssim_below_its_window_says_so():
    result = measure("ssim", picture(1, 10, 64), picture(1, 10, 64, seed=2))
    assert result.value is None
    assert "11 px" in result.reason


@pytest.mark.slow
@pytest.mark.parametrize("amount", [0.01, 0.2])
def test_ms_ssim_against_torchmetrics(amount):
    from torchmetrics.functional.image import multiscale_structural_similarity_index_measure as reference

    golden = picture(1, 192, 208)
    candidate = noisy(golden, amount)
    want = reference(candidate / 2 + 0.5, golden / 2 + 0.5, data_range=1.0, normalize="relu").item()
    assert measure("ms_ssim", candidate, golden).value == pytest.approx(want, abs=2e-3)


def test_ms_ssim_below_its_scales_says_so():
    result = measure("ms_ssim", picture(1, 160, 200), picture(1, 160, 200, seed=2))
    assert result.value is None
    assert "161 px" in result.reason
