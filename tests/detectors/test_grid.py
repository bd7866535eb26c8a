"""The grid from the receipts: checked before anything is looked for."""

from __future__ import annotations

import msgspec
import pytest
import torch

from fidelity.detectors.grid import Layout, layout
from fidelity.detectors.seams import FAMILY
from fidelity.records import DecodePlan, TileAxis, TileGrid, Tiling, to_json
from fidelity.registry import DETECTORS
from tests.doctored import pictures as p

PLAN = DecodePlan(tiling=Tiling(16, 0.25))


def built(grid: TileGrid) -> dict:
    return {"tiling": {"grid": msgspec.to_builtins(grid)}}


def test_lines_are_borders_and_far_edges_of_bands():
    tiles = layout(torch.zeros(1, 3, 256, 256), PLAN, built(p.grid(0.25)))
    assert isinstance(tiles, Layout)
    assert tiles.lines("x").positions == (96, 128, 192, 224)
    assert tiles.period == 8


def test_half_overlap_s_edges_coincide():
    tiles = layout(torch.zeros(1, 3, 256, 256), DecodePlan(tiling=Tiling(16, 0.5)), built(p.grid(0.5)))
    assert tiles.lines("x").positions == (64, 128, 192)


def test_controls_keep_the_phase_and_keep_away():
    tiles = layout(torch.zeros(1, 3, 256, 256), PLAN, built(p.grid(0.25)))
    controls = tiles.lines("x").controls()
    assert all(c % 8 == 0 for c in controls)
    assert not set(controls) & {0, 96, 128, 192, 224}
    assert len(controls) == 32 - 1 - 4


def test_tile_at():
    tiles = layout(torch.zeros(1, 3, 256, 256), PLAN, built(p.grid(0.25)))
    assert tiles.tile_at(95, 96) == [0, 1]


@pytest.mark.parametrize(
    ("receipts", "words"),
    [
        ({}, "no tile grid"),
        ({"tiling": {"grid": None}}, "no tile grid"),
        ({"tiling": {"grid": {"rows": 3}}}, "cannot be read"),
        (built(p.grid(0.25, size=(256, 264))), "256×264"),
        (built(TileGrid(TileAxis((0,), 0, 256, 256), TileAxis((0,), 0, 256, 256))), "one tile"),
        (built(TileGrid(TileAxis((0, 128), 0, 128, 256), TileAxis((128, 0), 0, 128, 256))), "ascending"),
        (built(TileGrid(TileAxis((8, 128), 0, 128, 256), TileAxis((0,), 0, 256, 256))), "expected 0"),
    ],
)
@pytest.mark.parametrize("name", FAMILY)
def test_a_grid_that_does_not_fit_is_a_reason_not_a_score(name, receipts, words):
    golden = p.golden()
    found = DETECTORS.get(name)(golden + 0.1, golden, plan=PLAN, receipts=receipts, data_range=(-1, 1))
    assert found.value is None
    assert words in found.reason
    to_json(found)


@pytest.mark.parametrize("name", FAMILY)
def test_nan_is_a_reason_not_a_score(name):
    golden = p.golden(batch=2)
    candidate = p.noise(golden)
    candidate[1, 0, 3, 3] = float("nan")
    found = DETECTORS.get(name)(candidate, golden, plan=PLAN, receipts=built(p.grid(0.25)), data_range=(-1, 1))
    assert found.value is None
    assert "not finite: image 1" in found.reason
    assert found.per_image[0] is not None
    to_json(found)


def test_a_picture_of_two_tiles_and_few_latents_says_that_it_cannot_tell():
    tiles = p.grid(0.0, size=(24, 24), tile=2)
    golden = p.golden(size=(24, 24))
    found = p.measure("tile_step", golden + 0.01, golden, tiles, tile=2)
    assert found.value is None
    assert "too few" in found.reason


def test_lines_on_every_latent_leave_nothing_to_compare_with():
    tiles = p.grid(1 / 3, size=(48, 296), tile=2)
    golden = p.golden(size=(48, 296))
    found = p.measure("tile_step", p.noise(golden, 3.0), golden, tiles, tile=2)
    assert found.value is None
    assert found.reason


@pytest.mark.parametrize("name", ["tile_tone", "tile_chroma"])
@pytest.mark.parametrize(
    ("size", "tile", "overlap"), [((264, 200), 24, 0.5), ((160, 296), 12, 0.75), ((264, 264), 3, 0.25)]
)
def test_cells_that_do_not_divide_the_picture(name, size, tile, overlap):
    golden = p.golden(3, size=size)
    found = p.measure(name, p.noise(golden, 0.3), golden, p.grid(overlap, size, tile), tile=tile)
    assert found.value is None or found.value < 0.3
    assert found.value is not None or found.reason
    to_json(found)
