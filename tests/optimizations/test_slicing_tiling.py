"""Slicing and tiling: proved by the calls that the decoder saw, restored to the attribute."""

from __future__ import annotations

import pytest
import torch

from fidelity.errors import EvaluationError
from fidelity.optimizations import apply_plan, inapplicable
from fidelity.records import DecodePlan, Temporal, Tiling
from tests.optimizations.small import MODEL, decode, latents, model_with

T8 = Tiling(8, 0.25)


def test_slicing_is_each_item_alone(module):
    sample, receipts = decode(module, DecodePlan(slicing=True))
    assert receipts["slicing"] == {
        "requested": True, "engaged": True, "reason": None, "calls": 2, "batches": [1]
    }  # fmt: skip
    alone = torch.cat([decode(module, z=item)[0] for item in latents().split(1)])
    assert torch.equal(sample, alone)
    assert module.use_slicing is False


def test_slicing_that_was_on_before_stays_on(module):
    module.use_slicing = True
    try:
        decode(module, DecodePlan(slicing=True))
        assert module.use_slicing is True
    finally:
        module.use_slicing = False


def test_slicing_accepted_and_ignored_is_not_engaged(module):
    module.enable_slicing = lambda: None
    try:
        sample, receipts = decode(module, DecodePlan(slicing=True))
    finally:
        del module.enable_slicing
    assert torch.equal(sample, decode(module)[0])  # the picture is perfect, and still
    assert receipts["slicing"]["engaged"] is False
    assert receipts["slicing"]["reason"] == "the decoder saw batches of 2, expected 1 at a time"


def test_class_without_slicing_is_not_engaged(module):
    def cannot():
        raise NotImplementedError("no slices")

    module.enable_slicing = cannot
    try:
        _, receipts = decode(module, DecodePlan(slicing=True))
    finally:
        del module.enable_slicing
    assert receipts["slicing"]["engaged"] is False
    assert "cannot slice: no slices" in receipts["slicing"]["reason"]


def test_each_slice_decoded_twice_is_not_engaged(module):
    model = model_with(decode=lambda self, part, z: (part.decode(z), part.decode(z))[1].sample)
    _, receipts = decode(module, DecodePlan(slicing=True), model=model)
    assert receipts["slicing"]["reason"] == "expected 2 decoder calls (2 items × 1 tiles and chunks), saw 4"


@pytest.mark.parametrize("slicing", [False, True])
def test_tiling_is_proved_by_calls_and_sizes(module, slicing):
    attributes = {name: getattr(module, name) for name in MODEL.family.tiling_attributes()}
    _, receipts = decode(module, DecodePlan(tiling=T8, slicing=slicing))
    receipt = receipts["tiling"]
    assert receipt["engaged"] is True
    assert receipt["reason"] is None
    # latents 12×16, step 6: rows of 8 and 6, columns of 8, 8 and 4
    batch, items = (1, 2) if slicing else (2, 1)
    assert receipt["calls"] == 6 * items
    assert receipt["shapes"] == [
        [batch, 4, 8, 8, 2 * items], [batch, 4, 8, 4, items], [batch, 4, 6, 8, 2 * items], [batch, 4, 6, 4, items]
    ]  # fmt: skip
    assert receipt["grid"]["rows"]["starts"] == (0, 12)
    assert all(one["engaged"] for one in receipts.values())
    assert {name: getattr(module, name) for name in MODEL.family.tiling_attributes()} == attributes


def test_tiling_accepted_and_ignored_is_not_engaged(module):
    model = model_with(set_tiling=lambda self, part, geometry, tiling: None)
    sample, receipts = decode(module, DecodePlan(tiling=T8), model=model)
    assert torch.equal(sample, decode(module)[0])
    assert receipts["tiling"]["engaged"] is False
    assert receipts["tiling"]["reason"] == "expected 6 decoder calls, saw 1"


def test_tiles_of_another_size_are_not_engaged(module):
    def transpose(self, part, z):
        return part.decode(z.transpose(2, 3)).sample.transpose(2, 3)

    _, receipts = decode(module, DecodePlan(tiling=T8), model=model_with(decode=transpose))
    assert receipts["tiling"]["engaged"] is False
    assert receipts["tiling"]["reason"].startswith("expected tiles of 1× 6×4, 2× 6×8")


def test_slicing_ignored_when_tiling_is_on_fails_both(module):
    def tile_first(self, part, z):
        part.use_slicing = False
        return part.decode(z).sample

    _, receipts = decode(module, DecodePlan(tiling=T8, slicing=True), model=model_with(decode=tile_first))
    assert receipts["slicing"]["engaged"] is False
    assert receipts["tiling"]["reason"] == "expected 12 decoder calls, saw 6"


def test_attributes_that_did_not_exist_are_gone_again(module):
    model = model_with(
        tiling_attributes=lambda self: (*MODEL.family.tiling_attributes(), "brand_new"),
        set_tiling=lambda self, part, geometry, tiling: (
            MODEL.family.set_tiling(part, geometry, tiling),
            setattr(part, "brand_new", 3),
        ),
    )
    decode(module, DecodePlan(tiling=T8), model=model)
    assert not hasattr(module, "brand_new")


def test_attributes_come_back_when_the_decode_raises(module):
    model = model_with(decode=lambda self, part, z: part.tile_latent_min_size // 0)
    with pytest.raises(ZeroDivisionError):
        decode(module, DecodePlan(tiling=T8), model=model)
    assert module.use_tiling is False


def test_class_without_tile_attributes_is_a_clean_error():
    with (
        pytest.raises(EvaluationError, match="Linear has none of use_tiling"),
        apply_plan(torch.nn.Linear(1, 1), DecodePlan(tiling=T8), model=MODEL, device="cpu"),
    ):
        raise AssertionError("not reached")


@pytest.mark.parametrize(
    ("plan", "shape", "reason"),
    [
        (DecodePlan(slicing=True), (1, 4, 12, 16), "slicing: a batch of one has nothing to slice"),
        (DecodePlan(slicing=True), (2, 4, 12, 16), None),
        (DecodePlan(tiling=Tiling(32, 0.25)), (2, 4, 24, 32), "tile 32 is not smaller than the latents 24×32"),
        (DecodePlan(tiling=Tiling(31, 0.0)), (2, 4, 24, 32), None),
        (DecodePlan(temporal=Temporal(4, 0.0)), (2, 4, 12, 16), "temporal: an image autoencoder has no frames"),
        (DecodePlan(slicing=True, tiling=Tiling(9, 0)), (1, 4, 8, 8), "slicing: a batch of one has nothing to slice"),
        (DecodePlan(), (1, 4, 8, 8), None),
    ],
)  # fmt: skip
def test_what_cannot_apply_says_why(plan, shape, reason):
    assert inapplicable(plan, MODEL, shape) == reason
