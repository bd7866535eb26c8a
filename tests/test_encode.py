"""The encoder under a plan: the class's own tiled encode held to an assembly of ours, and seen in grey levels."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest
import torch

from fidelity import oracles, registry, suite
from fidelity.detectors.grid import Layout, layout
from fidelity.encoding import RoundTrip, relative_rmse
from fidelity.errors import EvaluationError, SuiteError
from fidelity.evaluator import Evaluator
from fidelity.optimizations import inapplicable
from fidelity.optimizations.encode import EncoderView, view
from fidelity.records import Case, DecodePlan, Limit, Temporal, Tiling
from fidelity.registry import DETECTORS
from fidelity.runner import Runner
from tests.optimizations.small import MODEL
from tests.suites import write_suite

WAN = registry.MODELS.get("small-wan")
T8 = Tiling(8, 0.25)


def plan(**settings):
    return DecodePlan(**settings, options={"encode": True})


def picture(*size, seed=3):
    """Smooth noise in [-1, 1]."""
    small = torch.randn(*size[:-2], size[-2] // 4, size[-1] // 4, generator=torch.Generator().manual_seed(seed))
    return small.repeat_interleave(4, -1).repeat_interleave(4, -2).tanh()


@pytest.fixture(scope="module")
def trip():
    """The small AutoencoderKL, f = 2."""
    return RoundTrip(Runner(MODEL))


@pytest.fixture(scope="module")
def image():
    return picture(2, 3, 24, 32)


@pytest.fixture(scope="module")
def film_trip():
    return RoundTrip(Runner(WAN))


# ---------------------------------------------------------------- what it gives


def by_hand(module, image, tile, overlap, f):
    """AutoencoderKL's tiled encode written anew: moments of each tile, blended pixel by pixel as its law says."""
    step, band, height, width = tile - overlap, overlap, image.shape[-2] // f, image.shape[-1] // f
    tops, lefts = range(0, height, step), range(0, width, step)
    tiles = {
        (top, left): module.quant_conv(
            module.encoder(image[..., top * f : (top + tile) * f, left * f : (left + tile) * f])
        ).chunk(2, dim=1)[0]
        for top in tops
        for left in lefts
    }
    for (top, left), own in tiles.items():
        for neighbour, axis in (((top - step, left), -2), ((top, left - step), -1)):
            if neighbour not in tiles:
                continue
            other = tiles[neighbour]
            extent = min(band, own.shape[axis], other.shape[axis])
            for n in range(extent):
                before = other.select(axis, other.shape[axis] - extent + n)
                own.select(axis, n).copy_(before * (1 - n / extent) + own.select(axis, n) * (n / extent))
    rows = [torch.cat([tiles[top, left][..., :step, :step] for left in lefts], dim=-1) for top in tops]
    return torch.cat(rows, dim=-2)


def test_tiled_encode_is_the_law_and_its_decode_is_plain(trip, image):
    decoded = trip.decode(image, plan(tiling=T8), trace=False)
    with torch.no_grad():
        latents = by_hand(trip.module, image, 8, 2, 2)
        sample = MODEL.family.decode(trip.plain.module, latents)
    assert torch.allclose(decoded.sample, sample, atol=1e-5)
    receipt = decoded.receipts["encode"]
    assert receipt["engaged"] is True
    assert receipt["latents"] == receipt["whole"] == [2, 4, 12, 16]
    assert receipt["latents_rmse"] == pytest.approx(relative_rmse(latents, trip.whole(image)), rel=1e-4)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("tiling", [None, T8, Tiling(8, 0.0)], ids=str)
@pytest.mark.parametrize("slicing", [False, True])
def test_the_oracle_is_the_encode_to_the_bit(trip, image, dtype, tiling, slicing):
    asked = plan(dtype=dtype, tiling=tiling, slicing=slicing)
    assert oracles.has_one(asked, MODEL)
    decoded = trip.decode(image, asked, trace=False)
    found = oracles.compare(decoded.sample, trip.expected(image, asked), data_range=MODEL.data_range)
    assert found.value == 0.0
    assert {name for name, receipt in decoded.receipts.items() if not receipt["engaged"]} == set()


def test_a_plain_encode_is_the_whole_one(trip, image):
    decoded = trip.decode(image, plan(), trace=False)
    with torch.no_grad():
        full = MODEL.family.decode(trip.plain.module, trip.whole(image))
    assert torch.equal(decoded.sample, full)
    assert decoded.receipts["encode"]["latents_rmse"] == [0.0, 0.0]


def test_calls_and_sizes_are_the_encoders(trip, image):
    decoded = trip.decode(image, plan(tiling=T8, slicing=True), trace=False)
    receipts = decoded.receipts
    # 24×32 pixels, tiles of 16 every 12: rows of 16 and 12, columns of 16, 16 and 8
    shapes = [[1, 3, 16, 16, 4], [1, 3, 16, 8, 2], [1, 3, 12, 16, 4], [1, 3, 12, 8, 2]]
    assert receipts["encode"]["shapes"] == receipts["tiling"]["shapes"] == shapes
    assert receipts["encoder"]["calls"] == receipts["slicing"]["calls"] == 12
    assert "decoder" not in receipts
    found = layout(decoded.sample, plan(tiling=T8), receipts)
    assert isinstance(found, Layout)
    assert found.lines("x").positions == (12, 16, 24, 28)
    assert found.period == 2


def test_tiles_that_were_not_encoded_are_not_engaged(trip, image, monkeypatch):
    monkeypatch.setattr(type(MODEL.family), "set_tiling", lambda self, module, geometry, tiling: None)
    receipt = trip.decode(image, plan(tiling=T8), trace=False).receipts["tiling"]
    assert receipt["engaged"] is False
    assert receipt["reason"] == "expected 6 encoder calls, saw 1"


def test_a_wrong_blend_is_seen(trip, image, monkeypatch):
    """The band of tiled_encode forgotten: as small a fault as a class can have here."""
    expected = trip.expected(image, plan(tiling=T8))
    monkeypatch.setattr(type(trip.module), "blend_h", lambda self, a, b, extent: b)
    decoded = trip.decode(image, plan(tiling=T8), trace=False)
    assert decoded.receipts["tiling"]["engaged"] is True
    assert oracles.compare(decoded.sample, expected, data_range=MODEL.data_range).value > 1


def test_nothing_sticks_to_the_encoder(trip, image):
    before = trip.decode(image, plan(), trace=False).sample
    for each in (plan(tiling=T8, dtype="bf16"), plan(offload="sequential"), plan(slicing=True, offload="group_leaf")):
        decoded = trip.decode(image, each, trace=False)
        assert decoded.receipts["state"]["restored"], each.id
        assert all(receipt["engaged"] for receipt in decoded.receipts.values()), each.id
    assert torch.equal(trip.decode(image, plan(), trace=False).sample, before)


def test_memory_is_the_encoders(trip, image):
    whole, tiled = (trip.decode(image, each).memory for each in (plan(), plan(tiling=T8)))
    assert whole.allocated_peak_bytes > tiled.allocated_peak_bytes
    assert {stage.name for stage in tiled.stages} >= {"tile"}


# ---------------------------------------------------------------- videos


@pytest.mark.parametrize("tiling", [None, Tiling(4, 0.25)], ids=str)
def test_a_video_is_encoded_in_the_calls_of_its_class(film_trip, tiling):
    film = picture(1, 3, 9, 32, 48)
    asked = plan(tiling=tiling)
    decoded = film_trip.decode(film, asked, trace=False)
    tiles = 4 if tiling else 1
    receipt = decoded.receipts["encode"]
    assert receipt["latents"] == [1, 4, 3, 4, 6]
    assert receipt["calls"] == 3 * tiles
    assert sorted({shape[2] for shape in receipt["shapes"]}) == [1, 4]  # frames: the first alone, then four by four
    assert {name for name, each in decoded.receipts.items() if not each["engaged"]} == set()
    found = oracles.compare(decoded.sample, film_trip.expected(film, asked), data_range=WAN.data_range)
    assert found.value <= oracles.LIMIT.max


def test_folded_pixels_count_as_pixels():
    seen = view(WAN).family
    assert seen.call_shape(WAN.geometry, (1, 12, 4, 16, 24), {}) == (1, 3, 4, 32, 48)
    assert seen.call_shape(WAN.geometry, (1, 3, 4, 32, 48), {}) == (1, 3, 4, 32, 48)


# ---------------------------------------------------------------- where it applies


SHAPE = (2, 4, 24, 32)


@pytest.mark.parametrize(
    ("asked", "model", "reason"),
    [
        (plan(tiling=T8), MODEL, None),
        (plan(temporal=Temporal(2, 0.0)), registry.MODELS.get("reference-video"), "encode: chunks of latent frames"),
        (DecodePlan(options={"encode": True, "ramp_tiling": "t8o2"}), MODEL, "encode: ramp_tiling changes the decode"),
        (plan(tiling=T8), registry.MODELS.get("reference-video"), "encode: the tiles of reference-video's encoder"),
        (plan(), registry.MODELS.get("reference-video"), None),
    ],
    ids=lambda value: value.id if isinstance(value, DecodePlan) else None,
)
def test_where_it_applies(asked, model, reason):
    found = inapplicable(asked, model, (2, 4, 6, 24, 32) if model.geometry.video else SHAPE)
    assert found is None if reason is None else found.startswith(reason)


def test_no_encoder_no_encode():
    family = type("Deaf", (type(MODEL.family),), {"lacks": frozenset({"encode"})})()
    assert inapplicable(plan(), replace(MODEL, family=family), SHAPE) == "encode: AutoencoderKL has no encoder"


def test_a_value_that_is_none_is_refused():
    with pytest.raises(SuiteError, match="encode is 'tiled': write true"):
        inapplicable(DecodePlan(options={"encode": "tiled"}), MODEL, SHAPE)


def test_latents_alone_cannot_be_encoded(trip):
    with pytest.raises(EvaluationError, match="latents alone have no picture"):
        trip.plain.decode(torch.zeros(1, 4, 8, 8), plan(), trace=False)


def test_a_decode_of_ones_own_has_no_encoder(trip, image):
    with pytest.raises(EvaluationError, match="no encoder to judge"):
        trip.decode(image, plan(), decode=lambda module, z: z)


def test_a_law_that_is_not_known_has_no_oracle():
    family = type("Other", (type(MODEL.family),), {"tiles_alike": False})()
    other = replace(MODEL, family=family)
    assert not oracles.has_one(plan(tiling=T8), other)
    assert oracles.has_one(plan(slicing=True), other)
    assert isinstance(view(other).family, EncoderView)


def test_latents_without_a_picture_are_not_applicable(tmp_path):
    path = write_suite(tmp_path, "encode = [false, true]")
    cases = {case.plan.id: case for case in suite.load(path, registry).cases}
    reason = cases["fp32-upcast0-slice0-t0-none+encode"].not_applicable
    assert reason == "encode: latents 'ramp' have no picture behind them; name those of a photograph"
    assert cases["fp32-upcast0-slice0-t0-none"].not_applicable is None


# ---------------------------------------------------------------- the latents' own figure


def measured(receipt):
    sample = torch.zeros(2, 3, 8, 8)
    about = {"plan": plan(), "receipts": {"encode": receipt}, "data_range": (-1.0, 1.0)}
    return DETECTORS.get("latents_rmse")(sample, sample, **about)


def test_latents_rmse_is_the_share_of_the_spread():
    whole = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(2)) * 3 + 1
    moved = whole.clone()
    moved[1] += 0.5
    shares = relative_rmse(moved, whole)
    assert shares == [0.0, pytest.approx(0.5 / float(whole[1].std(correction=0)), rel=1e-5)]
    found = measured({"latents_rmse": shares})
    assert found.value == shares[1]
    assert found.where == {"image": 1}


def test_latents_that_cannot_be_compared_have_a_reason_and_no_value():
    whole = torch.ones(2, 4, 8, 8)
    assert relative_rmse(torch.ones(2, 4, 8, 9), whole) == []
    assert relative_rmse(whole * math.nan, whole) == [None, None]
    found = measured({"latents_rmse": [], "latents": [2, 4, 8, 9], "whole": [2, 4, 8, 8]})
    assert found.value is None
    assert found.reason == "the latents differ in size: 2×4×8×9, encoded whole 2×4×8×8"
    assert measured({"latents_rmse": [None, 0.1]}).reason == "the latents of an item are not finite"
    assert measured({}).value is None


# ---------------------------------------------------------------- judged as any other case


@pytest.fixture
def bench(tmp_path):
    evaluator = Evaluator(
        {"reference-kl": registry.MODELS.get("reference-kl")},
        {"photo-pair": registry.LATENTS.get("photo-pair")},
        tmp_path,
    )
    evaluator.record("reference-kl", "photo-pair")
    return evaluator


@pytest.mark.slow
def test_a_case_of_the_encoder_is_judged_against_the_golden(bench):
    limits = {
        "rmse": Limit(max=3.0, origin="test"),
        "latents_rmse": Limit(max=0.04, origin="test"),
        "tile_step": Limit(max=2.0, origin="test"),
    }
    case = Case("reference-kl", "photo-pair", plan(tiling=Tiling(16, 0.25), dtype="bf16"), limits=limits)
    result = bench.case(case)
    assert result.verdict == "pass", result.reasons
    found = result.measurements
    assert 1 < found["rmse"].value < 2
    assert 0.01 < found["latents_rmse"].value < 0.04
    assert found[oracles.NAME].exact
    assert result.memory.allocated_peak_bytes

    tight = msgspec.structs.replace(case, limits={"latents_rmse": Limit(max=0.001, origin="test")})
    failed = bench.case(tight)
    assert failed.verdict == "fail"
    assert [reason.name for reason in failed.reasons] == ["latents_rmse"]


@pytest.mark.slow
def test_a_crash_of_the_encoder_is_an_error(bench, monkeypatch):
    model = registry.MODELS.get("reference-kl")
    case = Case("reference-kl", "photo-pair", plan(), limits={"rmse": Limit(max=1.0, origin="test")})
    bench.subject("reference-kl", "photo-pair", case.plan)  # the picture is made before anything breaks

    def broken(self, module, image):
        raise RuntimeError("no room")

    monkeypatch.setattr(type(model.family), "encode", broken)
    result = bench.case(case)
    assert result.verdict == "error"
    assert "no room" in result.reasons[0].message
