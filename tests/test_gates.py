"""Every gate at, under and over its limit, and with NaN, inf and nothing."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fidelity import gates
from fidelity.records import Case, DecodePlan, Expectation, Limit, Measurement, Reason

finite = st.floats(allow_nan=False, allow_infinity=False, width=64)
broken = st.sampled_from([None, math.nan, math.inf, -math.inf])
INSTRUMENTS = {"tile_step": ("seam",), "tile_tone": ("tone_drift",)}


def limit(**bound: float) -> Limit:
    return Limit(origin="a test", **bound)


def measured(name: str, value: float | None, better: str = "lower", **more) -> Measurement:
    return Measurement(name=name, value=value, unit="grey levels", better=better, **more)


def judged(value: float | None, bound: Limit, name: str = "rmse", better: str = "lower", **more) -> tuple[Reason, ...]:
    return gates.judge({name: measured(name, value, better, **more)}, {name: bound}, instruments=INSTRUMENTS)


# ---------------------------------------------------------------- limits


@given(finite)
def test_a_value_equal_to_its_limit_passes(bound):
    assert judged(bound, limit(max=bound)) == ()
    assert judged(bound, limit(min=bound), better="higher") == ()


@given(finite)
def test_the_next_number_over_the_limit_fails_and_the_one_under_passes(bound):
    over, under = math.nextafter(bound, math.inf), math.nextafter(bound, -math.inf)
    if math.isfinite(over):
        (reason,) = judged(over, limit(max=bound))
        assert (reason.measured, reason.limit) == (over, bound)
        assert judged(over, limit(min=bound)) == ()
    if math.isfinite(under):
        assert judged(under, limit(max=bound)) == ()
        assert len(judged(under, limit(min=bound))) == 1


@given(broken, finite, st.sampled_from(["max", "min"]), st.sampled_from(["lower", "higher"]))
def test_a_value_that_is_no_finite_number_is_within_no_limit(value, bound, word, better):
    reasons = judged(value, limit(**{word: bound}), better=better)
    assert len(reasons) == 1
    assert reasons[0].measured is None
    assert gates.verdict(reasons) == "error"


@given(finite, finite, finite, st.sampled_from(["lower", "higher"]))
def test_a_worse_value_never_turns_a_failure_into_a_pass(a, b, bound, better):
    word = "max" if better == "lower" else "min"
    good, bad = sorted((a, b), reverse=better == "higher")
    if judged(good, limit(**{word: bound}), better=better):
        assert judged(bad, limit(**{word: bound}), better=better)


@given(st.dictionaries(st.sampled_from(["rmse", "tile_step", "tile_tone"]), st.one_of(finite, broken)), finite)
def test_taking_a_measurement_away_never_helps(values, bound):
    limits = {name: limit(max=bound) for name in ("rmse", "tile_step", "tile_tone")}
    measurements = {name: measured(name, value) for name, value in values.items()}
    failing = {reason.name for reason in gates.judge(measurements, limits, instruments=INSTRUMENTS)}
    for name in values:
        fewer = {key: value for key, value in measurements.items() if key != name}
        assert failing | {name} == {r.name for r in gates.judge(fewer, limits, instruments=INSTRUMENTS)}


def test_nothing_measured_fails_each_limit():
    reasons = gates.judge({}, {"rmse": limit(max=1.0), "ssim": limit(min=0.9)}, instruments={})
    assert [reason.name for reason in reasons] == ["rmse", "ssim"]
    assert gates.verdict(reasons) == "error"


def test_no_limit_at_all_cannot_pass():
    reasons = gates.judge({"rmse": measured("rmse", 0.0)}, {}, instruments={})
    assert gates.verdict(reasons) == "fail"
    assert "no limit" in reasons[0].message


def test_a_limit_without_a_bound_cannot_pass():
    assert judged(0.0, limit()) != ()


def test_both_bounds_of_a_limit_hold():
    both = limit(min=-1.0, max=1.0)
    assert judged(0.0, both) == ()
    assert judged(2.0, both)[0].limit == 1.0
    assert judged(-2.0, both)[0].limit == -1.0


def test_the_psnr_of_an_exact_decode_is_within_any_minimum_and_no_maximum():
    assert judged(None, limit(min=200.0), "psnr", "higher", exact=True) == ()
    assert judged(None, limit(max=200.0), "psnr", "higher", exact=True) != ()
    assert judged(None, limit(min=200.0), "psnr", "higher", exact=False) != ()
    assert judged(None, limit(max=1.0), "rmse", "lower", exact=True) != ()


def test_a_reason_says_what_where_measured_limit_and_origin_in_one_line():
    (reason,) = judged(3.1, limit(max=1.0), "tile_step", where={"image": 1, "x": 128})
    assert reason.message == "tile_step is 3.1 grey levels, above the limit 1 in image 1 at x 128 (a test)"
    assert reason.diagnosis == ("seam",)


def test_a_pure_number_is_told_without_a_unit():
    for unit in ("1", "share", ""):
        found = Measurement("lpips_alex", 1.0, unit, "lower", (1.0,))
        (reason,) = gates.judge({"lpips_alex": found}, {"lpips_alex": limit(max=0.5)}, instruments={})
        assert reason.message.startswith("lpips_alex is 1, above the limit 0.5")


def test_the_reason_why_something_was_not_measured_is_told():
    (reason,) = judged(None, limit(max=1.0), reason="weights are missing")
    assert "weights are missing" in reason.message


# ---------------------------------------------------------------- non-finite decodes


def test_a_non_finite_decode_fails_without_a_limit_and_is_blamed_on_nothing_else():
    measurements = {
        "nonfinite_share": measured("nonfinite_share", 0.25),
        "tile_step": measured("tile_step", None, reason="not finite"),
    }
    for limits in ({}, {"tile_step": limit(max=1.0), "rmse": limit(max=1.0)}, {"nonfinite_share": limit(max=1.0)}):
        reasons = gates.judge(measurements, limits, instruments=INSTRUMENTS)
        assert gates.diagnosis(reasons) == ("non_finite",)
        assert gates.verdict(reasons) == "fail"


def test_the_smallest_share_of_non_finite_values_fails():
    share = {"nonfinite_share": measured("nonfinite_share", math.ulp(0.0)), "rmse": measured("rmse", 0.0)}
    assert gates.verdict(gates.judge(share, {"rmse": limit(max=1.0)}, instruments={})) == "fail"


@given(broken)
def test_a_share_that_was_not_measured_is_no_pass(value):
    found = {"nonfinite_share": measured("nonfinite_share", value), "rmse": measured("rmse", 0.0)}
    assert gates.verdict(gates.judge(found, {"rmse": limit(max=1.0)}, instruments={})) == "error"


# ---------------------------------------------------------------- receipts

GOOD = {
    "tiling": {"requested": True, "engaged": True, "reason": None},
    "decoder": {"calls": 9, "shapes": [[1, 4, 16, 16]]},
    "dtype": {"weights": "bf16", "middle_layer": "bf16", "output": "bf16", "emulated": False},
    "state": {"restored": True, "leaks": []},
}


def test_good_receipts_give_no_reason():
    assert gates.receipt_reasons(GOOD, ["tiling"], repeat_exact=True) == ()


@pytest.mark.parametrize(("name", "blamed"), [("tiling", "not_engaged"), ("precision", "dtype"), ("dtype", "dtype")])
def test_an_option_that_did_not_engage_is_named(name, blamed):
    receipts = {**GOOD, name: {"requested": True, "engaged": False, "reason": "one call of the whole latents"}}
    (reason,) = gates.receipt_reasons(receipts)
    assert reason.diagnosis == (blamed,)
    assert "one call of the whole latents" in reason.message


def test_a_requested_option_without_receipt_or_proof_is_named():
    (missing,) = gates.receipt_reasons(GOOD, ["tiling", "slicing"])
    assert (missing.name, missing.diagnosis) == ("slicing", ("not_engaged",))
    (empty,) = gates.receipt_reasons({**GOOD, "offload": {"requested": True}})
    assert empty.name == "offload"
    (unsaid,) = gates.receipt_reasons({**GOOD, "offload": {"requested": True, "engaged": None, "reason": ""}})
    assert unsaid.name == "offload"


def test_a_receipt_may_say_that_nothing_can_be_proved():
    receipts = {**GOOD, "offload": {"requested": True, "engaged": None, "reason": "no accelerator"}}
    assert gates.receipt_reasons(receipts, ["offload"]) == ()


@pytest.mark.parametrize("state", [{"restored": False, "leaks": ["use_tiling"]}, {"leaks": ["use_tiling"]}])
def test_state_left_behind_is_named_with_what_leaked(state):
    (reason,) = gates.receipt_reasons({**GOOD, "state": state})
    assert reason.diagnosis == ("state_leak",)
    assert "use_tiling" in reason.message


def test_a_decode_that_varies_is_nondeterministic():
    assert gates.diagnosis(gates.receipt_reasons(GOOD, repeat_exact=False)) == ("nondeterministic",)
    assert gates.receipt_reasons(GOOD, repeat_exact=None) == ()


# ---------------------------------------------------------------- regressions


@given(finite, st.floats(0, 1e6), st.sampled_from(["lower", "higher"]))
def test_better_never_regresses(was, gain, better):
    value = was - gain if better == "lower" else was + gain
    assert gates.regressions({"m": measured("m", value, better)}, {"m": was}, {"m": 0.0}) == ()


@pytest.mark.parametrize(
    ("value", "regressed"), [(1.0, False), (1.25, False), (1.25 + 0.5e-8, False), (1.25 + 2e-8, True)]
)
def test_worse_within_the_noise_floor_is_no_regression(value, regressed):
    reasons = gates.regressions({"rmse": measured("rmse", value)}, {"rmse": 1.0}, {"rmse": 0.25})
    assert gates.diagnosis(reasons) == (("regressed",) if regressed else ())


def test_a_lower_ssim_regresses():
    found = {"ssim": measured("ssim", 0.9, "higher")}
    assert gates.regressions(found, {"ssim": 0.95}, {"ssim": 0.01})[0].measured == 0.9


def test_a_metric_without_a_floor_has_a_floor_of_zero():
    assert gates.regressions({"rmse": measured("rmse", 1.0 + 2e-8)}, {"rmse": 1.0}, {}) != ()
    assert gates.regressions({"rmse": measured("rmse", 1.0)}, {"rmse": 1.0}, {}) == ()


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_an_approved_metric_that_is_no_longer_measured_fails(value):
    for found in ({}, {"rmse": measured("rmse", value)}):
        reasons = gates.regressions(found, {"rmse": 1.0}, {"rmse": 10.0})
        assert gates.diagnosis(reasons) == ("regressed",)
        assert gates.verdict(reasons) == "fail"


def test_a_psnr_that_became_exact_is_better():
    assert gates.regressions({"psnr": measured("psnr", None, "higher", exact=True)}, {"psnr": 60.0}, {}) == ()


@pytest.mark.parametrize("floor", [math.nan])
def test_a_floor_that_is_no_number_holds_nothing(floor):
    assert gates.regressions({"rmse": measured("rmse", 1.1)}, {"rmse": 1.0}, {"rmse": floor}) != ()


# ---------------------------------------------------------------- verdicts


def case(verdict: str = "pass", *diagnosis: str) -> Case:
    return Case("m", "l", DecodePlan(), expected=Expectation(verdict, diagnosis, "a test"))


def test_one_word_for_a_case():
    assert gates.verdict(()) == "pass"
    assert gates.verdict([Reason("rmse", "too much", 2.0, 1.0)]) == "fail"
    assert gates.verdict([Reason("rmse", "too much", 2.0, 1.0)], error=True) == "error"
    assert gates.verdict((), error=True) == "error"


@pytest.mark.parametrize(
    ("expected", "verdict", "diagnosis", "surprised"),
    [
        (case(), "pass", (), False),
        (case(), "fail", ("seam",), True),
        (case(), "error", ("crash",), True),
        (case(), "not_applicable", (), False),
        (case("fail", "seam"), "fail", ("seam",), False),
        (case("fail", "seam"), "pass", (), True),
        (case("fail", "seam"), "error", ("crash",), True),
        (case("fail", "seam"), "fail", (), True),
        (case("fail", "seam"), "fail", ("tone_drift",), True),
        (case("fail", "seam"), "fail", ("seam", "tone_drift"), True),
        (case("fail", "seam", "tone_drift"), "fail", ("tone_drift", "seam"), False),
        (case("fail", "seam", "tone_drift"), "fail", ("seam",), True),
        (case("fail", "seam"), "not_applicable", (), False),
        (case("error"), "error", ("crash",), False),
        (case("error", "memory"), "error", ("crash",), True),
        (case("error"), "fail", (), True),
    ],
)
def test_surprise(expected, verdict, diagnosis, surprised):
    assert gates.surprise(expected, verdict, diagnosis) is surprised


def test_the_diagnosis_is_the_ordered_union_of_the_reasons():
    reasons = [Reason("a", "", diagnosis=("seam", "band")), Reason("b", "", diagnosis=("blur", "seam"))]
    assert gates.diagnosis(reasons) == ("seam", "band", "blur")
    with pytest.raises(ValueError, match="smudge"):
        gates.diagnosis([Reason("a", "", diagnosis=("smudge",))])


def test_a_measurement_without_an_instrument_blames_what_it_names_itself():
    seam = Measurement("tile_seam", 5.0, "grey levels", details={"diagnosis": ["tone_drift"]})
    (reason,) = gates.judge({"tile_seam": seam}, {"tile_seam": Limit(origin="test", max=1.0)}, instruments={})
    assert reason.diagnosis == ("tone_drift",)
