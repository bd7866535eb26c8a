"""`fidelity.check`: a decode of one's own, judged in a test or a notebook."""

from __future__ import annotations

import pytest
import torch

import fidelity

pytestmark = pytest.mark.slow
LIMITS = {"rmse": 1.0}


def honest(module, latents):
    return module.decode(latents)


def check(decode, **about):
    return fidelity.check(decode, model="reference-kl", latents="ramp", **{"limits": LIMITS, **about})


def test_an_honest_decode_passes_and_the_result_comes_back():
    result = check(honest)
    assert result.verdict == "pass"
    assert result.measurements["rmse"].value == 0.0
    assert result.receipts["decoder"]["calls"] == 1


def bright(module, latents):
    return module.decode(latents).sample + 0.02


def dropped_row(module, latents):
    return module.decode(latents).sample[..., :-1, :]


def broken(module, latents):
    sample = module.decode(latents).sample.clone()
    sample[0, 0, 5, 7] = float("nan")
    return sample


def raising(module, latents):
    raise ValueError("no such layer")


def nothing(module, latents):
    return None


def half_left_behind(module, latents):
    module.use_tiling = True
    return module.decode(latents)


@pytest.mark.parametrize(
    ("decode", "named"),
    [
        (bright, "rmse is 2.55 grey levels, above the limit 1"),
        (dropped_row, "[geometry]"),
        (broken, "[non_finite]"),
        (raising, "ValueError at test_api.py"),
        (nothing, "a decode must return a tensor"),
        (half_left_behind, "[state_leak]"),
    ],
)
def test_a_broken_decode_is_named(decode, named):
    with pytest.raises(AssertionError) as caught:
        check(decode)
    assert named in str(caught.value)


def tiled(module, latents):
    module.enable_tiling()
    module.tile_latent_min_size, module.tile_sample_min_size, module.tile_overlap_factor = 16, 128, 0.0
    try:
        return module.decode(latents)
    finally:
        module.disable_tiling()
        module.tile_latent_min_size, module.tile_sample_min_size, module.tile_overlap_factor = 32, 256, 0.25


def test_a_claimed_tiling_is_looked_at_where_its_tiles_lie():
    with pytest.raises(AssertionError, match=r"\[seam\]") as caught:
        check(tiled, plan="tile=16,overlap=0.0", limits={"tile_step": 1.0})
    assert "tile_step" in str(caught.value)


def test_a_claimed_tiling_that_never_happened_is_not_engaged():
    with pytest.raises(AssertionError, match=r"\[not_engaged\]"):
        check(honest, plan="tile=16,overlap=0.25")


@pytest.mark.parametrize(
    ("about", "says"),
    [
        ({"limits": {}}, "no limits"),
        ({"limits": {"rsme": 1.0}}, "did you mean 'rmse'"),
        ({"plan": "tile=16,overlap=2"}, "overlap"),
    ],
)
def test_wrong_requests(about, says):
    with pytest.raises(fidelity.RequestError, match=says):
        check(honest, **about)


def test_limits_may_be_tables_and_bound_from_below():
    assert check(honest, limits={"ssim": 0.99, "rmse": {"max": 0.5}}).verdict == "pass"
    with pytest.raises(AssertionError, match="ssim"):
        check(lambda module, latents: torch.zeros_like(module.decode(latents).sample), limits={"ssim": 0.99})


def in_place(module, latents):
    sample = module.decode(latents).sample
    latents.mul_(0.5)
    return sample


def test_a_decode_that_changes_its_latents_is_named_and_spoils_nothing():
    with pytest.raises(AssertionError, match="changed its latents in place"):
        check(in_place)
    assert check(honest).measurements["rmse"].value == 0.0


@pytest.mark.parametrize(
    ("plan", "named"),
    [("bf16", "dtype"), ("tile=16,overlap=0.25", "not_engaged")],
)
def test_claims_are_held_against_what_the_hooks_saw(plan, named):
    with pytest.raises(AssertionError, match=named):
        check(honest, plan=plan, limits={"rmse": 50.0})


def test_a_visible_line_fails_where_the_decode_says_that_it_tiles():
    with pytest.raises(AssertionError, match=r"\[seam\]"):
        check(tiled, plan="tile=16,overlap=0.0", limits={"rmse": 50.0})


@pytest.mark.parametrize("limits", [{"rmse": {"min": 0.0}}, {"rmse": {"mx": 1.0}}, {"rmse": "low"}])
def test_limits_that_hold_nothing_are_refused(limits):
    with pytest.raises(fidelity.RequestError, match="rmse"):
        check(honest, limits=limits)
