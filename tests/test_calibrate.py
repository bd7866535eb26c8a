"""Noise measured under each condition, limits that follow from it, and the upper rule at, under and over its bound."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fidelity import calibrate, gates, noise, registry, suite
from fidelity.calibrate import Row, proposal, round_up, table
from fidelity.errors import EvaluationError, RequestError, SuiteError
from fidelity.noise import ALONE, CONDITIONS, PLAIN, POSITION, REPEAT, THREADS, Noise
from fidelity.records import DecodePlan, Limit, Measurement
from tests.suites import LIMITS, fidelity, write_suite

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

registry.load_plugins()
BF16 = DecodePlan(dtype="bf16")
DAY = date(2026, 11, 30)


# ---------------------------------------------------------------- the upper rule


def held(value: float | None, plain: gates.Plain | None, times: float = 3.0, most: float = 100.0):
    found = {"rmse": Measurement("rmse", value, "grey levels", reason=None if value is not None else "not finite")}
    limits = {"rmse": Limit(origin="a test", max=most, times_plain=times)}
    given_ = {} if plain is None else {"rmse": plain}
    return gates.judge(found, limits, instruments={"rmse": ("blur",)}, plain=given_)


def test_the_upper_rule_is_met_when_equal_and_broken_by_the_next_number():
    plain = gates.Plain(0.5, 0.25)
    assert held(1.75, plain) == ()
    (reason,) = held(1.7500001, plain)
    assert (reason.measured, reason.limit, reason.unit) == (1.7500001, 1.75, "grey levels")
    assert reason.diagnosis == ("blur",)
    assert "3 × 0.5 of the plain decode" in reason.message
    assert gates.verdict([reason]) == "fail"


def test_the_upper_rule_stands_beside_the_maximum_and_does_not_replace_it():
    assert [reason.limit for reason in held(2.0, gates.Plain(0.5, 0.0), most=1.0)] == [1.0, 1.5]
    assert [reason.limit for reason in held(1.2, gates.Plain(0.5, 0.0), most=1.0)] == [1.0]


@pytest.mark.parametrize(
    "plain",
    [None, gates.Plain(None, 0.1), gates.Plain(0.5, None), gates.Plain(float("nan"), 0.1),
     gates.Plain(0.5, float("inf")), gates.Plain(None, None, "RuntimeError: no kernel")],
)  # fmt: skip
def test_a_plain_decode_that_was_not_measured_is_an_error_and_no_pass(plain):
    (reason,) = held(0.0, plain)
    assert gates.verdict([reason]) == "error"
    assert "plain decode" in reason.message
    if plain is not None and plain.reason:
        assert "no kernel" in reason.message


def test_what_was_not_measured_itself_is_one_reason_not_two():
    (reason,) = held(None, gates.Plain(0.5, 0.1))
    assert gates.verdict([reason]) == "error"


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0, 1), st.floats(1, 10))
def test_the_upper_rule_passes_exactly_what_is_within_it(value, cost, floor, times):
    assert (held(value, gates.Plain(cost, floor), times, most=1e6) == ()) is (value <= times * cost + floor)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('ssim = { min = 0.9, times_plain = 2.0, origin = "t" }', "of ssim more is better"),
        ('tile_step = { max = 2.0, times_plain = 2.0, origin = "t" }', "a plain decode has no tile_step"),
        ('oracle_max_abs = { max = 1.0, times_plain = 2.0, origin = "t" }', "a plain decode has no oracle_max_abs"),
        ('rmse = { max = 2.0, times_plain = 0.5, origin = "t" }', "from 1 on"),
        ('rmse = { max = 2.0, times_plain = inf, origin = "t" }', "finite"),
        ('rmse = { times_plain = 2.0, origin = "t" }', "max is missing"),
        ('rmse = { max = 2.0, times_plane = 2.0, origin = "t" }', "did you mean 'times_plain'"),
    ],
)
def test_an_upper_rule_that_holds_nothing_is_refused(tmp_path, line, said):
    path = write_suite(tmp_path, "", f"[limits]\n{line}\n")
    with pytest.raises(SuiteError if "mean" not in said else RequestError, match=said):
        suite.load(path, registry)


# ---------------------------------------------------------------- noise, measured on a decoder whose noise is known


class Stub:
    """A runner whose decode is the latents, plus a known noise."""

    def __init__(self, repeat=0.0, threads=0.0, position=0.0, batch=0.0):
        self.repeat, self.threads, self.position, self.batch = repeat, threads, position, batch
        self.count, self.leaks, self.raising, self.reloaded, self.restored_with = 0, [], False, False, None

    @contextmanager
    def applied(self, plan):
        yield self._decode

    def restore(self):
        self.restored_with = torch.get_num_threads()
        return {"leaks": self.leaks}

    def reload(self):
        self.reloaded = True

    def _decode(self, latents):
        if self.raising:
            raise RuntimeError("no kernel")
        sample = latents.clone()
        sample += self.repeat * self.count + self.threads * (torch.get_num_threads() - 1)
        sample += self.position * torch.arange(len(latents)).reshape(-1, 1, 1, 1) + self.batch * (len(latents) - 1)
        self.count += 1
        return sample, {}


def measured(candidate, golden, plan):
    apart = (candidate - golden).abs()
    return {
        "rmse": Measurement("rmse", float(apart.pow(2).mean().sqrt())),
        "max_abs": Measurement("max_abs", float(apart.max())),
        "broken": Measurement("broken", None, reason="never"),
    }


def noises(latents, **amounts):
    golden = latents - 0.5
    found = noise.measure_noise(Stub(**amounts), latents, golden, (BF16,), CONDITIONS, measured)
    return {each.condition: each for each in found}


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize(
    ("amounts", "condition"),
    [({"threads": 0.25}, THREADS), ({"position": 0.25}, POSITION), ({"batch": 0.25}, ALONE)],
    ids=["threads", "position", "batch"],
)
def test_each_condition_sees_its_own_noise_alone(batch, amounts, condition):
    torch.manual_seed(1)
    found = noises(torch.randn(batch, 3, 8, 8), **amounts)
    for name in (REPEAT, THREADS, POSITION, ALONE):
        amount = 0.25 if name == condition else 0.0
        assert found[name].rmse == pytest.approx(amount, abs=1e-6), name
        assert found[name].max_abs == pytest.approx(amount, abs=1e-6)
        assert found[name].moved["rmse"] == pytest.approx(amount, abs=1e-6)
        assert "broken" not in found[name].moved


def test_repeat_sees_a_decode_that_varies_and_plain_is_the_cost_itself():
    found = noises(torch.zeros(2, 3, 8, 8), repeat=0.125)
    assert found[REPEAT].rmse == pytest.approx(0.125)
    assert found[PLAIN].rmse == found[PLAIN].moved["rmse"] == pytest.approx(0.5)


def test_threads_are_put_back_even_if_the_decode_raises():
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError, match="no"), noise.threads(before + 1):
        raise RuntimeError("no")
    assert torch.get_num_threads() == before


def test_the_runner_s_net_is_spread_at_its_own_thread_count_and_what_it_finds_is_raised():
    """Its probe has the bits of that count: under another it would find a leak that is none, and make one of it."""
    z, stub = torch.zeros(2, 3, 8, 8), Stub()
    list(noise.measure_noise(stub, z, z, (BF16,), (THREADS,), measured))
    assert stub.restored_with == torch.get_num_threads()
    assert not stub.reloaded
    stub.leaks = ["attribute use_slicing: False → True"]
    with pytest.raises(EvaluationError, match="use_slicing"):
        list(noise.measure_noise(stub, z, z, (BF16,), (THREADS,), measured))
    stub.raising = True
    with pytest.raises(RuntimeError, match="no kernel"):
        list(noise.measure_noise(stub, z, z, (BF16,), (THREADS,), measured))
    assert stub.reloaded


def test_a_floor_is_the_worst_condition_and_plain_is_none_of_them():
    found = [
        Noise(BF16, REPEAT, 0.0, 0.0, {"rmse": 0.0, "ssim": 0.001}),
        Noise(BF16, THREADS, 0.1, 0.5, {"rmse": 0.1}),
        Noise(BF16, PLAIN, 9.0, 9.0, {"rmse": 9.0, "lpips_alex": 1.0}),
    ]
    assert noise.floors(found) == {"bf16": {"rmse": 0.1, "ssim": 0.001}}


# ---------------------------------------------------------------- proposals


def row(plan, condition, rmse, *, model="kl", latents="a", **moved):
    return Row(model, latents, Noise(plan, condition, rmse, rmse, {"rmse": rmse, **moved}))


ROWS = [
    row(DecodePlan(), PLAIN, 0.0, lpips_alex=0.0, ssim=1.0),
    row(DecodePlan(), THREADS, 0.001, lpips_alex=0.0, ssim=0.0),
    row(BF16, PLAIN, 0.4, lpips_alex=0.001, ssim=0.999),
    row(BF16, PLAIN, 0.5, latents="b", lpips_alex=0.0005, ssim=0.998),
    row(BF16, THREADS, 0.01, lpips_alex=0.0, ssim=0.0),
]


def proposed(rows, factor=1.5):
    text = "\n".join(proposal(rows, factor=factor, today=DAY))
    return {str(rule["match"]): rule for rule in tomllib.loads(text).get("limits", {}).get("where", [])}, text


def test_a_proposal_is_the_worst_times_the_factor_and_says_where_it_comes_from():
    rules, _ = proposed(ROWS)
    bf16 = rules["{'dtype': 'bf16', 'tiling': False}"]
    assert bf16["rmse"]["max"] == 1.8  # 0.5 × 1.5 + 0.01 + 1 = 1.76, rounded up to two digits
    assert bf16["rmse"]["times_plain"] == 1.5
    assert "calibrated 2026-11-30: plain bf16 0.5 (b) × 1.5" in bf16["rmse"]["origin"]
    assert bf16["lpips_alex"]["max"] == 0.0016
    assert bf16["ssim"]["min"] == pytest.approx(1 - 0.0032)
    fp32 = rules["{'dtype': 'fp32', 'tiling': False}"]
    assert fp32["rmse"]["max"] == 0.11
    assert "times_plain" not in fp32["rmse"]  # three times nothing is nothing


def test_what_is_proposed_can_be_pasted_into_a_suite(tmp_path):
    _, text = proposed(ROWS)
    path = write_suite(tmp_path, 'dtype = ["fp32", "bf16"]', LIMITS + text)
    loaded = suite.load(path, registry)
    assert loaded.cases[1].limits["rmse"].times_plain == 1.5


def test_every_measured_plain_decode_passes_its_proposal():
    rules, _ = proposed(ROWS, factor=1.0)
    for each in ROWS:
        if each.noise.condition == PLAIN:
            rule = rules[str({"dtype": each.noise.plan.dtype, "tiling": False})]
            assert each.noise.moved["rmse"] <= rule["rmse"]["max"]
            assert each.noise.moved["lpips_alex"] <= rule["lpips_alex"]["max"]
            assert each.noise.moved["ssim"] >= rule["ssim"]["min"]


def test_nothing_is_proposed_where_the_plain_decode_is_not_finite():
    rules, text = proposed([Row("kl", "a", Noise(DecodePlan(dtype="fp16"), PLAIN, None, None, {}))])
    assert rules == {}
    assert "the plain decode is not finite (a), so nothing is proposed" in text


def test_models_are_named_where_there_are_several_and_upcast_is_kept_apart():
    upcast = DecodePlan(dtype="fp16", force_upcast=True)
    rows = [row(plan, PLAIN, 0.1, model=model, lpips_alex=0.0, ssim=1.0)
            for model in ("kl", "hot") for plan in (DecodePlan(dtype="fp16"), upcast)]  # fmt: skip
    rules, _ = proposed(rows)
    assert len(rules) == 4
    assert all("model" in name and "force_upcast" in name for name in rules)


@pytest.mark.parametrize("factor", [0.99, 0.0, -1.0, float("nan"), float("inf")])
def test_a_factor_under_which_the_plain_decode_fails_is_refused(factor):
    with pytest.raises(RequestError, match="--factor"):
        proposal(ROWS, factor=factor, today=DAY)


@given(st.floats(1e-9, 1e6))
def test_rounding_up_never_rounds_down_and_stays_near(value):
    assert value <= round_up(value) <= value * 1.1 + 1e-12


def test_the_table_has_the_worst_latents_of_each_condition():
    lines = table(ROWS)
    assert lines[0].split()[:3] == ["model", "plain", "decode"]
    (worst,) = [line for line in lines if "bf16" in line and PLAIN in line.split()]
    assert worst.split()[:4] == ["kl", "bf16", "plain", "0.5"]
    assert worst.endswith("b")
    assert "0.998" in worst  # of ssim the least
    assert "not finite" in "\n".join(table([Row("kl", "a", Noise(BF16, PLAIN, None, None, {}))]))


# ---------------------------------------------------------------- the whole way


UPPER = (
    LIMITS
    + """
[[limits.where]]
match = { dtype = "bf16" }
rmse  = { max = 100.0, times_plain = TIMES, origin = "test" }
"""
)


@pytest.mark.slow
def test_calibrate_and_the_upper_rule_on_the_embedded_model(tmp_path):
    matrix = 'dtype = ["fp32", "bf16"]\ntiling = [false, { tile = 16, overlap = 0.25 }]'
    path = write_suite(tmp_path, matrix, UPPER.replace("TIMES", "1.0"))
    missing = fidelity("calibrate", path.name, cwd=tmp_path)
    assert missing.returncode == 2
    assert "fidelity golden record" in missing.stderr
    assert fidelity("golden", "record", path.name, cwd=tmp_path).returncode == 0

    done = fidelity("calibrate", path.name, "--factor", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    kinds = [line.split()[1:3] for line in lines if line.startswith("reference-kl")]
    assert kinds == [[dtype, condition] for dtype in ("fp32", "bf16") for condition in CONDITIONS]
    rule = tomllib.loads(done.stdout[done.stdout.index("# Limits") :])["limits"]["where"][1]
    assert rule["match"] == {"dtype": "bf16", "tiling": False}
    assert rule["rmse"]["times_plain"] == 2.0
    assert 1.0 < rule["rmse"]["max"] < 3.0
    assert fidelity("calibrate", path.name, "--factor", "0.5", cwd=tmp_path).returncode == 2

    # tiles cost several times what bf16 costs here, the plain bf16 decode exactly once
    run = fidelity("run", path.name, "--out", "out", cwd=tmp_path)
    assert run.returncode == 1, run.stderr
    cases = verdicts(tmp_path / "out")
    assert cases["reference-kl/ramp/bf16-upcast0-slice0-t0-none"].verdict == "pass"
    tiled = cases["reference-kl/ramp/bf16-upcast0-slice0-t16o0.25-none"]
    assert tiled.diagnosis == ()  # rmse blames nothing by itself, and measuring the plain decode left nothing behind
    assert [reason.name for reason in tiled.reasons if "of the plain decode" in reason.message] == ["rmse"]
    assert any("plain" in case.seconds for case in cases.values())
    assert sum("plain" in case.seconds for case in cases.values()) == 1  # measured once for the golden and dtype

    path.write_text(path.read_text().replace("times_plain = 1.0", "times_plain = 500.0"))
    assert fidelity("run", path.name, "--out", "out", cwd=tmp_path).returncode == 0


def verdicts(folder: Path):
    from fidelity.report import json

    return {case.id: case for case in json.read(folder).cases}


def test_a_suite_of_checks_alone_has_nothing_to_calibrate(tmp_path):
    path = tmp_path / "checks.toml"
    path.write_text(
        'schema = "fidelity.suite/1"\n[suite]\nname = "checks"\ngolden = "golden"\n'
        '[[check]]\nmodels = ["reference-kl"]\nlatents = ["ramp"]\nchecks = ["second_decode"]\n'
    )
    with pytest.raises(RequestError, match="nothing to calibrate"):
        calibrate.calibrate(suite.load(path, registry), options=None)
