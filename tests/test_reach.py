"""How far decoders look that are known to look so far, and how well the prediction meets tiled decodes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fidelity import reach, registry
from fidelity.errors import LatentsError, WorkerDied
from fidelity.records import (
    DecodePlan,
    Geometry,
    ModelReach,
    Reach,
    Reference,
    RunResult,
    TileAxis,
    TileGrid,
    Tiling,
    from_json,
)
from fidelity.runner import Runner
from fidelity.runs import Options, Run
from fidelity.suite import load
from fidelity.worker import Probed, Refused
from tests.suites import LIMITS, fidelity, write_suite

registry.load_plugins()
BASE = registry.MODELS.get("reference-kl")


class Toy:
    """A runner of a decoder that is written here."""

    def __init__(self, decode, spatial=2, **geometry):
        geometry = Geometry(spatial=spatial, latent_channels=4, sample_channels=4, **geometry)
        family = type("Family", (), {"decode": lambda _, module, z: decode(z), "tile_grid": BASE.family.tile_grid})()
        self.model = replace(BASE, geometry=geometry, family=family)
        self.module, self.device = None, "cpu"


def noise(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


KERNELS = [noise(4, 4, 3, 3, seed=seed) / 6 for seed in (2, 3)]


def convolutions(z):
    """×2 nearest upsampling and two 3×3 convolutions: one latent pixel reaches one more."""
    sample = z.repeat_interleave(2, -1).repeat_interleave(2, -2)
    for kernel in KERNELS:
        sample = torch.nn.functional.conv2d(sample, kernel, padding=1)
    return sample


def statistics(z):
    """No context at all, but the mean of the whole picture is taken out."""
    return (z - z.mean((-2, -1), keepdim=True)).repeat_interleave(2, -1).repeat_interleave(2, -2)


def tiled_error(decode, z, tile, overlap, spatial=2):
    """RMSE in grey levels of an assembly of tiles that is written out here, and its grid."""
    size = z.shape[-2:]
    grid = BASE.family.tile_grid(Geometry(spatial=spatial, latent_channels=4), size, Tiling(tile, overlap))
    full, step = decode(z), int(tile * (1 - overlap))
    out, weights = torch.zeros_like(full), torch.zeros(size[0] * spatial, size[1] * spatial)
    ramps = []
    for axis, extent in ((grid.rows, size[0]), (grid.cols, size[1])):
        count = len(range(0, extent, step))
        ramp = torch.zeros(count, axis.size)
        for number in range(count):
            start, end = number * step * spatial, min((number * step + tile) * spatial, axis.size)
            ramp[number, start:end] = 1
            if number:
                band = min(axis.band, end - start)
                rise = torch.arange(band) / max(1, band)
                ramp[number, start : start + band] = rise
                ramp[:number, start:] = 0
                ramp[number - 1, start : start + band] = 1 - rise
        ramps.append(ramp)
    for i, y in enumerate(ramps[0]):
        for j, x in enumerate(ramps[1]):
            top, left = i * step, j * step
            piece = decode(z[..., top : top + tile, left : left + tile])
            down = slice(top * spatial, top * spatial + piece.shape[-2])
            across = slice(left * spatial, left * spatial + piece.shape[-1])
            weight = y[:, None] * x[None, :]
            out[..., down, across] += piece * weight[down, across]
            weights += weight
    assert torch.allclose(weights, torch.ones_like(weights))
    return float((out - full).square().mean().sqrt()) * 127.5, grid


# ---------------------------------------------------------------- what is measured


def test_a_convolutional_decoder_is_exact_beyond_its_receptive_field():
    found = reach.probe(Toy(convolutions), noise(1, 4, 24, 24))
    assert not found.is_global
    assert reach.radius(found) == 2  # two 3×3 convolutions at twice the resolution: one latent pixel to either side
    assert found.edge[0] > 1.0
    assert max(found.edge[1:]) < 1e-3
    assert found.tone == (0.0, 0.0)
    assert reach.overlap(found, 0.1) == 2


def test_statistics_of_the_whole_picture_reach_everywhere_and_are_no_lost_context():
    found = reach.probe(Toy(statistics), noise(1, 4, 24, 24))
    assert found.is_global
    assert reach.radius(found) is None
    assert max(found.edge) < 0.5 * found.tone[0]
    # the mean of n independent pixels spreads by 1 / √n: a quarter of the area has about twice the error
    assert found.tone[1] / found.tone[0] == pytest.approx(2.0, rel=0.5)
    assert reach.overlap(found, 0.1) is None


@pytest.mark.slow
def test_a_groupnorm_decoder_is_never_exact():
    found = reach.probe(Runner(BASE), noise(1, 4, 32, 32) * 4)
    assert found.is_global
    assert found.pixel[0] > 10 * found.pixel[-1] > 0
    assert found.edge[0] > 3 * found.edge[4]
    assert found.tone[1] > found.tone[0] > 1
    assert found.frames_reason == reach.PICTURES


def frames(shift, causal=True, f_t=4):
    """A video decoder that is nearest in time, the first frame alone, plus each frame's neighbour `shift` away."""

    def decode(z):
        mixed = z.clone()
        for by in shift:
            moved = torch.zeros_like(z)
            if by > 0:
                moved[:, :, by:] = z[:, :, :-by]
            else:
                moved[:, :, :by] = z[:, :, -by:]
            mixed = mixed + moved / 2
        sample = mixed.repeat_interleave(f_t, 2)
        return convolutions_of_frames(sample[:, :, f_t - 1 :] if causal else sample)

    return decode


def convolutions_of_frames(sample):
    flat = convolutions(sample.transpose(1, 2).flatten(0, 1))
    return flat.reshape(sample.shape[0], sample.shape[2], *flat.shape[1:]).transpose(1, 2)


@pytest.mark.parametrize(
    ("shift", "first_alone", "before", "after"),
    [((1,), True, 0, 1), ((1, 2), True, 0, 2), ((-1, 1), False, 1, 1), ((), False, 0, 0)],
    ids=["causal", "causal by two", "both ways", "frame by frame"],
)
def test_how_far_one_latent_frame_shows(shift, first_alone, before, after):
    found = reach.probe(Toy(frames(shift, first_alone), temporal=4, video=True), noise(1, 4, 5, 16, 16))
    assert found.frames_reason is None
    assert [change > reach.EXACT for change in found.before] == [d <= before for d in range(3)]
    assert [change > reach.EXACT for change in found.after] == [d <= after for d in range(3)]
    assert reach.causal(found) is (before == 0)


def test_too_few_frames_say_so():
    found = reach.probe(Toy(frames((1,)), temporal=4, video=True), noise(1, 4, 2, 16, 16))
    assert (found.before, found.after) == ((), ())
    assert "2 latent frames" in str(found.frames_reason)
    assert reach.causal(found) is None


def test_latents_that_cannot_be_cut_are_refused_and_become_a_reason():
    with pytest.raises(LatentsError, match="8×24 are too small to cut: 12 latent pixels"):
        reach.probe(Toy(convolutions), noise(1, 4, 8, 24))
    told = reach.measure(Toy(convolutions), "m", "tiny", noise(1, 4, 8, 24), [])
    assert told.reach is None
    assert "too small to cut" in str(told.reason)


def test_large_latents_are_probed_in_their_middle_alone():
    seen = []

    def decode(z):
        seen.append(tuple(z.shape))
        return convolutions(z)

    reach.probe(Toy(decode), noise(5, 4, 80, 40))
    assert seen[0] == (2, 4, 32, 32)
    assert {shape[-1] for shape in seen} == {32, 16, 8}


# ---------------------------------------------------------------- what is predicted


def test_the_weights_of_all_tiles_add_up_to_one_everywhere():
    for axis in (
        TileAxis((0, 96, 192), 32, 128, 256),
        TileAxis((0, 64, 128, 192), 64, 128, 200),
        TileAxis((0, 128), 0, 128, 160),
    ):
        total = torch.zeros(axis.size, dtype=torch.float64)
        for start, length, weight, cut in reach._tiles(axis, 8):
            assert len(weight) == len(cut) <= length
            total[start : start + len(weight)] += weight
        assert torch.allclose(total, torch.ones(axis.size, dtype=torch.float64))


def test_distance_is_to_the_nearest_cut_and_the_pictures_border_is_none():
    first, last = reach._tiles(TileAxis((0, 16), 0, 16, 32), 8)
    assert first[3].tolist() == [1] * 8 + [0] * 8
    assert last[3].tolist() == [0] * 8 + [1] * 8


def test_one_tile_that_holds_the_picture_costs_nothing():
    whole = TileGrid(TileAxis((0,), 0, 256, 256), TileAxis((0,), 0, 256, 256))
    assert reach.predict(Reach((1.0,), (9.0,), (3.0, 4.0), (16, 8), is_global=True), whole, 8) == 0.0


def test_tone_follows_a_power_of_the_area():
    found = Reach((1.0,), (0.0,), (2.0, 4.0), (16, 8), is_global=True)
    assert reach.tone(found, 256) == pytest.approx(2.0)
    assert reach.tone(found, 64) == pytest.approx(4.0)
    assert reach.tone(found, 1024) == pytest.approx(1.0)
    assert reach.tone(Reach((1.0,), (0.0,), (0.0, 0.0), (16, 8), is_global=False), 64) == 0.0


@pytest.mark.parametrize("overlap", [0.0, 0.125, 0.25, 0.5])
@pytest.mark.parametrize("decode", [convolutions, statistics])
def test_prediction_meets_toy_decodes(decode, overlap):
    found = reach.probe(Toy(decode), noise(2, 4, 32, 32))
    seen, grid = tiled_error(decode, noise(1, 4, 40, 56, seed=9), 8, overlap)
    told = reach.predict(found, grid, 2)
    if decode is convolutions and overlap:
        assert told == pytest.approx(seen, rel=0.35)
    else:
        assert told == pytest.approx(seen, rel=0.25)


@pytest.mark.slow
def test_prediction_meets_the_embedded_model_within_a_factor_of_two():
    """docs/design/reach.md holds the figures; `python benchmarks/reach.py` prints them."""
    runner = Runner(BASE)
    z = registry.LATENTS.get("photo-pair").make(BASE, runner.module).tensor
    full = runner.decode(z, DecodePlan(), trace=False).sample
    wanted = [("photo-pair", tuple(z.shape), Tiling(16, overlap)) for overlap in (0.0, 0.25, 0.5)]
    ratios = {}
    for each in reach.measure(runner, "m", "photo-pair", z, wanted).predictions:
        plan = DecodePlan(tiling=Tiling(each.tile, each.overlap))
        seen = (runner.decode(z, plan, trace=False).sample - full).square().mean().sqrt() * 127.5
        ratios[each.overlap] = each.rmse / float(seen)
    assert set(ratios) == {0.0, 0.25, 0.5}
    assert all(0.5 < ratio < 2.0 for ratio in ratios.values()), ratios
    assert ratios[0.0] == pytest.approx(1.0, abs=0.25)


# ---------------------------------------------------------------- in a run


class Answers:
    """A pool that answers every probe as it is told."""

    environment: dict[str, str] = {}  # noqa: RUF012 - never written

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    def run(self, tasks, on_reply, on_death):
        for task in tasks:
            self.asked.append(task)
            reply = self.answer(task)
            on_death(task, reply) if isinstance(reply, WorkerDied) else on_reply(task, reply)


def probed(suite, answer, held=("ramp", "contrast")):
    run = Run(suite, Answers(answer), set(), Options())
    run.references = {
        ("reference-kl", name): Reference("reference-kl", name, 0.0, 1.0, ok=name in held, same_environment=True)
        for name in ("ramp", "contrast")
    }
    run._probe_models()
    return run


@pytest.fixture
def suite(tmp_path):
    matrix = 'dtype = ["fp32", "bf16"]\ntiling = [false, { tile = 16, overlap = 0.25 }, { tile = 8, overlap = 0.0 }]'
    path = write_suite(tmp_path, matrix)
    path.write_text(path.read_text().replace('["ramp"]', '["ramp", "contrast"]'))
    return load(path, registry)


def test_a_run_probes_each_tiled_model_once_with_all_its_tilings(suite):
    told = ModelReach("reference-kl", "ramp", None, reason="asked")
    run = probed(suite, lambda _: Probed(told))
    (task,) = run.pool.asked
    assert (task.model, task.latents) == ("reference-kl", "ramp")
    both = (Tiling(16, 0.25), Tiling(8, 0.0))
    assert set(task.tilings) == {(name, tiling) for name in ("ramp", "contrast") for tiling in both}
    assert run.reach == {"reference-kl": told}


def test_a_drifted_reference_is_not_probed(suite):
    some = probed(suite, lambda _: Probed(ModelReach("m", "l", None)), held=("contrast",))
    assert some.pool.asked[0].latents == "contrast"
    none = probed(suite, lambda _: pytest.fail("it was asked"), held=())
    assert none.reach["reference-kl"].reason == "no reference of this model holds"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(Refused("the golden vanished", wrong_request=True), "the golden vanished"), (WorkerDied("it died"), "it died")],
)
def test_a_probe_that_fails_is_told_and_ends_no_run(suite, answer, reason):
    told = ModelReach("reference-kl", "ramp", None, reason=reason)
    assert probed(suite, lambda _: answer).reach == {"reference-kl": told}


@pytest.mark.slow
def test_a_run_stores_reach_predictions_and_headroom(tmp_path):
    write_suite(tmp_path, "tiling = [{ tile = 16, overlap = 0.25 }]", LIMITS.replace("6.0", "30.0"))
    done = fidelity("run", "small.toml", "--record-missing", "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    stored = from_json((tmp_path / "out/results.json").read_bytes(), RunResult)
    (found,) = stored.reach
    assert (found.model, found.latents, found.reason) == ("reference-kl", "ramp", None)
    assert found.reach.is_global
    (told,) = found.predictions
    assert (told.latents, told.tile, told.overlap) == ("ramp", 16, 0.25)
    assert 0.3 < told.rmse / stored.cases[0].measurements["rmse"].value < 2.0
    (reference,) = stored.reference
    assert reference.headroom.tightest > 1
    assert len(reference.headroom.layers) == 10
    assert "Predicted is" in (tmp_path / "out/summary.md").read_text()
