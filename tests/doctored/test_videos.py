"""Every temporal detector against a doctored video it must catch and clean ones it must not."""

from __future__ import annotations

import pytest
import torch

import fidelity.detectors  # noqa: F401 (registers)
from fidelity.detectors.cause import causes
from fidelity.records import DecodePlan
from tests.doctored import videos as v

pytestmark = pytest.mark.slow  # the films are decoded once, two seconds each

FILMS = ["face", "cup"]
NOISES = ["oracle", "bf16"]
NEW = ["frame_step", "frame_flicker", "frame_ghost"]
HARD, BLENDED = v.axis(), v.axis(4)
LIMIT = 0.3
"""Grey levels: the limit under which doctored videos of half a level and more must stand out."""
SHARE = 0.015


def base(film: str, noise: str) -> torch.Tensor:
    return v.golden(film) if noise == "oracle" else v.clean(film, noise)


def named(candidate: torch.Tensor, golden: torch.Tensor) -> dict[str, str]:
    return dict(causes(candidate, golden, plan=DecodePlan(), receipts={}, data_range=v.RANGE))


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("film", FILMS)
class TestMustFail:
    def test_hard_jump_of_half_a_level(self, film, noise):
        found = v.measure("frame_step", v.jump(base(film, noise), HARD, 0.5), v.golden(film), HARD)
        assert found.value > LIMIT
        assert (found.where["frame"], found.where["line"]) in {(5, "joint"), (13, "joint")}
        assert found.details["kind"] == "tone"
        assert found.details["effect"] == pytest.approx(0.5, abs=0.1)

    def test_jump_blended_over_four_frames(self, film, noise):
        found = v.measure("frame_step", v.jump(base(film, noise), BLENDED, 0.75), v.golden(film), BLENDED)
        assert found.value > LIMIT
        assert found.details["kind"] == "chunk tone"
        assert found.where["frame"] == 5
        assert found.where["chunk"] == 1

    def test_a_chunk_that_did_not_see_what_was_before(self, film, noise):
        found = v.measure("frame_step", v.no_context(base(film, noise), HARD, 1.0), v.golden(film), HARD)
        assert found.value > LIMIT
        assert found.details["kind"] == "rough"
        assert found.where["frame"] in (5, 13)

    def test_a_jump_in_one_quarter_of_the_frame(self, film, noise):
        doctored = base(film, noise)
        doctored[..., 5:, 48:, :48] += 1.0 / 127.5
        found = v.measure("frame_step", doctored, v.golden(film), HARD)
        assert found.value > LIMIT
        assert found.where["frame"] == 5
        assert found.where["x"] < 48 <= found.where["y"]

    def test_rough_at_the_end_of_a_band(self, film, noise):
        doctored = base(film, noise)
        doctored[:, :, 9] = v.noise(doctored[:, :, 9:10], 1.0)[:, :, 0]
        found = v.measure("frame_step", doctored, v.golden(film), BLENDED)
        assert found.value > LIMIT
        assert (found.where["frame"], found.where["line"]) == (9, "band end")

    @pytest.mark.parametrize(("share", "step"), [(0.03, -1), (0.1, 1), (0.1, -3), (0.3, 4)])
    def test_ghost(self, film, noise, share, step):
        found = v.measure("frame_ghost", v.ghost(base(film, noise), share, step, of=v.golden(film)), v.golden(film))
        assert found.value > SHARE
        assert found.value == pytest.approx(share, rel=0.3)
        assert found.where["frame"] in (5, 6)
        assert found.where["shows"] == f"frame {found.where['frame'] + step}"
        assert found.details["diagnosis"] == ["ghost"]

    def test_ghost_of_both_neighbours(self, film, noise):
        doctored = base(film, noise)
        doctored[:, :, 7] = (doctored[:, :, 6] + 8 * doctored[:, :, 7] + doctored[:, :, 8]) / 10
        found = v.measure("frame_ghost", doctored, v.golden(film))
        assert found.value == pytest.approx(0.1, rel=0.3)
        assert (found.where["frame"], found.where["shows"]) == (7, "both neighbours")

    def test_brightness_that_jumps_at_every_eighth_frame(self, film, noise):
        found = v.measure("frame_flicker", v.beat(base(film, noise), 0.5), v.golden(film))
        assert found.value > LIMIT
        assert found.where["frame"] in (1, 9)
        assert (found.details["period"], found.details["phase"]) == (8, 1)

    def test_flicker_in_the_last_frames(self, film, noise):
        found = v.measure("frame_flicker", v.flicker(base(film, noise), 0.5), v.golden(film))
        assert found.value > LIMIT
        assert found.where["frame"] >= 13

    def test_flicker_in_every_frame_is_not_its_own_excuse(self, film, noise):
        assert v.measure("frame_flicker", v.flicker(base(film, noise), 0.5, last=17), v.golden(film)).value > LIMIT

    def test_off_by_one_frame_after_a_joint(self, film, noise):
        doctored = v.off_by_one(v.decoded(film, "fp32" if noise == "oracle" else noise))
        found = v.measure("frame_ghost", doctored, v.golden(film))
        assert found.value == pytest.approx(1, abs=0.05)
        assert found.details["diagnosis"] == ["misaligned"]
        assert found.where["frame"] >= 9
        assert found.details["profile"][0][:9] == pytest.approx([0] * 9, abs=0.02)
        assert "frame 9 is the frame later (7 frames so)" in named(doctored, v.golden(film))["misaligned"]

    def test_frozen_frame(self, film, noise):
        doctored = v.frozen(base(film, noise))
        found = v.measure("frame_ghost", doctored, v.golden(film))
        assert found.value == pytest.approx(1, abs=0.05)
        assert (found.where["frame"], found.where["shows"]) == (6, "frame 5")
        assert "frame 6 is the frame earlier (1 frames so)" in named(doctored, v.golden(film))["misaligned"]

    def test_first_frames_hold_what_a_cache_kept(self, film, noise):
        other = v.golden("cup" if film == "face" else "face")
        found = v.measure("frame_rmse", v.stale(base(film, noise), 4.0, other), v.golden(film))
        assert found.value > 3
        assert found.where["frame"] == 0
        assert found.details["stand_out"] == [0, 1, 2]


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("kind", v.MUST_NOT_FAIL)
def test_must_not_fail(name, kind):
    golden = v.golden("face")
    found = v.measure(name, v.MUST_NOT_FAIL[kind](golden), golden)
    assert found.value is not None, found.reason
    # three levels of drift over sixteen steps are a fifth of a level each, and read as that
    most = 0.25 if (name, kind) == ("frame_flicker", "lighter_and_lighter") else 0.005
    assert found.value <= most, (found.where, found.details)


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("film", FILMS)
@pytest.mark.parametrize("chunks", [HARD, BLENDED, v.TileAxis((0, 9), 4, 12, 17)], ids=["hard", "blended", "two"])
def test_a_decode_in_bf16_must_not_fail(name, film, chunks):
    assert v.measure(name, v.clean(film), v.golden(film), chunks).value == 0


@pytest.mark.parametrize("name", NEW)
def test_a_cut_between_two_scenes_must_not_fail(name):
    """Another scene from a joint on: its error is another, and none of it is the joint's."""
    golden, candidate = (torch.cat([of("face")[:, :, :9], of("cup")[:, :, 9:]], 2) for of in (v.golden, v.clean))
    assert v.measure(name, candidate, golden, v.TileAxis((0, 9), 0, 12, 17)).value <= LIMIT


def test_an_honest_video_has_no_cause():
    assert named(v.clean("face"), v.golden("face")) == {}


def test_a_lighter_chunk_is_no_shift_of_the_whole():
    assert "shift" not in named(v.jump(v.golden("face"), BLENDED, 1.0), v.golden("face"))
    assert "shift" in named(v.golden("face") + 1 / 127.5, v.golden("face"))


def test_a_shift_by_three_frames_is_named_so():
    golden = v.golden("cup")
    doctored = golden.clone()
    doctored[:, :, 4:14] = golden[:, :, 7:17]
    assert "frame 4 is the frame 3 frames later (10 frames so)" in named(doctored, golden)["misaligned"]
