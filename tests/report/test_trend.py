"""A trend in words, and in the report."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from fidelity.records import RunResult
from fidelity.report import html, markdown
from fidelity.report import trend as said
from fidelity.trend import Drift, Series, Trend, TrendRun
from tests.report import sample
from tests.report.test_browser import ARGUMENTS, CHROMIUM, shoot

HOSTILE = "</script><script>alert(1)</script>"


def trend(*drifts: Drift, drifting: int | None = None, commit: str | None = None) -> Trend:
    runs = tuple(
        TrendRun(
            recorded=f"2026-11-{day:02d}T10:00:00.000+00:00",
            suite="s",
            commit=commit or f"{day:x}" * 40,
            environment="other" if day == 4 else "cpu",
            versions={"torch": "2.14.1" if day < 6 else "2.15.0"},
            exit_status=0,
        )
        for day in range(1, 8)
    )
    values = (0.5, 0.5, None, 0.9, 0.5, 0.75, 0.75)
    series = (Series("m/l/p", "rmse", "grey levels", "lower", values, 0.1, 1.0),
              Series("m/l/p", "allocated_peak_bytes", "bytes", "lower", (2.0**20,) * 7),
              Series("m/l/q", "rmse", "grey levels", "lower", (None,) * 7))  # fmt: skip
    return Trend(runs, series, drifts, drifting=len(drifts) if drifting is None else drifting)


def step(case: str = "m/l/p", name: str = "rmse", after: float = 0.75) -> Drift:
    return Drift(case, name, "grey levels", "step", 0.5, after, 0.1, 6, 5, 1.0)


def test_drifts_alike_share_a_line():
    found = said.notes(trend(step(), step("m/l/q"), step("m/l/r"), step(name="max_abs")))
    assert found == [
        "drift below the limit: rmse of m/l/p stepped from 0.500 to 0.750 grey levels over 6 comparable runs "
        "(noise floor 0.100, limit 1.00), since 6666666 of 2026-11-06 10:00; 2 more cases alike",
        "drift below the limit: max_abs of m/l/p stepped from 0.500 to 0.750 grey levels over 6 comparable runs "
        "(noise floor 0.100, limit 1.00), since 6666666 of 2026-11-06 10:00",
    ]


def test_notes_are_bounded():
    found = said.notes(trend(*(step(name=f"m{place}") for place in range(9)), drifting=300))
    assert len(found) == 6
    assert found[-1] == "295 more series drift within their limits: see the history"
    assert said.notes(trend()) == []


def test_figures_are_told_apart():
    assert said.apart("rmse", 2.8771, 2.8792) == ("2.877", "2.879")
    assert said.apart("rmse", 1.0, 1.0) == ("1.00", "1.00")
    assert said.apart("allocated_peak_bytes", 1048576, 1048577) == ("1048576", "1048577")
    assert said.apart("rmse", 0.5, 0.75) == ("0.500", "0.750")


def test_a_line_of_bars():
    assert said.spark((0.0, 1.0, None, 0.5)) == "▁█·▅"
    assert said.spark((3.0, 3.0)) == "▁▁"
    assert said.spark((None,)) == "·"
    assert said.short(None) == "–"
    assert said.short("a" * 40 + "-dirty") == "aaaaaaa-dirty"


def a_run(found: Trend) -> RunResult:
    return RunResult({"name": "s"}, {}, cases=(sample.judged(),), trend=found, notes=tuple(said.notes(found)))


def test_the_report_and_the_summary_name_the_drift():
    page = html.render(a_run(trend(step())), Path("nowhere"))
    assert page.count("rmse of m/l/p stepped from 0.500 to 0.750") == 2, "beside the chart, and among the notes"
    assert "rmse of m/l/p stepped from 0.500 to 0.750" in markdown.render(a_run(trend(step()))).replace("\\", "")
    assert "Nothing drifts below its limit" in html.render(a_run(trend()), Path("nowhere"))
    bare = html.render(msgspec.structs.replace(a_run(trend()), trend=None), Path("nowhere"))
    assert 'id="trend"' not in bare
    hostile = html.render(a_run(trend(step(HOSTILE), commit=HOSTILE)), Path("nowhere"))
    assert HOSTILE not in hostile


@pytest.mark.slow
def test_the_chart_in_a_browser(tmp_path):
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[test]'")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium, or name it in CHROMIUM")
    html.write(a_run(trend(step())), tmp_path)
    complaints: list[str] = []
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 390, "height": 844})
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto((tmp_path / "report.html").as_uri())
        choices = [page.locator(f"#trend-controls select >> nth={place}") for place in (0, 1)]
        assert choices[0].input_value() == "rmse"
        assert choices[1].locator("option").all_inner_texts() == ["m/l/p · drifts", "m/l/q"]
        rows = page.locator("#trend-table tbody tr")
        assert rows.count() == 7
        assert re.split(r"\t", rows.nth(0).inner_text()) == ["2026-11-07 10:00", "0.750", "0", "7777777", "cpu", "–"]
        assert rows.nth(1).inner_text().split("\t")[1:3] == ["0.750", "+0.250"]
        assert rows.nth(1).inner_text().split("\t")[5] == "torch 2.15.0"
        assert rows.nth(4).inner_text().split("\t")[1:3] == ["–", "–"], "not measured in that run"
        assert "Its noise floor is 0.100" in page.locator("#trend-note").inner_text()
        drawn = "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((v) => v !== 0)"
        assert page.locator("#trend-chart").evaluate(drawn)
        shoot(page, "trend", full=True)
        choices[0].select_option("allocated_peak_bytes")
        assert rows.nth(0).inner_text().split("\t")[1].replace("\xa0", " ") == "1.00 MiB"
        choices[0].select_option("rmse")
        choices[1].select_option("m/l/q")
        assert rows.nth(0).inner_text().split("\t")[1] == "–"
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is cut off on a phone"
        browser.close()
    assert complaints == []
