"""Effects with known answers: a synthetic cross product whose figures are sums that the test wrote down."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fidelity.attribution import BYTES, FLOOR, attribute
from fidelity.records import (
    OFFLOADS,
    Attribution,
    CaseResult,
    DecodePlan,
    Effect,
    Interaction,
    Measurement,
    MemoryTrace,
    RunResult,
    Tiling,
    from_json,
    to_json,
)

TILES = Tiling(16, 0.25)
DTYPE = {"fp32": 0.0, "bf16": 0.5, "fp16": 0.0625}
PEAK = {"fp32": 1000, "bf16": 600, "fp16": 500}


def rmse(plan: DecodePlan, latents: str = "a") -> float:
    """bf16 costs 0.5 alone and 0.25 more in tiles; tiles cost 3 on `a` and 4 on `b`; nothing else costs anything."""
    tiled = plan.tiling is not None
    return DTYPE[plan.dtype] + tiled * (3 if latents == "a" else 4) + 0.25 * (tiled and plan.dtype == "bf16")


def case(plan: DecodePlan, latents: str = "a", error: float | None = None, **more) -> CaseResult:
    emulated = plan.dtype == "fp16"
    value = rmse(plan, latents) if error is None else error
    peak = PEAK[plan.dtype] // (1 + plan.slicing) - 50 * (plan.offload == "disk")
    return CaseResult(
        **{
            "id": f"m/{latents}/{plan.id}",
            "model": "m",
            "latents": latents,
            "plan": plan,
            "verdict": "pass",
            "measurements": {"rmse": Measurement("rmse", value, "grey levels")},
            "memory": MemoryTrace(allocated_peak_bytes=peak, method="events"),
            "receipts": {"precision": {"emulated": emulated}},
            **more,
        }
    )


def product(latents=("a", "b"), offloads=OFFLOADS) -> list[CaseResult]:
    cells = itertools.product(latents, DTYPE, (False, True), (None, TILES), offloads)
    return [
        case(DecodePlan(dtype, False, slicing, tiling, None, offload), name)
        for name, dtype, slicing, tiling, offload in cells
    ]


def effect(found: Attribution, measurement: str, axis: str, value: str) -> Effect:
    (only,) = [e for e in found.effects if (e.measurement, e.axis, e.value) == (measurement, axis, value)]
    return only


def interaction(found: Attribution, measurement: str, *pairs: tuple[str, str]) -> Interaction:
    axes, values = zip(*pairs)
    (only,) = [i for i in found.interactions if (i.measurement, i.axes, i.values) == (measurement, axes, values)]
    return only


def test_main_effects_are_the_mean_over_pairs_that_differ_in_one_setting():
    found = attribute(product())
    bf16 = effect(found, "rmse", "dtype", "bf16")
    assert (bf16.mean, bf16.least, bf16.most) == (0.625, 0.5, 0.75)  # half of the pairs are tiled
    assert (bf16.n, bf16.against) == (2 * 2 * 2 * 6, "fp32")
    tiled = effect(found, "rmse", "tiling", "t16o0.25")
    assert tiled.mean == pytest.approx((3 + 4) / 2 + 0.25 / 3)
    assert (tiled.least, tiled.most, tiled.n, tiled.against) == (3.0, 4.25, 2 * 3 * 2 * 6, "off")
    assert effect(found, "rmse", "slicing", "on").mean == 0.0
    assert all(effect(found, "rmse", "offload", name).most == 0.0 for name in OFFLOADS[1:])


def test_interactions_are_differences_of_differences():
    found = attribute(product())
    both = interaction(found, "rmse", ("dtype", "bf16"), ("tiling", "t16o0.25"))
    assert (both.mean, both.least, both.most, both.n) == (0.25, 0.25, 0.25, 2 * 2 * 6)
    assert interaction(found, "rmse", ("dtype", "fp16"), ("tiling", "t16o0.25")).mean == 0.0
    assert interaction(found, "rmse", ("slicing", "on"), ("offload", "disk")).n == 2 * 3 * 2
    # bytes: slicing halves the peak, so that it saves less of bf16's smaller one
    assert interaction(found, BYTES, ("dtype", "bf16"), ("slicing", "on")).mean == pytest.approx(500 - 300)


def test_emulated_fp16_takes_no_part_in_bytes():
    found = attribute(product())
    assert effect(found, "rmse", "dtype", "fp16").mean == 0.0625
    assert {e.value for e in found.effects if (e.measurement, e.axis) == (BYTES, "dtype")} == {"bf16"}
    assert effect(found, BYTES, "slicing", "on").n == 2 * 2 * 2 * 6  # two dtypes, not three
    assert effect(found, BYTES, "offload", "disk").mean == -50.0


def test_only_complete_pairs_and_quadruples_count():
    whole = product(latents=("a",), offloads=("none", "disk"))
    gone = {"m/a/bf16-upcast0-slice1-t16o0.25-disk"}
    broken = [
        msgspec.structs.replace(one, measurements={"rmse": Measurement("rmse", None, reason="not finite")})
        if one.id == "m/a/fp32-upcast0-slice0-t0-none"
        else one
        for one in whole
        if one.id not in gone
    ]
    found = attribute(broken)
    assert effect(found, "rmse", "dtype", "bf16").n == 8 - 1 - 1
    assert interaction(found, "rmse", ("dtype", "bf16"), ("tiling", "t16o0.25")).n == 4 - 1 - 1
    assert effect(found, BYTES, "dtype", "bf16").n == 8 - 1  # its memory was measured all the same


def test_a_lone_plan_has_no_effects():
    assert attribute([case(DecodePlan(dtype="bf16"))]) == Attribution()
    assert attribute([]) == Attribution()


def test_models_are_kept_apart_and_checks_errors_and_inapplicable_cases_left_out():
    plain, bf16 = case(DecodePlan()), case(DecodePlan(dtype="bf16"))
    other = msgspec.structs.replace(bf16, model="other")
    assert attribute([plain, other]).effects == ()
    for strange in ({"verdict": "error"}, {"verdict": "not_applicable"}, {"check": "a_b_a"}):
        assert attribute([plain, msgspec.structs.replace(bf16, **strange)]).effects == ()
    failed = msgspec.structs.replace(bf16, verdict="fail")
    assert effect(attribute([plain, failed]), "rmse", "dtype", "bf16").mean == 0.5


def test_an_honest_product_raises_no_alarm():
    assert attribute(product()).alarms == ()


@pytest.mark.parametrize("size", [FLOOR * 1.01, 2.0, -0.5])
def test_one_cell_in_which_offload_moves_a_pixel_is_an_alarm(size):
    doctored = "m/b/bf16-upcast0-slice1-t16o0.25-disk"
    cases = [case(one.plan, "b", rmse(one.plan, "b") + size) if one.id == doctored else one for one in product()]
    found = attribute(cases)
    assert found.alarms
    assert any("slicing on × offload disk" in line for line in found.alarms)
    assert any("tiling t16o0.25 × offload disk" in line for line in found.alarms)
    assert all("offload disk" in line for line in found.alarms)
    assert not attribute(cases, floor=3.0).alarms


def test_below_the_floor_and_in_other_figures_there_is_no_alarm():
    cases = [
        case(one.plan, one.latents, rmse(one.plan, one.latents) + 0.9 * FLOOR * (one.plan.offload == "disk"))
        for one in product()
    ]
    assert attribute(cases).alarms == ()
    assert interaction(attribute(cases), BYTES, ("slicing", "on"), ("offload", "disk")).mean == 0.0


def test_options_of_somebody_else_are_axes():
    cases = [case(DecodePlan(options={"mine": value}), error=float(value or 0)) for value in (False, True, 4)]
    found = attribute(cases)
    assert effect(found, "rmse", "mine", "on").mean == 1.0
    assert effect(found, "rmse", "mine", "4").mean == 4.0
    without = attribute([case(DecodePlan()), case(DecodePlan(options={"mine": True}), error=1.0)])
    assert effect(without, "rmse", "mine", "on").mean == 1.0


@given(st.floats(-5, 5), st.floats(-5, 5), st.floats(-5, 5))
def test_effects_of_an_additive_world_are_its_terms_and_nothing_interacts(a, b, c):
    cases = [
        case(DecodePlan("bf16" if x else "fp32", False, bool(y), TILES if z else None), error=a * x + b * y + c * z)
        for x, y, z in itertools.product((0, 1), repeat=3)
    ]
    found = attribute(cases)
    assert effect(found, "rmse", "dtype", "bf16").mean == pytest.approx(a, abs=1e-9)
    assert effect(found, "rmse", "slicing", "on").mean == pytest.approx(b, abs=1e-9)
    assert effect(found, "rmse", "tiling", "t16o0.25").mean == pytest.approx(c, abs=1e-9)
    assert all(abs(each.mean) < 1e-9 for each in found.interactions if each.measurement == "rmse")


def test_it_is_stored_without_loss_and_older_runs_have_none():
    run = RunResult(suite={}, environment={}, attribution=attribute(product()))
    assert from_json(to_json(run), RunResult) == run
    assert from_json('{"suite": {}, "environment": {}}', RunResult).attribution is None
