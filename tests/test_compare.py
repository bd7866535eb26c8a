"""Two runs side by side: what counts as worse, at the boundary, and what must never pass in silence."""

from __future__ import annotations

import math

import msgspec
import pytest

from fidelity.compare import compare
from fidelity.comparison import Comparison, Rise, Rises
from fidelity.differences import OTHER_DRIFT
from fidelity.errors import RequestError
from fidelity.records import (
    ApprovedValues,
    CaseResult,
    DecodePlan,
    Measurement,
    MemoryTrace,
    Reason,
    Reference,
    RunResult,
    Tiling,
    from_json,
    to_json,
)
from fidelity.trend import SAME_DRIFT
from tests.report import sample

HERE = {"class": "cpu-here", "versions": {"torch": "2.14.1", "diffusers": "0.42.1"}}
GOLDEN = {"weights": "w", "latents": "l", "sample": "s"}


def case(rmse: float | None = 0.5, **changes: object) -> CaseResult:
    measured = Measurement("rmse", rmse, "grey levels", "lower", (rmse,), reason=None if rmse is not None else "NaN")
    return sample.judged(**{"measurements": {"rmse": measured}, **changes})


def a_run(*cases: CaseResult, **about: object) -> RunResult:
    reference = (Reference("m", "l", 0.0, 1e-3, True, True, digests=GOLDEN),)
    return RunResult(**{"suite": {"name": "s", "digest": "d"}, "environment": HERE, "reference": reference,
                        "cases": cases, **about})  # type: ignore[arg-type]  # fmt: skip


def held(base: CaseResult, head: CaseResult, **rises: object) -> Comparison:
    return compare(a_run(base), a_run(head), Rises(**rises))  # type: ignore[arg-type]


def outcome(base: CaseResult, head: CaseResult, **rises: object) -> str:
    found = held(base, head, **rises)
    assert found.exit_status == bool(found.regressions)
    return found.cases[0].outcome


# ---------------------------------------------------------------- fidelity


def test_the_same_run_is_the_same():
    found = held(case(), case())
    assert (found.exit_status, found.cases[0].outcome, found.differences, found.notes[1:]) == (0, "same", (), ())


@pytest.mark.parametrize(("rise", "said"), [(0.999, "worse"), (1.0, "worse"), (1.001, "regressed"), (-5.0, "better")])
def test_a_rise_is_held_to_what_a_repeated_decode_may_differ_by(rise, said):
    base = 2.0**-10  # so that the sum is exact
    assert outcome(case(base), case(base + rise * SAME_DRIFT), memory=None) == said


@pytest.mark.parametrize(("rise", "said"), [(0.06249, "worse"), (0.0625, "worse"), (0.06251, "regressed")])
def test_the_noise_floor_of_the_case_may_be_risen_by(rise, said):
    approved = ApprovedValues("cpu-here", True, {"rmse": 0.5}, {"rmse": 0.0625})
    assert outcome(case(0.5), case(0.5 + rise, approved=approved)) == said


@pytest.mark.parametrize(("limit", "said"), [(Rise(0.25), "worse"), (Rise(0.2499), "regressed"),
                                             (Rise(0.5, True), "worse"), (Rise(0.49, True), "regressed")])  # fmt: skip
def test_a_limit_of_the_callers_own_replaces_it(limit, said):
    assert outcome(case(0.5), case(0.75), measurements={"rmse": limit}) == said


def test_higher_is_better_where_it_is():
    def ssim(value):
        return case(measurements={"ssim": Measurement("ssim", value, "", "higher")})

    assert outcome(ssim(0.90), ssim(0.95)) == "better"
    found = held(ssim(0.95), ssim(0.90))
    assert found.cases[0].reasons == ("ssim fell from 0.95 to 0.9: worse by 0.05, allowed 0.00095",)


def test_a_number_that_is_none_any_more_is_a_regression():
    found = held(case(0.5), case(None))
    assert found.exit_status == 1
    assert found.cases[0].reasons == ("rmse was 0.5 grey levels and is no longer measured: NaN",)
    assert outcome(case(0.5), case(measurements={})) == "regressed"
    assert outcome(case(0.5), case(math.nan)) == "regressed"
    assert outcome(case(0.5), case(math.inf)) == "regressed"
    assert outcome(case(None), case(None)) == "same"
    assert outcome(case(None), case(0.5)) == "same"


def test_a_decode_that_became_exact_lost_nothing():
    psnr = case(measurements={"psnr": Measurement("psnr", 40.0, "dB", "higher")})
    exact = case(measurements={"psnr": Measurement("psnr", None, "dB", "higher", exact=True, reason="exact")})
    assert outcome(psnr, exact) == "better"
    assert outcome(exact, exact) == "same"


def test_a_decode_that_stopped_being_exact_is_worse_and_gated_if_asked():
    def psnr(value, **about):
        return case(measurements={"psnr": Measurement("psnr", value, "dB", "higher", **about)})

    exact = psnr(None, exact=True, reason="exact")
    found = held(exact, psnr(30.0)).cases[0]
    assert found.outcome == "worse"
    assert found.change("psnr").reason == "psnr was that of an exact decode and is 30 dB"
    assert outcome(exact, psnr(30.0), measurements={"psnr": Rise(100.0)}) == "regressed", "infinity has no share"
    lost = held(exact, psnr(None, reason="NaN")).cases[0]
    assert (lost.outcome, lost.reasons) == (
        "regressed", ("psnr was that of an exact decode and is no longer measured: NaN",)
    )  # fmt: skip
    assert outcome(psnr(None, reason="NaN"), psnr(30.0)) == "same"


# ---------------------------------------------------------------- verdicts


FAILS = {"verdict": "fail", "reasons": (Reason("rmse", "rmse is 9"),), "diagnosis": ("seam",)}


@pytest.mark.parametrize(
    ("base", "head", "said"),
    [
        ({}, FAILS, "regressed"),
        (FAILS, {}, "better"),
        (FAILS, FAILS, "same"),
        (FAILS, {**FAILS, "diagnosis": ("seam", "tone_drift")}, "regressed"),
        ({**FAILS, "diagnosis": ("seam", "tone_drift")}, FAILS, "same"),
        (FAILS, {"verdict": "error"}, "regressed"),
        ({}, {"verdict": "error"}, "regressed"),
        ({"verdict": "error"}, {"verdict": "error"}, "same"),
        ({"verdict": "error"}, {}, "better"),
        ({}, {"verdict": "not_applicable", "reasons": (Reason("n", "tiles too large"),)}, "regressed"),
        (FAILS, {"verdict": "not_applicable"}, "regressed"),
        ({"verdict": "not_applicable"}, {}, "appeared"),
        ({"verdict": "not_applicable"}, {"verdict": "not_applicable"}, "unjudged"),
    ],
)
def test_verdicts(base, head, said):
    other = case(latents="other")
    found = compare(a_run(case(**base), other), a_run(case(**head), other), Rises())
    mine = next(each for each in found.cases if each.latents == "l")
    assert mine.outcome == said
    assert found.exit_status == (said == "regressed")
    assert bool(mine.reasons) == (said == "regressed")


def test_a_defect_that_is_expected_and_no_longer_found_is_a_regression():
    blind = held(case(**FAILS), case(surprise=True))
    assert blind.exit_status == 1
    assert blind.cases[0].reasons == ("ended as expected (fail for seam) and is a surprise now (pass)",)
    assert outcome(case(**FAILS, surprise=True), case()) == "better", "a defect that nobody expected is mended"
    assert outcome(case(surprise=True), case(surprise=True)) == "same"


def test_the_reason_of_a_verdict_is_told():
    assert held(case(), case(**FAILS)).cases[0].reasons[0] == "pass became fail: rmse is 9"


def test_a_case_that_vanished_is_a_regression_unless_allowed():
    base, head = a_run(case(), case(latents="gone")), a_run(case(), case(latents="new"))
    found = compare(base, head, Rises())
    assert {each.latents: each.outcome for each in found.cases} == {"gone": "vanished", "l": "same", "new": "appeared"}
    assert found.exit_status == 1
    assert compare(base, head, Rises(allow=("vanished",))).exit_status == 0
    idle = a_run(case(), case(latents="gone", verdict="not_applicable"))
    assert compare(idle, head, Rises()).exit_status == 0, "what was never judged cannot be lost"


# ---------------------------------------------------------------- what may not be compared


@pytest.mark.parametrize("digests", [{"latents": "other"}, {"weights": "other"}, {"sample": "other"}])
def test_another_golden_is_a_regression_unless_allowed(digests):
    head = a_run(case(0.5), reference=(Reference("m", "l", 0.0, 1e-3, True, True, digests={**GOLDEN, **digests}),))
    found = compare(a_run(case(0.5)), head, Rises())
    assert (found.exit_status, found.cases[0].outcome) == (1, "not_comparable")
    assert f"other {next(iter(digests))}" in found.cases[0].reasons[0]
    allowed = compare(a_run(case(0.5)), head, Rises(allow=("goldens",)))
    assert allowed.exit_status == 0
    assert allowed.cases[0].outcome == ("same" if "sample" in digests else "not_comparable")
    assert any("leans on a golden of other" in note for note in allowed.notes)
    red = msgspec.structs.replace(head, cases=(case(**FAILS),))
    assert compare(a_run(case()), red, Rises(allow=("goldens",))).exit_status == 1, (
        "its verdict is compared all the same"
    )


def test_a_run_that_does_not_name_its_goldens_is_said_to():
    old = a_run(case(), reference=(Reference("m", "l", 0.0, 1e-3, True, True),))
    found = compare(old, a_run(case()), Rises())
    assert found.exit_status == 0
    assert any("does not say which golden" in note for note in found.notes)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_between_classes_only_the_drift_limit_on_rmse_gates(dtype):
    plan, other = DecodePlan(dtype=dtype), {**HERE, "class": "cpu-there"}

    def both(rise: float) -> Comparison:
        measured = {"rmse": Measurement("rmse", rise, "grey levels"), "lpips_alex": Measurement("lpips_alex", rise)}
        return compare(a_run(case(0.0, plan=plan, measurements={**measured, "rmse": Measurement("rmse", 0.0)})),
                       a_run(case(plan=plan, measurements=measured), environment=other), Rises())  # fmt: skip

    limit = OTHER_DRIFT[dtype]
    assert both(limit).exit_status == 0
    assert both(limit * 1.001).exit_status == 1
    assert "stated drift limit" in both(limit).notes[0]
    assert both(limit).pace.ratio is None
    assert both(limit).cases[0].change("lpips_alex").allowed is None


def test_two_unknown_environments_are_not_the_same():
    found = compare(a_run(case(), environment={}), a_run(case(), environment={}), Rises())
    assert "another environment class" in found.notes[0]


def test_differences_are_named():
    head = a_run(case(), environment={**HERE, "versions": {"torch": "2.15.0", "diffusers": "0.42.1"}}, commit="abc",
                 suite={"name": "s", "digest": "other"}, partial=True)  # fmt: skip
    found = compare(a_run(case()), head, Rises())
    assert set(found.differences) == {("version of torch", "2.14.1", "2.15.0"), ("commit", "None", "abc"),
                                      ("suite file", "d", "other")}  # fmt: skip
    assert any("not the same file" in note for note in found.notes)
    assert "HEAD is a partial run" in found.notes


@pytest.mark.parametrize(
    ("base", "head", "rises", "says"),
    [
        (a_run(), a_run(case()), Rises(), "judged no case"),
        (a_run(case(verdict="not_applicable")), a_run(case()), Rises(), "judged no case"),
        (a_run(case(), partial=True), a_run(case()), Rises(), "BASE is a partial run .1 judged.*--allow partial"),
        (a_run(case()), a_run(case(latents="x")), Rises(), "no case in common"),
        (a_run(case()), a_run(), Rises(), "no case in common"),
        (a_run(case()), a_run(case()), Rises({"rmes": Rise(1.0)}), "did you mean 'rmse'"),
        (a_run(case()), a_run(case(), environment={"class": "x"}), Rises(time=Rise(0.25, True)), "--max-time-rise"),
    ],
)
def test_wrong_requests(base, head, rises, says):
    with pytest.raises(RequestError, match=says) as caught:
        compare(base, head, rises)
    assert "\n" not in str(caught.value)


def test_a_partial_base_is_compared_where_that_is_allowed():
    found = compare(a_run(case(), partial=True), a_run(case()), Rises(allow=("partial",)))
    assert found.exit_status == 0
    assert "BASE is a partial run" in found.notes


# ---------------------------------------------------------------- memory and time


@pytest.mark.parametrize(("peak", "said"), [(105, "worse"), (106, "regressed"), (95, "better"), (100, "same")])
def test_memory_may_rise_by_a_share(peak, said):
    def peaks(size):
        return case(memory=MemoryTrace(size * sample.MIB, method="events"))

    assert outcome(peaks(100), peaks(peak)) == said
    assert outcome(peaks(100), peaks(peak), memory=None) in ("worse", "better", "same")
    if said == "regressed":
        found = held(peaks(100), peaks(peak)).cases[0].reasons
        assert found == ("the allocated peak rose from 100.0 to 106.0 MiB, by 6.0%, allowed 5 %",)


def test_a_peak_that_is_not_measured_any_more_is_a_regression():
    lost = case(memory=MemoryTrace(reason="the profiler is absent"))
    found = held(case(), lost)
    assert found.cases[0].reasons == (
        "the allocated peak was 100.0 MiB and is no longer measured: the profiler is absent",
    )
    assert outcome(case(), lost, memory=None) == "same"
    other = case(memory=MemoryTrace(900 * sample.MIB, method="max_memory_allocated"))
    found = held(case(), other)
    assert found.exit_status == 0
    assert "not compared" in found.cases[0].change("allocated_peak_bytes").reason


def test_memory_gates_between_classes_only_if_asked():
    def peaks(size, **about):
        return a_run(case(memory=MemoryTrace(size, method="events")), **about)

    base, head = peaks(100), peaks(240, environment={**HERE, "class": "cpu-there"})
    shown = compare(base, head, Rises())
    assert shown.exit_status == 0
    assert "RMSE is held" in shown.notes[0]
    assert "other measurements, memory and time are shown" in shown.notes[0]
    assert compare(base, head, Rises(memory_across=True)).exit_status == 1
    lost = a_run(case(memory=None), environment={**HERE, "class": "cpu-there"})
    assert compare(base, lost, Rises()).exit_status == 1, "a figure that is lost is one everywhere"


def timed(*seconds: float, **changes: object) -> RunResult:
    cases = [case(latents=f"l{place}", seconds={"decode": span}, **changes) for place, span in enumerate(seconds)]
    return a_run(*cases)


def test_time_is_the_median_ratio_and_gates_only_if_asked():
    base, slow = timed(1, 1, 1, 1, 1, 1), timed(1.25, 1.25, 1.25, 1.25, 9, 0.1)
    shown = compare(base, slow, Rises())
    assert (shown.exit_status, shown.pace.ratio, shown.pace.cases) == (0, 1.25, 6)
    assert compare(base, slow, Rises(time=Rise(0.25, True))).exit_status == 0, "met when equal"
    found = compare(base, slow, Rises(time=Rise(0.24, True)))
    assert found.exit_status == 1
    assert found.pace.reason == "decodes take 1.25 × as long, allowed 1.24"
    assert all(each.outcome == "same" for each in found.cases)


def test_time_that_cannot_be_compared_fails_where_it_is_gated():
    few = compare(timed(1, 1), timed(1, 1), Rises(time=Rise(0.25, True)))
    assert few.exit_status == 1
    assert few.pace.reason == "2 decodes have a time on both sides, fewer than 5"
    emulated = {"receipts": {"precision": {"emulated": True}}}
    assert compare(timed(*[1] * 9, **emulated), timed(*[1] * 9, **emulated), Rises()).pace.ratio is None


# ---------------------------------------------------------------- over all cases


def test_axes_tell_where_it_got_worse():
    tiled = DecodePlan(tiling=Tiling(8, 0.25))
    base = a_run(case(0.5), case(0.5, plan=tiled), case(latents="x"), case(latents="x", plan=tiled))
    head = a_run(case(0.5), case(0.75, plan=tiled), case(latents="x"), case(latents="x", plan=tiled))
    axes = {(one.axis, one.value): one for one in compare(base, head, Rises()).axes}
    assert set(axes) == {("latents", "l"), ("latents", "x"), ("tiling", "off"), ("tiling", "t8o0.25")}
    one = axes["tiling", "t8o0.25"]
    assert (one.cases, one.regressed, one.rmse, one.rmse_worst, one.memory, one.seconds) == (2, 1, 0.125, 0.25, 1, 1)
    assert axes["tiling", "off"].regressed == 0


def test_worst_comes_first():
    names = ["a", "b", "c", "d", "e"]
    base = a_run(*(case(0.5, latents=name) for name in names))
    head = a_run(*(case(value, latents=name) for name, value in zip(names, (0.5, 0.6, 0.9, 0.4))),
                 case(0.5, latents="e", verdict="error"))  # fmt: skip
    assert [each.latents for each in compare(base, head, Rises()).cases] == ["e", "c", "b", "d", "a"]


def test_a_comparison_survives_json():
    found = held(case(), case(**FAILS))
    assert from_json(to_json(found), Comparison) == found
