"""Where in time a decode left its oracle."""

from __future__ import annotations

import msgspec
import pytest
import torch

from fidelity import frames
from fidelity.records import DecodePlan, Temporal, TileAxis

AXIS = TileAxis(starts=(0, 13, 25), band=4, tile=16, size=37)
PLAN = DecodePlan(temporal=Temporal(4, 0.25))
LEVEL = 2 / 255


def video():
    return torch.rand(2, 3, 37, 16, 24, generator=torch.Generator().manual_seed(1)) - 0.5


def told(candidate, expected, plan=PLAN, axis=AXIS):
    receipts = {"temporal": {"grid": msgspec.to_builtins(axis)}}
    return frames.placed(candidate, expected, plan, receipts, (-1.0, 1.0))


def test_error_in_the_blended_frames_is_a_seam_in_time():
    wrong = video()
    wrong[:, :, 13:17] += 3 * LEVEL * torch.randn(2, 3, 4, 16, 24, generator=torch.Generator().manual_seed(2))
    reason = told(wrong, video())
    assert reason.diagnosis == ("temporal_seam",)
    assert "frames 13 to 16" in reason.message
    assert reason.measured == pytest.approx(3.0, rel=0.05)


def test_a_chunk_of_another_brightness_is_tone():
    wrong = video()
    wrong[:, :, 13:25] += 2 * LEVEL
    reason = told(wrong, video())
    assert reason.diagnosis == ("tone_drift",)
    assert reason.measured == pytest.approx(2.0, rel=0.01)
    assert "chunk 1, frames 13 to 24, is off by +2" in reason.message


def test_error_everywhere_is_no_chunks_own():
    noise = 2 * LEVEL * torch.randn(2, 3, 37, 16, 24, generator=torch.Generator().manual_seed(3))
    assert told(video() + noise, video()) is None


def test_nothing_is_said_where_nothing_was_cut_or_nothing_differs():
    assert told(video(), video()) is None
    assert told(video() + 0.001 * LEVEL, video()) is None
    wrong = video()
    wrong[:, :, 13:17] += 1.0
    assert told(wrong, video(), plan=DecodePlan()) is None
    assert told(wrong, video(), axis=msgspec.structs.replace(AXIS, size=36)) is None
    wrong[:, :, 14] = float("nan")
    assert told(wrong, video()) is None


def test_a_band_that_is_most_of_the_video_must_hold_nearly_all():
    axis = TileAxis(starts=(0, 5, 9, 13), band=4, tile=8, size=17)
    noise = 2 * LEVEL * torch.randn(2, 3, 17, 16, 24, generator=torch.Generator().manual_seed(4))
    noise[:, :, :5] *= 0.2
    clean = video()[:, :, :17]
    assert told(clean + noise, clean, axis=axis) is None
