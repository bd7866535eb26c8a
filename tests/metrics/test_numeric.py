"""Numeric metrics against numpy and scikit-image, and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from skimage.metrics import peak_signal_noise_ratio

from tests.metrics.samples import measure, noisy, picture


def test_rmse_against_numpy():
    golden = picture()
    candidate = noisy(golden)
    difference = (candidate.double() - golden.double()).numpy() * 127.5
    result = measure("rmse", candidate, golden)
    assert result.per_image == pytest.approx(np.sqrt((difference**2).mean((1, 2, 3))).tolist(), rel=1e-5)


def test_rmse_counts_what_lies_outside_the_range():
    golden = torch.full((1, 3, 8, 8), 1.0)
    assert measure("rmse", golden + 1, golden).value == pytest.approx(127.5)


def test_psnr_against_scikit_image():
    golden = picture()
    candidate = noisy(golden)
    want = [peak_signal_noise_ratio(g.numpy(), c.numpy(), data_range=2.0) for c, g in zip(candidate, golden)]
    assert measure("psnr", candidate, golden).per_image == pytest.approx(want, rel=1e-5)


def test_psnr_of_an_equal_decode_is_null_and_exact():
    golden = picture()
    result = measure("psnr", golden.clone(), golden)
    assert (result.value, result.reason, result.exact) == (None, "exact", True)


def test_psnr_where_one_image_is_equal_is_that_of_the_other():
    golden = picture()
    candidate = golden.clone()
    candidate[1] = noisy(golden[1])
    result = measure("psnr", candidate, golden)
    assert result.value == pytest.approx(measure("psnr", candidate[1:], golden[1:]).value)
    assert result.details["per_image"][0] is None
    assert result.reason is None
    assert not result.exact


def test_max_abs_names_the_place_and_both_values():
    golden = picture()
    candidate = golden.clone()
    candidate[1, 2, 11, 7] += 0.5
    result = measure("max_abs", candidate, golden)
    assert result.value == pytest.approx(63.75, rel=1e-4)
    where = dict(result.where)
    assert (where.pop("image"), where.pop("channel"), where.pop("y"), where.pop("x")) == (1, 2, 11, 7)
    assert where["candidate"] - where["golden"] == pytest.approx(0.5)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 10_000))
def test_p999_is_an_order_statistic(height, width, seed):
    golden = torch.zeros(1, 3, height, width)
    candidate = torch.randn(golden.shape, generator=torch.Generator().manual_seed(seed))
    values = np.sort(np.abs(candidate.numpy().ravel() * 127.5))[::-1]
    want = values[max(1, int(np.ceil(values.size * 0.001))) - 1]
    assert measure("p999_abs", candidate, golden).value == pytest.approx(float(want), rel=1e-5)


def test_nonfinite_share_counts_the_candidate_s_alone():
    golden = picture()
    golden[0, 0, 0, 0] = float("nan")
    candidate = picture()
    candidate[1, 0, :4, :6] = float("inf")
    result = measure("nonfinite_share", candidate, golden)
    assert result.value == pytest.approx(24 / (3 * 64 * 96))
    assert result.where == {"image": 1, "x": 0, "y": 0, "channel": 0}


def test_nonfinite_share_of_nothing_but_nan():
    result = measure("nonfinite_share", torch.full((1, 3, 4, 4), float("nan")), torch.zeros(1, 3, 4, 4))
    assert result.value == 1.0


def test_huge_but_finite_values_are_finite():
    candidate = torch.full((1, 3, 64, 64), 3e38)
    assert measure("nonfinite_share", candidate, torch.zeros_like(candidate)).value == 0.0
    assert measure("rmse", candidate, torch.zeros_like(candidate)).value is None  # its square is not: no score


def test_clipped_share_is_what_a_viewer_loses():
    golden = torch.zeros(1, 3, 10, 10)
    golden[0, 0, 0, :5] = 2.0
    candidate = torch.zeros(1, 3, 10, 10)
    candidate[0, 1, :3] = -1.5
    candidate[0, 2, 0, 0] = 1.0  # on the border is inside
    result = measure("clipped_share", candidate, golden)
    assert result.value == pytest.approx(30 / 300)
    assert result.details["golden"] == pytest.approx(5 / 300)
