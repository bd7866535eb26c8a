"""The temporal detectors, piece by piece: the grid of frames, the statistics and their limits, what is not measured."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

import fidelity.detectors  # noqa: F401 (registers)
from fidelity import measuring
from fidelity.detectors.chunks import chunk_tones
from fidelity.detectors.course import courses
from fidelity.detectors.joints import FLOOR, Joints, _usual, joints
from fidelity.errors import EvaluationError
from fidelity.records import DecodePlan, Temporal, TileAxis, to_json
from fidelity.registry import DETECTORS, FRAMES
from fidelity.signal import Pair
from tests.doctored import pictures as p
from tests.doctored import videos as v

ALL = ["frame_rmse", "frame_step", "frame_flicker", "frame_ghost"]
PLAN = DecodePlan(temporal=Temporal(2, 0.0))


def film(seed: int = 0, frames: int = 17, size: int = 64, batch: int = 1) -> torch.Tensor:
    """(B, 3, T, size, size): a drawn picture that moves two pixels a frame, and one down in two frames."""
    big = p.golden(seed, (size + frames, size + 3 * frames), batch)
    return torch.stack([big[:, :, t // 2 : t // 2 + size, 2 * t : 2 * t + size] for t in range(frames)], dim=2)


@pytest.fixture(scope="module")
def golden() -> torch.Tensor:
    return film()


# ---------------------------------------------------------------- who is asked


def test_detectors_of_frames_look_at_videos_only():
    for name in ("frame_rmse", "frame_flicker", "frame_ghost"):
        assert DETECTORS.get(name).needs == FRAMES
        assert DETECTORS.get(name).looks_at(DecodePlan(), video=True)
        assert not DETECTORS.get(name).looks_at(PLAN, video=False)
    assert DETECTORS.get("frame_step").looks_at(PLAN, video=True)
    assert not DETECTORS.get("frame_step").looks_at(DecodePlan(), video=True)


@pytest.mark.slow
def test_a_picture_is_not_measured_in_time_and_a_video_is():
    picture = p.golden(0, (64, 64))
    found = measuring.measure(p.noise(picture), picture, DecodePlan(), {}, v.RANGE)
    assert not any(name.startswith("frame_") for name in found)
    video = film(frames=2)
    found = measuring.measure(v.noise(video), video, DecodePlan(), {}, v.RANGE)
    assert {name for name in found if name.startswith("frame_")} == {"frame_rmse", "frame_flicker", "frame_ghost"}


@pytest.mark.parametrize("name", ALL)
def test_a_picture_has_no_frames_to_measure(name):
    picture = p.golden(0, (64, 64))
    found = DETECTORS.get(name)(picture, picture, plan=PLAN, receipts={}, data_range=v.RANGE)
    assert found.value is None
    assert "a picture has no frames" in found.reason


# ---------------------------------------------------------------- the grid of frames


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        (None, "hold no grid of frames"),
        ({"starts": [0, 5]}, "cannot be read"),
        (TileAxis((0, 5), 0, 8, 33), "for 33 frames, the sample has 17"),
        (TileAxis((5, 9), 0, 8, 17), "start at [5, 9]"),
        (TileAxis((0, 9, 5), 0, 8, 17), "start at [0, 9, 5]"),
        (TileAxis((0, 17), 0, 8, 17), "below 17"),
        (TileAxis((0,), 0, 8, 17), "one chunk"),
    ],
)
def test_a_grid_of_frames_that_does_not_fit_is_a_reason(golden, grid, words):
    receipts = {"temporal": {"grid": msgspec.to_builtins(grid)}}
    assert words in joints(17, PLAN, receipts)
    found = DETECTORS.get("frame_step")(v.noise(golden), golden, plan=PLAN, receipts=receipts, data_range=v.RANGE)
    assert found.value is None
    assert words in found.reason


def test_both_ends_of_each_band_may_break():
    assert Joints(TileAxis((0, 5, 13), 0, 8, 17), 4).breaks == {5: "joint", 13: "joint"}
    assert Joints(TileAxis((0, 5, 13), 3, 8, 17), 4).breaks == {
        5: "joint", 8: "band end", 13: "joint", 16: "band end",
    }  # fmt: skip
    assert Joints(TileAxis((0, 8), 9, 16, 17), 1).breaks == {8: "joint"}  # the band ends with the video
    assert Joints(TileAxis((0, 4, 8), 4, 8, 12), 1).breaks == {4: "joint", 8: "joint"}


def test_frames_near_a_break_are_not_compared_with():
    where = Joints(TileAxis((0, 5), 0, 8, 9), 4)
    assert where.clear(0) == [1, 2, 3, 4, 6, 7, 8]
    assert where.clear(1) == [1, 2, 3, 7, 8]


def test_the_usual_step_at_a_frame_is_that_of_others():
    effect = torch.zeros(17, 1)
    effect[4] = 3.0
    usual = _usual(effect, list(range(1, 17)), reach=8)[:, 0]
    assert float(usual[4]) == pytest.approx(FLOOR)
    assert float(usual[5]) > 0.7
    assert float(usual[13]) == pytest.approx(FLOOR)  # out of reach


@pytest.mark.parametrize(
    ("axis", "temporal", "period"),
    [
        (TileAxis((0, 5, 13), 0, 8, 17), Temporal(2, 0.0), 4),
        (TileAxis((0, 12), 4, 16, 28), Temporal(4, 0.25), 4),
        (TileAxis((0, 8), 0, 8, 16), Temporal(8, 0.0), 1),
        (TileAxis((0, 5, 13), 0, 8, 17), None, 8),
        (TileAxis((0, 5, 11), 0, 6, 17), Temporal(4, 0.0), 6),
    ],
)
def test_frames_a_latent_frame(axis, temporal, period):
    receipts = {"temporal": {"grid": msgspec.to_builtins(axis)}}
    assert joints(axis.size, DecodePlan(temporal=temporal), receipts).period == period


# ---------------------------------------------------------------- values


def test_the_profile_is_each_frame_s_error(golden):
    candidate = v.noise(golden, 0.5)
    found = v.measure("frame_rmse", candidate, golden)
    error = (candidate - golden).numpy().astype(np.float64) * 127.5
    expected = np.sqrt((error**2).mean((1, 3, 4)))
    np.testing.assert_allclose(found.details["profile"], expected, rtol=1e-5)
    assert found.value == pytest.approx(expected.max(), rel=1e-5)
    assert found.where == {"image": 0, "frame": int(expected.argmax())}


def test_frames_that_stand_out_are_listed(golden):
    candidate = v.noise(golden, 0.3)
    candidate[:, :, :2] = v.noise(golden, 2.0)[:, :, :2]
    assert v.measure("frame_rmse", candidate, golden).details["stand_out"] == [0, 1]


def test_rough_steps_are_those_of_the_pixels(golden):
    candidate = v.noise(golden, 0.5)
    rough = courses(Pair(candidate, golden, v.RANGE))[0].rough
    error = (candidate - golden).numpy().astype(np.float64)[0] * 127.5
    steps = (np.diff(error, axis=1) ** 2).mean(0)
    assert float(rough[0].sum()) == 0
    np.testing.assert_allclose(rough[1:, 1], steps[:, :32, 32:].mean((1, 2)), rtol=1e-4)
    np.testing.assert_allclose(rough[1:, 2], steps[:, 32:, :32].mean((1, 2)), rtol=1e-4)


def test_flicker_s_profile_is_the_mean_luma_of_the_error(golden):
    candidate = v.noise(golden, 0.5)
    error = (candidate - golden).numpy().astype(np.float64) * 127.5
    expected = np.tensordot(error.mean((3, 4)), [0.2126, 0.7152, 0.0722], axes=([1], [0]))
    found = v.measure("frame_flicker", candidate, golden).details["profile"]
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_jump_is_read_in_full(golden):
    for amplitude in (1.0, -2.5):
        candidate = golden.clone()
        candidate[:, :, 5:] += amplitude / 127.5
        for name in ("frame_step", "frame_flicker"):
            found = v.measure(name, candidate, golden)
            assert found.value == pytest.approx(abs(amplitude), rel=0.02)
            assert found.where["frame"] == 5


def test_no_step_is_seen_where_no_chunks_meet(golden):
    candidate = v.noise(golden)
    candidate[:, :, 8:] += 2 / 127.5
    assert v.measure("frame_step", candidate, golden, v.axis()).value == 0
    assert v.measure("frame_flicker", candidate, golden).where["frame"] == 8


@pytest.mark.parametrize("band", [2, 4, 8])
def test_a_chunk_s_tone_is_read_through_its_blend(golden, band):
    chunks = TileAxis((0, 8), band, 8 + band, 17)
    course = courses(Pair(v.jump(golden, chunks, 1.0), golden, v.RANGE))[0]
    (tone,) = chunk_tones(course, chunks, 10)
    assert tone.frame == 8
    assert tone.effect == pytest.approx(1, abs=0.01)


def test_a_drift_in_time_is_no_chunk_s_tone(golden):
    course = courses(Pair(v.fade(golden), golden, v.RANGE))[0]
    assert all(tone.value == 0 and tone.effect < 0.05 for tone in chunk_tones(course, v.axis(4), 10))


def test_chunks_that_are_too_many_have_no_tone_of_their_own():
    video = film(frames=9)
    chunks = TileAxis(tuple(range(0, 9, 2)), 1, 3, 9)
    assert chunk_tones(courses(Pair(v.noise(video), video, v.RANGE))[0], chunks, 10) == []


@pytest.mark.parametrize("every", [4, 6, 8])
def test_a_rhythm_is_named(golden, every):
    video = film(frames=33, size=48)
    found = v.measure("frame_flicker", v.beat(v.noise(video, 0.1), 0.3, every, phase=2), video)
    assert (found.details["period"], found.details["phase"]) == (every, 2)


@pytest.mark.parametrize("step", [1, -1, 2, -3, 4])
def test_a_ghost_is_the_share_of_the_frame(golden, step):
    found = v.measure("frame_ghost", v.ghost(golden, 0.25, step, frames=(8,)), golden)
    assert found.value == pytest.approx(0.25, rel=0.05)
    assert (found.where["frame"], found.where["shows"]) == (8, f"frame {8 + step}")
    profile = found.details["profile"][0]
    assert profile[8] == pytest.approx(0.25, rel=0.05)
    assert [share for frame, share in enumerate(profile) if frame != 8] == pytest.approx([0] * 16, abs=1e-3)
    levels = float((golden[:, :, 8 + step] - golden[:, :, 8]).square().mean().sqrt()) * 127.5 * 0.25
    assert 0.2 * levels < found.details["levels"] < levels  # small frames, and beside contrast and detail


# ---------------------------------------------------------------- what is not measured


def test_a_still_film_has_no_ghost_to_measure(golden):
    still = golden[:, :, :1].expand_as(golden).contiguous()
    found = v.measure("frame_ghost", v.noise(still), still)
    assert found.value is None
    assert "still" in found.reason
    both = torch.cat([golden, still])
    found = v.measure("frame_ghost", v.noise(both), both)
    assert found.value is None
    assert found.per_image[0] == 0
    assert found.per_image[1] is None


def test_a_fade_is_no_motion(golden):
    """Frames that differ in contrast alone: a share of one cannot be told from a gain."""
    fades = golden[:, :, :1] * torch.linspace(0.5, 1, 17).view(-1, 1, 1)
    assert v.measure("frame_ghost", v.noise(fades), fades).value is None


def test_too_few_frames_without_a_joint_are_a_reason():
    video = film(frames=5)
    chunks = TileAxis((0, 1, 3), 1, 2, 5)
    found = v.measure("frame_step", v.noise(video), video, chunks)
    assert found.value is None
    assert "of 4 frames are no joint" in found.reason
    assert v.measure("frame_step", video.clone(), video, chunks).value == 0  # equal is equal


def test_one_frame_has_nothing_to_flicker_or_to_show():
    video = film(frames=1)
    for name in ("frame_flicker", "frame_ghost"):
        found = v.measure(name, v.noise(video), video, TileAxis((0,), 0, 8, 1))
        assert found.value == 0
        assert "one frame alone" in found.details["note"]


@pytest.mark.parametrize("name", ALL)
def test_an_item_that_is_not_finite_is_not_measured(golden, name):
    both = torch.cat([golden, film(1)])
    candidate = v.noise(both)
    candidate[1, 0, 3, 5, 7] = float("nan")
    found = v.measure(name, candidate, both)
    assert found.value is None
    assert found.per_image[0] is not None
    assert found.per_image[1] is None
    assert "not finite" in found.reason
    to_json(found)


@pytest.mark.parametrize("name", ALL)
def test_samples_that_do_not_fit_raise(golden, name):
    with pytest.raises(EvaluationError, match="has shape"):
        v.measure(name, golden[:, :, :-1], golden)


# ---------------------------------------------------------------- what all keep to


def spoilt(name: str, video: torch.Tensor) -> torch.Tensor:
    return v.ghost(video, 0.3) if name == "frame_ghost" else v.jump(video, v.axis(), 3.0)


@pytest.mark.parametrize("name", ALL)
def test_the_worst_item_decides_and_is_named(golden, name):
    both = torch.cat([golden, film(1), film(2)])
    candidate = v.noise(both, 0.1)
    candidate[1:2] = spoilt(name, candidate[1:2])
    found = v.measure(name, candidate, both)
    assert found.where["image"] == 1
    assert found.value == found.per_image[1] == max(found.per_image)
    assert [len(each) for each in found.details["profile"]] == [17] * 3
    to_json(found)
    alone = v.measure(name, candidate[1:2].contiguous(), both[1:2].contiguous())
    assert found.value == pytest.approx(alone.value, rel=0.05)  # a batch is looked at more often


@pytest.mark.parametrize("name", ALL)
def test_range_zero_to_one_gives_the_same(golden, name):
    candidate = spoilt(name, v.noise(golden, 0.1))
    receipts = {"temporal": {"grid": msgspec.to_builtins(v.axis())}}
    shifted = DETECTORS.get(name)(
        (candidate + 1) / 2, (golden + 1) / 2, plan=PLAN, receipts=receipts, data_range=(0.0, 1.0)
    )
    assert shifted.value == pytest.approx(v.measure(name, candidate, golden).value, rel=1e-2)


@pytest.mark.parametrize("name", ALL)
def test_measuring_changes_neither_sample(golden, name):
    candidate = spoilt(name, v.noise(golden))
    before = candidate.clone(), golden.clone()
    v.measure(name, candidate, golden)
    assert torch.equal(candidate, before[0])
    assert torch.equal(golden, before[1])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(1, 3, 9, 33, 47), (2, 1, 9, 8, 8), (1, 4, 12, 6, 20)])
def test_any_size_and_channels(name, shape):
    video = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.3
    found = v.measure(name, v.noise(video), video, TileAxis((0, 5), 0, 8, shape[2]))
    assert found.value is not None, found.reason
    assert len(found.per_image) == shape[0]
    to_json(found)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.03, 0.3])
@pytest.mark.parametrize("kind", ["hard", "blended", "flicker", "ghost"])
def test_what_the_detection_limit_promises_is_caught(kind, noise):
    """A defect of that size is significant in eleven of twelve films at least, and one of a fifth of it in none."""
    name = {"hard": "frame_step", "blended": "frame_step"}.get(kind, f"frame_{kind}")
    chunks = v.axis(4) if kind == "blended" else v.axis()
    seen = []
    for seed in range(12):
        video, sign = film(seed, size=48), 1 if seed % 2 else -1
        candidate = v.noise(video, noise, 100 + seed)
        limit = v.measure(name, candidate, video, chunks).detection_limit
        if kind == "ghost":
            injured = [v.ghost(candidate, limit * by, -1, (6,), of=video) for by in (1, 0.2)]
        else:
            injured = [v.jump(candidate, chunks, sign * limit * by) for by in (1, 0.2)]
        seen.append([v.measure(name, each, video, chunks).value > 0 for each in injured])
    caught, missed = zip(*seen)
    assert sum(caught) >= 11
    assert sum(missed) == 0
