"""Everything that needs no browser: the files, and what hostile or broken runs do to them."""

from __future__ import annotations

import base64
import hashlib
import io
import json as plain_json
import os
import random
import re
import time
import xml.etree.ElementTree as XML
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageChops

from fidelity import standings
from fidelity.errors import OutputError, RequestError
from fidelity.records import (
    DIAGNOSES,
    CaseResult,
    DecodePlan,
    Limit,
    Measurement,
    MemoryTrace,
    Reason,
    Reference,
    RunResult,
    Tiling,
)
from fidelity.report import album as album_
from fidelity.report import console, files, glossary, html, json, junit, markdown, words, write_all
from tests.report import sample

TEMPLATES = Path(html.__file__).parent / "templates"
HOSTILE = (
    "<!--<script </script x><script>alert(1)</script> | `x` <img src=x onerror=alert(2)> --> {{ 7*7 }} @all \x07\x00 ü"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def run(folder) -> RunResult:
    return sample.build(folder)


@pytest.fixture(scope="module")
def page(run, folder) -> str:
    return html.render(run, folder)


def hostile() -> RunResult:
    case = sample.judged(
        model=HOSTILE, latents="<b>l</b>", verdict="fail", surprise=True, diagnosis=("seam",),
        plan=DecodePlan(tiling=Tiling(8, 0.0), options={"<u>o</u>": "<s>"}),
        reasons=(Reason(HOSTILE, HOSTILE, 3.0, 1.0),), notes=(HOSTILE,), reproduce=HOSTILE,
        images={"golden": ("<i>.png",), "candidate": (HOSTILE,)},
    )  # fmt: skip
    silent = sample.judged(model=HOSTILE, verdict="not_applicable", reasons=(Reason("n", HOSTILE),), measurements={})
    return RunResult(
        suite={"name": HOSTILE, HOSTILE: HOSTILE}, environment={HOSTILE: [HOSTILE], "class": HOSTILE},
        reference=(Reference(HOSTILE, "l", None, 0.1, False, False, HOSTILE),), cases=(case, silent), notes=(HOSTILE,),
    )  # fmt: skip


# ---------------------------------------------------------------- files and results.json


def test_write_all_leaves_the_four_files_and_nothing_else(run, tmp_path):
    write_all(run, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "junit.xml",
        "report.html",
        "results.json",
        "summary.md",
    ]
    assert json.read(tmp_path) == run


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    files.write(tmp_path / "a", "old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OutputError, match="No space left") as caught:
        files.write(tmp_path / "a", "new")
    assert "\n" not in str(caught.value)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        files.write(tmp_path / "file" / "below" / "a", "x")


names = st.text(min_size=1, max_size=12)
figures = st.none() | st.floats(allow_nan=False, allow_infinity=False)
measured = st.builds(
    Measurement, name=names, value=figures, unit=names, better=st.sampled_from(["lower", "higher"]),
    per_image=st.lists(figures, max_size=3).map(tuple), reason=st.none() | names, exact=st.booleans(),
    detection_limit=figures,
    where=st.none()
    | st.dictionaries(names, st.integers(0, 999) | st.dictionaries(names, st.lists(figures), max_size=2), max_size=3),
    details=st.dictionaries(names, st.lists(st.lists(figures, max_size=2), max_size=2), max_size=2),
)  # fmt: skip
cases = st.builds(
    CaseResult, id=names, model=names, latents=names,
    verdict=st.sampled_from(["pass", "fail", "error", "not_applicable"]),
    plan=st.builds(DecodePlan, dtype=st.sampled_from(["fp32", "bf16", "fp16"]),
                   options=st.dictionaries(names, st.booleans() | names, max_size=2),
                   tiling=st.none() | st.builds(Tiling, st.integers(1, 64), st.floats(0, 0.75))),
    expected=st.sampled_from(["pass", "fail", "error"]), surprise=st.booleans(),
    reasons=st.lists(st.builds(Reason, names, names, figures, figures), max_size=2).map(tuple),
    measurements=st.dictionaries(names | st.just("rmse"), measured, max_size=3),
    limits=st.dictionaries(names, st.builds(Limit, names, figures, figures), max_size=2),
    memory=st.none() | st.builds(MemoryTrace, st.none() | st.integers(0, 2**40), reason=st.none() | names),
    seconds=st.dictionaries(st.just("decode"), st.floats(0, 1e6), max_size=1),
    images=st.dictionaries(st.sampled_from(["golden", "candidate", "difference"]),
                           st.lists(names, max_size=2).map(tuple)),
    receipts=st.dictionaries(names, st.dictionaries(names, st.booleans() | names | figures, max_size=2), max_size=2),
)  # fmt: skip
runs = st.builds(RunResult, suite=st.dictionaries(names, names | figures, max_size=2),
                 environment=st.dictionaries(names, names | st.dictionaries(names, figures), max_size=2),
                 cases=st.lists(cases, max_size=4).map(tuple), notes=st.lists(names, max_size=2).map(tuple),
                 partial=st.booleans())  # fmt: skip


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(runs)
def test_any_run_survives_json_and_renders(tmp_path_factory, run):
    here = tmp_path_factory.mktemp("any")
    write_all(run, here)
    assert json.read(here) == run
    XML.parse(here / "junit.xml")
    Structure.of((here / "report.html").read_text(encoding="utf-8"))
    stream = io.StringIO()
    console.table(run, stream=stream, width=80)
    console.finish(run, stream=stream)


def test_results_have_the_shape_of_the_contract(run, tmp_path):
    case = next(case for case in run.cases if case.id == "reference-kl/photo-pair/bf16-upcast0-slice1-t8o0.25-disk")
    json.write(msgspec.structs.replace(run, cases=(case,)), tmp_path)
    stored = plain_json.loads((tmp_path / "results.json").read_text())
    assert stored["schema"] == "fidelity.results/1"
    assert set(stored) >= {"schema", "suite", "environment", "reference", "cases"}
    (written,) = stored["cases"]
    assert set(written) >= {"id", "model", "latents", "plan", "verdict", "expected", "surprise", "reasons", "diagnosis",
                            "receipts", "measurements", "memory", "seconds", "reproduce"}  # fmt: skip
    assert written["plan"]["tiling"] == {"tile": 8, "overlap": 0.25}
    assert written["plan"]["temporal"] is None
    assert written["measurements"]["rmse"].items() >= {"unit": "grey levels", "better": "lower"}.items()
    assert written["memory"]["allocated_peak_bytes"] == case.memory.allocated_peak_bytes


def test_nan_is_refused_and_text_that_utf8_cannot_hold_is_not(tmp_path):
    bad = sample.judged(seconds={"decode": float("nan")})
    with pytest.raises(ValueError, match=r"seconds\.decode"):
        json.write(RunResult({}, {}, cases=(bad,)), tmp_path)
    assert not (tmp_path / "results.json").exists()
    write_all(RunResult({"path": "caf\udce9"}, {}, cases=(sample.judged(notes=("\ud800",)),)), tmp_path)
    assert json.read(tmp_path).suite == {"path": "caf?"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "is missing"),
        (b"", "is not a fidelity run"),
        (b"[]", "is not a fidelity run"),
        (b'{"schema": 3}', "is not a fidelity run"),
        (b'{"schema": "fidelity.results/9"}', "fidelity.results/9"),
        (b'{"schema": "fidelity.results/1", "suite": {}, "environment": {}, "cases": [{}]}', "is damaged"),
        (b'{"schema": "fidelity.results/1", "suite": {"a": "\xff"}}', "is damaged"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path, content, said):
    if content is not None:
        (tmp_path / "results.json").write_bytes(content)
    with pytest.raises(RequestError, match=re.escape(said)) as caught:
        json.read(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_truncated_file_is_refused_at_any_length(run, tmp_path):
    data = json.write(msgspec.structs.replace(run, cases=run.cases[:1]), tmp_path).read_bytes()
    for length in range(0, len(data.rstrip()) - 1, 97):
        (tmp_path / "results.json").write_bytes(data[:length])
        with pytest.raises(RequestError):
            json.read(tmp_path)


# ---------------------------------------------------------------- words and plans


def test_counts_are_a_partition(run):
    tally = words.counts(run)
    assert sum(tally.values()) == len(run.cases) == 144
    assert all(tally.values()), "the sample has every kind"
    assert words.summary(run).startswith(
        "144 cases: 48 passed, 40 failed as expected, 8 surprises (1 error), 48 not applicable"
    )


def test_worst_first_orders_errors_surprises_expected_passes():
    def case(name: str, **about: object) -> CaseResult:
        rmse = {"rmse": Measurement("rmse", about.pop("rmse", 1.0), better="lower")}
        return sample.judged(id=name, measurements=rmse, **about)

    over = [Reason("rmse", "r", times, 1.0) for times in (2.0, 5.0)]
    given = [
        case("pass-low", rmse=0.1), case("pass-high", rmse=0.9), case("expected", verdict="fail", expected="fail"),
        case("near", verdict="fail", surprise=True, reasons=over[:1]),
        case("far", verdict="fail", surprise=True, reasons=over[1:]),
        case("nan", verdict="fail", surprise=True, reasons=(Reason("rmse", "not finite"),)),
        case("error", verdict="error", surprise=True),
    ]  # fmt: skip
    assert [c.id for c in words.worst_first(given)] == [
        "error",
        "nan",
        "far",
        "near",
        "expected",
        "pass-high",
        "pass-low",
    ]


@pytest.mark.parametrize(
    ("figure", "said"),
    [
        (None, "–"),
        (0.0, "0"),
        (0.8349, "0.835"),
        (12.34, "12.3"),
        (1234.0, "1.23e+03"),
        (2e-5, "2.00e-05"),
        (-0.5, "-0.500"),
    ],
)
def test_numbers(figure, said):
    assert words.number(figure) == said


@pytest.mark.parametrize(
    ("count", "said"),
    [(None, "–"), (0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (470_000_000, "448.2 MiB"), (2**30, "1.00 GiB")],
)
def test_sizes(count, said):
    assert words.size(count) == said


@pytest.mark.parametrize(
    ("span", "said"), [(None, "–"), (0.314, "0.31 s"), (12.2, "12 s"), (221, "3:41"), (3723, "1:02:03")]
)
def test_durations(span, said):
    assert words.duration(span) == said


MIB = 2**20


def plan_case(
    latents: str, peak: int | None, verdict: str = "pass", *, span: float = 1.0, **plan: object
) -> CaseResult:
    emulated = plan.pop("emulated", False)
    return sample.judged(
        latents=latents, plan=DecodePlan(**plan), verdict=verdict, seconds={"decode": span},  # type: ignore[arg-type]
        memory=MemoryTrace(reason="emulated") if peak is None else MemoryTrace(allocated_peak_bytes=peak * MIB),
        receipts={"precision": {"emulated": emulated}},
    )  # fmt: skip


def summaries(*cases: CaseResult) -> dict[str, standings.PlanSummary]:
    return {
        item.plan.id.removeprefix("fp32-upcast0-"): item
        for item in standings.summarize(RunResult({}, {}, cases=cases))["m"]
    }


def test_the_recommended_plan_passes_with_all_latents():
    tiled, sliced = {"tiling": Tiling(8, 0.25)}, {"slicing": True}
    found = standings.summarize(RunResult({}, {}, cases=(
        plan_case("a", 100), plan_case("b", 400), plan_case("a", 40, **tiled), plan_case("b", 40, "fail", **tiled),
        plan_case("a", 30, **sliced), plan_case("a", 60, offload="disk"), plan_case("b", 90, offload="disk"),
        plan_case("a", None, dtype="fp16", emulated=True), plan_case("b", None, dtype="fp16", emulated=True),
    )))["m"]  # fmt: skip
    best = standings.recommend(found)
    assert [item.plan.offload for item in best] == ["disk", "none"], (
        "failed, judged too little, or without a peak: never"
    )
    assert best[0].saved == pytest.approx(0.4)
    assert standings.recommend(found, 60 * MIB) == best[:1], "a budget is met when equal"
    assert standings.recommend(found, 60 * MIB - 1) == []
    narrow = next(item for item in found if item.plan.slicing)
    assert (narrow.passes, narrow.everywhere, narrow.missing) == (True, False, ("b",))


def test_what_to_take_under_each_budget():
    def case(peak, seconds, rmse, **plan):
        found = {"rmse": Measurement("rmse", rmse, "grey levels")}
        return msgspec.structs.replace(plan_case("a", peak, span=seconds, **plan), measurements=found)

    found = standings.summarize(RunResult({}, {}, cases=(
        case(100, 1.0, 0.0), case(60, 1.05, 0.5, dtype="bf16"), case(50, 0.98, 0.6, dtype="bf16", offload="model"),
        case(40, 3.0, 0.2, slicing=True), case(20, 9.0, 2.0, tiling=Tiling(8, 0.25)),
        plan_case("a", None, offload="disk"),
    )))["m"]  # fmt: skip
    chosen = standings.choices(found)
    told = [(c.budget // MIB, *(words.plan(p.plan) for p in (c.recommended, c.closest))) for c in chosen]
    assert told == [
        (20, "fp32, tile 8 overlap 0.25", "fp32, tile 8 overlap 0.25"),
        (40, "fp32, slicing", "fp32, slicing"),
        (50, "bf16, offload model", "fp32, slicing"),
        (60, "bf16", "fp32, slicing"),  # as fast as the fastest within half its time, and closer to the golden
        (100, "fp32", "fp32"),
    ]
    assert {words.plan(choice.least.plan) for choice in chosen} == {"fp32, tile 8 overlap 0.25"}
    assert words.figures(chosen[0].least) == "20.0 MiB peak, 80 % less than plain fp32; 9.00 s; RMSE 2.00"
    assert standings.choices([]) == []


@pytest.mark.parametrize(("slow", "taken"), [(1.5, "fp32"), (1.501, "fp32, offload model")])
def test_times_that_a_busy_machine_explains_choose_no_plan(slow, taken):
    found = standings.summarize(RunResult({}, {}, cases=(
        plan_case("a", 100, span=slow), plan_case("a", 100, span=1.2, offload="disk"),
        plan_case("a", 100, span=1.0, offload="model"),
    )))["m"]  # fmt: skip
    assert [words.plan(choice.recommended.plan) for choice in standings.choices(found)] == [taken]


def test_latents_to_which_a_plan_cannot_apply_are_no_gap():
    found = summaries(
        plan_case("a", 100), plan_case("b", 100), plan_case("a", 50, slicing=True),
        plan_case("b", None, "not_applicable", slicing=True),
    )  # fmt: skip
    assert found["slice1-t0-none"].everywhere


def test_without_a_plain_decode_nothing_is_said_to_be_saved():
    assert summaries(plan_case("a", 50, slicing=True))["slice1-t0-none"].saved is None


def test_approving_is_the_command_that_reproduces_and_only_for_cases_of_a_suite():
    run = "fidelity run suites/s.toml --device cuda --case m/l/x"
    assert words.approve(sample.judged(reproduce=run)) == (
        "fidelity golden approve suites/s.toml --device cuda --case m/l/x --reason 'why this may change'"
    )
    assert words.approve(sample.judged(reproduce="fidelity run --plan bf16 --case m/l/x")) is None
    assert words.approve(sample.judged(reproduce=run, check="second_decode")) is None
    assert words.approve(sample.judged(reproduce=run, verdict="error")) is None
    assert words.approve(sample.judged()) is None


def test_every_diagnosis_is_explained_in_a_sentence():
    assert set(glossary.DIAGNOSES) == set(DIAGNOSES)
    assert all(text.endswith(".") and len(text) < 120 for text in glossary.DIAGNOSES.values())


# ---------------------------------------------------------------- markdown


def test_summary_reads_as_a_comment(run):
    text = markdown.render(run)
    assert text.startswith("## ❌ reference: 7 cases did not end as the suite expects; 1 case could not be judged.")
    assert len(text.splitlines()) < 200
    assert (
        text.index("bf16-upcast0-slice1-t8o0.25-disk") < text.index("Least memory") < text.index("What each plan costs")
    )
    assert "again: `fidelity run suites/reference.toml --case" in text
    assert "| `reference-kl` | `photo-pair` | bf16, tile 8 overlap 0 | 4 | ▲ failed as expected |" in text
    assert "28.7 MiB – 58.5 MiB" in text, "offload and slicing are folded with the range of peaks"
    assert "24 × force\\_upcast changes nothing at bf16" in text
    assert "1 × excluded by the suite: strides &lt;i&gt;not&lt;/i&gt; whole" in text
    assert "- a note of the suite" in text
    assert "fp16 ᴱ" in text
    assert "fp16 emulated" in text


def test_surprises_alike_are_told_once():
    def red(latents, message="boom"):
        return sample.judged(latents=latents, verdict="error", surprise=True, reasons=(Reason("d", message),))

    text = markdown.render(RunResult({}, {}, cases=(*map(red, "abcdef"), red("g", "other"))))
    assert text.count("boom") == 1
    assert "- just so: `m/b/fp32-upcast0-slice0-t0-none`, `m/c/" in text
    assert "`m/d/fp32-upcast0-slice0-t0-none` and 2 more" in text
    assert "other" in text


def test_summary_of_a_green_run_and_of_nothing():
    green = RunResult({"name": "s"}, {}, cases=(sample.judged(),))
    assert markdown.render(green).startswith("## ✅ s: Every case ended as the suite expects.")
    assert markdown.render(RunResult({"name": "s"}, {})).startswith("## ❌ s: Nothing was judged.")
    partial = msgspec.structs.replace(green, partial=True)
    assert "⚠️" in markdown.render(partial)
    assert "partial" in markdown.render(partial)


def test_summary_is_bounded():
    many = tuple(
        sample.judged(model=f"m{place}", latents="l" * 5000, verdict="fail", surprise=True, reproduce="y" * 9000,
                      reasons=tuple(Reason("r", "x" * 9000) for _ in range(50)))
        for place in range(2000)
    )  # fmt: skip
    text = markdown.render(
        RunResult({"name": "n" * 9999}, {str(k): "v" * 9999 for k in range(500)}, cases=many, notes=("z" * 9999,) * 99)
    )
    assert len(text) < 65_536, "a comment on GitHub"
    assert re.search(r"… and 19\d\d more in `report.html`", text)
    assert "again: `yyy" in text
    assert len(text.splitlines()) < 500


def test_hostile_text_stays_text_in_markdown():
    outside = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", markdown.render(hostile()).replace("\\`", ""))
    tags = set(re.findall(r"<[a-z/!][^>]*>", outside))
    assert tags <= {"<details>", "</details>", "<summary>", "</summary>", "<br>"}
    assert "@all" not in outside
    tables = re.findall(r"(?:^\| .*\n)+", markdown.render(hostile()), re.M)
    assert len(tables) == 2
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1, (
            "a pipe in a name adds no cell"
        )


def test_code_spans_outlast_their_backticks():
    assert markdown.code("a`b``c") == "``` a`b``c ```"
    assert markdown.code("a|b") == "`a\\|b`"


# ---------------------------------------------------------------- junit


def test_junit_totals_and_kinds(run):
    root = XML.fromstring(junit.render(run))
    suite = root.find("testsuite")
    found = suite.findall("testcase")
    assert len(found) == int(suite.get("tests")) == int(root.get("tests")) == 144
    for tag, total in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        assert len([case for case in found if case.find(tag) is not None]) == int(suite.get(total)) > 0
    by_name = {case.get("name"): case for case in found}
    case = by_name["reference-kl/photo-pair/fp32-upcast0-slice0-t8o0-none"]
    assert case.get("classname") == "reference.reference-kl.photo-pair"
    assert case.find("failure") is None
    properties = {item.get("name"): item.get("value") for item in case.find("properties")}
    assert properties["failed_as_expected"] == "no overlap leaves edges"
    surprise = by_name["reference-kl/photo-pair/bf16-upcast0-slice0-t8o0.25-none"].find("failure")
    assert surprise.get("message").startswith("tile_seam 1.22")
    assert surprise.get("type") == "seam"
    assert "fidelity run" in surprise.text


def test_junit_says_which_commit_and_when():
    run = RunResult({}, {}, cases=(sample.judged(),), commit="abc", recorded="2026-11-30T12:40:01.123+00:00")
    suite = XML.fromstring(junit.render(run)).find("testsuite")
    assert suite.get("timestamp") == "2026-11-30T12:40:01"
    assert suite.find("properties/property").attrib == {"name": "commit", "value": "abc"}
    assert "timestamp" not in junit.render(RunResult({}, {}))


@pytest.mark.parametrize("command", ["fidelity run a.toml --out 'my out' --resume", None])
def test_junit_of_an_interrupted_run_is_red(command):
    about = {"name": "s", "judged": 9, **({"resume": command} if command else {})}
    run = RunResult(about, {}, cases=(sample.judged(),), notes=("interrupted",), partial=True)
    root = XML.fromstring(junit.render(run))
    assert (root.get("tests"), root.get("errors"), root.get("failures")) == ("2", "1", "0")
    assert [case.get("name") for case in root.iter("testcase")] == [run.cases[0].id, "run"]
    error = root.find(".//testcase[@name='run']/error")
    said = command or "the same command with --resume"
    assert error.get("message") == f"interrupted after 1 of 9 cases; go on with {said}"
    assert error.text == f"{said}\ninterrupted"


def test_junit_says_when_an_expected_failure_passed():
    case = sample.judged(expected="fail", expected_reason="edges", surprise=True)
    failure = XML.fromstring(junit.render(RunResult({}, {}, cases=(case,)))).find(".//failure")
    assert failure.get("message") == "expected fail (edges), but it passed"


def test_junit_holds_whatever_a_message_holds():
    text = junit.render(hostile())
    assert HOSTILE.replace("\x07", "\ufffd").replace("\x00", "\ufffd") == XML.fromstring(text).find(".//failure").get(
        "message"
    )
    every = "".join(map(chr, [*range(0x20), 0x7F, 0xD800, 0xFFFE, 0xFFFF]))
    XML.fromstring(
        junit.render(RunResult({"name": every}, {every: every}, cases=(sample.judged(notes=(every,), id=every),)))
    )


# ---------------------------------------------------------------- html


class Structure(HTMLParser):
    """The elements of a page, and the text of each script."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.inside = False

    @classmethod
    def of(cls, text: str) -> Structure:
        parser = cls()
        parser.feed(text)
        parser.close()
        return parser

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = tag == "script"
        if self.inside:
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            about, text = self.scripts[-1]
            self.scripts[-1] = (about, text + data)


def test_page_is_one_file_that_fetches_nothing(page):
    structure = Structure.of(page)
    for tag, about in structure.tags:
        assert not (tag in ("script", "img", "iframe", "object") and "src" in about), tag
        assert not any(name.startswith("on") for name in about), about
        if tag in ("a", "link"):
            assert about["href"].startswith(("#", "data:")), about
    assert "http-equiv" in page
    assert "sourceMappingURL" not in page


def test_policy_names_the_very_scripts_that_are_there(page):
    structure = Structure.of(page)
    policy = next(about["content"] for tag, about in structure.tags if tag == "meta" and "http-equiv" in about)
    code = [text for about, text in structure.scripts if about.get("type") is None]
    assert len(code) == 2
    for text in code:
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in policy
    assert "default-src 'none'" in policy


def pixels(source) -> Image.Image:
    with Image.open(source) as picture:
        return picture.convert("RGB")


def shown(page: str) -> dict[str, Image.Image]:
    """Every embedded picture by digest, put together as the page does it: difference + base, modulo 256."""
    scripts = Structure.of(page).scripts
    read = {
        about["id"].removeprefix("png-"): pixels(io.BytesIO(base64.b64decode(text)))
        for about, text in scripts
        if about.get("type") == "text/plain"
    }
    details = [plain_json.loads(text) for about, text in scripts if (about.get("id") or "").startswith("case-")]
    refs = {ref["digest"]: ref for each in details for refs in each["images"].values() for ref in refs}
    assert set(refs) == set(read)
    return {
        digest: ImageChops.add_modulo(read[digest], read[ref["base"]]) if "base" in ref else read[digest]
        for digest, ref in refs.items()
    }


def test_pictures_are_embedded_once_and_bit_for_bit(page, run, folder):
    used = {path for case in run.cases for paths in case.images.values() for path in paths}
    found = [picture.tobytes() for picture in shown(page).values()]
    assert sorted(found) == sorted(pixels(folder / path).tobytes() for path in used)
    assert page.count('"base":') > 0, "candidates are stored as differences"
    assert len(used) < sum(len(paths) for case in run.cases for paths in case.images.values()) / 4, (
        "many share a picture"
    )


def test_a_difference_wraps_around_and_needs_a_base_of_its_size_that_is_whole(tmp_path):
    greys = {"golden": 250, "candidate": 3, "other": 7}
    for name, grey in greys.items():
        Image.new("RGB", (8, 8), (grey,) * 3).save(tmp_path / f"{name}.png")
    Image.new("RGB", (4, 4)).save(tmp_path / "small.png")
    album = album_.Album(tmp_path, 10**6)
    golden = album.add("golden.png")
    candidate = album.add("candidate.png", golden)
    assert candidate["base"] == golden["digest"]
    gap = pixels(io.BytesIO(base64.b64decode(album.embedded[candidate["digest"]])))
    assert gap.getpixel((0, 0)) == (9, 9, 9), "3 − 250 modulo 256"
    assert "base" not in album.add("other.png", candidate), "a difference is no base"
    assert "base" not in album.add("small.png", golden)
    assert album.add("golden.png", candidate) == golden


def test_details_round_trip_through_the_page(page, run):
    details = {
        about["id"]: text for about, text in Structure.of(page).scripts if (about.get("id") or "").startswith("case-")
    }
    assert len(details) == len(run.cases)
    first = plain_json.loads(details["case-0"])
    assert first["id"] == words.worst_first(run.cases)[0].id
    assert first["reasons"][0]["message"].endswith("<b>on meta</b>")


def test_decision_stands_in_the_page_without_scripts(page):
    assert '<h1 id="headline">7 cases did not end as the suite expects; 1 case could not be judged.</h1>' in page
    assert "fp32, slicing, tile 8 overlap 0.25, offload disk" in page
    assert page.index('id="decision"') < page.index('id="tradeoff"') < page.index('id="cases"')


def test_hostile_text_stays_text_in_html(tmp_path):
    page = html.render(hostile(), tmp_path)
    structure = Structure.of(page)
    assert not {"img", "u", "s"} & {tag for tag, _ in structure.tags}
    assert [about.get("type") for about, _ in structure.scripts].count(None) == 2
    stored = [text for about, text in structure.scripts if about.get("type") == "application/json"]
    assert not any(sign in text for text in stored for sign in "<>&"), "no sign that HTML knows, whatever it would do"
    assert "{{ 7*7 }}" in page, "data is never rendered as a template"
    detail = plain_json.loads(next(text for about, text in structure.scripts if about.get("id") == "case-0"))
    assert detail["reasons"][0]["message"] == HOSTILE
    assert detail["images"]["golden"][0]["missing"].startswith("<i>.png cannot be read")


def test_missing_foreign_and_damaged_pictures_are_named(tmp_path):
    (tmp_path / "secret.png").write_bytes(album_.PNG + b"secret")
    inside = tmp_path / "run"
    inside.mkdir()
    (inside / "text.png").write_text("no picture")
    (inside / "cut.png").write_bytes(album_.PNG + b"1")
    Image.new("RGB", (2, 2)).save(inside / "good.png")
    album = album_.Album(inside, 10**6)
    assert "cannot be read" in album.add("gone.png")["missing"]
    assert "outside" in album.add("../secret.png")["missing"]
    assert "outside" in album.add(str(tmp_path / "secret.png"))["missing"]
    assert "not a PNG" in album.add("text.png")["missing"]
    assert "damaged" in album.add("cut.png")["missing"]
    assert "missing" in album.add("nul\0.png")
    assert "digest" in album.add("good.png")
    assert len(album.embedded) == 1


def test_stored_difference_is_embedded_only_where_it_cannot_be_computed(tmp_path):
    for grey, name in enumerate("gcd"):
        Image.new("L", (2, 2), grey).save(tmp_path / f"{name}.png")
    stored = {"golden": ("g.png",), "candidate": ("c.png",), "difference": ("d.png",)}
    whole, broken = album_.Album(tmp_path, 10**6), album_.Album(tmp_path, 10**6)
    assert "difference" not in html._pictures(sample.judged(images=stored), whole)
    assert len(whole.embedded) == 2
    found = html._pictures(sample.judged(images={**stored, "candidate": ("gone.png",)}), broken)
    assert "digest" in found["difference"][0]


def test_budget_leaves_out_the_least_interesting_pictures(tmp_path):
    for place in range(4):
        noise = random.Random(place).randbytes(32 * 32 * 3)  # about 4 KiB of base64, whatever packs it
        Image.frombytes("RGB", (32, 32), noise).save(tmp_path / f"{place}.png")
    album = album_.Album(tmp_path, budget=10_000)
    found = [album.add(f"{place}.png") for place in (0, 1, 2, 0)]
    assert ["digest" in item for item in found] == [True, True, False, True]
    assert "left out" in found[2]["missing"]


def test_emulated_is_said_everywhere(run, page):
    scripts = {about.get("id"): text for about, text in Structure.of(page).scripts}
    rows = [row for row in plain_json.loads(scripts["data"])["cases"] if row["emulated"]]
    assert len(rows) == 24
    assert all(row["values"]["peak"] is None for row in rows)
    surprise = next(case for case in run.cases if words.emulated(case) and case.verdict == "fail")
    loud = RunResult({}, {}, cases=(msgspec.structs.replace(surprise, surprise=True),))
    assert '<em class="tag">emulated</em>' in html.render(loud, Path("nowhere"))
    assert "emulated, **fail**" in markdown.render(loud)
    stream = io.StringIO()
    console.table(loud, stream=stream, width=80)
    assert "SURPRISE E" in stream.getvalue()
    assert '<property name="emulated" value="true" />' in junit.render(loud)


def test_time_is_the_runs_own_or_said_to_be_the_decodes():
    assert words.took(RunResult({"seconds": 221}, {})) == "in 3:41"
    assert words.took(RunResult({}, {}, cases=(sample.judged(), sample.judged()))) == "with 2.00 s of judged decodes"


def test_exclusions_are_told_with_their_reason(page):
    assert "Excluded by the suite" in page
    assert "strides &lt;i&gt;not&lt;/i&gt; whole" in page


def test_an_empty_run_renders(tmp_path):
    write_all(RunResult({}, {}), tmp_path)
    assert "Nothing was judged" in (tmp_path / "report.html").read_text()


def test_pictures_get_what_the_text_leaves_of_the_page(run, folder, monkeypatch):
    full = html.render(run, folder)
    pictures = sum(len(text) for about, text in Structure.of(full).scripts if about.get("type") == "text/plain")
    monkeypatch.setattr(html, "PAGE_BUDGET", len(full) - pictures // 2)
    small = html.render(run, folder)
    assert len(full) - pictures < len(small) <= len(full) - pictures // 2 + 40_000, "40 kB of markup beside it"
    assert "was left out to keep this file small" in small


@pytest.mark.parametrize("name", [*html.STYLES, *html.SCRIPTS])
def test_scripts_and_styles_are_short_enough_to_read(name):
    lines = (TEMPLATES / name).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 300
    assert max(map(len, lines)) <= 120


@pytest.mark.slow
def test_a_thousand_cases_render_quickly_and_stay_small(tmp_path):
    big = sample.thousand(tmp_path)
    assert len(big.cases) > 1000
    start = time.process_time()
    size = html.write(big, tmp_path).stat().st_size
    assert time.process_time() - start < 10
    assert size < 25 * 2**20


def test_vendored_library_is_what_its_provenance_says():
    vendor = Path(html.__file__).parent / "vendor"
    digest = hashlib.sha256((vendor / "chart.umd.min.js").read_bytes()).hexdigest()
    assert digest in (vendor / "README.md").read_text()
    assert "MIT License" in (vendor / "LICENSE.chart.js.md").read_text()
    assert "</script" not in (vendor / "chart.umd.min.js").read_text()


def test_results_survive_a_page_that_cannot_be_drawn(tmp_path, monkeypatch):
    def broken(*_):
        raise AttributeError("no such figure")

    monkeypatch.setattr(html, "render", broken)
    run = RunResult({"path": "a"}, {}, cases=(sample.judged(),))
    (failed,) = write_all(run, tmp_path)
    assert failed == "html could not be rendered: AttributeError: no such figure; results.json is whole"
    assert {"results.json", "summary.md", "junit.xml"} <= {path.name for path in tmp_path.iterdir()}
    assert not (tmp_path / "report.html").exists()
