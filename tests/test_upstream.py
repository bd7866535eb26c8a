"""The page of diffusers' defects: drawn from the suites, committed as drawn, and its programs show what it says."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from fidelity import registry, suite, upstream
from fidelity.checks.instance import bounded
from fidelity.errors import SuiteError
from fidelity.records import Reason, RunResult
from fidelity.verdicts import result_of
from tests.suites import fidelity
from tests.test_snippet import run

registry.load_plugins()
ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "upstream.md"
HEADER = 'schema = "fidelity.suite/1"\n[suite]\nname = "mine"\ngolden = "golden"\n'
CHECKED = (
    HEADER
    + """
[[check]]
models  = ["small-dc", "small-mochi", "small-wan"]
latents = ["small"]
checks  = ["zero_argument", "encode_size"]

[[expect]]
match     = { check = "zero_argument", model = ["small-dc", "small-mochi"] }
verdict   = "fail"
diagnosis = ["not_engaged"]
versions  = "diffusers>=0.35"
reason    = "a zero | is ignored"

[[expect]]
match     = { check = "zero_argument", model = "small-wan" }
verdict   = "fail"
diagnosis = ["not_engaged"]
reason    = "without versions, so not of diffusers"
"""
)


def load(tmp_path, text=CHECKED):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return suite.load(path, registry)


def shipped(monkeypatch):
    """The suites as the command in the page names them."""
    monkeypatch.chdir(ROOT)
    names = re.search(r"Generated: fidelity upstream (.+) --write", PAGE.read_text())[1].split()
    return [suite.load(Path(name), registry) for name in names]


# ---------------------------------------------------------------- the committed page


@pytest.mark.slow
def test_the_page_is_that_of_the_suites(monkeypatch):
    suites = shipped(monkeypatch)
    again = "fidelity upstream suites/*.toml --results … --write docs/upstream.md"
    assert upstream.without_figures(PAGE.read_text()) == upstream.render(suites), f"draw it again: {again}"
    assert [one.path for one in suites] == sorted(Path("suites").glob("*.toml")), "a suite is not on the page"
    assert str(upstream.CHECKOUT) not in PAGE.read_text()
    assert "from_pretrained('fidelity/data/reference_kl')" in PAGE.read_text()


@pytest.mark.slow
def test_the_programs_of_the_page_show_what_it_says(monkeypatch, tmp_path):
    suites = [one for one in shipped(monkeypatch) if one.name == "upstream"]
    monkeypatch.chdir(tmp_path)
    for defect in upstream.collect(suites):
        with bounded(20):  # one of them never ends
            told = run(defect.code)
        raised = re.search(r"^\w+(Error|Exception): ", told, re.MULTILINE)
        assert bool(raised) == (defect.rule.expectation.verdict == "error"), (defect.first.id, told)


# ---------------------------------------------------------------- drawing it


def test_a_defect_is_a_rule_with_versions_and_its_cases(tmp_path):
    (defect,) = upstream.collect([load(tmp_path)])
    assert defect.classes == ("AutoencoderDC", "AutoencoderKLMochi")
    assert [case.model for case in defect.cases] == ["small-dc", "small-mochi"]
    assert defect.command == f"fidelity run {tmp_path}/mine.toml --case '{defect.first.id}'"


def test_a_later_rule_takes_its_cases_away(tmp_path):
    more = (
        CHECKED
        + '\n[[expect]]\nmatch = { check = "zero_argument", model = "small-dc" }\nverdict = "pass"\nreason = "x"\n'
    )
    (defect,) = upstream.collect([load(tmp_path, more)])
    assert defect.classes == ("AutoencoderKLMochi",)


def test_the_page_has_class_versions_diagnosis_command_and_program(tmp_path):
    page = upstream.render([load(tmp_path)])
    assert (
        "| [1](#1) | `AutoencoderDC`, `AutoencoderKLMochi` | a zero \\| is ignored | not_engaged | diffusers>=0.35 |"
        in page
    )
    assert "~zero_argument'` and 1 more" in page
    assert "from diffusers import AutoencoderDC" in page
    assert "    vae.enable_tiling(tile_sample_min_height=0)" in page
    assert upstream.MEASURED not in page


def test_figures_are_of_the_newest_run_and_do_not_change_the_rest(tmp_path):
    loaded = load(tmp_path)
    case = upstream.collect([loaded])[0].first

    def ran(words):
        result = result_of(case, "fail", (Reason("check_max_abs", words),))
        return RunResult(suite={}, environment={"versions": {"diffusers": "0.42.1"}}, cases=(result,))

    page = upstream.render([loaded], [ran("four"), ran("three <b>")])
    assert "Measured with diffusers 0.42.1: three &lt;b>\n" in page
    assert "four" not in page
    assert upstream.without_figures(page) == upstream.render([loaded])


def test_a_rule_that_is_not_in_force_is_said(tmp_path):
    old = (
        CHECKED
        + """
[[expect]]
match     = { check = "encode_size", model = "small-dc" }
verdict   = "fail"
diagnosis = ["geometry"]
versions  = "diffusers<0.30"
reason    = "long mended"
"""
    )
    page = upstream.render([load(tmp_path, old)])
    assert "## Not in the installed version" in page
    assert "it holds for diffusers&lt;0.30" in page


def test_suites_without_a_defect_are_refused(tmp_path):
    none = re.sub(r"versions .*\n", "", CHECKED)
    with pytest.raises(SuiteError, match=r"mine: no \[\[expect\]\] has versions"):
        upstream.render([load(tmp_path, none)])


# ---------------------------------------------------------------- the command


@pytest.mark.slow
def test_the_command_prints_or_writes(tmp_path):
    load(tmp_path)
    printed = fidelity("upstream", tmp_path / "mine.toml", cwd=tmp_path)
    assert printed.returncode == 0
    written = fidelity("upstream", tmp_path / "mine.toml", "--write", tmp_path / "page.md", cwd=tmp_path)
    assert written.stdout == f"{tmp_path}/page.md: 1 defects\n"
    assert (tmp_path / "page.md").read_text() == printed.stdout
    for wrong in ([], [str(tmp_path / "mine.toml"), "--results", str(tmp_path)],
                  [str(tmp_path / "mine.toml"), "--write", str(tmp_path)]):  # fmt: skip
        failed = fidelity("upstream", *wrong, cwd=tmp_path)
        assert (failed.returncode, failed.stdout) == (2, ""), failed
        assert failed.stderr.count("\n") == 1


@pytest.mark.slow
def test_one_case_is_run_with_its_program(tmp_path):
    load(tmp_path)
    asked = ("--case", "small-dc/*~zero_argument", "--out", "run")
    done = fidelity("run", tmp_path / "mine.toml", *asked, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    program = done.stdout.split("reproduction without fidelity:\n")[1].split("\n\n1 case")[0]
    assert "vae.enable_tiling(tile_sample_min_height=0)" in program
    result = msgspec.json.decode((tmp_path / "run" / "results.json").read_bytes())["cases"][0]
    assert "tile_sample_min_height stayed 512" in result["reasons"][0]["message"]
    assert run(result["code"]).splitlines()[-1] == "tile_sample_min_height 512"
