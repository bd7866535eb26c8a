"""The family's worst, and what every seam measurement carries."""

from __future__ import annotations

import pytest
import torch

from fidelity.detectors import seam_family
from fidelity.detectors.seams import FAMILY
from fidelity.records import DIAGNOSES, Measurement, to_json
from fidelity.registry import DETECTORS
from tests.doctored import pictures as p


def measured(**values) -> dict[str, Measurement]:
    return {
        name: Measurement(
            name=name, value=value, per_image=(value,), where={"image": 0}, reason=(value is None and "why") or None
        )
        for name, value in values.items()
    }


def test_the_worst_of_the_family():
    worst = seam_family(measured(tile_step=1.0, tile_tone=3.0, tile_band=None))
    assert (worst.name, worst.value, worst.unit) == ("tile_seam", 3.0, "grey levels")
    assert worst.details["member"] == "tile_tone"
    assert worst.details["diagnosis"] == ["tone_drift"]
    assert worst.details["not_measured"] == {"tile_band": "why"}


def test_no_tiles_no_family():
    assert seam_family(measured(rmse=1.0)) is None


@pytest.mark.parametrize("found", [{"tile_step": None, "tile_tone": 0.0}, {"tile_tone": 0.0}])
def test_without_steps_the_family_has_no_value(found):
    worst = seam_family(measured(**found))
    assert worst.value is None
    assert worst.reason


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.5])
def test_stories_are_complete_and_go_to_json(name, overlap):
    golden = p.golden(1)
    found = p.measure(name, p.noise(golden, 0.3), golden, p.grid(overlap))
    to_json(found)
    assert found.unit == "grey levels"
    if found.value is None:
        assert overlap == 0.5
        assert found.reason
    elif "note" not in found.details:
        assert 0 < found.detection_limit < (1.5 if overlap < 0.5 else 4.0)  # ramps without a plateau hide a tone
        assert 0 <= found.details["p_value"] <= 1
        assert {"image", "x", "y", "tile"} <= set(found.where)


@pytest.mark.parametrize("name", FAMILY)
def test_the_detection_limit_is_kept(name):
    """What is injected at twice the limit of the middling place is caught, noise and all."""
    golden = p.golden(6)
    tiles = p.grid(0.25)
    limit = p.measure(name, p.noise(golden, 0.3), golden, tiles).detection_limit
    inject = {"tile_step": lambda a: p.line(golden, a, 192), "tile_tone": lambda a: p.offset(golden, tiles, a, (1, 1)),
              "tile_band": lambda a: p.band(golden, tiles, a), "tile_corner": lambda a: p.corner(golden, tiles, a),
              "tile_chroma": lambda a: p.hue(golden, tiles, a * 1.5, (1, 1))}  # fmt: skip
    assert p.measure(name, p.noise(inject[name](2 * limit), 0.3), golden, tiles).value > 0


def test_range_zero_to_one_gives_the_same():
    golden = p.golden(1)
    candidate = p.noise(p.line(golden, 2.0), 0.3)
    import msgspec

    receipts = {"tiling": {"grid": msgspec.to_builtins(p.grid(0.0))}}
    from fidelity.records import DecodePlan, Tiling

    plan = DecodePlan(tiling=Tiling(16, 0.0))
    for name in FAMILY:
        call = DETECTORS.get(name)
        unit = call((candidate + 1) / 2, (golden + 1) / 2, plan=plan, receipts=receipts, data_range=(0, 1)).value
        assert unit == pytest.approx(
            call(candidate, golden, plan=plan, receipts=receipts, data_range=(-1, 1)).value, rel=0.01, abs=0.01
        )


def test_a_step_transposed_is_found_on_the_other_axis():
    golden = p.golden(1)
    candidate = p.line(golden, 2.0)
    found = p.measure("tile_step", candidate.mT.contiguous(), golden.mT.contiguous(), p.grid(0.0))
    assert (found.where["axis"], found.where["position"]) == ("y", 128)
    assert found.value == pytest.approx(p.measure("tile_step", candidate, golden, p.grid(0.0)).value, rel=1e-3)


def test_blame_is_from_the_closed_list():
    assert all(set(DETECTORS.get(name).diagnosis) <= set(DIAGNOSES) for name in DETECTORS)


def test_grey_pictures_have_steps_but_no_chroma():
    golden = p.golden(1)[:, :1].contiguous()
    assert p.measure("tile_step", p.line(golden, 2.0), golden, p.grid(0.0)).value > 1
    found = p.measure("tile_chroma", p.line(golden, 2.0), golden, p.grid(0.0))
    assert found.value is None
    assert "colour" in found.reason
    assert torch.isfinite(golden).all()
