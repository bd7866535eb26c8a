"""A real report in a real browser, used as a person would. Screenshots go to FIDELITY_SCREENSHOTS, if that is set."""

from __future__ import annotations

import functools
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from fidelity.records import MEMORY_KINDS, RunResult, Tiling
from fidelity.report import html, words
from tests.report import film, sample
from tests.report.sample import MIB

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync"]  # fmt: skip
MODEL = "reference-kl"
CHUNKED = f"{film.MODEL}/{film.LATENTS}/{film.CHUNKED.id}"
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


@pytest.fixture(scope="module")
def video(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("film")
    html.write(film.build(folder), folder)
    shutil.rmtree(folder / "images")
    return (folder / "report.html").as_uri()


@pytest.fixture
def visit(browser):
    """Opens pages; anything on the console, any error, any request beyond the page itself fails the test."""
    contexts, complaints = [], []

    def open_page(address: str, *, width: int = 1440, height: int = 900, **options):
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
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=full)


def rows(page) -> list[str]:
    return page.eval_on_selector_all("#table tbody tr", "lines => lines.map(line => line.dataset.id)")


def canvas(page, place: int, at: tuple[int, int]) -> list[int]:
    """RGB of one pixel of the pane `place`."""
    return captioned(page, place, at)[1]


def captioned(page, place: int, at: tuple[int, int]) -> tuple[str, list[int]]:
    """The first pane's caption, and RGB of one pixel of the pane `place`, at one instant."""
    return page.evaluate(
        """([place, x, y]) => {
          const pen = new OffscreenCanvas(1, 1).getContext('2d');
          pen.drawImage(document.querySelectorAll('.stage canvas')[place], -x, -y);
          const caption = document.querySelector('.panes figcaption').innerText;
          return [caption, [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3)];
        }""",
        [place, *at],
    )


def open_case(page, case: str) -> None:
    page.locator(f'#table tr[data-id="{case}"] a').click()
    page.wait_for_selector(".stage canvas")


def open_case_by_link(page, case: str) -> None:
    page.evaluate("case_ => { location.hash = `case=${encodeURIComponent(case_)}`; }", case)
    page.wait_for_selector(f'dialog .id:text-is("{case}")')


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
    page.click('[aria-label="Image 0"]')
    page.wait_for_selector('[aria-label="Image 0"][aria-pressed=true]')
    golden, candidate = sampled.golden[0].astype(int), sampled.decode(0, plan).astype(int)
    for x, y in ((3, 5), (48, 42), (127, 127), (60, 90)):
        assert canvas(page, 0, (x, y)) == golden[y, x].tolist()
        assert canvas(page, 1, (x, y)) == candidate[y, x].tolist()
        gap = candidate[y, x] - golden[y, x]
        for power in (0, 3, 6):
            slide(page, "gain", power)
            assert canvas(page, 2, (x, y)) == (128 + 2**power * gap).clip(0, 255).tolist()
    assert "×64" in page.inner_text(".panes figure:nth-child(3) figcaption")
    columns = (candidate - golden).mean((0, 2))
    assert page.evaluate(LINE.format(".profiles")) == pytest.approx(columns.tolist(), abs=1e-6)


def test_blink_and_onion_skin_show_both(visit, report):
    page = visit(report)
    open_case(page, SEAMED)
    both = canvas(page, 0, (48, 42)), canvas(page, 1, (48, 42))
    page.keyboard.press("b")
    shoot(page, "blink-1440-light")
    seen = set()
    until = time.monotonic() + 3
    while len(seen) < 2 and time.monotonic() < until:
        caption, pixel = captioned(page, 0, (48, 42))
        seen.add((caption, tuple(pixel)))
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
    shoot(page, "seam-1440-light")


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


def marked(page) -> str:
    return page.get_attribute("#table tr.at", "data-id")


def test_j_follows_the_filters_and_goes_past_the_rows_that_are_drawn(visit, tmp_path):
    html.write(sample.thousand(tmp_path), tmp_path)
    page = visit((tmp_path / "report.html").as_uri())
    for _ in range(3):
        page.keyboard.press("j")
    assert marked(page) == rows(page)[2]
    page.click('[data-filter="pass"]')
    page.keyboard.press("j")
    assert marked(page) == rows(page)[0], "the row that was marked is filtered out: from the top"
    page.click('[data-sort="rmse"]')
    page.click("text=Reset")
    page.reload()
    for _ in range(105):
        page.keyboard.press("j")
    assert len(rows(page)) == 200
    assert rows(page).index(marked(page)) > 99


def test_the_way_of_looking_is_kept_from_case_to_case_and_through_a_change_of_theme(visit, report):
    page = visit(f"{report}#case={SEAMED}", color_scheme="light")
    page.wait_for_selector(".stage canvas")
    page.click('[data-mode="difference"]')
    slide(page, "gain", 5)
    page.click('[aria-label="Zoom in"]')
    seen = """() => [document.querySelector('.tools [data-mode][aria-pressed=true]').dataset.mode,
      document.querySelector('figcaption').textContent,
      document.querySelector('.stage canvas').style.transform.split(' scale')[1]]"""
    before = page.evaluate(seen)
    assert "32" in before[1]
    node = page.query_selector(".stage canvas")
    page.emulate_media(color_scheme="dark")
    page.wait_for_selector("html.dark")
    assert page.evaluate(seen) == before
    assert node.evaluate("node => node.isConnected"), "the pictures stay, only charts are drawn again"
    page.keyboard.press("j")
    page.wait_for_function("before => document.querySelector('figcaption')?.textContent === before", arg=before[1])
    assert page.evaluate(seen) == before


def test_a_run_without_cases_draws_what_there_is(visit, tmp_path):
    html.write(RunResult({"name": "s"}, {}), tmp_path)
    page = visit((tmp_path / "report.html").as_uri())
    assert "Nothing was judged." in page.inner_text("#decision")
    assert page.is_hidden("#tradeoff")
    assert page.inner_text("#shown").startswith("0 cases")


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
    page.click('[data-act="copy-approve"]')
    page.wait_for_selector('[data-act="copy-approve"]:text-is("Copied")')
    assert page.evaluate("navigator.clipboard.readText()") == (
        f"fidelity golden approve suites/reference.toml --case '{SEAMED}' --reason 'why this may change'"
    )


def test_budget_slider_changes_what_is_recommended(visit, report):
    page = visit(report)
    article = page.locator('.model[data-model="reference-kl"]')
    picks = {role: article.locator(f"[data-role={role}]") for role in ("recommended", "closest", "least")}
    named = {role: pick.locator("b").inner_text() for role, pick in picks.items()}
    assert named == {
        "recommended": "fp32, offload disk",
        "closest": "fp32, slicing, offload disk",
        "least": "fp32, slicing, tile 8 overlap 0.25, offload disk",
    }
    slider = article.locator("input[type=range]")
    slider.evaluate("node => { node.value = 0; node.dispatchEvent(new Event('input')); }")
    assert article.locator("output").inner_text().replace("\xa0", " ") == "50.6 MiB"
    closer = "fp16 upcast, slicing, tile 8 overlap 0.25, offload disk"
    assert [pick.locator("b").inner_text() for pick in picks.values()] == [closer, closer, named["least"]]
    assert "50.6 MiB peak, 74 % less than plain fp32" in picks["recommended"].inner_text()
    picks["recommended"].click()
    assert page.inner_text("dialog .id").endswith("fp16-upcast1-slice1-t8o0.25-disk")
    page.keyboard.press("Escape")
    article.locator("summary").click()
    article.locator("tbody tr >> nth=27").wait_for()
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


def test_effects_and_interactions_are_plotted_for_every_measurement(visit, report):
    page = visit(report)
    plotted = """() => [...document.querySelectorAll('#effects canvas')].map((canvas) => {
        const { labels, datasets } = Chart.getChart(canvas).data;
        return [labels, datasets[0].data.map((point) => point.x), datasets[1].data];
    })"""
    stored = page.evaluate("JSON.parse(document.getElementById('data').textContent).attribution")
    select = page.locator("#effects select >> nth=1")
    for measurement in select.evaluate("node => [...node.options].map(option => option.value)"):
        select.select_option(measurement)
        effects = [row for row in stored["effects"] if (row["model"], row["measurement"]) == (MODEL, measurement)]
        (labels, means, ranges), *interactions = page.evaluate(plotted)
        assert means == [row["mean"] for row in effects]
        assert ranges == [[row["least"], row["most"]] for row in effects]
        assert len(set(labels)) == len(effects)
        for pairs, _, spans in interactions:
            reach = [max(map(abs, span)) for span in spans]
            assert reach == sorted(reach, reverse=True)
            assert all(" × " in pair for pair in pairs)
    select.select_option("rmse")
    page.locator("#effects summary").first.click()
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
    page.locator(f'#table tr[data-id="{SEAMED}"] .verdict').click()
    assert page.inner_text("dialog .id") == SEAMED, "a row opens its case anywhere"


EDGES = "Chart.getChart(document.querySelector('{} canvas')).options.plugins.marks.edges"
LINE = "Chart.getChart(document.querySelector('{} canvas')).data.datasets[0].data.map(point => point.y)"


def test_profiles_and_tone_are_drawn(visit, report):
    page = visit(report)
    open_case(page, SEAMED)
    assert len(page.evaluate(LINE.format(".profiles"))) == 128
    assert page.evaluate(EDGES.format(".profiles")) == [48, 96]
    cells = page.locator(".heat td").all_inner_texts()
    assert len(cells) == 9
    assert cells[1].startswith("+1.68")
    page.locator(".heat td >> nth=7").click()
    page.wait_for_selector("circle.ring")
    ring = page.locator("circle.ring").first
    assert (ring.get_attribute("cx"), ring.get_attribute("cy")) == ("72.5", "112.5"), "from 48 to 96, 96 to 128"


# ---------------------------------------------------------------- memory

AREAS = """() => [...document.querySelectorAll('.memline path')].map(path => {
  const box = path.getBBox(); return [path.getAttribute('class'), box.y, box.height, box.x, box.width]; })"""


def stored_trace(name):
    return next(case.memory for case in stored_run().cases if case.id == name)


@functools.cache
def stored_run():
    with tempfile.TemporaryDirectory() as folder:
        return sample.build(Path(folder))


def test_memory_is_drawn_by_kind_under_its_stages(visit, report):
    page = visit(report)
    open_case(page, SEAMED)
    trace = stored_trace(SEAMED)
    areas = page.evaluate(AREAS)
    kinds = [kind for kind in MEMORY_KINDS if any(trace.layers.get(kind, ()))]
    assert [name.removeprefix("area m-") for name, *_ in areas] == kinds
    top = min(y for _, y, *_ in areas)
    bottom = max(y + height for _, y, height, *_ in areas)
    assert (bottom, areas[0][3:]) == (1000, [0, len(trace.timeline)])
    # the axis ends 6 % above the peak
    assert 1000 - top == pytest.approx(1000 / 1.06, abs=1)
    assert page.locator(".bands .stretch").all_inner_texts() == [
        *(f"tile {n} of 4" for n in range(1, 5)),
        "assemble",
        "convert",
    ]
    mark = page.locator(".memline .peakmark")
    assert mark.inner_text().replace("\u00a0", " ") == f"peak {words.size(trace.allocated_peak_bytes)}"
    line, plot = mark.bounding_box(), page.locator(".memline .areas").bounding_box()
    at = (trace.timeline.index(trace.allocated_peak_bytes) + 0.5) / len(trace.timeline)
    assert line["x"] == pytest.approx(plot["x"] + at * plot["width"], abs=2)


def test_memory_is_said_to_whoever_does_not_see_it(visit, report):
    page = visit(report)
    open_case(page, SEAMED)
    trace = stored_trace(SEAMED)
    said = page.locator(".memline title").text_content().replace("\u00a0", " ")
    assert said.startswith(
        f"Bytes alive over the decode: {words.size(trace.allocated_peak_bytes)} at most, in tile 4 of 4"
    )
    rows = page.locator(".memory details tbody tr")
    assert rows.count() == len(trace.spans)
    for place, span in enumerate(trace.spans):
        told = rows.nth(place).locator("td").all_text_contents()
        assert told[1] == f"{span.start}–{span.stop - 1}"
        drawn = pytest.approx(max(trace.timeline[span.start : span.stop]), rel=0.01)
        assert float(told[2].split("\u00a0")[0]) * MIB == drawn
    kinds = page.locator(".kinds tbody tr").all_text_contents()
    assert kinds[0].startswith("weights")
    assert all(MEMORY_KINDS[kind] in row for kind, row in zip(trace.layers, kinds))


def test_pointing_at_the_memory_says_what_was_alive(visit, report):
    page = visit(report)
    open_case(page, SEAMED)
    trace = stored_trace(SEAMED)
    plot = page.locator(".memline .areas")
    plot.scroll_into_view_if_needed()
    box, share = plot.bounding_box(), trace.timeline.index(trace.allocated_peak_bytes)
    page.mouse.move(box["x"] + (share + 0.5) / len(trace.timeline) * box["width"], box["y"] + 40)
    said = page.inner_text(".readout").replace("\u00a0", " ")
    assert said.startswith(f"tile 4 of 4: {words.size(trace.allocated_peak_bytes)} alive, weights")
    assert "activations" in said


def test_what_was_alive_at_the_peak_each_tile_and_the_steps_after(visit, report):
    page = visit(report)
    open_case(page, SEAMED)
    trace = stored_trace(SEAMED)
    held = page.locator(".held tbody tr").all_text_contents()
    assert len(held) == len(trace.peak.held)
    assert "decoder.up_blocks.2.resnets.1.norm1" in " ".join(held)
    assert "2×128×128×128" in " ".join(held)
    assert page.locator(".stages > i").count() == 5
    assert page.locator(".stages svg.each rect").count() == 4
    steps = page.locator(".steps tbody tr").all_text_contents()
    assert [re.split(r" ×|\d", row.replace("float32 array", "float array"))[0] for row in steps] == [
        "denormalise", "float array", "uint", "PIL", "PNG", "JPEG", "WebP",
    ]  # fmt: skip
    assert "×2" in steps[4]
    page.get_by_text("How it was counted").click()
    assert "numpy allocates past torch's allocator" in page.inner_text(".after")


def test_offload_shows_weights_and_transfers(visit, report):
    name = SEAMED.removesuffix("none") + "disk"
    page = visit(report)
    open_case_by_link(page, name)
    moved = stored_trace(name).transfers
    said = page.inner_text(".memory").replace("\u00a0", " ")
    assert f"{words.size(moved.bytes_in)} in 34 transfers" in said
    assert "Weights resident over the decode: " in page.locator(".areas.low title").text_content()
    open_case_by_link(page, SEAMED)
    assert "Offload" not in page.locator(".memory h4").all_inner_texts()


def test_running_out_links_to_what_fits_and_old_runs_still_show(visit, tmp_path):
    html.write(sample.out_of_memory(tmp_path), tmp_path)
    page = visit((tmp_path / "report.html").as_uri())
    open_case_by_link(page, "reference-kl/photo-pair/fp32-upcast0-slice1-t8o0.25-none")
    said = page.inner_text(".memory .alarm").replace("\u00a0", " ")
    assert (
        "Memory ran out in tile (decoder.up_blocks.2.resnets.1.conv1): 12.0 MiB asked for with 44.0 MiB alive" in said
    )
    assert "limit 48.0 MiB" in said
    page.click(".memory .alarm a")
    page.wait_for_selector('dialog .id:text-is("reference-kl/photo-pair/bf16-upcast0-slice1-t8o0.25-none")')
    open_case_by_link(page, "reference-kl/photo-pair/fp32-upcast0-slice0-t8o0.25-none")
    assert len(page.evaluate(AREAS)) == 1, "an old run kept the sum alone"
    assert "not told by kind" in page.inner_text(".memory")


def test_approved_values_stand_beside_the_measured_and_say_if_they_are_gated(visit, report):
    page = visit(report)
    open_case(page, SEAMED)
    assert "another-cpu: shown, not gated" in page.inner_text(".dbody")
    row = page.locator(".measured tbody tr", has=page.locator('span:text-is("rmse")'))
    assert row.locator("td >> nth=3").inner_text() == "0.750"
    open_case_by_link(page, f"{MODEL}/photo-pair/fp32-upcast0-slice0-t0-none")
    assert "cpu-avx512: worse than these" in page.inner_text(".dbody")


FRAME = "document.querySelector('.scrub output').textContent"


def at_frame(page, frame: int) -> None:
    page.wait_for_selector(f'.scrub output:text-is("frame {frame} of 0–16")')


def test_a_video_is_scrubbed_stepped_and_clicked_frame_by_frame(visit, video):
    page = visit(f"{video}#case={CHUNKED}")
    at_frame(page, film.JUMP)  # it opens where the error is worst
    golden, candidate = film.clip(), film.decoded(film.clip(), film.CHUNKED)
    page.click('[aria-label="Image 1"]')
    for frame in (16, 0, 12):
        slide(page, "frame", frame)
        at_frame(page, frame)
        for place, made in ((0, golden), (1, candidate)):
            assert canvas(page, place, (40, 30)) == made[1, frame, 30, 40].clip(0, 255).round().astype(int).tolist()
    page.locator("dialog .id").click()  # the keys are the page's, not the slider's
    page.keyboard.press("ArrowRight")
    at_frame(page, 13)
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    at_frame(page, 11)
    values = page.evaluate(LINE.format(".film-profile"))
    error = np.sqrt(((candidate - golden)[1] ** 2).mean((1, 2, 3)))
    assert values == pytest.approx(error.tolist())
    assert "chunk starts (5, 9, 13)" in page.inner_text(".film .about")
    assert page.evaluate(EDGES.format(".film-profile")) == [5, 9, 13]
    page.select_option(".film select", "rmse")
    assert page.evaluate(LINE.format(".film-profile")) == values
    spot = page.evaluate("""() => {
        const chart = Chart.getChart(document.querySelector('.film-profile canvas'));
        const box = chart.canvas.getBoundingClientRect();
        return [box.x + chart.scales.x.getPixelForValue(4), box.y + box.height / 2];
    }""")
    page.mouse.click(*spot)
    at_frame(page, 4)


def test_a_video_plays_and_pauses_and_keeps_the_way_of_looking(visit, video):
    page = visit(f"{video}#case={CHUNKED}")
    at_frame(page, film.JUMP)
    page.click('[data-mode="difference"]')
    page.keyboard.press("p")
    page.wait_for_selector(f'.scrub output:not(:text-is("frame {film.JUMP} of 0–16"))')
    page.keyboard.press("p")
    stopped = page.evaluate(FRAME)
    page.wait_for_timeout(400)
    assert page.evaluate(FRAME) == stopped
    assert page.locator(".stage").count() == 1
    slide(page, "frame", 3)
    at_frame(page, 3)
    page.keyboard.press("s")
    at_frame(page, film.JUMP)
    page.wait_for_selector("circle.ring")
    slide(page, "frame", 3)
    at_frame(page, 3)
    assert page.locator("circle.ring").count() == 0, "the worst place is in another frame"


def test_pictures_that_are_missing_are_said_in_place(visit, tmp_path):
    run = sample.build(tmp_path)
    case = next(case for case in run.cases if case.id == SEAMED)
    (tmp_path / case.images["candidate"][0]).unlink()
    bare = sample.judged(model="bare", latents="none")
    html.write(RunResult({}, {}, cases=(case, bare)), tmp_path)
    page = visit((tmp_path / "report.html").as_uri())
    open_case(page, SEAMED)
    page.click('[aria-label="Image 0"]')
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
@pytest.mark.parametrize("width", [390, 1440])
def test_nothing_sticks_out_and_text_has_contrast(visit, report, video, width, scheme):
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
    page = visit(f"{video}#case={CHUNKED}", width=width, color_scheme=scheme)
    at_frame(page, film.JUMP)
    assert page.evaluate(
        "document.getElementById('detail').scrollWidth <= document.getElementById('detail').clientWidth"
    )
    shoot(page, f"video-{width}-{scheme}")


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
LOADED = """() => {
  const [found] = performance.getEntriesByType('navigation');
  return found.loadEventEnd - found.startTime;
}"""
TYPED = """(text) => {
  const start = performance.now();
  const box = document.getElementById('search');
  box.value = text;
  box.dispatchEvent(new Event('input'));
  document.body.offsetHeight;
  return performance.now() - start;
}"""


def test_a_thousand_cases_stay_quick(visit, tmp_path, capsys):
    run = sample.thousand(tmp_path)
    size = html.write(run, tmp_path).stat().st_size
    page = visit((tmp_path / "report.html").as_uri())
    page.wait_for_selector("#table tbody tr")
    took = {"load": page.evaluate(LOADED)}
    assert page.locator("#table tbody tr").count() == 100
    took["search"] = page.evaluate(TYPED, "bf16 disk")
    page.evaluate(TYPED, "")
    took["sort"] = page.evaluate(TIMED, '[data-sort="rmse"]')
    took["filter"] = page.evaluate(TIMED, '[data-filter="pass"]')
    took["show all"] = page.evaluate(TIMED, "#all-rows")
    page.wait_for_selector("#table tbody tr:nth-child(300)")
    took["open a case"] = page.evaluate(TIMED, "#table tbody tr td a")
    page.wait_for_selector("dialog[open] .stage canvas")
    took["next case"] = page.evaluate(TIMED, '[aria-label="Next case (j)"]')
    with capsys.disabled():
        told = ", ".join(f"{name} {spent:.0f} ms" for name, spent in took.items())
        print(f"\n{len(run.cases)} cells in {size / 1e6:.1f} MB: {told}")
    # about 0.6 s and 0.1 s on a free machine: bounds for one whose cores are shared ten times over
    assert took.pop("load") < 20000
    assert {name: spent for name, spent in took.items() if spent > 5000} == {}
