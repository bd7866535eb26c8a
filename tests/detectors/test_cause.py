"""Causes: each wrong decode is named by its own diagnosis, and an honest one by none."""

from __future__ import annotations

import pytest
import torch

from fidelity.detectors import causes
from fidelity.records import DIAGNOSES, DecodePlan
from tests.doctored import pictures as p

RANGE = (-1.0, 1.0)


def named(candidate, golden, tiles=None, data_range=RANGE) -> list[str]:
    import msgspec

    from fidelity.records import Tiling

    plan, receipts = DecodePlan(), {}
    if tiles is not None:
        plan = DecodePlan(tiling=Tiling(16, tiles.cols.band / tiles.cols.tile))
        receipts = {"tiling": {"grid": msgspec.to_builtins(tiles)}}
    found = causes(candidate, golden, plan=plan, receipts=receipts, data_range=data_range)
    assert all(name in DIAGNOSES and len(words) > 10 and "\n" not in words for name, words in found)
    return [name for name, _ in found]


@pytest.fixture
def golden() -> torch.Tensor:
    return p.golden(4, batch=3)


@pytest.mark.parametrize(
    "kind", [k for k in p.MUST_NOT_FAIL if k not in ("lighter_everywhere", "contrast_everywhere", "eight_bits")]
)
def test_an_honest_decode_has_no_cause(golden, kind):
    assert set(named(p.MUST_NOT_FAIL[kind](golden), golden, p.grid(0.25))) <= {"shift", "scale"} & (
        {"shift"} if kind in ("vignette", "tone_curve_everywhere") else set()
    )


@pytest.mark.parametrize("factor", [0.995, 1.005, 0.5, 1.3])
@pytest.mark.parametrize("grey", [-0.3, 0.0, 0.2])
def test_a_gain_about_the_decoder_s_grey_is_a_scale(golden, factor, grey):
    assert named(grey + factor * (golden - grey), golden) == ["scale"]


def test_half_a_percent_shows_through_bf16_noise(golden):
    assert named(p.noise(golden * 1.005, 0.15), golden) == ["scale"]


@pytest.mark.parametrize("levels", [0.3, -5.0, 40.0])
def test_an_offset_is_a_shift(golden, levels):
    assert named(p.noise(golden + levels / 127.5, 0.1), golden) == ["shift"]


def test_an_offset_of_one_channel_is_a_shift(golden):
    candidate = golden.clone()
    candidate[:, 1] += 0.02
    assert named(candidate, golden) == ["shift"]


def test_double_normalisation_both_ways(golden):
    assert named((golden + 1) / 2, golden) == ["double_normalised"]
    assert named(2 * golden - 1, golden) == ["double_normalised"]
    assert named((2 * golden - 1).clamp(-1, 1), golden) == ["double_normalised"]
    unit = (golden + 1) / 2
    assert named(2 * unit - 1, unit, data_range=(0.0, 1.0)) == ["double_normalised"]


def test_truncation_is_told_from_rounding(golden):
    levels = (golden + 1) * 127.5
    assert named(levels.floor() / 127.5 - 1, golden) == ["truncation"]
    found = causes(levels.round() / 127.5 - 1, golden, plan=DecodePlan(), receipts={}, data_range=RANGE)
    assert [name for name, _ in found] == ["truncation"]
    assert "went through integers" in found[0][1]


def test_a_sample_cut_at_the_range_is_clipping(golden):
    assert named((golden * 1.5).clamp(-1, 1), golden * 1.5) == ["clipping"]


@pytest.mark.parametrize("order", [[1, 0, 2], [2, 0, 1], [0, 0, 2]])
def test_items_in_another_order(golden, order):
    assert named(p.noise(golden[order], 1.0), golden) == ["order"]


@pytest.mark.parametrize("order", [[2, 1, 0], [1, 2, 0]])
def test_channels_in_another_order(golden, order):
    assert named(p.noise(golden[:, order], 1.0), golden) == ["order"]


@pytest.mark.parametrize("shift", [(0, 1), (1, 0), (-3, 2), (8, 0)])
def test_a_picture_moved_by_pixels(golden, shift):
    found = causes(golden.roll(shift, (-2, -1)), golden, plan=DecodePlan(), receipts={}, data_range=RANGE)
    assert found[0][0] == "misaligned"
    assert f"{shift[1]:+d} px in x and {shift[0]:+d} px in y" in found[0][1]


def test_a_picture_turned(golden):
    for turned in (golden.flip(-1), golden.flip(-2), golden.mT):
        assert named(turned, golden) == ["geometry"]


def test_a_tile_moved_by_a_pixel(golden):
    candidate = p.noise(golden, 0.3)
    candidate[..., 128:, 128:] = golden.roll(1, -1)[..., 128:, 128:]
    assert named(candidate, golden, p.grid(0.0)) == ["misaligned"]


def test_a_tile_shown_twice(golden):
    candidate = p.noise(golden, 0.3)
    candidate[..., 128:, :128] = golden[..., :128, :128]
    assert named(candidate, golden, p.grid(0.0)) == ["geometry"]


@pytest.mark.parametrize(
    ("shape", "words"),
    [((3, 3, 512, 512), "2 times the size"), ((6, 3, 256, 256), "6 images for 3"), ((3, 3, 256, 248), "shape")],
)
def test_another_shape_is_geometry(golden, shape, words):
    found = causes(torch.zeros(shape), golden, plan=DecodePlan(), receipts={}, data_range=RANGE)
    assert [name for name, _ in found] == ["geometry"]
    assert words in found[0][1]


def test_not_finite(golden):
    golden = golden.clone()
    candidate = golden.clone()
    candidate[1] = float("nan")
    assert named(candidate, golden) == ["non_finite"]


def test_equal_has_no_cause(golden):
    assert named(golden.clone(), golden) == []


# ---------------------------------------------------------------- frames


@pytest.fixture
def video() -> torch.Tensor:
    """(1, 3, 9, 256, 256): a picture that moves and fades."""
    first, last = p.golden(8), p.golden(9)
    frames = [((8 - t) * first + t * last).roll(3 * t, -1) / 8 for t in range(9)]
    return torch.stack(frames, dim=2)


def test_frames_shifted_from_a_joint_on(video):
    candidate = video.clone()
    candidate[:, :, 4:8] = video[:, :, 5:9]
    found = causes(candidate, video, plan=DecodePlan(), receipts={}, data_range=RANGE)
    assert found[0][0] == "misaligned"
    assert "frame 4 is the frame later" in found[0][1]


def test_a_ghost_of_the_neighbour(video):
    candidate = p.noise(video.transpose(1, 2)[0], 0.2).transpose(0, 1)[None]
    candidate[:, :, 4] = 0.7 * candidate[:, :, 4] + 0.3 * video[:, :, 3]
    found = causes(candidate, video, plan=DecodePlan(), receipts={}, data_range=RANGE)
    assert "ghost" in [name for name, _ in found]
    assert "frame 4 holds 30% of frame 3" in dict(found)["ghost"]


@pytest.mark.slow
def test_an_honest_video_has_no_cause(video):
    candidate = p.noise(video.transpose(1, 2)[0], 0.5).transpose(0, 1)[None]
    assert named(candidate, video) == []


@pytest.mark.parametrize("at", [1.0, 0.9, 0.5])
def test_a_sample_cut_anywhere_is_clipping(at):
    golden = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(4)) * 0.6
    rounded = (golden + 1e-3 * torch.randn(golden.shape, generator=torch.Generator().manual_seed(5))).clamp(-at, at)
    for candidate in (golden.clamp(-at, at), rounded):
        found = causes(candidate, golden, plan=DecodePlan(), receipts={}, data_range=(-1.0, 1.0))
        assert "clipping" in [name for name, _ in found]


def test_a_tone_curve_that_also_cuts_is_not_clipping():
    golden = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(4)) * 0.45
    darker = ((golden.clamp(-1, 1) + 1) / 2) ** 0.8 * 2 - 1
    found = causes(darker, golden, plan=DecodePlan(), receipts={}, data_range=(-1.0, 1.0))
    assert "clipping" not in [name for name, _ in found]


def test_a_sample_of_few_values_went_through_integers():
    golden = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(4)) * 2 - 1
    sixty_four = ((golden + 1) * 31.5).round() / 31.5 - 1
    found = causes(sixty_four, golden, plan=DecodePlan(), receipts={}, data_range=(-1.0, 1.0))
    assert [name for name, _ in found][:1] == ["truncation"]
    assert causes(golden + 1e-4, golden, plan=DecodePlan(), receipts={}, data_range=(-1.0, 1.0)) == []


def test_an_item_that_holds_a_share_of_another_is_a_ghost():
    golden = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(4)).repeat_interleave(4, -1) * 2 - 1
    candidate = golden.clone()
    candidate[1] = torch.lerp(golden[1], golden[2], 0.05)
    found = causes(candidate, golden, plan=DecodePlan(), receipts={}, data_range=(-1.0, 1.0))
    assert [name for name, _ in found][:1] == ["ghost"]
