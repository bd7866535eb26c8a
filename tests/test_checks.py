"""Each check is clean on the honest model to the bit, and finds the fault that it is there for."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager

import pytest
import torch

from fidelity import checks, registry, suite
from fidelity.errors import EvaluationError, RequestError, UnknownName
from fidelity.evaluator import Evaluator
from fidelity.optimizations import state
from fidelity.records import Case, DecodePlan, Limit, Tiling
from fidelity.registry import CHECKS, Check
from tests.suites import fidelity, write_suite

registry.load_plugins()
pytestmark = pytest.mark.slow
TILES = Tiling(8, 0.25)
TILED = DecodePlan(tiling=TILES)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """An evaluator of the embedded model on small latents, 2 × 4 × 12 × 14."""
    models = {"reference-kl": registry.MODELS.get("reference-kl")}
    found = Evaluator(models, {}, tmp_path_factory.mktemp("none"))
    found.make_latents = lambda model, latents: drawn()
    return found


def drawn(batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 4, 12, 14, generator=torch.Generator().manual_seed(5)) * 4


PLAIN = DecodePlan()


def judge(bench, name: str, plan: DecodePlan = PLAIN):
    check = CHECKS.get(name)
    case = Case("reference-kl", "drawn", plan, limits={checks.NAME: checks.limit(check)}, check=name)
    assert check.reason(plan, tuple(drawn().shape)) is None
    return bench.case(case)


HONEST = [
    *((name, plan) for name in ("batch_order", "second_decode", "after_exception", "a_b_a") for plan in (
        DecodePlan(), DecodePlan(dtype="bf16", tiling=TILES, slicing=True), DecodePlan(dtype="fp16"),
        DecodePlan(offload="disk"),
    )),
    *(("offload_plain", DecodePlan(dtype="bf16", offload=name))
      for name in ("model", "sequential", "group_block", "group_leaf", "disk")),
    ("slicing_alone", DecodePlan(slicing=True)),
    ("slicing_alone", DecodePlan(dtype="bf16", slicing=True, tiling=TILES)),
    ("tile_holds_image", DecodePlan()), ("tile_holds_image", DecodePlan(dtype="bf16", slicing=True)),
    *(("transposed", DecodePlan(tiling=Tiling(8, overlap))) for overlap in (0.0, 0.25, 0.5)),
    ("knobs", DecodePlan()), ("knobs", DecodePlan(dtype="bf16", slicing=True)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "plan"), HONEST, ids=lambda value: getattr(value, "id", value))
def test_the_honest_model_is_clean_to_the_bit(bench, name, plan):
    result = judge(bench, name, plan)
    assert result.verdict == "pass", result.reasons
    assert result.id.endswith(f"{plan.id}~{name}")
    assert result.check == name
    found = result.measurements[checks.NAME]
    assert (found.value, found.exact, found.unit) == (0.0, True, CHECKS.get(name).unit)
    assert result.receipts["state"]["restored"]
    assert all(result.receipts[option]["engaged"] for option in plan.settings)


KINDS = ("options", "state", "geometry")
"""Modules of checks; test_checks_api.py, test_sweep.py and test_scaling.py have the others."""


def test_every_check_of_options_state_and_geometry_is_judged_here():
    here = {name for name, each in CHECKS.items() if each.function.__module__.rpartition(".")[2] in KINDS}
    assert {name for name, _ in HONEST} == here


# ---------------------------------------------------------------- a fault for each


class Fault:
    """A decoder's forward with something wrong. `calls` counts the decoder's calls over the instance's life."""

    def __init__(self, module, wrong):
        self.module, self.wrong, self.calls = module, wrong, 0
        self.honest = type(module).forward

    def __call__(self, latents, *args, **kwargs):
        self.calls += 1
        return self.wrong(self, latents, lambda z: self.honest(self.module, z, *args, **kwargs))


@contextmanager
def faulty(bench, wrong):
    """The bench's model with `wrong(fault, latents, honest)` as its decoder, put in place as weights are loaded."""
    runner = bench.runner("reference-kl")
    load = runner.reload

    def broken():
        load()
        runner.module.decoder.forward = Fault(runner.module.decoder, wrong)
        runner.fingerprint = state.fingerprint(runner.module, runner.model.family)  # the fault itself is no leak
        runner._probe_bits = runner._decode_probe()

    runner.reload = broken
    try:
        broken()
        yield runner
    finally:
        del runner.reload
        runner.reload()


def blamed(bench, name, plan, wrong):
    with faulty(bench, wrong):
        result = judge(bench, name, plan)
    assert result.verdict == "fail", (result.verdict, result.reasons)
    return result


def in_order_of_batch(fault, latents, honest):
    return honest(latents) + torch.arange(latents.shape[0]).reshape(-1, 1, 1, 1) * 0.01


def drifting(fault, latents, honest):
    return honest(latents) + 0.001 * fault.calls


def remembers_an_exception(fault, latents, honest):
    try:
        return honest(latents) + getattr(fault, "stuck", 0.0)
    except Exception:
        fault.stuck = 0.05
        raise


def remembers_the_last_size(fault, latents, honest):
    if getattr(fault, "size", latents.shape) != latents.shape:
        fault.stuck = getattr(fault, "stuck", 0.0) + 0.05
    fault.size = latents.shape
    return honest(latents) + getattr(fault, "stuck", 0.0)


def remembers_a_half_dtype(fault, latents, honest):
    if latents.dtype is torch.bfloat16:
        fault.stuck = 0.05
    return honest(latents) + getattr(fault, "stuck", 0.0)


FAULTS = [
    ("batch_order", DecodePlan(), in_order_of_batch, "order"),
    ("second_decode", DecodePlan(), drifting, "nondeterministic"),
    ("after_exception", DecodePlan(), remembers_an_exception, "state_leak"),
    ("after_exception", TILED, remembers_an_exception, "state_leak"),
    ("a_b_a", DecodePlan(), remembers_the_last_size, "state_leak"),
    ("knobs", DecodePlan(), remembers_a_half_dtype, "state_leak"),
]


@pytest.mark.parametrize(("name", "plan", "wrong", "word"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_faulty_decoder_is_caught_and_named(bench, name, plan, wrong, word):
    result = blamed(bench, name, plan, wrong)
    reason = next(each for each in result.reasons if each.name == checks.NAME)
    assert reason.diagnosis == (word,)
    assert reason.measured > checks.LIMIT.max
    assert " in image" in reason.message


def test_the_runner_is_sound_again_after_a_fault(bench):
    blamed(bench, "second_decode", DecodePlan(), drifting)
    assert judge(bench, "second_decode").verdict == "pass"


def test_slices_joined_in_the_wrong_order_are_caught(bench, monkeypatch):
    cls = type(bench.runner("reference-kl").module)
    honest = cls.decode

    def reversed_slices(self, z, *args, **kwargs):
        found = honest(self, z.flip(0) if self.use_slicing else z, *args, **kwargs)
        return found

    monkeypatch.setattr(cls, "decode", reversed_slices)
    result = judge(bench, "slicing_alone", DecodePlan(slicing=True))
    assert (result.verdict, result.diagnosis) == ("fail", ("not_as_specified",))


def test_a_whole_batch_for_each_slice_differs_in_shape(bench, monkeypatch):
    cls = type(bench.runner("reference-kl").module)
    honest = cls._decode

    def whole(self, z, *args, **kwargs):
        found = honest(self, z, *args, **kwargs)
        if self.use_slicing:
            found.sample = torch.cat([found.sample, found.sample])
        return found

    monkeypatch.setattr(cls, "_decode", lambda self, z, return_dict=True: whole(self, z, True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cls, "decode", _sliced_decode)
        result = judge(bench, "slicing_alone", DecodePlan(slicing=True))
    assert result.verdict == "fail"
    assert "not_as_specified" in result.diagnosis
    assert any("4×3×96×112, expected 2×3×96×112" in reason.message for reason in result.reasons)


def _sliced_decode(self, z, return_dict=True, generator=None):
    from diffusers.models.autoencoders.vae import DecoderOutput

    items = z.split(1) if self.use_slicing else (z,)
    return DecoderOutput(sample=torch.cat([self._decode(item).sample for item in items]))


def test_a_group_that_loads_other_weights_is_caught(bench, monkeypatch):
    from diffusers.hooks import group_offloading

    honest = group_offloading.ModuleGroup.onload_

    def wrong(self):
        honest(self)
        for module in self.modules:
            for weight in module.parameters():
                if weight.ndim == 1:
                    weight.data = weight.data * 1.01

    monkeypatch.setattr(group_offloading.ModuleGroup, "onload_", wrong)
    result = judge(bench, "offload_plain", DecodePlan(offload="group_leaf"))
    assert result.verdict == "fail"
    assert "not_as_specified" in result.diagnosis
    monkeypatch.undo()
    assert judge(bench, "second_decode").verdict == "pass"


def test_a_threshold_that_compares_with_the_stride_is_caught(bench, monkeypatch):
    cls = type(bench.runner("reference-kl").module)
    honest = cls._decode

    def eager(self, z, return_dict=True):
        stride = int(self.tile_latent_min_size * (1 - self.tile_overlap_factor))
        if self.use_tiling and max(z.shape[-2:]) > stride:
            return self.tiled_decode(z, return_dict=return_dict)
        return honest(self, z, return_dict=return_dict)

    monkeypatch.setattr(cls, "_decode", eager)
    result = judge(bench, "tile_holds_image")
    assert (result.verdict, result.diagnosis) == ("fail", ("geometry",))


@pytest.mark.parametrize("wrong", ["width only", "height against the stride"])
def test_a_threshold_that_treats_the_sides_unlike_is_caught(bench, monkeypatch, wrong):
    cls = type(bench.runner("reference-kl").module)
    honest = cls._decode

    def one_sided(self, z, return_dict=True):
        tile, (height, width) = self.tile_latent_min_size, z.shape[-2:]
        stride = int(tile * (1 - self.tile_overlap_factor))
        tiles = width > tile if wrong == "width only" else height > stride or width > tile
        if self.use_tiling and tiles:
            return self.tiled_decode(z, return_dict=return_dict)
        self.use_tiling, before = False, self.use_tiling
        try:
            return honest(self, z, return_dict=return_dict)
        finally:
            self.use_tiling = before

    monkeypatch.setattr(cls, "_decode", one_sided)
    result = judge(bench, "transposed", TILED)
    assert result.verdict == "fail", result.reasons
    assert "geometry" in result.diagnosis
    assert result.measurements[checks.NAME].unit == "calls"


# ---------------------------------------------------------------- a check that shows nothing never passes


def test_alike_items_have_no_order_and_the_case_is_an_error(bench):
    subject = checks.Subject(bench.runner("reference-kl"))
    with pytest.raises(EvaluationError, match="all items are alike"):
        checks.options.batch_order(subject, drawn(1).expand(2, -1, -1, -1), DecodePlan())


def test_a_decode_that_goes_past_the_middle_layer_is_an_error(bench, monkeypatch):
    family = bench.models["reference-kl"].family
    unused = torch.nn.Conv2d(1, 1, 1)
    monkeypatch.setattr(type(family), "middle", lambda self, module: unused)
    result = judge(bench, "after_exception")
    assert result.verdict == "error"
    assert "never reached the middle layer" in result.reasons[0].message


def test_two_pictures_of_nan_are_equal_and_no_pass(bench):
    with faulty(bench, lambda fault, latents, honest: honest(latents) * float("nan")):
        result = judge(bench, "a_b_a")
    assert (result.verdict, "non_finite" in result.diagnosis) == ("fail", True)


def test_a_decode_that_raises_is_a_crash_and_the_next_case_is_judged(bench):
    def raising(fault, latents, honest):
        raise RuntimeError("no kernel")

    with faulty(bench, lambda fault, latents, honest: honest(latents)) as runner:
        runner.module.decoder.forward.wrong = raising
        result = judge(bench, "second_decode")
        assert (result.verdict, result.diagnosis) == ("error", ("crash",))
        assert "no kernel" in result.reasons[0].message
        assert judge(bench, "second_decode").verdict == "pass"


def test_an_option_that_does_not_engage_fails_though_nothing_differs(bench, monkeypatch):
    cls = type(bench.runner("reference-kl").module)
    monkeypatch.setattr(cls, "enable_slicing", lambda self: None)
    result = judge(bench, "second_decode", DecodePlan(slicing=True))
    assert (result.verdict, result.diagnosis) == ("fail", ("not_engaged",))


def test_the_limit_is_met_when_equal_and_the_suite_may_set_its_own(bench):
    check = CHECKS.get("batch_order")
    one = torch.zeros(1, 3, 8, 8)
    other = one.clone()
    other[0, 1, 2, 3] = 2 / 255
    found = checks.measure(check, other, one, (-1.0, 1.0))[checks.NAME]
    assert found.value == pytest.approx(1.0)
    assert found.where == {"image": 0, "x": 3, "y": 2}
    from fidelity import gates

    for bound, passes in ((found.value, True), (found.value - 1e-6, False)):
        limit = {checks.NAME: Limit(origin="test", max=bound)}
        assert (gates.judge({checks.NAME: found}, limit, instruments={}) == ()) is passes


# ---------------------------------------------------------------- in a suite


CHECK = '[[check]]\nmodels = ["reference-kl"]\nlatents = ["ramp"]\n'


def test_a_suite_of_checks_runs_without_any_golden(tmp_path):
    path = write_suite(tmp_path, "", "")
    head = path.read_text().split("[[matrix]]")[0]
    path.write_text(head + CHECK + 'checks = ["second_decode", "slicing_alone"]\nslicing = [false, true]\n')
    done = fidelity("run", path.name, "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "golden").exists()
    summary = (tmp_path / "out" / "summary.md").read_text()
    assert "| `second_decode` |" in summary
    assert "only checks were judged" in (tmp_path / "out" / "report.html").read_text()


def test_a_plugin_s_check_is_listed_judged_and_may_be_expected_to_fail(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from fidelity.registry import check\n\n"
        '@check("doubled", diagnosis=("scale",))\n'
        "def doubled(runner, latents, plan):\n"
        '    "Twice the latents give the same picture, which is wrong."\n'
        "    return runner.decode(2 * latents, plan), runner.decode(latents, plan)\n"
    )
    path = write_suite(tmp_path, "", "")
    head = path.read_text().split("[[matrix]]")[0]
    expect = '[[expect]]\nmatch = {{ check = "dou*" }}\nverdict = "fail"\ndiagnosis = ["{}"]\nreason = "it is wrong"\n'
    path.write_text(head + CHECK + 'checks = ["doubled"]\n' + expect.format("scale"))
    listed = fidelity("ls", "checks", "--plugin", "mine", cwd=tmp_path)
    assert "doubled" in listed.stdout
    done = fidelity("run", path.name, "--plugin", "mine", "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    path.write_text(head + CHECK + 'checks = ["doubled"]\n' + expect.format("order"))
    assert fidelity("run", path.name, "--plugin", "mine", "--out", "out", cwd=tmp_path).returncode == 1


def test_a_registered_check_says_when_it_cannot_apply():
    assert "no slicing" in CHECKS.get("slicing_alone").reason(DecodePlan(), (2, 4, 8, 8))
    assert "sets tiling itself" in CHECKS.get("tile_holds_image").reason(TILED, (2, 4, 8, 8))
    assert "batch of one" in CHECKS.get("batch_order").reason(DecodePlan(), (1, 4, 8, 8))
    with pytest.raises(UnknownName, match="did you mean 'batch_order'"):
        CHECKS.get("batch_ordr")
    assert isinstance(CHECKS.get("knobs"), Check)


HEAD = 'schema = "fidelity.suite/1"\n[suite]\nname = "small"\ngolden = "golden"\n'
BLOCK = '[[check]]\nmodels = ["reference-kl"]\nlatents = ["normal"]\n'
MATRIX = '[[matrix]]\nmodels = ["reference-kl"]\nlatents = ["normal"]\n[limits]\nrmse = { max = 1.0, origin = "t" }\n'


def load(folder, text: str) -> suite.Suite:
    path = folder / "small.toml"
    path.write_text(HEAD + text)
    return suite.load(path, registry)


def test_a_check_block_is_a_full_product_and_its_cells_are_none_of_the_matrix(tmp_path):
    axes = 'checks = ["slicing_alone", "second_decode"]\ndtype = ["fp32", "bf16"]\nslicing = [false, true]\n'
    loaded = load(tmp_path, BLOCK + axes + MATRIX)
    assert [case.id for case in loaded.cases][:2] == [
        "reference-kl/normal/fp32-upcast0-slice0-t0-none",
        "reference-kl/normal/fp32-upcast0-slice0-t0-none~slicing_alone",
    ]
    assert len(loaded.cases) == 1 + 2 * 2 * 2
    idle = [case.id for case in loaded.cases if case.not_applicable]
    assert idle == [f"reference-kl/normal/{dtype}-upcast0-slice0-t0-none~slicing_alone" for dtype in ("fp32", "bf16")]
    assert {case.check: set(case.limits) for case in loaded.cases} == {
        None: {"rmse"}, "slicing_alone": {checks.NAME}, "second_decode": {checks.NAME},
    }  # fmt: skip
    (only,) = suite.select(loaded, "*/bf16*~second*").cases[:1]
    assert only.check == "second_decode"
    planned = suite.with_plan(loaded, DecodePlan(dtype="bf16", slicing=True))
    assert [case.check for case in planned.cases] == [None, "slicing_alone", "second_decode"]
    own = dataclasses.replace(registry.MODELS.get("reference-kl"), name="mine")
    mine = suite.load(tmp_path / "small.toml", registry, substitute=own)
    assert {case.model for case in mine.cases} == {"mine"}
    assert len(mine.cases) == len(loaded.cases)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BLOCK + 'checks = ["batch_ordr"]', r"check\[0\].checks\[0\]: unknown check .* did you mean 'batch_order'"),
        (BLOCK, r"check\[0\].checks is missing"),
        (BLOCK + "checks = []", r"check\[0\].checks is empty"),
        (BLOCK + 'checks = ["knobs"]\ntillng = [false]', r"unknown axis 'tillng': did you mean 'tiling'"),
        (MATRIX.replace("[limits]", 'checks = ["knobs"]\n[limits]'), "unknown axis 'checks'"),
        ('[check]\nmodels = ["reference-kl"]', r"write \[\[check\]\]"),
        (BLOCK + 'checks = ["knobs"]\n[limits]\nrmse = { max = 1.0, origin = "t" }', r"there is no \[\[matrix\]\]"),
        (MATRIX + 'check_max_abs = { max = 1.0, origin = "t" }', r"there is no \[\[check\]\]"),
        (MATRIX + '[[expect]]\nmatch = { check = "nobs" }\nverdict = "error"\nreason = "t"', "did you mean 'knobs'"),
        (MATRIX + '[[expect]]\nmatch = { check = "knobs" }\nverdict = "error"\nreason = "t"', "matches none"),
        (BLOCK + 'checks = ["knobs"]\n[[expect]]\nmatch = { dtype = "fp32" }\nverdict = "error"\nreason = "t"',
         "matches none"),
        (BLOCK + 'checks = ["knobs"]\n[[limits.where]]\nmatch = { check = "knobs" }\n'
         'rmse = { max = 1.0, origin = "t" }', "a check has no other limit"),
        (MATRIX + '[[limits.where]]\nmatch = { dtype = "fp32" }\ncheck_max_abs = { max = 1.0, origin = "t" }',
         "only checks have it"),
        (BLOCK + 'checks = ["slicing_alone"]', "nothing to judge: no case is applicable"),
    ],
)  # fmt: skip
def test_a_suite_that_checks_nothing_or_something_unknown_is_refused(tmp_path, text, said):
    with pytest.raises(RequestError, match=said):
        load(tmp_path, text)


def test_what_is_expected_against_a_golden_says_nothing_of_checks(tmp_path):
    expect = '[[expect]]\nmatch = {{ {} }}\nverdict = "fail"\ndiagnosis = ["order"]\nreason = "t"\n'
    text = BLOCK + 'checks = ["knobs", "a_b_a"]\n' + MATRIX
    loaded = load(tmp_path, text + expect.format('dtype = "fp32"'))
    assert {case.check: case.expected.verdict for case in loaded.cases} == {
        None: "fail",
        "knobs": "pass",
        "a_b_a": "pass",
    }
    loaded = load(tmp_path, text + expect.format('check = "kn*", dtype = "fp32"'))
    assert {case.check: case.expected.verdict for case in loaded.cases} == {
        None: "pass",
        "knobs": "fail",
        "a_b_a": "pass",
    }
    exclude = '[[exclude]]\nmatch = { check = ["knobs", "a_b_a"] }\nreason = "t"\n'
    assert [case.check for case in load(tmp_path, text + exclude).cases] == [None]


def test_a_suite_s_own_bound_holds_for_pictures_and_not_for_counts(tmp_path):
    text = BLOCK + 'checks = ["knobs", "transposed"]\ntiling = [{ tile = 16, overlap = 0.0 }]\n'
    loaded = load(tmp_path, text + '[limits]\ncheck_max_abs = { max = 1.5, origin = "another device" }\n')
    assert {case.check: case.limits[checks.NAME].max for case in loaded.cases} == {"knobs": 1.5, "transposed": 0.0}
    where = '[[limits.where]]\nmatch = { check = "knobs" }\ncheck_max_abs = { max = 2.5, origin = "t" }\n'
    assert {case.check: case.limits[checks.NAME].max for case in load(tmp_path, text + where).cases} == {
        "knobs": 2.5, "transposed": 0.0,
    }  # fmt: skip
