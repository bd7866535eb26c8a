"""Causal streaming is the full decode to the bit, restarts are not; both are proved, and detectors look at joints."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
import torch

from fidelity import oracles, registry
from fidelity.detectors.joints import Joints, joints
from fidelity.errors import EvaluationError, IllegalTiling, SuiteError
from fidelity.optimizations import frame_axis, inapplicable
from fidelity.optimizations.streaming import restarted, segments
from fidelity.records import Chunk, DecodePlan, Geometry, Temporal, Tiling
from fidelity.registry import DETECTORS, cuts
from fidelity.runner import Runner

registry.load_plugins()
WAN = registry.MODELS.get("small-wan")
VIDEO = registry.MODELS.get("reference-video")
SHAPE = (2, 4, 6, 4, 6)


def stream(size, **settings):
    return DecodePlan(**settings, options={"streaming": size})


def restart(size, **settings):
    return DecodePlan(**settings, options={"restarts": size})


@pytest.fixture(scope="module")
def runner():
    return Runner(WAN)


@pytest.fixture(scope="module")
def latents():
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(7))


# ---------------------------------------------------------------- with the cache


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_streaming_is_the_full_decode_to_the_bit(runner, latents, size, dtype):
    full = runner.decode(latents, DecodePlan(dtype=dtype), trace=False)
    streamed = runner.decode(latents, stream(size, dtype=dtype), trace=False)
    assert torch.equal(streamed.sample, full.sample)
    receipt = streamed.receipts["streaming"]
    assert receipt["engaged"] is True
    assert receipt["frames"] == [1] * 6
    assert streamed.receipts["state"]["restored"]


def test_streaming_hands_out_each_segment_before_the_next_is_decoded(runner, latents):
    calls = []
    hook = runner.module.decoder.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        with torch.no_grad():
            parts = WAN.family.segments(runner.module, latents, 2)
            assert not calls
            shapes = [(tuple(part.shape), len(calls)) for part in parts]
    finally:
        hook.remove()
    assert shapes == [((2, 3, 5, 32, 48), 2), ((2, 3, 8, 32, 48), 4), ((2, 3, 8, 32, 48), 6)]


def test_streaming_is_held_to_an_oracle(runner, latents):
    plan = stream(2, slicing=True)
    assert oracles.has_one(plan)
    assert not oracles.has_one(msgspec.structs.replace(plan, options={"streaming": 2, "ramp_tiling": "t4o1"}))
    decoded = runner.decode(latents, plan, trace=False)
    found = oracles.compare(decoded.sample, runner.expected(latents, plan), data_range=WAN.data_range)
    assert 0 < found.value <= oracles.LIMIT.max  # all frames in one call, without any cache


def test_a_cache_that_is_lost_between_segments_is_seen(runner, latents, monkeypatch):
    """The fault that streaming invites: each segment begins with an empty cache."""
    honest = type(WAN.family).segments

    def forgetful(self, module, z, size):
        for part in z.split(size, dim=2):
            yield from honest(self, module, part, size)

    monkeypatch.setattr(type(WAN.family), "segments", forgetful)
    decoded = runner.decode(latents, stream(2), trace=False)
    found = oracles.compare(decoded.sample, runner.expected(latents, stream(2)), data_range=WAN.data_range)
    assert found.value is None  # fewer frames
    assert found.reason.startswith("candidate and oracle differ in shape")


def test_stale_frames_are_seen(runner, latents, monkeypatch):
    """A cache of another video: right frames, right calls, and a wrong beginning of every segment."""
    family = type(WAN.family)
    honest = family.call

    def stale(self, decoder, x, *, first, feat_cache=None, **rest):
        if feat_cache is not None and not first:
            feat_cache[:] = [torch.zeros_like(each) if isinstance(each, torch.Tensor) else each for each in feat_cache]
        return honest(self, decoder, x, first=first, feat_cache=feat_cache, **rest)

    expected = runner.expected(latents, stream(2))
    monkeypatch.setattr(family, "call", stale)
    decoded = runner.decode(latents, stream(2), trace=False)
    assert decoded.receipts["streaming"]["engaged"] is True
    assert oracles.compare(decoded.sample, expected, data_range=WAN.data_range).value > 10


@pytest.mark.parametrize("offload", ["model", "sequential", "group_block"])
def test_offload_is_engaged_under_it(runner, latents, offload):
    plain = runner.decode(latents, stream(3), trace=False).sample
    moved = runner.decode(latents, stream(3, offload=offload), trace=False)
    assert torch.equal(moved.sample, plain)
    assert moved.receipts["offload"]["engaged"] is True


def test_ramp_tiles_stream_each_with_a_cache_of_its_own(runner, latents):
    tiled = DecodePlan(options={"ramp_tiling": "t4o1"})
    both = DecodePlan(options={"ramp_tiling": "t4o1", "streaming": 2})
    one, two = (runner.decode(latents, plan, trace=False) for plan in (tiled, both))
    assert torch.equal(one.sample, two.sample)
    assert all(receipt["engaged"] for receipt in two.receipts.values())
    assert two.receipts["ramp_tiling"]["calls"] == 2 * 6


def test_a_decode_without_a_cache_is_refused_by_the_family():
    with pytest.raises(EvaluationError, match="carries no causal cache"):
        VIDEO.family.segments(None, None, 2)


# ---------------------------------------------------------------- without it


def test_restarts_are_each_segment_alone(runner, latents):
    decoded = runner.decode(latents, restart(2), trace=False)
    with torch.no_grad():
        alone = [WAN.family.decode(runner.module, latents[:, :, a:b]) for a, b in ((0, 2), (1, 4), (3, 6))]
    expected = torch.cat([alone[0], *(sample[:, :, 1:] for sample in alone[1:])], dim=2)
    assert torch.equal(decoded.sample, expected)
    receipt = decoded.receipts["restarts"]
    assert receipt["engaged"] is True
    assert len(receipt["frames"]) == 2 + 3 + 3
    assert receipt["grid"]["starts"] == (0, 5, 13)


def test_restarts_are_not_the_full_decode(runner, latents):
    full = runner.decode(latents, DecodePlan(), trace=False).sample
    sample = runner.decode(latents, restart(2), trace=False).sample
    assert torch.equal(sample[:, :, :5], full[:, :, :5])  # what has nothing before it
    assert not torch.equal(sample[:, :, 5:], full[:, :, 5:])
    assert not oracles.has_one(restart(2))


def test_restarts_of_tiles(runner, latents):
    decoded = runner.decode(latents, restart(3, tiling=Tiling(4, 0.25), slicing=True), trace=False)
    assert {name for name, receipt in decoded.receipts.items() if not receipt["engaged"]} == set()
    assert decoded.receipts["restarts"]["calls"] == 2 * 4 * 7


@pytest.mark.slow
def test_restarts_of_a_trained_model_jump_where_they_meet():
    runner = Runner(VIDEO)
    z = registry.LATENTS.get("photo-pan").make(VIDEO, runner.module).tensor
    full, cut = (runner.decode(z, plan, trace=False) for plan in (DecodePlan(), restart(2)))
    about = {"plan": restart(2), "receipts": cut.receipts, "data_range": VIDEO.data_range}
    found = DETECTORS.get("frame_step")(cut.sample, full.sample, **about)
    assert found.value > 2.7  # what suites/video.toml allows
    assert found.where["frame"] in (5, 13)


# ---------------------------------------------------------------- their laws


def test_segments():
    assert segments("streaming", 4, 6) == (Chunk(0, 4), Chunk(4, 6))
    assert segments("streaming", 1, 2) == (Chunk(0, 1), Chunk(1, 2))


@pytest.mark.parametrize(
    ("law", "size", "frames", "chunks"),
    [
        ("causal", 2, 5, (Chunk(0, 2), Chunk(1, 4, 1), Chunk(3, 5, 1))),
        ("every", 2, 5, (Chunk(0, 2), Chunk(2, 4), Chunk(4, 5))),
        ("odd", 2, 5, (Chunk(0, 2), Chunk(2, 4), Chunk(4, 5))),
        ("odd", 3, 7, (Chunk(0, 3), Chunk(2, 6, 1), Chunk(6, 7))),
    ],
)
def test_restarts_give_as_many_frames_as_the_whole(law, size, frames, chunks):
    geometry = Geometry(spatial=8, latent_channels=4, temporal=4, video=True, frames=law)
    found = restarted("restarts", size, geometry, frames)
    given = [geometry.sample_frames(chunk.stop - chunk.start) - chunk.drop for chunk in found]
    assert sum(given) == geometry.sample_frames(frames)
    assert found == chunks


def test_segments_that_cannot_add_up_are_refused():
    squares = SimpleNamespace(sample_frames=lambda frames: frames**2)
    with pytest.raises(IllegalTiling, match="latent frames 2 to 3 give 4 frames alone, 9 with the one before, and 12"):
        restarted("restarts", 2, squares, 4)


@pytest.mark.parametrize("value", [True, 0, -1, 1.5, "2"])
def test_a_size_that_is_none_is_refused(value):
    for plan in (DecodePlan(options={"streaming": value or "0"}), DecodePlan(options={"restarts": value or "0"})):
        with pytest.raises(SuiteError, match="write a whole number of latent frames a segment, at least 1"):
            inapplicable(plan, WAN, SHAPE)


@pytest.mark.parametrize(
    ("plan", "model", "reason"),
    [
        (stream(2), VIDEO, "streaming: AutoencoderKLHunyuanVideo carries no causal cache"),
        (stream(6), WAN, "streaming: a segment of 6 is not shorter than the 6 latent frames"),
        (stream(2, tiling=Tiling(8, 0.25)), WAN, "streaming: each tile has a cache of its own"),
        (restart(2, temporal=Temporal(2, 0.0)), VIDEO, "restarts: temporal cuts the frames already"),
        (DecodePlan(options={"streaming": 2, "restarts": 2}), WAN, "restarts: streaming cuts the frames already"),
        (restart(2), WAN, None),
        (restart(2), VIDEO, None),
    ],
)
def test_where_they_apply(plan, model, reason):
    found = inapplicable(plan, model, SHAPE)
    assert found == reason if reason is None else found.startswith(reason)


def test_pictures_have_no_segments():
    model = registry.MODELS.get("reference-kl")
    assert inapplicable(stream(2), model, (1, 4, 8, 8)) == "streaming: an image autoencoder has no frames"


@pytest.mark.parametrize("plan", [stream(2), restart(2)], ids=["streaming", "restarts"])
def test_detectors_look_where_segments_meet(runner, latents, plan):
    assert cuts(plan) == {"temporal"}
    assert frame_axis(plan, WAN, SHAPE).starts == (0, 5, 13)
    decoded = runner.decode(latents, plan, trace=False)
    found = joints(decoded.sample.shape[2], plan, decoded.receipts)
    assert isinstance(found, Joints)
    assert list(found.breaks) == [5, 13]
    assert found.period == 4
