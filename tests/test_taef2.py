"""docs/examples/taef2.py, the documented decoder of one's own, against what is known of its real weights."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import skimage.data
import torch

from fidelity import DecodePlan, Tiling, registry
from fidelity.errors import ModelError
from fidelity.evaluator import Evaluator
from fidelity.models import from_path
from fidelity.records import Case, Limit
from fidelity.runner import Runner

EXAMPLE = Path(__file__).resolve().parent.parent / "docs" / "examples" / "taef2.py"
ADVISED = DecodePlan(tiling=Tiling(24, 0.25))
FACTS = {"astronaut": (31.2, 12.4), "coffee": (29.6, 10.9), "chelsea": (32.7, 7.3)}
"""Published: round trip in dB, and RMSE in grey levels of tiles of 24 latents every 18 against the full decode."""


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """The plugin, imported without an installed module of that name; its model is gone again afterwards."""
    registry.load_plugins()
    before = dict(registry.MODELS.items())
    spec = importlib.util.spec_from_file_location("taef2_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    registry.MODELS._entries = before


@pytest.fixture(scope="module")
def runner(example: Any, shared: Path) -> Runner:
    folder = shared / "data" / "taef2"
    if not folder.is_dir():
        pytest.skip(f"the weights of TAEF2 are absent: no {folder.name}/ in the shared data")
    return Runner(from_path("taef2", folder))


def test_it_says_in_one_line_where_weights_are_missed(example, tmp_path):
    model = from_path("taef2", tmp_path)
    assert (model.geometry.latent_channels, model.data_range) == (32, (0, 1))
    with pytest.raises(ModelError, match=r"model 'taef2': weights: .*decoder\.safetensors does not exist"):
        model.load()


@pytest.mark.slow
@pytest.mark.parametrize("name", FACTS)
def test_it_gives_the_published_figures(runner, name):
    picture = getattr(skimage.data, name)()
    height, width = (side - side % 8 for side in picture.shape[:2])
    image = torch.from_numpy(np.ascontiguousarray(picture[:height, :width])).permute(2, 0, 1)[None].float() / 255
    family = runner.model.family
    with torch.no_grad():
        latents = family.encode(runner.module, image)
    full, tiled = (runner.decode(latents, plan, trace=False) for plan in (DecodePlan(), ADVISED))
    trip, drift = FACTS[name]
    assert -10 * math.log10(float((full.sample.clamp(0, 1) - image).square().mean())) == pytest.approx(trip, abs=0.15)
    # which pixels the published figures were taken of is not known to the last row
    assert float((tiled.sample - full.sample).square().mean().sqrt()) * 255 == pytest.approx(drift, abs=0.4)
    assert tiled.receipts["tiling"]["engaged"] is True


@pytest.mark.slow
def test_blended_tiles_drift_in_tone_and_show_no_line(runner, tmp_path):
    name, plan = "photo-pair", DecodePlan(tiling=Tiling(16, 0.25))
    bench = Evaluator({"taef2": runner.model}, {name: registry.LATENTS.get(name)}, tmp_path)
    bench.record("taef2", name)
    limits = {each: Limit(max=2.0, origin="visible") for each in ("tile_step", "tile_tone")}
    result = bench.case(Case("taef2", name, plan, limits=limits))
    assert result.diagnosis == ("tone_drift",), [reason.message for reason in result.reasons]
    assert result.measurements["tile_tone"].value > 5
    assert result.measurements["oracle_max_abs"].value < 0.01
