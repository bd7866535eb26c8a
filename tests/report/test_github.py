"""What GitHub Actions gets: annotations that cannot break out of their line, and a step summary that fits."""

from __future__ import annotations

import io

import pytest

from fidelity.compare import compare
from fidelity.comparison import Rise, Rises
from fidelity.records import Reason, RunResult
from fidelity.report import github
from tests.report import sample


@pytest.fixture
def actions(monkeypatch, tmp_path):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    return tmp_path


def red(count: int, message: str = "rmse is 9", **about: object) -> RunResult:
    cases = tuple(
        sample.judged(latents=f"l{place}", verdict="fail", surprise=True, diagnosis=("seam",),
                      reasons=(Reason("rmse", message, 5.0 + place, 1.0),))
        for place in range(count)
    )  # fmt: skip
    return RunResult({"name": "s", **about}, {}, cases=(sample.judged(), *cases))


def printed(result: RunResult, markdown: str = "# m") -> list[str]:
    stream = io.StringIO()
    github.run(result, markdown, stream)
    return stream.getvalue().splitlines()


def test_each_surprise_is_annotated_worst_first(actions):
    lines = printed(red(3, path=str(actions / "suites" / "s.toml")))
    assert lines == [
        f"::error title=m/l{place}/fp32-upcast0-slice0-t0-none,file=suites/s.toml"
        "::fail (seam), expected pass: rmse is 9"
        for place in (2, 1, 0)
    ]


def test_a_green_run_and_one_elsewhere_annotate_nothing(actions, monkeypatch):
    assert printed(red(0)) == []
    monkeypatch.setenv("GITHUB_ACTIONS", "false")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY")
    assert printed(red(3)) == []
    assert sorted(path.name for path in actions.iterdir()) == ["summary"], "of the first run alone"


@pytest.mark.parametrize(("count", "last"), [(10, "m/l0/"), (11, "2 more"), (500, "491 more")])
def test_no_more_than_github_shows(actions, count, last):
    lines = printed(red(count))
    assert len(lines) == 10
    assert lines[-1].startswith(f"::error title={last}")


def test_hostile_text_stays_within_its_annotation(actions):
    (line,) = printed(red(1, "50% of\r\n::error title=x::y, a:b,c", path="elsewhere/s.toml"))
    assert line.count("::") == 4, "the two that the command has, and the two that are text"
    assert line.endswith("expected pass: 50%25 of ::error title=x::y, a:b,c")
    assert ",file=" not in line
    assert github.command("error", "a\r\nb%", title="t:,\n%") == "::error title=t%3A%2C%0A%25::a%0D%0Ab%25"


def test_a_long_message_is_cut(actions):
    (line,) = printed(red(1, "x" * 70_000))
    assert len(line) < 2000


def test_summaries_are_appended(actions):
    printed(red(0), "first")
    printed(red(0), "second ü")
    assert (actions / "summary").read_text() == "first\nsecond ü\n"


def test_a_summary_stays_under_its_ceiling(actions):
    path = actions / "summary"
    path.write_bytes(b"x" * (2**20 - 100))
    printed(red(0), "y" * 50)
    printed(red(0), "z" * 90)
    assert path.stat().st_size < 2**20
    assert b"y" * 50 in path.read_bytes()
    assert b"z" not in path.read_bytes()
    path.write_bytes(b"x" * (2**20 - 500))
    printed(red(0), "z" * 900)
    assert "did not fit here" in path.read_text()
    assert path.stat().st_size < 2**20


def test_a_summary_that_cannot_be_written_is_said_and_costs_nothing(actions, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(actions))
    (line,) = printed(red(0))
    assert line.startswith("::warning::the step summary")


def test_a_comparison_annotates_what_got_worse(actions):
    base = RunResult({"name": "s"}, {"class": "c"}, cases=tuple(sample.judged(latents=f"l{n}") for n in range(6)))
    slow = tuple(sample.judged(latents=f"l{n}", seconds={"decode": 2.0}) for n in range(6))
    head = RunResult({"name": "s"}, {"class": "c"}, cases=(sample.judged(latents="l0", verdict="error"), *slow[1:]))
    stream = io.StringIO()
    github.comparison(compare(base, head, Rises(time=Rise(0.25, True))), "md", stream)
    assert stream.getvalue().splitlines() == [
        "::error title=decode time::decodes take 2 × as long, allowed 1.25",
        "::error title=m/l0/fp32-upcast0-slice0-t0-none::pass became error",
    ]
    assert (actions / "summary").read_text() == "md\n"
