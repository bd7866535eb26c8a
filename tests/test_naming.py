"""Where the error against the oracle lies gives it its name; an honest decode has none."""

from __future__ import annotations

import msgspec
import pytest
import torch

from fidelity import naming
from fidelity.optimizations import witness
from fidelity.records import DecodePlan, Measurement, TileAxis, TileGrid, Tiling

PLAN = DecodePlan(tiling=Tiling(16, 0.25))
GRID = TileGrid(TileAxis((0, 96), 32, 128, 192), TileAxis((0, 96, 192), 32, 128, 256))
RECEIPTS = {"tiling": {"grid": msgspec.to_builtins(GRID)}, "decoder": {"calls": 6, "shapes": [[1, 4, 16, 16]]}}


@pytest.fixture
def picture():
    noise = torch.rand(1, 3, 24, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return torch.nn.functional.interpolate(noise, scale_factor=8, mode="bicubic")


def named(candidate, golden, expected, plan=PLAN, receipts=RECEIPTS, measurements=None):
    found = naming.reasons(candidate, golden, expected, plan=plan, receipts=receipts, data_range=(-1.0, 1.0),
                           measurements=measurements or {})  # fmt: skip
    return [name for each in found for name in each.diagnosis]


def honest(picture):
    """A golden from which honest tiles differ by a few levels, so that only the oracle can tell."""
    drift = torch.nn.functional.interpolate(torch.randn(1, 3, 6, 8, generator=torch.Generator().manual_seed(1)),
                                            size=picture.shape[-2:], mode="bicubic")  # fmt: skip
    return picture + drift * 0.03


@pytest.mark.parametrize(
    ("rows", "cols", "kind"),
    [
        (slice(96, 128), slice(192, 224), "corner"),
        (slice(0, 96), slice(192, 193), "seam"),
        (slice(0, 96), slice(100, 120), "band"),
        (slice(96, 192), slice(96, 192), "tone_drift"),
    ],
)
def test_error_is_named_by_the_place_that_holds_it(picture, rows, cols, kind):
    candidate = picture.clone()
    candidate[..., rows, cols] += 2 / 127.5
    assert named(candidate, honest(picture), picture) == [kind]


def test_a_tile_of_another_hue_is_chroma(picture):
    candidate = picture.clone()
    candidate[..., 96:, 96:192] += torch.tensor([2.0, 0.0, -2.0]).view(3, 1, 1) / 127.5
    assert named(candidate, honest(picture), picture) == ["chroma"]


def test_a_gain_of_the_whole_picture_is_scale_and_no_tone(picture):
    mean = picture.mean((0, 2, 3), keepdim=True)
    assert named(mean + (picture - mean) * 1.01, honest(picture), picture) == ["scale"]


def test_a_column_that_shows_something_else_is_geometry(picture):
    candidate = picture.clone()
    candidate[..., 224:] = picture[..., :32].flip(-1)
    candidate[..., 192:224] = picture[..., 32:64]
    assert "geometry" in named(candidate, honest(picture), picture)


def test_an_equal_decode_is_named_nothing(picture):
    assert named(picture.clone(), picture, None) == []
    assert named(picture.clone(), honest(picture), picture) == []


def test_tiles_that_nobody_asked_for_are_geometry(picture):
    assert named(honest(picture), picture, None, plan=DecodePlan()) == ["geometry"]
    once = {"decoder": {"calls": 1, "shapes": [[1, 4, 24, 32]]}}
    assert named(honest(picture), picture, None, plan=DecodePlan(), receipts=once) == []


def test_lost_detail_is_blur(picture):
    lost = {"detail_loss": Measurement(name="detail_loss", value=0.2)}
    assert named(honest(picture), picture, None, plan=DecodePlan(), receipts={}, measurements=lost) == ["blur"]
    kept = {"detail_loss": Measurement(name="detail_loss", value=0.02)}
    assert named(honest(picture), picture, None, plan=DecodePlan(), receipts={}, measurements=kept) == []


def test_only_tiles_of_half_the_picture_and_slices_promise_memory():
    assert naming.saves_memory(PLAN, (1, 4, 24, 32))
    assert not naming.saves_memory(PLAN, (1, 4, 18, 20))
    assert naming.saves_memory(DecodePlan(slicing=True), (2, 4, 8, 8))
    assert not naming.saves_memory(DecodePlan(slicing=True), (1, 4, 8, 8))
    assert not naming.saves_memory(DecodePlan(), (2, 4, 24, 32))
    assert not naming.saves_memory(DecodePlan(slicing=True, options={"compiled": True}), (2, 4, 8, 8))


def test_the_witness_sees_a_dtype_that_no_layer_shows():
    norm = torch.nn.GroupNorm(2, 4)
    with witness.dtypes() as seen, torch.no_grad():
        norm(torch.ones(1, 4, 2, 2))
    assert witness.unasked(seen, DecodePlan()) == {}
    with witness.dtypes() as seen, torch.no_grad():
        norm(torch.ones(1, 4, 2, 2)).to(torch.bfloat16).float()
    assert witness.unasked(seen, DecodePlan()) == {"bfloat16": "_to_copy"}
    assert witness.unasked(seen, DecodePlan(dtype="bf16")) == {}
    assert witness.unasked(seen, DecodePlan(dtype="fp16", force_upcast=True)) == {"bfloat16": "_to_copy"}
