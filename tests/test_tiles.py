"""`fidelity tiles`: what is legal, why not, where tiles lie, and as which attributes; an illegal one is refused."""

from __future__ import annotations

import json

import pytest

from fidelity import registry, tiles
from fidelity.errors import IllegalTiling, RequestError
from fidelity.models import configs
from fidelity.records import Temporal, Tiling, to_json
from tests.suites import fidelity

registry.load_plugins()
KNOWN = [*registry.MODELS, *configs.known()]


def model(name: str):
    return registry.MODELS.get(name) if name in registry.MODELS else configs.from_name(name)


@pytest.mark.parametrize("name", KNOWN)
def test_every_known_model_says_what_is_legal_and_what_it_is_as_attributes(name):
    asked = model(name)
    found = tiles.report(asked)
    assert (asked.family.tile_controls == "none") == (not found.tiles)
    assert bool(asked.family.temporal_attributes()) == bool(found.chunks)
    for legal in found.tiles:
        if legal.first_illegal is not None:
            assert legal.first_illegal not in legal.tiles
            assert legal.reason
            with pytest.raises(IllegalTiling, match="nearest"):
                tiles.report(asked, tiling=Tiling(legal.first_illegal, legal.overlap))
    some = next((each for each in found.tiles if each.tiles and each.overlap == 0.25), None)
    if some is not None and asked.family.name != "LTX2VideoDiffusionDecoderModel":  # there it depends on the size
        cut = tiles.report(asked, tiling=Tiling(some.tiles[0], 0.25)).tiling
        names = {line.removeprefix("vae.").partition(" ")[0].partition("(")[0] for line in cut.attributes}
        assert names <= {*asked.family.tiling_attributes(), "enable_tiling"}
        assert names
    assert json.loads(to_json(found))["family"] == asked.family.name


def test_where_the_tiles_of_a_size_lie():
    cut = tiles.report(model("reference-kl"), size=(192, 256), tiling=Tiling(16, 0.25)).tiling
    assert (cut.stride, cut.sample_tile, cut.sample_overlap, cut.sample_stride, cut.count) == (12, 128, 32, 96, 6)
    assert cut.axes["rows"] == tiles.AxisTiles(((0, 128), (96, 192)), 32)
    assert cut.axes["cols"] == tiles.AxisTiles(((0, 128), (96, 224), (192, 256)), 32)
    assert cut.attributes[-1] == "vae.tile_overlap_factor = 0.25"


def test_one_tile_that_holds_the_picture_blends_nothing():
    cut = tiles.report(model("reference-kl"), size=(128, 64), tiling=Tiling(16, 0.25)).tiling
    assert cut.axes == {"rows": tiles.AxisTiles(((0, 128),), 0), "cols": tiles.AxisTiles(((0, 64),), 0)}


def test_chunks_of_a_video_and_its_frames():
    found = tiles.report(model("reference-video"), frames=33, temporal=Temporal(4, 0.25))
    assert found.latent_frames == 9
    assert found.frames_law == "one for the first latent frame, 4 for each later one"
    assert found.chunking.stride == 3
    assert found.chunking.attributes[1:] == (
        "vae.tile_sample_min_num_frames = 16",
        "vae.tile_sample_stride_num_frames = 12",
    )
    assert found.chunking.axes["frames"].spans[-1][1] == 33


@pytest.mark.parametrize(
    ("name", "asked", "said"),
    [
        ("reference-kl", {"size": (100, 96)}, "multiples of 8 pixels; nearest: 96x96"),
        ("reference-kl", {"size": (0, 96)}, "nearest: 8x96"),
        ("reference-kl", {"frames": 5}, "is a model of pictures"),
        ("wan21", {"frames": 80}, "nearest: 81"),
        ("wan21", {"frames": 0}, "nearest: 1"),
        ("wan21", {"temporal": Temporal(4, 0.25)}, "does not cut a video into chunks"),
        ("sdxl", {"tiling": Tiling(10, 0.25)}, "nearest legal: overlap 0.2 with this tile, or tile 8"),
        ("wan21", {"tiling": Tiling(10, 0.25)}, "nearest legal: overlap 0.2 with this tile"),
        ("sdxl", {"tiling": Tiling(0, 0.25)}, "at least 1 latent pixel"),
        ("sdxl", {"tiling": Tiling(8, 1.0)}, "below 1"),
        ("movq", {"tiling": Tiling(8, 0.25)}, "does not tile"),
    ],
)
def test_what_cannot_be_is_refused_with_the_next_step(name, asked, said):
    with pytest.raises(RequestError) as refused:
        tiles.report(model(name), **asked)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_lines_tell_why_and_where():
    said = "\n".join(tiles.lines(tiles.report(model("sdxl"), size=(1024, 512), tiling=Tiling(64, 0.25))))
    assert "tile o=0.25   4, 8, … 128 (every 4) latent pixels; not 5: tiles start 24 sample pixels apart" in said
    assert "64 latent pixels every 48 = 512 pixels every 384, 128 of them overlapping" in said
    assert "3 × 2 = 6 tiles" in said
    assert "rows    0–512, 384–896, 768–1024, the first 128 of each later one blended" in said
    assert "  vae.tile_latent_min_size = 64" in said
    assert "none: the class does not tile" in "\n".join(tiles.lines(tiles.report(model("movq"))))


@pytest.mark.slow
def test_the_command_line_takes_a_config_alone(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(configs.from_name("wan21").config))
    done = fidelity("tiles", f"mine={tmp_path}", "--tile", "32", "--size", "480x832", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["model"], found["family"]) == ("mine", "AutoencoderKLWan")
    assert found["tiling"]["sample_stride"] == 192
    assert len(found["tiling"]["axes"]["cols"]["spans"]) == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("sdxl", "--tile", "10"), "fidelity: AutoencoderKL cannot tile by 10 with overlap 0.25"),
        (("sdxl", "--overlap", "0.5"), "--overlap without --tile"),
        (("wan21", "--temporal-overlap", "0.5"), "--temporal-overlap without --temporal-tile"),
        (("sdxxl",), "did you mean 'sdxl'"),
        (("sdxl", "--size", "12"), "write HEIGHTxWIDTH"),
    ],
)
def test_a_wrong_request_ends_with_two(arguments, said, tmp_path):
    done = fidelity("tiles", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not done.stdout
