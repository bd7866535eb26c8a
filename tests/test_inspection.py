"""What `fidelity inspect` measures of a model, and how it says it."""

from __future__ import annotations

import pytest

from fidelity import inspection, registry
from fidelity.inspection import Inspection, lines
from fidelity.reach import PICTURES
from fidelity.records import Headroom, Layer, Reach

registry.load_plugins()
REACH = Reach((9.0, 1.0, 0.5), (8.0, 2.0, 0.0), (0.4, 0.8), (16, 8), is_global=True, frames_reason=PICTURES)
ROOM = Headroom((Layer("up.conv", "Conv2d", 131008.0, 0.5),), 7, force_upcast=False)


def found(**changes) -> str:
    about = {
        "name": "m",
        "family": "F",
        "spatial": 8,
        "temporal": 1,
        "latent_channels": 4,
        "compression": 48.0,
        "scaling": {},
        "force_upcast": False,
        "reference": "full",
        "legal_tiles": {"0": (1, 2, 3, 4)},
        "decoder_weights": 10,
        "decoder_bytes": 40,
        "round_trip": {},
        "reach": REACH,
        "predicted": {"16": {"0.25": 1.5}},
        "headroom": ROOM,
    }
    return "\n".join(lines(Inspection(**{**about, **changes})))


def test_a_global_decoder_is_never_exact_and_its_tone_is_told():
    said = found()
    assert "one latent px moves the whole picture (0.5 grey levels 2 latent pixels away): tiling is never exact" in said
    assert "0.40 in a tile of 16 · 0.80 in a tile of 8" in said
    assert "overlap for 1 grey level RMS at a tile's inner edge: 4 latent pixels" in said
    assert "overlap for 0.1 grey level RMS at a tile's inner edge: no overlap is enough" in said
    assert "1.50 at 0.25  (predicted RMSE" in said
    assert "latent frame" not in said


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ((9.0, 0.0, 0.0), (9.0, 3.0, 0.0), "moves none before it and 1 after it: causal"),
        ((9.0, 0.5, 0.0), (9.0, 3.0, 2.0), "moves 1 before it and 2 or more after it"),
    ],
)
def test_frames_to_either_side(before, after, said):
    video = Reach((9.0, 0.0), (1.0,), (0.0, 0.0), (16, 8), is_global=False, before=before, after=after)
    assert said in found(reach=video)
    assert "one latent px reaches 1 latent pixels: tiling is exact beyond that" in found(reach=video)


@pytest.mark.parametrize(
    ("declared", "max_abs", "said"),
    [
        (False, 131008.0, "needs force_upcast: up.conv passes 65504, and it is not declared"),
        (True, 131008.0, "needs force_upcast: up.conv passes 65504, and it is declared"),
        (True, 655.04, "65504 is 100 times the largest activation, though force_upcast is declared"),
        (False, 655.04, "65504 is 100 times the largest activation: no force_upcast needed"),
        (False, 65504.0, "65504 is 1 times the largest activation: no force_upcast needed"),
    ],
)
def test_headroom_is_held_against_the_flag(declared, max_abs, said):
    room = Headroom((Layer("up.conv", "Conv2d", max_abs, 65504 / max_abs),), 7, declared)
    assert f"fp16          {said}" in found(headroom=room)


def test_what_was_not_measured_is_said_with_its_reason():
    assert "fp16 headroom not measured: nobody looked" in found(headroom=Headroom(reason="nobody looked"))
    assert "not finite" in found(headroom=Headroom((Layer("up", "Conv2d", None, None),), 1))


@pytest.mark.slow
def test_the_hot_twin_needs_force_upcast_and_has_it():
    told = inspection.inspect(registry.MODELS.get("reference-kl-hot"), [registry.LATENTS.get("photo-pair")])
    assert told.headroom.over[0].name.startswith("up_blocks.3.resnets.")
    assert "needs force_upcast: up_blocks.3.resnets" in "\n".join(lines(told))
    assert told.reach.is_global
    assert "largest       " in "\n".join(lines(told))
    assert told.intermediates.largest[0].module == "decoder.up_blocks.2.upsamplers.0.conv"
    sixteen = told.predicted["16"]
    assert sixteen["0"] > sixteen["0.125"] > sixteen["0.25"] > sixteen["0.5"] > 1
    assert told.predicted["32"]["0.25"] < sixteen["0.25"]
