"""The command line: wrong requests are one line, exit status 2, and nothing written."""

from __future__ import annotations

import pytest

from fidelity import cli
from fidelity.cli import show
from tests.suites import LIMITS, write_suite


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return end.value.code, out, err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["rnu"], "No such command 'rnu'"),
        (["run"], "nothing to run"),
        (["run", "absent.toml"], "absent.toml"),
        (["run", "--plan", "bf61"], "did you mean 'bf16'"),
        (["run", "--plan", "tile=0,overlap=0.25"], "tile"),
        (["run", "--plan", "tile=16,overlap=1"], "overlap"),
        (["run", "--plan", "offload=dsk"], "did you mean 'disk'"),
        (["run", "--plan", "bf16", "--jobs", "99"], "--jobs 99"),
        (["run", "--plan", "bf16", "--device", "gpu"], "--device 'gpu'"),
        (["run", "--plan", "bf16", "--model", "nonsense"], "write NAME=PATH"),
        (["run", "--plan", "bf16", "--model", "mine=/does/not/exist"], "/does/not/exist"),
        (["run", "--plan", "bf16", "--plugin", "no_such_module"], "plugin 'no_such_module' does not import"),
        (["ls", "modles"], "'modles' is not one of"),
        (["report", "nowhere"], "nowhere"),
        (["validate", "absent.toml"], "absent.toml"),
    ],
)
def test_wrong_requests(capsys, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, *arguments)
    assert code == 2
    assert says in err
    assert err.count("\n") == 1, err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("matrix", "rest", "says"),
    [
        ('dtype = ["fp33"]', LIMITS, "did you mean 'fp32'"),
        ("slcing = [true]", LIMITS, "did you mean 'slicing'"),
        ("tiling = [{ tile = 16, overlap = 0.3 }]", LIMITS, "overlap"),
        ('dtype = ["fp32"]', '[limits]\nrsme = { max = 1.0, origin = "x" }', "did you mean 'rmse'"),
        ('dtype = ["fp32"]', "[limits]\nrmse = { max = 1.0 }", "origin"),
        ('dtype = ["bf16"]\nforce_upcast = [true]', LIMITS, "nothing"),
        ('dtype = ["fp32"', LIMITS, "toml"),
    ],
)
def test_bad_suites(capsys, tmp_path, matrix, rest, says):
    path = write_suite(tmp_path, matrix, rest)
    for command in ("validate", "run"):
        code, _, err = call(capsys, command, path)
        assert code == 2
        assert says in err
        assert str(path) in err
        assert err.count("\n") == 1, err


@pytest.mark.parametrize("kind", show.KINDS)
def test_ls_prints_one_line_each(capsys, kind):
    code, out, _ = call(capsys, "ls", kind)
    assert code == 0
    assert out
    assert all(len(line.split(None, 1)) == 2 for line in out.splitlines())


def test_validate_counts_cases_by_verdict_to_be(capsys, tmp_path):
    axes = ('dtype = ["fp32", "bf16", "fp16"]', "force_upcast = [false, true]", "slicing = [false, true]")
    path = write_suite(tmp_path, "\n".join(axes))
    code, out, _ = call(capsys, "validate", path)
    assert code == 0
    assert out.splitlines()[0] == "small: 12 cases, 4 judged, 8 not applicable"


def test_case_globs_must_match(capsys, tmp_path):
    path = write_suite(tmp_path, 'dtype = ["fp32", "bf16"]')
    code, _, err = call(capsys, "run", path, "--case", "*-fp64-*")
    assert code == 2
    assert "reference-kl/ramp/fp32-upcast0-slice0-t0-none" in err


def test_one_plan_without_a_suite_takes_latents_that_the_model_has():
    from fidelity import registry, suite
    from fidelity.cli import run
    from fidelity.models import configs

    registry.load_plugins()
    models = [registry.MODELS.get("reference-kl"), registry.MODELS.get("reference-video")]
    models += [configs.from_name(name) for name in ("ltx-video", "ltx-2.5-diffusion-decoder")]
    chosen = [run._quick(model, registry).stem for model in (None, *models)]
    # LTX-Video takes no frames of 56 × 80 pixels, and a diffusion decoder none at all
    assert chosen == ["quick", "quick", "quick_video", "quick_drawn", "quick_drawn"]
    assert [len(suite.load(path, registry).judged) for path in run.QUICK_SUITES] == [1, 1, 1]
