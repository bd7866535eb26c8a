"""A comparison on the terminal, as a comment and as a page."""

from __future__ import annotations

import io
import re

import msgspec
import pytest

from fidelity.compare import compare
from fidelity.comparison import OUTCOMES, TITLES, Comparison, Pace, Rises
from fidelity.errors import OutputError
from fidelity.records import DecodePlan, Measurement, Reason, RunResult, Tiling, from_json
from fidelity.report import comment, compare_console, compare_html, compare_markdown
from fidelity.report import compare as rendering
from tests.report import sample

HOSTILE = "<script>alert(1)</script> | `x` [l](http://x) @all \x07 {{ 7*7 }}"
HERE = {"class": "cpu", "versions": {"torch": "1"}}


def case(rmse: float = 0.5, **about: object):
    return sample.judged(**{"measurements": {"rmse": Measurement("rmse", rmse, "grey levels")}, **about})


def runs() -> tuple[RunResult, RunResult]:
    tiled = DecodePlan(tiling=Tiling(8, 0.25))
    base = (case(latents="worse"), case(0.5, latents="better"), case(latents="gone"), case(latents="red", plan=tiled),
            case(latents="same"))  # fmt: skip
    head = (case(0.9, latents="worse"), case(0.25, latents="better"), case(latents="new"),
            case(latents="red", plan=tiled, verdict="error", surprise=True, reasons=(Reason("d", "boom"),)),
            case(latents="same"))  # fmt: skip
    about = {"name": "s", "digest": "d"}
    return (RunResult(about, HERE, cases=base, commit="a" * 40),
            RunResult(about, {**HERE, "versions": {"torch": "2"}}, cases=head, commit="b" * 40))  # fmt: skip


@pytest.fixture(scope="module")
def found() -> Comparison:
    return compare(*runs(), Rises())


@pytest.fixture(scope="module")
def green() -> Comparison:
    base, _ = runs()
    return compare(base, base, Rises())


def hostile() -> Comparison:
    base = RunResult({"name": HOSTILE}, HERE, cases=(case(model=HOSTILE, latents=HOSTILE),), notes=(HOSTILE,))
    red = case(model=HOSTILE, latents=HOSTILE, verdict="fail", reasons=(Reason("r", HOSTILE),))
    head = RunResult({"name": HOSTILE}, {"class": HOSTILE}, cases=(red,), commit=HOSTILE)
    return compare(base, head, Rises(), names=(HOSTILE, HOSTILE))


def test_every_outcome_has_a_word_a_mark_and_a_colour():
    for table in (TITLES, rendering.MARKS, rendering.KINDS, compare_console.STYLES):
        assert set(table) == set(OUTCOMES)


def test_headlines(found, green):
    assert rendering.headline(found) == "3 cases got worse."
    assert rendering.tally(found) == "2 regressed, 1 vanished, 1 better, 1 appeared, 1 the same, of 6 cases"
    assert rendering.headline(green) == "Nothing got worse beyond what may rise."
    better = msgspec.structs.replace(found, cases=tuple(c for c in found.cases if c.outcome in ("better", "same")))
    assert rendering.headline(better) == "Nothing got worse beyond what may rise, 1 case got better."


def test_files_are_written_and_read_again(found, tmp_path):
    rendering.refuse_foreign(tmp_path / "out")
    rendering.write_all(found, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(rendering.NAMES)
    assert from_json((tmp_path / "out/comparison.json").read_bytes(), Comparison) == found
    rendering.refuse_foreign(tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.md").write_text("x")
    for folder in (tmp_path / "mine", tmp_path / "mine/thesis.md"):
        with pytest.raises(OutputError, match="name a"):
            rendering.refuse_foreign(folder)


@pytest.mark.parametrize("with_comparison", [False, True])
def test_the_folder_of_a_run_is_refused(found, tmp_path, with_comparison):
    if with_comparison:
        rendering.write_all(found, tmp_path)
    (tmp_path / "results.json").write_text("{}")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OutputError, match="holds a run, nothing written: name a folder of its own"):
        rendering.refuse_foreign(tmp_path)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("pace", "said"),
    [
        (Pace(1.0, 1.0, 1.0, 13), "Decodes take as long as before (13 cases), not gated."),
        (Pace(1.0, 0.9, 1.2, 13), "Decodes take as long as before (half of 13 between 0.9 and 1.2), not gated."),
        (Pace(1.3, 1.1, 1.5, 6, 1.25), "Decodes take 1.3 × as long (half of 6 between 1.1 and 1.5), allowed 1.25 ×."),
    ],
)
def test_time_in_one_sentence(pace, said):
    assert rendering.pace(pace) == said


def test_the_comment_says_what_and_why(found, green):
    text = compare_markdown.render(found)
    assert text.startswith("## ❌ s: 3 cases got worse.\n")
    assert "- `m/red/fp32-upcast0-slice0-t8o0.25-none`: **pass → error**\n  - pass became error: boom" in text
    assert text.index("m/red") < text.index("m/worse/fp32") < text.index("m/gone")
    assert "rmse rose from 0.5 to 0.9 grey levels: worse by 0.4, allowed 0.001" in text
    assert "<summary>1 case better</summary>" in text
    assert "| version of torch | `1` | `2` |" in text
    assert "| tiling | t8o0.25 | 1 | 1 | 0 |" in text
    assert compare_markdown.render(green).startswith("## ✅ s: Nothing got worse")
    assert "Suite, environment and versions are the same." in compare_markdown.render(green)


def test_the_comment_fits_whatever_it_holds():
    base = RunResult({}, HERE, cases=tuple(case(latents=f"{n}" + "l" * 2000) for n in range(900)))
    reasons = tuple(Reason("r", "x" * 5000) for _ in range(9))
    bad = tuple(case(latents=one.latents, verdict="error", reasons=reasons) for one in base.cases)
    text = compare_markdown.render(compare(base, RunResult({}, HERE, cases=bad), Rises()))
    assert len(text) < 65_536
    assert text.startswith("## ❌")
    assert "… and 875 more in `comparison.html`" in text or "Left out, to fit into a comment" in text


def test_sections_that_do_not_fit_are_named():
    text = comment.bounded([["# a"], ["### long one", "x" * 70_000], [], ["### b", "kept"]], "page.html")
    assert text == "# a\n\n### b\nkept\n\nLeft out, to fit into a comment: long one. All of it is in `page.html`.\n"
    assert len(comment.bounded([["y" * 99_999]], "page.html")) < 65_536


def test_the_page_shows_every_case_and_every_reason(found):
    page = compare_html.render(found)
    for each in found.cases:
        assert each.id in page
        assert all(reason in page for reason in each.reasons)
    assert page.count("<details") == len(found.regressions)
    assert page.count("<circle") == 3, "cases with an RMSE on both sides"
    assert "version of torch" in page
    assert "<script" not in page
    assert "http" not in re.sub("http-equiv", "", page)


@pytest.mark.parametrize("render", [compare_html.render, compare_markdown.render])
def test_hostile_text_stays_text(render):
    page = render(hostile())
    bare = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", page) if render is compare_markdown.render else page
    assert "<script>" not in bare
    assert "7*7" in page
    if render is compare_markdown.render:
        assert "@all" not in bare
        assert "](http" not in bare.replace("\\]", "")


def printed(comparison: Comparison, width: int = 200) -> str:
    stream = io.StringIO()
    compare_console.show(comparison, stream=stream, width=width)
    compare_console.finish(comparison, stream=stream)
    return stream.getvalue()


def test_the_terminal_says_the_same(found, green):
    text = printed(found)
    lines = text.splitlines()
    assert lines[1].split() == ["m/red/fp32-upcast0-slice0-t8o0.25-none", "regressed", *"–––", "–"]
    assert "0.500 → 0.900" in lines[2]
    assert "m/red/fp32-upcast0-slice0-t8o0.25-none: pass → error\n  pass became error: boom\n" in text
    assert "version of torch: 1 → 2" in text
    assert lines[-1].startswith("3 cases got worse. 2 regressed, 1 vanished")
    assert printed(green).splitlines()[-1].startswith("Nothing got worse")
    assert "\x1b" not in printed(hostile()) + text
    assert max(map(len, printed(found, 60).splitlines()[:8])) <= 60


def test_figures_that_regressed_are_told_apart():
    near = compare(RunResult({}, HERE, cases=(case(2.8771),)), RunResult({}, HERE, cases=(case(2.8792),)), Rises())
    assert rendering.moved(near.cases[0].change("rmse")) == "2.877 → 2.879"
    assert rendering.moved(None) == "–"
    assert rendering.share(1.0525) == "+5.2 %"
    assert (rendering.share(0.5), rendering.share(1.0), rendering.share(None)) == ("−50 %", "0 %", "–")
