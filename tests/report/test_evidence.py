"""What the decoders tell beforehand, as the reports show it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fidelity.records import (
    DecodePlan,
    Headroom,
    Layer,
    Measurement,
    ModelReach,
    Prediction,
    Reach,
    Reference,
    RunResult,
    Tiling,
)
from fidelity.report import evidence, html, markdown
from tests.report.sample import judged
from tests.report.test_browser import browser, visit  # noqa: F401 - fixtures

REACH = Reach((70.0, 5.0, 0.2), (10.0, 3.0, 0.4), (2.0, 4.0), (16, 8), is_global=True)


def tiled(overlap: float, values: tuple[float | None, ...], *, latents="l", seam=1.5, **plan):
    worst = None if None in values else max(value for value in values if value is not None)
    found = {
        "rmse": Measurement("rmse", worst, "grey levels", "lower", values),
        "tile_seam": Measurement("tile_seam", seam, "grey levels", "lower", (seam,)),
    }
    return judged(plan=DecodePlan(tiling=Tiling(16, overlap), **plan), latents=latents, measurements=found)


def run(*cases, told=((0.0, 4.0), (0.25, 2.0)), reach: Reach | None = REACH, latents="l", reason=None, rooms=()):
    predictions = tuple(Prediction(latents, 16, overlap, rmse) for overlap, rmse in told)
    found = ModelReach("m", "l", reach, predictions if reach else (), reason)
    references = tuple(
        Reference("m", name, 0.0, 1e-3, ok=True, same_environment=True, headroom=room) for name, room in rooms
    )
    return RunResult(suite={"name": "s"}, environment={}, cases=cases, reach=(found,), reference=references)


def room(max_abs: float | None, *, declared: bool = False) -> Headroom:
    return Headroom((Layer("up.conv", "Conv2d", max_abs, None if max_abs is None else 65504 / max_abs),), 7, declared)


def test_a_prediction_stands_beside_the_plainest_case_of_its_tiling():
    found = run(
        tiled(0.0, (9.0, 9.0), dtype="bf16"),
        tiled(0.0, (3.0, 5.0), offload="disk"),
        tiled(0.0, (8.0, 8.0), slicing=True),
        tiled(0.0, (7.0, 7.0), options={"channels_last": True}),
    )
    first, second = evidence.outlooks(found)[0].meetings
    assert first.case == "m/l/fp32-upcast0-slice0-t16o0-disk"
    assert first.measured == pytest.approx(((9 + 25) / 2) ** 0.5), "all items together"
    assert first.ratio == pytest.approx(4.0 / 17**0.5)
    assert first.seam == 1.5
    assert (second.case, second.measured, second.ratio) == (None, None, None)


def test_what_was_not_measured_is_no_figure():
    (first, _) = evidence.outlooks(run(tiled(0.0, (3.0, None))))[0].meetings
    assert (first.measured, first.ratio) == (None, None)
    assert "not measured" in markdown.render(run(tiled(0.0, (3.0, None))))


def test_the_summary_says_what_it_means_and_how_good_it_was():
    text = markdown.render(run(tiled(0.0, (5.0,)), tiled(0.25, (1.0,))))
    assert "tiling is never exact, whatever the overlap" in text
    assert "wrong by 10.0 grey levels RMS for want of context and less than a tenth of that 2 latent pixels" in text
    assert "by 2.00 in a tile of 16 and 4.00 in a tile of 8 latent pixels: no overlap removes that" in text
    assert "| measured RMSE, all items |" in text, "the table of plans has the worst item's beside it"
    assert "Predicted is 0.80 to 2.00 times the measured RMSE of all items on l (2 tilings)." in text
    assert "| `m` | 16 | 0.25 | 2.00 | 1.00 | 2.00 | 1.50 |" in text


def test_other_latents_are_told_apart():
    found = run(tiled(0.0, (2.0,), latents="k"), latents="k")
    (outlook,) = evidence.outlooks(found)
    assert [each.own for each in outlook.meetings] == [False, False]
    assert "2.00 to 2.00 times the measured RMSE of all items on other latents" in outlook.said[-1]


def test_a_local_decoder_can_be_exact_and_a_causal_one_is_called_so():
    local = Reach((9.0, 0.0), (5.0, 0.0), (0.0, 0.0), (16, 8), is_global=False, before=(9.0, 0.0), after=(9.0, 3.0))
    said = " ".join(evidence.outlooks(run(reach=local))[0].said)
    assert "tiles with enough overlap are exact" in said
    assert "its own statistics" not in said
    assert "moves none before it and 3.00 grey levels after it: it is causal" in said


def test_a_reach_that_was_not_measured_gives_its_reason():
    text = markdown.render(run(reach=None, reason="latents of 8×8 are too small to cut"))
    assert "How far it looks was not measured: latents of 8×8 are too small to cut" in text


def test_the_tightest_latents_of_each_model_are_shown_and_a_missing_flag_is_an_alarm():
    found = run(rooms=[("a", room(655.04)), ("b", room(131008.0)), ("c", None)])
    (tight,) = evidence.rooms(found)
    assert tight.latents == "b"
    text = markdown.render(found)
    assert (
        r"- ❌ fp16 headroom of `m` on `b`: needs force\_upcast: up.conv passes 65504, and it is not declared" in text
    )
    page = html.render(found, Path("nowhere"))
    assert '<p class="alarm">Needs force_upcast: up.conv passes 65504, and it is not declared.</p>' in page
    assert "131,008" in page
    calm = html.render(run(rooms=[("b", room(131008.0, declared=True))]), Path("nowhere"))
    assert 'class="alarm">Needs' not in calm


def test_layers_that_were_not_finite_come_first():
    assert evidence.rooms(run(rooms=[("a", room(1e9)), ("b", room(None))]))[0].latents == "b"


def test_the_page_holds_the_figures_without_scripts_and_for_them():
    page = html.render(run(tiled(0.0, (5.0,)), tiled(0.25, (1.0,))), Path("nowhere"))
    assert page.index('id="models"') < page.index('id="cases"')
    assert '<a href="#case=m/l/fp32-upcast0-slice0-t16o0-none">5.00</a>' in page
    assert '"outlooks":[[{"latents":"l","own":true,"tile":16,"overlap":0.0,"predicted":4.0,"measured":5.0' in page
    assert 'data-outlook="0"' in page


def test_a_run_of_before_has_no_such_section():
    old = RunResult(suite={}, environment={}, cases=(judged(),))
    assert 'id="models"' not in html.render(old, Path("nowhere"))
    assert "tell beforehand" not in markdown.render(old)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_the_chart_is_drawn_in_both_themes_and_fits(visit, tmp_path, width):  # noqa: F811 - the fixture
    html.write(run(tiled(0.0, (5.0,)), tiled(0.25, (1.0,)), rooms=[("a", room(131008.0))]), tmp_path)
    page = visit((tmp_path / "report.html").as_uri(), width=width)
    drawn = "canvas => new Set(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data).size > 8"
    for _ in range(2):
        charts = page.locator("#models canvas")
        assert charts.count() == 1
        assert charts.first.evaluate(drawn)
        page.click("#theme")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
