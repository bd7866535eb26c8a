"""CIEDE2000 and Lab against scikit-image, and against the published test pairs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from skimage.color import deltaE_ciede2000, rgb2lab

from fidelity.metrics.color import ciede2000
from fidelity.signal import lab
from tests.metrics.samples import measure, noisy, picture, to_numpy

# Sharma, Wu, Dalal 2005, table 1: L a b, L a b, ΔE2000 (the pairs that separate wrong implementations)
SHARMA = [
    (50.0, 2.6772, -79.7751, 50.0, 0.0, -82.7485, 2.0425),
    (50.0, -1.3802, -84.2814, 50.0, 0.0, -82.7485, 1.0000),
    (50.0, 0.0, 0.0, 50.0, -1.0, 2.0, 2.3669),
    (50.0, 2.4900, -0.0010, 50.0, -2.4900, 0.0009, 7.1792),
    (50.0, 2.4900, -0.0010, 50.0, -2.4900, 0.0011, 7.2195),
    (50.0, -0.0010, 2.4900, 50.0, 0.0011, -2.4900, 4.7461),
    (50.0, 2.5, 0.0, 50.0, 0.0, -2.5, 4.3065),
    (50.0, 2.5, 0.0, 73.0, 25.0, -18.0, 27.1492),
    (60.2574, -34.0099, 36.2677, 60.4626, -34.1751, 39.4387, 1.2644),
    (22.7233, 20.0904, -46.6940, 23.0331, 14.9730, -42.5619, 2.0373),
    (90.8027, -2.0831, 1.4410, 91.1528, -1.6435, 0.0447, 1.4441),
    (2.0776, 0.0795, -1.1350, 0.9033, -0.0636, -0.5514, 0.9082),
]


def test_ciede2000_of_the_published_pairs():
    table = torch.tensor(SHARMA, dtype=torch.float64)
    first, second = table[:, 0:3].T[None, :, None], table[:, 3:6].T[None, :, None]
    assert ciede2000(first, second).flatten().tolist() == pytest.approx(table[:, 6].tolist(), abs=1e-4)


def test_lab_against_scikit_image():
    rgb = torch.rand(2, 3, 40, 50, generator=torch.Generator().manual_seed(0))
    rgb[0, :, 0] = torch.linspace(0, 0.06, 50)  # the linear parts of both curves
    rgb[1, :, 0, 0] = 0.0
    want = np.stack([rgb2lab(to_numpy(image)) for image in rgb])
    assert np.abs(lab(rgb).permute(0, 2, 3, 1).numpy() - want).max() < 2e-3


def test_delta_e_against_scikit_image():
    golden = picture()
    candidate = noisy(golden, 0.05)
    maps = [
        deltaE_ciede2000(*(rgb2lab(to_numpy(side / 2 + 0.5).clip(0, 1)) for side in pair))
        for pair in zip(candidate, golden)
    ]
    assert measure("delta_e_mean", candidate, golden).per_image == pytest.approx([m.mean() for m in maps], rel=1e-3)
    want = [np.sort(m.ravel())[::-1][int(np.ceil(m.size * 0.01)) - 1] for m in maps]
    assert measure("delta_e_p99", candidate, golden).per_image == pytest.approx(want, rel=1e-3)


def test_grey_has_no_colour():
    golden = picture()[:, :1]
    result = measure("delta_e_mean", golden.clone(), golden)
    assert result.value is None
    assert "1 channels" in result.reason


def test_one_map_serves_mean_and_p99_but_not_another_golden():
    golden, other = picture(), picture(seed=5)
    candidate = noisy(golden)
    first = measure("delta_e_mean", candidate, golden).value
    assert measure("delta_e_mean", candidate, other).value > first + 1
    assert measure("delta_e_mean", candidate, golden).value == first
