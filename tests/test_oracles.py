"""The oracle equals honest tiling and slicing to the bit, and sees a wrong line of one grey level."""

from __future__ import annotations

import pytest
import torch

from fidelity import oracles, registry
from fidelity.optimizations import apply_plan
from fidelity.records import DecodePlan, Tiling

registry.load_plugins()
RANGE = (-1.0, 1.0)


@pytest.fixture(scope="module")
def bench():
    model = registry.MODELS.get("reference-kl")
    return model, model.load()


def latents(batch=2, height=20, width=27):
    return torch.randn(batch, 4, height, width, generator=torch.Generator().manual_seed(3)) * 4


def decode(bench, z, plan):
    model, module = bench
    with torch.no_grad(), apply_plan(module, plan, model=model, device="cpu"):
        return model.family.decode(module, z)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("tiling", [None, Tiling(16, 0.0), Tiling(16, 0.25), Tiling(8, 0.5)], ids=str)
@pytest.mark.parametrize("slicing", [False, True])
def test_oracle_equals_honest_decode_to_the_bit(bench, dtype, tiling, slicing):
    plan = DecodePlan(dtype=dtype, tiling=tiling, slicing=slicing)
    z = latents().to({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
    candidate = decode(bench, z, plan).float()
    expected = oracles.expected(bench[1], z, plan, model=bench[0], device="cpu").float()
    measured = oracles.compare(candidate, expected, data_range=RANGE)
    assert measured.value is not None
    assert measured.value <= oracles.LIMIT.max
    assert measured.exact


@pytest.mark.parametrize(
    ("size", "tiling"),
    [
        ((17, 16), Tiling(16, 0.25)),  # last tile of five, single column
        ((9, 25), Tiling(8, 0.0)),  # last tile of one
        ((13, 40), Tiling(12, 0.25)),  # last tile narrower than the band
        ((12, 12), Tiling(16, 0.25)),  # a tile that holds the picture
    ],
    ids=str,
)
def test_oracle_follows_short_tiles(bench, size, tiling):
    plan, z = DecodePlan(tiling=tiling), latents(1, *size)
    expected = oracles.expected(bench[1], z, plan, model=bench[0], device="cpu")
    assert oracles.compare(decode(bench, z, plan), expected, data_range=RANGE).value == 0.0


def test_oracle_sees_a_line_of_one_grey_level_and_says_where(bench):
    plan, z = DecodePlan(tiling=Tiling(16, 0.25)), latents()
    expected = oracles.expected(bench[1], z, plan, model=bench[0], device="cpu")
    doctored = expected.clone()
    doctored[1, :, :, 96] += 2 / 255
    measured = oracles.compare(doctored, expected, data_range=RANGE)
    assert measured.value == pytest.approx(1.0, abs=1e-3)
    assert measured.per_image[0] == 0.0
    assert measured.where is not None
    assert (measured.where["image"], measured.where["x"]) == (1, 96)


def test_oracle_is_not_measured_where_shapes_differ_or_a_value_is_lost():
    one = torch.zeros(1, 3, 8, 8)
    assert oracles.compare(one, torch.zeros(1, 3, 8, 9), data_range=RANGE).value is None
    broken = one.clone()
    broken[0, 0, 0, 0] = float("nan")
    assert oracles.compare(broken, one, data_range=RANGE).value is None
    assert oracles.compare(broken, broken, data_range=RANGE).value == 0.0


def test_a_decode_of_another_size_than_its_plan_gives_is_not_as_specified():
    one = torch.zeros(1, 3, 5, 8, 8)
    assert oracles.shape_reason(one, one) is None
    reason = oracles.shape_reason(one[:, :, :4], one)
    assert reason.diagnosis == ("not_as_specified",)
    assert reason.message == "the sample is 1×3×4×8×8, put together independently it is 1×3×5×8×8"
    assert reason.limit is None  # so it is a failure, which an expectation can cover, and no error


def test_options_of_somebody_else_have_no_oracle():
    assert oracles.has_one(DecodePlan(tiling=Tiling(16, 0.25), options={"mine": False}))
    assert not oracles.has_one(DecodePlan(options={"mine": True}))
