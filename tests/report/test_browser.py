"""A real report in a real browser, used as a person would. Screenshots go to FIDELITY_SCREENSHOTS, if that is set."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from fidelity.records import RunResult, Tiling
from fidelity.report import html
from tests.report import sample

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync"]  # fmt: skip
SEAMED = "reference-kl/photo-pair/bf16-upcast0-slice0-t8o0.25-none"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[test]'")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium, or name it in CHROMIUM")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("run")
    html.write(sample.build(folder), folder)
    shutil.rmtree(folder / "images")  # the page must stand alone
    return (folder / "report.html").as_uri()


@pytest.fixture
def visit(browser):
    """Opens pages; anything on the console, any error, any request beyond the page itself fails the test."""
    contexts, complaints = [], []

    def open_page(address: str, *, width: int = 1280, height: int = 900, **options):
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on(
            "request",
            lambda request: (
                complaints.append(request.url) if not request.url.startswith((address.split("#")[0], "data:")) else None
            ),
        )
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def shoot(page, name: str, *, full: bool = False) -> None:
    if folder := os.environ.get("FIDELITY_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=full)


def rows(page) -> list[str]:
    return page.eval_on_selector_all("#table tbody tr", "lines => lines.map(line => line.dataset.id)")


def canvas(page, place: int, at: tuple[int, int]) -> list[int]:
    """RGB of one pixel of the pane `place`."""
    return page.evaluate(
        """([place, x, y]) => {
          const pen = new OffscreenCanvas(1, 1).getContext('2d');
          pen.drawImage(document.querySelectorAll('.stage canvas')[place], -x, -y);
          return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
        }""",
        [place, *at],
    )


def open_case(page, case: str) -> None:
    page.locator(f'#table tr[data-id="{case}"] a').click()
    page.wait_for_selector(".stage canvas")


def slide(page, name: str, value: int) -> None:
    page.locator(f'[data-slider="{name}"]').evaluate(
        "(node, value) => { node.value = value; node.dispatchEvent(new Event('input')); }", value
    )


def test_table_opens_worst_first_sorts_and_filters(visit, report):
    page = visit(report)
    assert rows(page)[0].endswith("bf16-upcast0-slice1-t8o0.25-disk"), "the error"
    assert len(rows(page)) == 96
    page.click('[data-sort="rmse"]')
    figures = page.eval_on_selector_all(
        "#table tbody tr td:nth-child(3)", "cells => cells.map(cell => cell.textContent)"
    )
    worst = [float(text) for text in figures if text[0].isdigit()]
    assert worst == sorted(worst, reverse=True)
    assert worst[0] > 4
    assert figures[-1] == "–", "what was not measured comes last either way"
    page.click('[data-sort="rmse"]')
    assert page.inner_text("#table tbody tr:first-child td:nth-child(3)") == "exact"
    page.click('[data-filter="surprise"]')
    assert len(rows(page)) == 7
    page.select_option('[data-axis="model"]', "reference-kl-hot")
    assert len(rows(page)) == 3
    page.click("text=Reset")
    page.fill("#search", "seam group_leaf")
    assert rows(page) == []
    page.fill("#search", "seam upcast1 disk")
    assert len(rows(page)) == 4
    assert all("upcast1" in name and name.endswith("disk") for name in rows(page))


def test_a_tile_of_the_header_filters(visit, report):
    page = visit(report)
    page.click('.stat[data-kind="not_applicable"]')
    assert len(rows(page)) == 48
    assert "filtered out" in page.inner_text("#shown")


def test_pictures_difference_and_amplification(visit, report, tmp_path):
    page = visit(report)
    open_case(page, SEAMED)
    assert page.locator(".stage").count() == 3
    sampled = sample._Pictures(tmp_path, 128)
    plan = sample.DecodePlan("bf16", tiling=Tiling(8, 0.25))
    page.click('[aria-label="Image 1"]')
    page.wait_for_function("document.querySelector('[aria-label=\"Image 1\"]').getAttribute('aria-pressed') === 'true'")
    golden, candidate = sampled.golden[0].astype(int), sampled.decode(0, plan).astype(int)
    for x, y in ((3, 5), (48, 42), (127, 127), (60, 90)):
        assert canvas(page, 0, (x, y)) == golden[y, x].tolist()
        assert canvas(page, 1, (x, y)) == candidate[y, x].tolist()
        gap = candidate[y, x] - golden[y, x]
        for power in (0, 3, 6):
            slide(page, "gain", power)
            assert canvas(page, 2, (x, y)) == (128 + 2**power * gap).clip(0, 255).tolist()
    assert "×64" in page.inner_text(".panes figure:nth-child(3) figcaption")


def test_blink_and_onion_skin_show_both(visit, report):
    page = visit(report)
    open_case(page, SEAMED)
    shoot(page, "case-desktop-light")
    both = canvas(page, 0, (48, 42)), canvas(page, 1, (48, 42))
    page.keyboard.press("b")
    seen = set()
    until = time.monotonic() + 3
    while len(seen) < 2 and time.monotonic() < until:
        seen.add((page.inner_text(".panes figcaption"), tuple(canvas(page, 0, (48, 42)))))
        page.wait_for_timeout(60)
    assert seen == {("golden", tuple(both[0])), ("candidate", tuple(both[1]))}
    page.keyboard.press("b")
    assert page.locator(".stage").count() == 3
    page.click('[data-mode="onion"]')
    for share, expected in ((0, both[0]), (100, both[1])):
        slide(page, "mix", share)
        assert canvas(page, 0, (48, 42)) == expected


def test_reduced_motion_flips_only_when_asked(visit, report):
    page = visit(report, reduced_motion="reduce")
    open_case(page, SEAMED)
    page.keyboard.press("b")
    first = page.inner_text(".panes figcaption")
    page.wait_for_timeout(1200)
    assert page.inner_text(".panes figcaption") == first
    page.keyboard.press("b")
    assert page.inner_text(".panes figcaption") != first


def test_jump_to_the_worst_seam_and_the_grid(visit, report):
    page = visit(report)
    open_case(page, SEAMED)
    assert page.locator(".stage line").count() == 0
    page.get_by_label("Tile grid").check()
    assert page.locator(".stage >> nth=0").locator("line").count() == 4
    assert page.locator(".stage >> nth=0").locator("line").first.get_attribute("x1") == "48"
    assert page.locator(".stage >> nth=0").locator("rect.band").first.get_attribute("width") == "16"
    page.click('[data-act="jump"]')
    page.wait_for_selector("circle.ring")
    assert page.inner_text(".tools output >> nth=-1") == "400 %"
    stage, ring = (page.locator(name).first.bounding_box() for name in (".stage", "circle.ring"))
    assert ring["x"] + ring["width"] / 2 == pytest.approx(stage["x"] + stage["width"] / 2, abs=8)
    assert ring["y"] + ring["height"] / 2 == pytest.approx(stage["y"] + stage["height"] / 2, abs=8)
    shoot(page, "seam-desktop-light")


def test_zoom_and_drag_move_all_panes_in_step(visit, report):
    page = visit(report)
    open_case(page, SEAMED)
    page.click('[aria-label="Zoom in"]')
    moved = "nodes => nodes.map(node => node.style.transform)"
    before = page.eval_on_selector_all(".stage canvas", moved)
    box = page.locator(".stage >> nth=1").bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + 60, box["y"] + 70)
    page.mouse.up()
    after = page.eval_on_selector_all(".stage canvas", moved)
    assert len(set(before)) == len(set(after)) == 1
    assert before[0] != after[0]
    page.click('.tools button:text-is("Fit")')
    assert "translate(0px, 0px)" in page.eval_on_selector_all(".stage canvas", moved)[0]


def test_deep_link_keys_and_closing(visit, report):
    page = visit(f"{report}#case={SEAMED}")
    assert page.inner_text("dialog .id") == SEAMED
    order = rows(page)
    place = order.index(SEAMED)
    page.keyboard.press("j")
    assert page.inner_text("dialog .id") == order[place + 1]
    assert order[place + 1] in page.evaluate("decodeURIComponent(location.hash)")
    page.keyboard.press("k")
    page.keyboard.press("k")
    assert page.inner_text("dialog .id") == order[place - 1]
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 0
    assert page.evaluate("location.hash") == ""
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    assert page.inner_text("dialog .id") == order[place]
    page.go_back()
    assert page.locator("dialog[open]").count() == 0


def test_a_link_to_no_case_is_said(visit, report):
    page = visit(f"{report}#case=%E0%A4%A")
    assert "has no case" in page.inner_text("#shown")


def test_keys_leave_the_search_box_alone(visit, report):
    page = visit(report)
    page.keyboard.press("/")
    page.keyboard.type("bjk")
    assert page.input_value("#search") == "bjk"
    assert page.locator("dialog[open]").count() == 0


def test_copy_gives_the_whole_command(visit, report):
    page = visit(report)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    open_case(page, SEAMED)
    page.click('[data-act="copy"]')
    page.wait_for_selector("text=Copied")
    assert page.evaluate("navigator.clipboard.readText()") == f"fidelity run suites/reference.toml --case '{SEAMED}'"


def test_budget_slider_changes_what_fits(visit, report):
    page = visit(report)
    article = page.locator('.model[data-model="reference-kl"]')
    assert "fp32, slicing, offload disk" in article.inner_text()
    slider = article.locator("input[type=range]")
    slider.evaluate("node => { node.value = 0; node.dispatchEvent(new Event('input')); }")
    assert article.locator("output").inner_text().replace("\xa0", " ") == "50.6 MiB"
    assert (
        article.locator(".picks b").all_inner_texts() == ["fp16 upcast, slicing, tile 8 overlap 0.25, offload disk"] * 2
    )
    article.locator("summary").click()
    assert article.locator("tbody tr").count() == 28


def test_pareto_front_is_of_passing_measured_cases(visit, report):
    page = visit(report)
    drawn = page.evaluate("""() => Chart.getChart('chart').data.datasets.map(set => ({
        line: set.type === 'line',
        rows: set.data.map(({ row }) => [row.kind, row.emulated, row.values.peak, row.values.rmse]),
    }))""")
    front = next(item["rows"] for item in drawn if item["line"])
    passing = [row for item in drawn if not item["line"] for row in item["rows"] if row[0] == "pass"]
    assert [row[2:] for row in front] == [row[2:] for row in sorted(front, key=lambda row: row[2])]
    for kind, emulated, peak, rmse in front:
        assert (kind, emulated) == ("pass", False)
        assert not any((p < peak and r <= rmse) or (p <= peak and r < rmse) for _, _, p, r in passing)
    for _, _, peak, rmse in passing:
        assert any(p <= peak and r <= rmse for _, _, p, r in front)
    page.locator("#chart-controls select >> nth=2").select_option("seconds")
    counted = """line => Chart.getChart('chart').data.datasets.filter(set => (set.type === 'line') === line)
        .flatMap(set => set.data).filter(point => point.row.emulated).length"""
    emulated, front = page.evaluate(counted, False), page.evaluate(counted, True)
    assert (emulated, front) == (12, 0)
    assert "emulated, not in the Pareto front" in page.inner_text("#chart-note")


def test_every_axis_draws(visit, report):
    page = visit(report)
    for place in (2, 3):
        select = page.locator(f"#chart-controls select >> nth={place}")
        for value in select.evaluate("node => [...node.options].map(option => option.value)"):
            page.locator(f"#chart-controls select >> nth={place}").select_option(value)
            page.get_by_label("log across").click()
    page.locator("#chart-controls select >> nth=0").select_option("reference-kl-hot")
    page.locator("#effects summary").click()
    page.wait_for_selector("#effects tbody tr")
    assert page.locator("#effects tbody tr").count() > 5


def test_chart_opens_a_case_and_table_points_back(visit, report):
    page = visit(report)
    spot = page.evaluate("""() => {
        document.getElementById('tradeoff').scrollIntoView({ behavior: 'instant' });
        const chart = Chart.getChart('chart');
        const found = chart.getDatasetMeta(0).data[0];
        const box = chart.canvas.getBoundingClientRect();
        return [box.x + found.x, box.y + found.y];
    }""")
    page.mouse.click(*spot)
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Escape")
    page.mouse.move(2, 2)
    page.wait_for_timeout(200)  # the chart answers the pointer's leaving in its next frame
    page.locator(f'#table tr[data-id="{SEAMED}"]').hover()
    assert page.evaluate("Chart.getChart('chart').getActiveElements().length") == 1


def test_profiles_and_memory_are_drawn(visit, report):
    page = visit(report)
    open_case(page, SEAMED)
    page.locator(".viewer summary").click()
    page.wait_for_selector(".profile canvas")
    values = page.evaluate(
        "Chart.getChart(document.querySelector('.profile canvas')).data.datasets[0].data.map(point => point.y)"
    )
    assert len(values) == 128
    assert page.locator(".stages i").count() == 5
    cells = page.locator(".heat td").all_inner_texts()
    assert len(cells) == 9
    assert cells[1].startswith("+1.68")


def test_pictures_that_are_missing_are_said_in_place(visit, tmp_path):
    run = sample.build(tmp_path)
    case = next(case for case in run.cases if case.id == SEAMED)
    (tmp_path / case.images["candidate"][0]).unlink()
    bare = sample.judged(model="bare", latents="none")
    html.write(RunResult({}, {}, cases=(case, bare)), tmp_path)
    page = visit((tmp_path / "report.html").as_uri())
    open_case(page, SEAMED)
    page.click('[aria-label="Image 1"]')
    page.wait_for_selector(".missing")
    assert "cannot be read: No such file" in page.inner_text(".missing")
    assert page.locator('[data-mode="blink"]').count() == 0
    page.keyboard.press("b")
    page.keyboard.press("j")
    assert "No pictures were stored" in page.inner_text("dialog")


def test_hostile_text_runs_nothing(visit, tmp_path):
    from tests.report.test_report import HOSTILE, hostile

    html.write(hostile(), tmp_path)
    page = visit((tmp_path / "report.html").as_uri())
    page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
    page.locator("#table tbody tr a").first.click()
    shown = page.inner_text("dialog .reasons")
    assert "<img src=x onerror=alert(2)>" in shown
    assert page.locator("dialog img, dialog u, main img").count() == 0
    assert page.input_value("#search") == ""
    assert HOSTILE.split()[0] in page.content().replace("&lt;", "<").replace("&gt;", ">")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_sticks_out_and_text_has_contrast(visit, report, width, scheme):
    page = visit(report, width=width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate("document.documentElement.classList.contains('dark')") == (scheme == "dark")
    shoot(page, f"page-{width}-{scheme}", full=True)
    ratios = page.evaluate(CONTRAST)
    assert {name: ratio for name, ratio in ratios.items() if ratio < 4.5} == {}
    open_case(page, SEAMED)
    assert page.evaluate(
        "document.getElementById('detail').scrollWidth <= document.getElementById('detail').clientWidth"
    )
    shoot(page, f"case-{width}-{scheme}")


CONTRAST = """() => {
  const lum = (rgb) => rgb.map((c) => c / 255).map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const probe = document.body.appendChild(document.createElement('span'));
  const rgb = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color.match(/\\d+/g).slice(0, 3).map(Number);
  };
  const inks = ['ink', 'soft', 'accent', 'pass', 'expected', 'surprise', 'error', 'none'];
  const out = {};
  for (const ground of ['bg', 'card']) for (const ink of inks) {
    const [a, b] = [lum(rgb(ground)), lum(rgb(ink))].sort((x, y) => y - x);
    out[`${ink} on ${ground}`] = (a + 0.05) / (b + 0.05);
  }
  probe.remove();
  return out;
}"""


def test_theme_button(visit, report):
    page = visit(report)
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


TIMED = """(target) => {
  const start = performance.now();
  document.querySelector(target).click();
  document.body.offsetHeight;
  return performance.now() - start;
}"""


def test_a_thousand_cases_stay_quick(visit, tmp_path):
    html.write(sample.thousand(tmp_path), tmp_path)
    start = time.monotonic()
    page = visit((tmp_path / "report.html").as_uri())
    page.wait_for_selector("#table tbody tr")
    assert time.monotonic() - start < 4
    assert page.locator("#table tbody tr").count() == 100
    filtered = page.evaluate(TIMED, '[data-filter="pass"]')
    page.click("#all-rows")
    assert page.locator("#table tbody tr").count() > 300
    opened = page.evaluate(TIMED, "#table tbody tr td a")
    page.wait_for_selector("dialog[open] .stage canvas")
    assert filtered < 500
    assert opened < 500
