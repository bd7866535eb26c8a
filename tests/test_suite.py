"""Suites: what they expand to, which rule wins, and each way in which one can be wrong."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fidelity import grammar, suite
from fidelity import registry as real
from fidelity.errors import GoldenError, IllegalTiling, RequestError, SuiteError, UnknownName
from fidelity.models.base import FamilyBase
from fidelity.records import (
    OFFLOADS,
    DecodePlan,
    Geometry,
    LatentSource,
    Model,
    Scaling,
    Temporal,
    TileAxis,
    TileGrid,
    Tiling,
)
from fidelity.registry import FRAMES, FunctionOptimization, Instrument, Registry

SUITES = Path(__file__).parent.parent / "suites"


class Family(FamilyBase):
    """Tiles as a factor-8 class does: the stride must be whole."""

    name = "FakeKL"

    def absent(self):
        return None

    def tile_grid(self, geometry, latent_size, tiling):
        stride = tiling.tile * (1 - tiling.overlap)
        if stride != int(stride):
            raise IllegalTiling(f"stride {stride} of tile {tiling.tile} is not whole; nearest legal: overlap 0.25")
        axes = [
            TileAxis(tuple(i * 8 for i in range(0, size, int(stride))), 0, tiling.tile * 8, size * 8)
            for size in latent_size
        ]
        return TileGrid(*axes)


def model(name: str, channels: int = 4) -> Model:
    return Model(name, "a model", Family(), Geometry(8, channels), Scaling(1.0), {}, load=lambda: None)


def latents(name: str, *size: int) -> LatentSource:
    batch, *rest = size
    return LatentSource(name, "latents", lambda geometry: (batch, geometry.latent_channels, *rest), lambda *_: None)


def option(name: str, order: int, reason=None) -> FunctionOptimization:
    return FunctionOptimization(name, name, order, lambda *_, **__: None, reason)


def instrument(name: str, better: str = "lower", needs: str | None = None) -> Instrument:
    return Instrument(name, "grey levels", better, name, lambda *_: None, needs is not None, needs)


@pytest.fixture
def registry() -> SimpleNamespace:
    def filled(kind, entries):
        made = Registry(kind)
        for entry in entries:
            made.add(entry.name, entry)
        return made

    return SimpleNamespace(
        MODELS=filled("model", [model("kl"), model("kl-hot")]),
        LATENTS=filled("latents", [latents("photo-pair", 2, 32, 24), latents("one", 1, 32, 32)]),
        OPTIMIZATIONS=filled(
            "optimization",
            [
                option("precision", 10),
                option("force_upcast", 15, lambda v, plan, m, s: "only fp16 upcasts" if plan.dtype != "fp16" else None),
                option("slicing", 20, lambda v, plan, m, s: "a batch of one" if s[0] == 1 else None),
                option("tiling", 30, lambda v, plan, m, s: "tiles not smaller" if v.tile >= max(s[-2:]) else None),
                option("offload", 90),
                option("quantized", 12),
            ],
        ),
        METRICS=filled("metric", [instrument("rmse"), instrument("ssim", "higher"), instrument("lpips_alex")]),
        DETECTORS=filled("detector", [instrument("tile_step", needs="tiling"), instrument("blind_step")]),
    )


HEAD = """
schema = "fidelity.suite/1"
[suite]
name = "small"
golden = "../golden"
"""
LIMITS = '[limits]\nrmse = { max = 4.0, origin = "a test" }\n'
MATRIX = """
[[matrix]]
models = ["kl"]
latents = ["photo-pair"]
dtype = ["fp32", "bf16", "fp16"]
force_upcast = [false, true]
slicing = [false, true]
tiling = [false, { tile = 16, overlap = 0.0 }, { tile = 16, overlap = 0.25 }]
offload = ["none", "model", "sequential", "group_block", "group_leaf", "disk"]
"""
ONE = '[[matrix]]\nmodels = ["kl"]\nlatents = ["photo-pair"]\n'


@pytest.fixture
def load(tmp_path, registry):
    def write_and_load(text: str, name: str = "small.toml", **more) -> suite.Suite:
        path = tmp_path / "suites" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return suite.load(path, registry, **more)

    return write_and_load


def ids(loaded: suite.Suite) -> list[str]:
    return [case.id for case in loaded.cases]


# ---------------------------------------------------------------- expansion


def test_the_full_cross_product_in_a_stable_order_with_the_offload_fastest(load):
    loaded = load(HEAD + MATRIX + LIMITS)
    assert len(loaded.cases) == 3 * 2 * 2 * 3 * 6
    assert len(set(ids(loaded))) == len(loaded.cases)
    assert [case.plan.offload for case in loaded.cases[:12]] == [*OFFLOADS, *OFFLOADS]
    assert loaded.cases[0].id == "kl/photo-pair/fp32-upcast0-slice0-t0-none"
    assert ids(loaded) == ids(load(HEAD + MATRIX + LIMITS))


def test_what_is_left_out_of_a_block_is_off(load):
    (case,) = load(HEAD + ONE + LIMITS).cases
    assert case.plan == DecodePlan()


def test_blocks_add_up_and_a_cell_of_two_blocks_is_one_case(load):
    loaded = load(HEAD + ONE + 'dtype = ["fp32", "bf16"]\n' + ONE + 'dtype = ["bf16", "fp16"]\n' + LIMITS)
    assert [case.plan.dtype for case in loaded.cases] == ["fp32", "bf16", "fp16"]


def test_a_pattern_in_a_list_stands_for_all_that_match_each_once(load):
    loaded = load(HEAD + ONE.replace('["kl"]', '["kl-hot", "kl*"]') + LIMITS)
    assert [case.model for case in loaded.cases] == ["kl-hot", "kl"]


def test_two_plans_that_share_an_id_are_refused(load):
    with pytest.raises(SuiteError, match="two plans have the id"):
        load(HEAD + ONE + "tiling = [{ tile = 16, overlap = 0.5 }, { tile = 16, overlap = 0.50000001 }]\n" + LIMITS)


def test_what_the_suite_knows_of_itself(load, tmp_path):
    loaded = load(HEAD + ONE + LIMITS)
    assert loaded.name == "small"
    assert loaded.golden == tmp_path / "golden"
    assert loaded.golden.is_absolute()
    assert loaded.shapes == {("kl", "photo-pair"): (2, 4, 32, 24)}
    assert list(loaded.models) == ["kl"]
    assert list(loaded.latents) == ["photo-pair"]
    assert loaded.about()["judged"] == 1
    assert loaded.digest != load(HEAD + ONE + LIMITS + "# a comment\n").digest


def test_a_registered_optimization_is_an_axis(load):
    loaded = load(HEAD + ONE + "quantized = [false, true, 4]\n" + LIMITS)
    assert [case.plan.options for case in loaded.cases] == [{}, {"quantized": True}, {"quantized": 4}]
    assert loaded.cases[2].id.endswith("+quantized=4")


# ---------------------------------------------------------------- not applicable


def test_what_cannot_apply_says_why(load):
    loaded = load(HEAD + MATRIX + LIMITS)
    for case in loaded.cases:
        cannot = case.plan.force_upcast and case.plan.dtype != "fp16"
        assert case.not_applicable == ("only fp16 upcasts" if cannot else None)
    assert len(loaded.judged) == 144


def test_the_first_reason_by_the_order_of_the_optimizations(load):
    text = HEAD + '[[matrix]]\nmodels = ["kl"]\nlatents = ["one", "photo-pair"]\nslicing = [true]\n'
    loaded = load(text + "force_upcast = [true, false]\ntiling = [false, {tile = 64, overlap = 0}]\n" + LIMITS)
    reasons = {(case.latents, case.plan.id): case.not_applicable for case in loaded.cases}
    assert reasons["one", "fp32-upcast1-slice1-t64o0-none"] == "only fp16 upcasts"
    assert reasons["one", "fp32-upcast0-slice1-t64o0-none"] == "a batch of one"
    assert reasons["photo-pair", "fp32-upcast0-slice1-t64o0-none"] == "tiles not smaller"
    assert reasons["photo-pair", "fp32-upcast0-slice1-t0-none"] is None


def test_a_suite_that_judges_nothing_is_refused(load):
    with pytest.raises(SuiteError, match=r"nothing to judge: no case is applicable.*a batch of one"):
        load(HEAD + '[[matrix]]\nmodels = ["kl"]\nlatents = ["one"]\nslicing = [true]\n' + LIMITS)
    with pytest.raises(SuiteError, match="nothing to judge"):
        load(HEAD + LIMITS)
    with pytest.raises(SuiteError, match=r"nothing to judge: every cell is excluded.*not today"):
        load(HEAD + ONE + LIMITS + '[[exclude]]\nmatch = {}\nreason = "not today"\n')


def test_an_optimization_that_nobody_registered_is_refused(load):
    with pytest.raises(UnknownName, match="unknown optimization 'temporal'"):
        load(HEAD + ONE + "temporal = [{tile = 2, overlap = 0.5}]\n" + LIMITS)


# ---------------------------------------------------------------- tile geometry

ODD = "tiling = [false, { tile = 16, overlap = 0.3 }]\n"


def test_illegal_tile_geometry_is_refused_with_the_case_and_the_legal_neighbour(load):
    with pytest.raises(IllegalTiling, match=r"kl/photo-pair/fp32-upcast0-slice0-t16o0.3-none.*nearest legal"):
        load(HEAD + ONE + ODD + LIMITS)


def test_illegal_tile_geometry_may_be_expected(load):
    expect = (
        '[[expect]]\nmatch = {tiling = {overlap = 0.3}}\nverdict = "fail"\ndiagnosis = ["geometry"]\nreason = "r"\n'
    )
    assert load(HEAD + ONE + ODD + LIMITS + expect).cases[1].expected.diagnosis == ("geometry",)
    with pytest.raises(IllegalTiling):
        load(HEAD + ONE + ODD + LIMITS + expect.replace('"fail"', '"pass"').replace('["geometry"]', "[]"))


def test_an_inapplicable_tile_is_not_asked_for_its_geometry(load):
    loaded = load(HEAD + ONE + "tiling = [false, { tile = 33, overlap = 0.3 }]\n" + LIMITS)
    assert loaded.cases[1].not_applicable == "tiles not smaller"


# ---------------------------------------------------------------- rules


def test_the_last_limit_that_matches_wins_measurement_by_measurement(load):
    rules = """
ssim = { min = 0.95, origin = "base" }
[[limits.where]]
match = { dtype = ["bf16", "fp16"] }
rmse = { max = 8.0, origin = "half" }
[[limits.where]]
match = { dtype = "fp16" }
rmse = { max = 6.0, origin = "fp16" }
"""
    fp32, bf16, fp16 = load(HEAD + ONE + 'dtype = ["fp32", "bf16", "fp16"]\n' + LIMITS + rules).cases
    assert [case.limits["rmse"].max for case in (fp32, bf16, fp16)] == [4.0, 8.0, 6.0]
    assert [case.limits["ssim"].origin for case in (fp32, bf16, fp16)] == ["base"] * 3


def test_a_limit_on_seams_holds_where_there_are_tiles(load):
    seams = 'tile_step = { max = 1.0, origin = "o" }\ntile_seam = { max = 1.0, origin = "o" }\n'
    seams += 'blind_step = { max = 1.0, origin = "o" }\n'
    plain, tiled = load(HEAD + ONE + "tiling = [false, {tile = 16, overlap = 0}]\n" + LIMITS + seams).cases
    assert set(plain.limits) == {"rmse", "blind_step"}
    assert set(tiled.limits) == {"rmse", "tile_step", "tile_seam", "blind_step"}


def test_a_limit_on_frames_holds_for_videos(load, registry):
    registry.DETECTORS.add("frame_flicker", instrument("frame_flicker", needs=FRAMES))
    registry.MODELS.add("film", replace(model("film"), geometry=Geometry(8, 4, temporal=4, video=True)))
    both = ONE.replace('["kl"]', '["kl", "film"]')
    limits = LIMITS + 'frame_flicker = { max = 1.0, times_plain = 2.0, origin = "o" }\n'
    picture, film = load(HEAD + both + limits).cases
    assert (picture.model, set(picture.limits)) == ("kl", {"rmse"})
    assert (film.model, set(film.limits)) == ("film", {"rmse", "frame_flicker"})


def test_a_limit_on_the_oracle_holds_where_there_is_one(load):
    loaded = load(HEAD + ONE + "quantized = [false, true]\n" + LIMITS + 'oracle_max_abs = {max = 0.1, origin = "o"}\n')
    assert [set(case.limits) for case in loaded.cases] == [{"rmse", "oracle_max_abs"}, {"rmse"}]


EXPECT = """
[[expect]]
match = { tiling = { overlap = 0.0 }, latents = "photo-*" }
verdict = "fail"
diagnosis = ["seam"]
reason = "edges"
[[expect]]
match = { model = "kl-*", dtype = "fp16", force_upcast = false }
verdict = "fail"
diagnosis = ["non_finite"]
reason = "overflow"
"""


def test_the_last_expectation_that_matches_wins(load):
    both = MATRIX.replace('["kl"]', '["kl", "kl-hot"]')
    for case in load(HEAD + both + LIMITS + EXPECT).cases:
        plan = case.plan
        if case.model == "kl-hot" and plan.dtype == "fp16" and not plan.force_upcast:
            wanted = ("non_finite",)
        else:
            wanted = ("seam",) if plan.tiling and plan.tiling.overlap == 0 else ()
        assert case.expected.diagnosis == wanted
        assert case.expected.verdict == ("fail" if wanted else "pass")


@pytest.mark.parametrize(
    ("match", "count"),
    [
        ("{}", 216),
        ("{tiling = false}", 72),
        ("{tiling = true}", 144),
        ("{tiling = {tile = 16}}", 144),
        ("{tiling = {tile = [8, 16], overlap = 0.25}}", 72),
        ("{tiling = [false, {overlap = 0.25}]}", 144),
        ('{offload = "group_*"}', 72),
        ('{offload = ["disk", "none"]}', 72),
        ("{slicing = true, force_upcast = false}", 54),
        ('{dtype = "?p16"}', 72),
        ('{model = "k?", latents = ["*-pair"]}', 216),
        ("{quantized = false}", 216),
        ("{temporal = false}", 216),
    ],
)
def test_what_a_match_means(load, match, count):
    text = f'[[limits.where]]\nmatch = {match}\nssim = {{ min = 0.5, origin = "o" }}\n'
    assert sum("ssim" in case.limits for case in load(HEAD + MATRIX + LIMITS + text).cases) == count


def test_excluded_cells_are_named_and_no_cases(load):
    loaded = load(HEAD + MATRIX + LIMITS + '[[exclude]]\nmatch = { offload = "disk" }\nreason = "slow"\n')
    assert len(loaded.cases) == 216 - 36
    assert len(loaded.excluded) == 36
    assert {reason for _, reason in loaded.excluded} == {"slow"}
    assert loaded.about()["excluded"][0]["id"] == "kl/photo-pair/fp32-upcast0-slice0-t0-disk"


@pytest.mark.parametrize(
    "rule",
    [
        '[[expect]]\nmatch = { latents = "foto-*" }\nverdict = "error"\nreason = "r"\n',
        '[[exclude]]\nmatch = { model = "lk" }\nreason = "r"\n',
        '[[limits.where]]\nmatch = { tiling = { tile = 32 } }\nrmse = { max = 1.0, origin = "o" }\n',
        '[[exclude]]\nmatch = {offload = "disk"}\nreason = "r"\n'
        '[[expect]]\nmatch = { offload = "disk" }\nverdict = "error"\nreason = "r"\n',
    ],
)
def test_a_rule_that_matches_nothing_is_refused(load, rule):
    with pytest.raises(SuiteError, match=r"(expect|exclude|limits.where)\[0\].match matches none"):
        load(HEAD + MATRIX + LIMITS + rule)


def test_an_expectation_holds_for_the_versions_it_names(load):
    rule = '[[expect]]\nmatch = {}\nverdict = "fail"\ndiagnosis = ["blur"]\nreason = "r"\nversions = "diffusers%s"\n'
    held, lapsed = (load(HEAD + ONE + LIMITS + rule % spec) for spec in (">=0.1", "<0.1"))
    assert held.cases[0].expected.verdict == "fail"
    assert held.notes == ()
    assert lapsed.cases[0].expected.verdict == "pass"
    assert "not in force: diffusers" in lapsed.notes[0]


# ---------------------------------------------------------------- what is refused

BASE = HEAD + ONE + LIMITS
WRONG = [
    ("", "schema is None"),
    ("schema = 'fidelity.suite/2'", "schema is 'fidelity.suite/2'"),
    ("schema = [", "not TOML"),
    (HEAD.replace("golden", "goldne") + ONE, "suite: unknown key 'goldne': did you mean 'golden'"),
    (HEAD.replace('name = "small"', "") + ONE, "suite: object missing required field `name`"),
    (HEAD.replace('"small"', "3") + ONE, "suite.name: expected `str`, got `int`"),
    (HEAD.replace('"small"', '"../up"') + ONE, "it names a folder"),
    (HEAD + ONE.replace("kl", "lk") + LIMITS, "matrix[0].models[0]: unknown model 'lk': did you mean 'kl'"),
    (HEAD + ONE.replace("kl", "lk*") + LIMITS, "matrix[0].models[0]: unknown model 'lk*'"),
    (HEAD + ONE.replace("pair", "pear") + LIMITS, "unknown latents 'photo-pear': did you mean 'photo-pair'"),
    (HEAD + "[[matrix]]\nmodels = ['kl']\n" + LIMITS, "matrix[0].latents is missing"),
    (HEAD + ONE.replace('["kl"]', "[]") + LIMITS, "matrix[0].models is empty"),
    (HEAD + ONE.replace('["kl"]', '"kl"') + LIMITS, "matrix[0].models is 'kl'"),
    (HEAD + ONE + "dtype = []\n" + LIMITS, "matrix[0].dtype is empty"),
    (HEAD + ONE + "dtypes = ['fp32']\n" + LIMITS, "matrix[0]: unknown axis 'dtypes': did you mean 'dtype'"),
    (HEAD + ONE + "precision = ['fp32']\n" + LIMITS, "matrix[0]: unknown axis 'precision'"),
    (HEAD + ONE + "dtype = ['bf61']\n" + LIMITS, "matrix[0].dtype[0]: unknown dtype 'bf61': did you mean 'bf16'"),
    (HEAD + ONE + "offload = ['none', 'disc']\n" + LIMITS, "matrix[0].offload[1]: unknown offload 'disc'"),
    (HEAD + ONE + "slicing = [1]\n" + LIMITS, "slicing is 1: write true or false"),
    (HEAD + ONE + "tiling = [true]\n" + LIMITS, "tiling is True: write false, or a table"),
    (HEAD + ONE + "tiling = [{tile = 0, overlap = 0}]\n" + LIMITS, "tile is 0: write a whole number"),
    (HEAD + ONE + "tiling = [{tile = -8, overlap = 0}]\n" + LIMITS, "tile is -8"),
    (HEAD + ONE + "tiling = [{tile = 16.0, overlap = 0}]\n" + LIMITS, "tile is 16.0: write a whole number"),
    (HEAD + ONE + "tiling = [{tile = true, overlap = 0}]\n" + LIMITS, "tile is True: write a whole number"),
    (HEAD + ONE + "tiling = [{tile = 16, overlap = 1}]\n" + LIMITS, "overlap is 1: write a fraction"),
    (HEAD + ONE + "tiling = [{tile = 16, overlap = -0.1}]\n" + LIMITS, "overlap is -0.1"),
    (HEAD + ONE + "tiling = [{tile = 16, overlap = nan}]\n" + LIMITS, "overlap is nan"),
    (HEAD + ONE + "tiling = [{tile = 16}]\n" + LIMITS, "tiling has no overlap"),
    (HEAD + ONE + "tiling = [{tile = 16, overlap = 0, stride = 3}]\n" + LIMITS, "unknown key 'stride'"),
    (HEAD + ONE + "quantized = [inf]\n" + LIMITS, "quantized is inf"),
    (HEAD + ONE + "quantized = ['a/b']\n" + LIMITS, "quantized is 'a/b'"),
    (HEAD + "[matrix]\nmodels = ['kl']\n" + LIMITS, "matrix is one table: write [[matrix]]"),
    (BASE + "rsme = { max = 1.0, origin = 'o' }\n", "limits: unknown measurement 'rsme': did you mean 'rmse'"),
    (BASE + "ssim = { min = 0.9 }\n", "limits.ssim: object missing required field `origin`"),
    (BASE + "ssim = { min = 0.9, origin = ' ' }\n", "limits.ssim: origin is empty"),
    (BASE + "ssim = { origin = 'o' }\n", "limits.ssim: min is missing"),
    (BASE + "ssim = 0.9\n", "limits.ssim is 0.9: write a table"),
    (BASE + "ssim = { min = nan, origin = 'o' }\n", "limits.ssim: min is nan"),
    (BASE + "ssim = { min = -inf, origin = 'o' }\n", "limits.ssim: min is -inf"),
    (BASE + "ssim = { min = '0.9', origin = 'o' }\n", "limits.ssim.min: expected `float | null`, got `str`"),
    (BASE + "ssim = { max = 0.9, origin = 'o' }\n", "max would let a worse ssim pass (higher is better): write min"),
    (BASE + "lpips_alex = { min = 0, max = 1, origin = 'o' }\n", "min would let a worse lpips_alex pass"),
    (BASE + "ssim = { mni = 0.9, origin = 'o' }\n", "limits.ssim: unknown key 'mni': did you mean 'min'"),
    (BASE + "[[limits.where]]\nrmse = { max = 1.0, origin = 'o' }\n", "limits.where[0].match is None"),
    (BASE + "[[limits.where]]\nmatch = {}\n", "limits.where[0] sets no limit"),
    (BASE + "[[limits.where]]\nmatch = {dtpye = 'bf16'}\nrmse = {max = 1, origin = 'o'}\n", "did you mean 'dtype'"),
    (BASE + "[[limits.where]]\nmatch = {models = 'kl'}\nrmse = {max = 1, origin = 'o'}\n", "did you mean 'model'"),
    (BASE + "[[exclude]]\nmatch = {dtype = 'fp8'}\nreason = 'r'\n", "exclude[0].match.dtype: unknown dtype 'fp8'"),
    (BASE + "[[exclude]]\nmatch = {dtype = []}\nreason = 'r'\n", "exclude[0].match.dtype is empty"),
    (BASE + "[[exclude]]\nmatch = {slicing = 'yes'}\nreason = 'r'\n", "exclude[0].match.slicing: slicing is 'yes'"),
    (BASE + "[[exclude]]\nmatch = {tiling = {tile = 0}}\nreason = 'r'\n", "tile is 0"),
    (BASE + "[[exclude]]\nmatch = {tiling = {size = 3}}\nreason = 'r'\n", "unknown key 'size'"),
    (BASE + "[[exclude]]\nmatch = {model = 3}\nreason = 'r'\n", "exclude[0].match.model is 3"),
    (BASE + "[[exclude]]\nmatch = {}\nreason = ''\n", "exclude[0]: reason is empty"),
    (
        BASE + "[[expect]]\nmatch = {}\nverdict = 'fails'\nreason = 'r'\n",
        "unknown verdict 'fails': did you mean 'fail'",
    ),
    (BASE + "[[expect]]\nmatch = {}\nverdict = 'fail'\nreason = 'r'\n", "diagnosis is missing"),
    (
        BASE + "[[expect]]\nmatch = {}\nverdict = 'fail'\ndiagnosis = ['seem']\nreason = 'r'\n",
        "expect[0]: unknown diagnosis 'seem': did you mean 'seam'",
    ),
    (BASE + "[[expect]]\nmatch = {}\nverdict = 'pass'\ndiagnosis = ['seam']\nreason = 'r'\n", "blamed on nothing"),
    (BASE + "[[expect]]\nmatch = {}\nverdict = 'error'\n", "expect[0]: object missing required field `reason`"),
    (BASE + "[[expect]]\nmatch = {}\nverdict = 'error'\nreason = 'r'\nversions = '0.42'\n", "expect[0].versions"),
    (
        BASE + "[[expect]]\nmatch = {}\nverdict = 'error'\nreason = 'r'\nversions = 'no-such-thing>1'\n",
        "no-such-thing is not installed",
    ),
    (BASE + "[models.kl]\npath = 'x'\n", "models.kl: 'kl' is registered already"),
    (BASE + "[latents.mine]\nfile = 'x.safetensors'\n", "latents.mine: object missing required field `scaled`"),
    (BASE + "[latents.'a/b']\nfile = 'x'\nscaled = true\n", "becomes part of ids"),
    (BASE + "[limit]\n", "unknown key 'limit': did you mean 'limits'"),
    (BASE + "[memory]\n", "memory sets no limit"),
    (BASE + "[memory]\nlimit = 0\n", "memory.limit '0': write a size above 0"),
    (BASE + "[memory]\nlimit = -64\n", "memory.limit '-64': write a size above 0"),
    (BASE + "[memory]\nlimit = 'lots'\n", "memory.limit 'lots': write a size above 0, as in 8GiB"),
    (BASE + "[memory]\nlimit = '64 MiB of it'\n", "memory.limit '64 MiB of it': write a size"),
    (BASE + "[memory]\nlimit = 1.5\n", "memory.limit: expected `int | str"),
    (BASE + "[memory]\nlimit = true\n", "memory.limit: expected `int | str"),
    (BASE + "[memory]\nlimits = '64MiB'\n", "memory: unknown key 'limits': did you mean 'limit'"),
    (BASE + "[[memory.where]]\nmatch = {}\n", "memory.where[0]: object missing required field `limit`"),
    (BASE + "[[memory.where]]\nlimit = '1GiB'\n", "memory.where[0]: object missing required field `match`"),
    (BASE + "[[memory.where]]\nmatch = {dtype = 'fp8'}\nlimit = 1\n", "memory.where[0].match.dtype: unknown dtype"),
    (BASE + "[[memory.where]]\nmatch = {}\nlimit = 'x'\n", "memory.where[0].limit 'x': write a size"),
    (BASE + "[[memory.where]]\nmatch = {check = '*'}\nlimit = 1\n", "a check decodes as often as it likes"),
    (BASE + "[[memory.where]]\nmatch = {dtype = 'bf16'}\nlimit = 1\n", "memory.where[0].match matches none of"),
]


@pytest.mark.parametrize(("text", "said"), WRONG, ids=[said for _, said in WRONG])
def test_a_wrong_suite_is_one_line_that_names_the_file_and_the_place(load, text, said):
    with pytest.raises(RequestError) as raised:
        load(text)
    assert said in str(raised.value)
    assert "small.toml" in str(raised.value)
    assert "\n" not in str(raised.value)


def nodes(tree, path=()):
    """The path of every node of a tree of tables and lists."""
    yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from nodes(value, (*path, key))


def replaced(tree, path, value):
    if not path:
        return value
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[path[0]] = replaced(tree[path[0]], path[1:], value)
    return copy


scalars = st.one_of(
    st.booleans(), st.integers(-2, 40), st.floats(), st.sampled_from(["", "kl", "bf16", "disk", "fail"])
)
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["tile", "overlap", "match", "max", "min", "rmse"]), inner, max_size=2)
    ),
    max_leaves=4,
)


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
def test_whatever_stands_anywhere_is_a_suite_or_a_request_error(registry, data):
    whole = grammar.tomllib.loads(
        HEAD + MATRIX + LIMITS + EXPECT + '[[exclude]]\nmatch = {slicing = true}\nreason = "r"\n'
    )
    path = data.draw(st.sampled_from([path for path in nodes(whole) if path]))
    table = replaced(whole, path, data.draw(anything))
    with contextlib.suppress(RequestError):
        document = grammar._document(Path("small.toml"), "digest", table, registry)
        assert suite._expand(document, registry)


def test_a_suite_that_cannot_be_read_is_one_line(tmp_path, registry):
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    for path, said in (
        (tmp_path / "no.toml", "No such file"),
        (tmp_path, "directory"),
        (tmp_path / "binary.toml", "TOML"),
    ):
        with pytest.raises(SuiteError, match=said) as raised:
            suite.load(path, registry)
        assert "\n" not in str(raised.value)


# ---------------------------------------------------------------- memory limits

MEMORY = """
[memory]
limit = "64MiB"
[[memory.where]]
match = { dtype = "bf16" }
limit = 1000
[[memory.where]]
match = { dtype = "bf16", slicing = true }
limit = "1.5 KiB"
"""


def test_the_last_memory_limit_that_matches_wins_and_has_no_part_in_the_id(load):
    limited, free = load(HEAD + MATRIX + LIMITS + MEMORY), load(HEAD + MATRIX + LIMITS)
    assert ids(limited) == ids(free)
    assert {case.memory_limit for case in free.cases} == {None}
    for case in limited.cases:
        bf16 = 1536 if case.plan.slicing else 1000
        assert case.memory_limit == (bf16 if case.plan.dtype == "bf16" else 64 * 2**20)


def test_a_run_may_limit_every_decode_in_place_of_the_suite(load):
    limited = suite.with_memory_limit(load(HEAD + MATRIX + LIMITS + MEMORY), 2**30)
    assert {case.memory_limit for case in limited.cases} == {2**30}


def test_checks_have_no_memory_limit():
    loaded = suite.select(suite.load(SUITES / "metamorphic.toml", real), "*~offload*")
    with pytest.raises(SuiteError, match="would hold for nothing: all of its cases are checks"):
        suite.with_memory_limit(loaded, 2**30)


def test_a_limit_that_cannot_hold_is_a_wrong_request(load, monkeypatch):
    limited = load(HEAD + MATRIX + LIMITS + MEMORY)
    assert suite.on(load(HEAD + MATRIX + LIMITS), "mps").cases  # without a limit there is nothing to hold
    with pytest.raises(SuiteError, match=r"kl/photo-pair/\S+: memory limit 64.0 MiB: a memory limit holds"):
        suite.on(limited, "mps")
    monkeypatch.setattr(suite.memory_limit.sys, "platform", "darwin")
    with pytest.raises(SuiteError, match="darwin does not hold a process to: run it on Linux"):
        suite.on(limited, "cpu")


@pytest.mark.skipif(sys.platform != "linux", reason="a limit on the address space holds on Linux only")
def test_emulated_fp16_cannot_be_limited(load):
    found = suite.on(load(HEAD + MATRIX + LIMITS + MEMORY), "cpu")
    emulated = {case.id for case in found.cases if case.not_applicable == suite.EMULATED}
    assert emulated == {case.id for case in found.cases if case.plan.dtype == "fp16" and not case.plan.force_upcast
                        and case.not_applicable not in {"a batch of one", "tiles not smaller"}}  # fmt: skip
    assert emulated
    only = load(HEAD + ONE + "dtype = ['fp16']\n" + LIMITS + "[memory]\nlimit = '64MiB'\n")
    with pytest.raises(SuiteError, match=r"nothing to judge: no case is applicable; .*emulated fp16"):
        suite.on(only, "cpu")


# ---------------------------------------------------------------- selecting and substituting


def test_select_is_a_glob_on_the_whole_id(load):
    loaded = load(HEAD + MATRIX + LIMITS)
    assert len(suite.select(loaded, "*-disk").cases) == 36
    assert len(suite.select(loaded, "kl/*/bf16-upcast0-slice0-t0-none").cases) == 1
    with pytest.raises(SuiteError, match=r"matches none of 216 cases; the nearest: .*kl/photo-pair/bf16"):
        suite.select(loaded, "kl/photo-pair/bf61*")
    with pytest.raises(SuiteError, match="nothing to judge"):
        suite.select(loaded, "*/bf16-upcast1-*")


def test_selecting_an_excluded_cell_says_so(load):
    loaded = load(HEAD + MATRIX + LIMITS + '[[exclude]]\nmatch = { offload = "disk" }\nreason = "slow"\n')
    with pytest.raises(SuiteError, match="excluded by the suite: slow"):
        suite.select(loaded, "*-disk")


def test_a_substitute_takes_the_place_of_its_name(load):
    mine = model("kl", channels=16)
    loaded = load(HEAD + MATRIX.replace('["kl"]', '["kl", "kl-hot"]') + LIMITS, substitute=mine)
    assert loaded.models["kl"] is mine
    assert set(loaded.models) == {"kl", "kl-hot"}
    assert loaded.shapes["kl", "photo-pair"] == (2, 16, 32, 24)


def test_a_substitute_of_another_name_takes_the_place_of_all_models(load):
    mine = model("mine")
    loaded = load(HEAD + MATRIX.replace('["kl"]', '["kl", "kl-hot"]') + LIMITS + EXPECT, substitute=mine)
    assert list(loaded.models) == ["mine"]
    assert len(loaded.cases) == 216
    fp16 = next(case for case in loaded.cases if case.plan == DecodePlan("fp16"))
    assert fp16.expected.verdict == "pass"


def test_one_plan_for_all_models_and_latents_of_a_suite(load):
    text = HEAD + MATRIX + '[[matrix]]\nmodels = ["kl-hot"]\nlatents = ["one"]\ndtype = ["fp16"]\n' + LIMITS + EXPECT
    plan = DecodePlan("bf16", slicing=True, tiling=Tiling(8, 0.0))
    loaded = suite.with_plan(load(text), plan)
    sliced, single = loaded.cases
    assert sliced.id == "kl/photo-pair/bf16-upcast0-slice1-t8o0-none"
    assert sliced.expected.diagnosis == ("seam",)
    assert sliced.limits["rmse"].max == 4.0
    assert single.not_applicable == "a batch of one"
    with pytest.raises(SuiteError, match="nothing to judge"):
        suite.with_plan(load(HEAD + ONE + LIMITS), DecodePlan(tiling=Tiling(64, 0.0)))
    with pytest.raises(IllegalTiling):
        suite.with_plan(load(HEAD + ONE + LIMITS), DecodePlan(tiling=Tiling(16, 0.3)))


def test_one_plan_keeps_the_substitute(load):
    mine = model("mine")
    loaded = suite.with_plan(load(HEAD + ONE + LIMITS, substitute=mine), DecodePlan("bf16"))
    assert loaded.models == {"mine": mine}


def test_suites_beside_each_other(load, registry, tmp_path):
    other = load(HEAD.replace("small", "other") + ONE + LIMITS, "other.toml")
    loaded = load(HEAD + ONE + LIMITS)
    (tmp_path / "suites" / "ruff.toml").write_text("line-length = 120")
    assert [each.name for each in suite.load_all(loaded.path.parent, loaded)] == ["other"]
    assert [name for name, _ in suite.listing(other.path.parent, registry)] == [str(other.path), str(loaded.path)]
    other.path.write_text(HEAD + "[[matrix]]")
    with pytest.raises(SuiteError, match=r"other\.toml"):
        suite.load_all(loaded.path.parent, loaded)
    assert dict(suite.listing(other.path.parent, registry))[str(other.path)].startswith("unreadable: ")


# ---------------------------------------------------------------- plans as text


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("fp32", DecodePlan()),
        ("bf16,tile=16,overlap=0.25,slicing", DecodePlan("bf16", slicing=True, tiling=Tiling(16, 0.25))),
        ("overlap=0, tile=8", DecodePlan(tiling=Tiling(8, 0.0))),
        ("fp16,upcast,disk", DecodePlan("fp16", force_upcast=True, offload="disk")),
        ("dtype=fp16,force_upcast=true,offload=group_leaf", DecodePlan("fp16", True, offload="group_leaf")),
        ("slicing=false", DecodePlan()),
        ("quantized", DecodePlan(options={"quantized": True})),
        ("quantized=4", DecodePlan(options={"quantized": 4})),
        ("quantized=int8", DecodePlan(options={"quantized": "int8"})),
        ("temporal_tile=4,temporal_overlap=0.5", DecodePlan(temporal=Temporal(4, 0.5))),
    ],
)
def test_a_plan_of_text(registry, text, plan):
    assert suite.parse_plan(text, registry) == plan


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "an empty token"),
        ("bf16,,slicing", "an empty token"),
        ("bf61", "unknown token 'bf61': did you mean 'bf16'"),
        ("sliceing", "did you mean 'slicing'"),
        ("tiles=16", "did you mean 'tile='"),
        ("tile=16", "tiling has no overlap"),
        ("overlap=0.5", "tiling has no tile"),
        ("tile=0,overlap=0", "tile is 0"),
        ("tile=16,overlap=1", "overlap is 1"),
        ("tile=16,overlap=nan", "overlap is nan"),
        ("tile=x,overlap=0", "tile is 'x'"),
        ("tile=16,tile=8,overlap=0", "tile is said twice"),
        ("bf16,fp16", "dtype is said twice"),
        ("offload=disc", "unknown offload 'disc': did you mean 'disk'"),
        ("slicing=2", "slicing is 2"),
        ("quantized=", "quantized is ''"),
        ("precision=bf16", "unknown token 'precision=bf16'"),
    ],
)
def test_a_wrong_plan_is_one_line(registry, text, said):
    with pytest.raises(RequestError) as raised:
        suite.parse_plan(text, registry)
    assert said in str(raised.value)
    assert "--plan" in str(raised.value)
    assert "\n" not in str(raised.value)


@given(st.text(max_size=30))
def test_any_plan_text_is_a_plan_or_a_request_error(text):
    known = SimpleNamespace(OPTIMIZATIONS={})
    with contextlib.suppress(RequestError):
        assert isinstance(suite.parse_plan(text, known), DecodePlan)


# ---------------------------------------------------------------- a user's own


def test_latents_of_the_users_own(load, tmp_path):
    from safetensors.torch import save_file
    from torch import ones

    (tmp_path / "suites").mkdir()
    save_file({"latents": ones(3, 4, 16, 24)}, tmp_path / "suites" / "mine.safetensors")
    own = '[latents.mine]\nfile = "mine.safetensors"\nscaled = true\n'
    loaded = load(HEAD + ONE.replace("photo-pair", "mine") + LIMITS + own)
    assert loaded.shapes == {("kl", "mine"): (3, 4, 16, 24)}
    with pytest.raises(RequestError, match=r"small.toml.*gone.safetensors"):
        load(HEAD + ONE.replace("photo-pair", "mine") + LIMITS + own.replace("mine.safe", "gone.safe"))


def test_a_model_of_the_users_own_is_looked_for_beside_the_suite(load, tmp_path):
    own = '[models.mine]\npath = "nowhere"\n'
    with pytest.raises(RequestError, match=r"small.toml.*nowhere"):
        load(HEAD + ONE.replace('"kl"', '"mine"') + LIMITS + own)


# ---------------------------------------------------------------- time, weight, and what ships


def test_the_estimate_grows_with_pixels_overlap_and_dtype(load):
    def seconds(axes: str) -> float:
        return suite.time_estimate(load(HEAD + ONE + axes + LIMITS))

    plain = seconds("")
    assert seconds("tiling = [{tile = 16, overlap = 0.5}]\n") > seconds("tiling = [{tile = 16, overlap = 0}]\n")
    assert seconds("tiling = [{tile = 16, overlap = 0}]\n") == pytest.approx(plain)
    assert seconds('dtype = ["bf16"]\n') < plain < seconds('dtype = ["fp16"]\n')
    assert seconds('dtype = ["fp32", "bf16"]\n') > plain


@pytest.fixture(scope="session")
def shipped() -> dict[str, suite.Suite]:
    real.load_plugins()
    return {path.stem: suite.load(path, real) for path in SUITES.glob("*.toml")}


def test_the_reference_suite_is_the_full_product(shipped):
    for name in ("reference-kl", "reference-kl-hot"):
        cases = [case for case in shipped["reference"].cases if (case.model, case.latents) == (name, "photo-pair")]
        assert len(cases) == 3 * 2 * 2 * 4 * 6
        assert sum(case.not_applicable is None for case in cases) == 4 * 2 * 4 * 6


def cut(plan: DecodePlan) -> bool:
    return plan.tiling is not None or plan.temporal is not None


def test_every_case_that_ships_has_limits_and_every_latents_is_used(shipped):
    used = set()
    for loaded in shipped.values():
        used |= {case.latents for case in loaded.judged}
        against_golden = [case for case in loaded.judged if case.check is None]
        # what tiles and chunks cost says nothing where weights were never trained: the oracle holds those cases
        trained = [case for case in against_golden if loaded.name != "families" or not cut(case.plan)]
        # and pictures of 24 pixels are too small for LPIPS
        named = {"rmse"} if loaded.name == "families" else {"rmse", "lpips_alex"}
        assert all(named <= set(case.limits) for case in trained)
        assert all("nonfinite_share" in case.limits for case in against_golden)
        assert all(set(case.limits) == {"check_max_abs"} for case in loaded.judged if case.check is not None)
    assert used == set(real.LATENTS)


def test_the_smoke_suite_touches_every_value_of_the_reference_suite(shipped):
    def values(loaded):
        return {
            (axis, str(getattr(case.plan, axis)))
            for case in loaded.judged
            for axis in ("dtype", "force_upcast", "slicing", "tiling", "offload")
        }

    assert values(shipped["smoke"]) == values(shipped["reference"])
    assert len(shipped["smoke"].judged) < 24


def test_the_import_stays_light():
    heavy = "{'torch', 'numpy', 'diffusers', 'safetensors.torch'}"
    code = f"import sys; import fidelity.suite, fidelity.golden, fidelity.gates; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_golden_errors_are_no_suite_errors():
    assert not issubclass(GoldenError, SuiteError)
