"""`fidelity predict`: a prediction of a whole decode, its law, its budget, and requests that cannot be."""

from __future__ import annotations

import importlib.util
import json
from itertools import islice
from pathlib import Path

import msgspec
import pytest
import torch

from fidelity import cli, extent, predict, prediction, registry, wording
from fidelity.errors import IllegalTiling, ModelError, RequestError, UnknownName
from fidelity.models import configs
from fidelity.models.reference import FOLDER
from fidelity.records import DecodePlan, Temporal, Tiling

registry.load_plugins()
KL = registry.MODELS.get("reference-kl")
SIZE = (128, 128)
ROOT = Path(__file__).resolve().parent.parent


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        cli.main(["predict", *arguments])
    printed = capsys.readouterr()
    return end.value.code, printed.out, printed.err


@pytest.fixture(scope="module")
def found():
    return predict.predict(KL, SIZE, DecodePlan(dtype="fp16"), device="cuda", with_law=True, budget=64 * 2**20)


# ---------------------------------------------------------------- what it says


@pytest.mark.slow
def test_json_is_one_object_with_the_peaks_and_stages(capsys):
    code, out, _ = run(capsys, "reference-kl", "--size", "64x96", "--json")
    told = json.loads(out)
    assert code == 0
    load, *stages = told["stages"]
    assert load["name"] == "load"
    assert told["allocated_peak_bytes"] == max(stage["peak_bytes"] for stage in stages)
    assert told["reserved_peak_bytes"] is None
    assert told["reserved_reason"] == predict.NOT_RESERVED
    assert [stage["name"] for stage in stages] == ["decode", "tile", "convert"]
    assert told["latents"] == [1, 4, 8, 12]
    assert told["sample"] == [1, 3, 64, 96]
    assert told["weights_bytes"] == 4 * sum(weight.numel() for weight in KL.load().parameters())


@pytest.mark.slow
def test_words_name_the_peak_its_holders_and_the_largest_tensor(found):
    text = "\n".join(prediction.lines(found))
    assert found.largest.times_latents == found.largest.bytes / (4 * 16 * 16 * 2)
    for said in ("allocated peak", "reserved peak", "at the peak", "weights", "NHWC", found.largest.module, "law",
                 "budget"):  # fmt: skip
        assert said in text


def test_fp16_on_a_cpu_is_predicted_though_it_is_emulated():
    half, full = (predict.of_shape(KL, (1, 4, 16, 16), DecodePlan(dtype=dtype), "cpu") for dtype in ("fp16", "fp32"))
    assert half.weights_bytes * 2 == full.weights_bytes
    assert 0.45 < half.allocated_peak_bytes / full.allocated_peak_bytes < 0.55
    upcast = predict.of_shape(KL, (1, 4, 16, 16), DecodePlan(dtype="fp16", force_upcast=True), "cpu")
    assert upcast.allocated_peak_bytes == full.allocated_peak_bytes


def test_a_prediction_leaves_no_trace_on_torch():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    predict.of_shape(KL, (1, 4, 8, 8), DecodePlan(slicing=False), "cuda")
    assert torch.equal(torch.rand(3), expected)
    assert torch.ones(2).sum() == 2


# ---------------------------------------------------------------- law and budget


def test_the_law_holds_for_sizes_that_it_was_not_fitted_to(found):
    other = predict.of_shape(KL, (1, 4, 40, 24), DecodePlan(dtype="fp16"), "cuda")
    assert found.law.largest_error < 0.02
    assert found.law.peak(40 * 8, 24 * 8) == pytest.approx(other.allocated_peak_bytes, rel=0.02)
    assert found.law.constant_bytes == pytest.approx(found.weights_bytes, abs=9 * 2**20)  # and cuBLAS' 8.1 MiB


def test_a_budget_gives_the_largest_picture_that_fits(found):
    room = found.budget
    assert room.peak_bytes <= room.budget_bytes
    assert room.fits == (found.allocated_peak_bytes <= room.budget_bytes)
    rows = room.height // 8
    larger = predict.of_shape(KL, (1, 4, rows + 3, rows + 3), DecodePlan(dtype="fp16"), "cuda")
    assert larger.allocated_peak_bytes > room.budget_bytes


def test_a_class_of_one_size_has_a_budget_and_no_law():
    room = predict.predict(configs.from_name("rae-dinov2"), (256, 256), DecodePlan(dtype="bf16"), budget=2**31)
    assert room.law is None
    assert (room.budget.fits, room.budget.height, room.budget.law_bytes) == (True, 256, None)
    assert any(line.endswith("fits; the only size that the class decodes") for line in prediction.lines(room))
    need = room.allocated_peak_bytes
    small = extent.only(room, need - 1)
    assert (small.fits, small.height) == (False, None)
    assert extent.only(room, need).fits


def test_a_budget_beyond_all_machines_ends_where_predictions_end():
    room = predict.predict(KL, (64, 64), budget=10**24).budget
    assert room.fits
    assert room.height * room.width * 3 <= extent.MOST_VALUES


def test_a_budget_below_the_weights_fits_nothing():
    small = predict.predict(KL, (64, 64), device="cpu", budget=2**20).budget
    assert (small.fits, small.height, small.peak_bytes) == (False, None, None)
    assert "do not depend on its size" in small.reason


@pytest.mark.slow
def test_a_tiled_budget_reckons_with_the_assembly_that_large_pictures_need():
    plan, room = DecodePlan(dtype="fp16", tiling=Tiling(16, 0.25)), 100 * 2**20
    told = predict.predict(KL, (256, 256), plan, device="cuda", budget=room)
    fits = told.budget
    assert {"tile", "assemble", "convert"} == set(told.law.stages)
    assert fits.height > 1024
    assert fits.peak_bytes <= room
    assert fits.law_bytes == pytest.approx(fits.peak_bytes, rel=0.02)
    rows = fits.height // 8
    more = rows + max(2, rows // 32)
    assert predict.of_shape(KL, (1, 4, more, more), plan, "cuda").allocated_peak_bytes > room
    sizes = [line for line in prediction.lines(told) if line.startswith("  256x256")]
    assert len(sizes) == 1
    assert sizes[0].endswith("%")


# ---------------------------------------------------------------- at once, beside others, before the decode


def test_decodes_at_once_share_the_weights_and_their_peaks_may_coincide():
    one = predict.predict(KL, SIZE, DecodePlan(dtype="fp16"), device="cuda")
    four = predict.predict(KL, SIZE, DecodePlan(dtype="fp16"), device="cuda", concurrency=4, resident=2**30)
    each = one.allocated_peak_bytes - one.weights_bytes
    assert one.together is None
    assert four.allocated_peak_bytes == one.allocated_peak_bytes
    assert four.together.rule.each_bytes == each
    assert four.together.rule.reserve_bytes == 2**30 + one.weights_bytes + 4 * each
    more = four.together.reserved_peak_bytes - 2**30 - one.weights_bytes
    assert more == 4 * (one.reserved_peak_bytes - one.weights_bytes)
    said = "\n".join(prediction.lines(four))
    assert "4 decodes at once, which share the weights beside 1.00 GiB" in said
    assert "for each decode until it has ended: their peaks may coincide" in said


def test_a_budget_is_for_all_that_is_there():
    room = 64 * 2**20
    alone = predict.predict(KL, SIZE, DecodePlan(dtype="fp16"), budget=room).budget
    beside = predict.predict(KL, SIZE, DecodePlan(dtype="fp16"), concurrency=2, resident=2**24, budget=room).budget
    assert beside.height < alone.height
    assert beside.peak_bytes <= room
    assert beside.law_bytes == pytest.approx(beside.peak_bytes, rel=0.05)  # of both, and what is beside them
    shape = (1, 4, beside.height // 8, beside.width // 8)
    one = predict.of_shape(KL, shape, DecodePlan(dtype="fp16"), "cpu")
    assert beside.peak_bytes == predict.together(one, 2, 2**24).rule.reserve_bytes


@pytest.mark.parametrize(("dtype", "device"), [("fp32", "cpu"), ("bf16", "cpu"), ("bf16", "cuda")])
def test_loading_is_predicted_as_from_pretrained_does_it(dtype, device, tmp_path):
    from diffusers import AutoencoderKL

    from fidelity.memory import profiler

    told = predict.of_shape(KL, (1, 4, 8, 8), DecodePlan(dtype=dtype), device)
    stages = {stage.name: stage.peak_bytes for stage in told.stages}
    assert stages.get("onload") == (told.weights_bytes if device == "cuda" else None)
    KL.load().save_pretrained(tmp_path)
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    with profiler.record() as timeline:
        AutoencoderKL.from_pretrained(tmp_path, torch_dtype=kind)
    assert stages["load"] == pytest.approx(max(timeline.alive), rel=0.01)


@pytest.mark.slow
def test_chunks_of_a_video_and_options_are_predicted():
    video = registry.MODELS.get("reference-video")
    whole = predict.predict(video, (64, 64), frames=17)
    cut = predict.predict(video, (64, 64), DecodePlan(temporal=Temporal(2, 0.0)), frames=17)
    assert cut.allocated_peak_bytes < whole.allocated_peak_bytes == cut.untiled_peak_bytes
    ramp = predict.predict(KL, SIZE, DecodePlan(options={"ramp_tiling": "t8o2"}))
    assert ramp.untiled_peak_bytes > ramp.allocated_peak_bytes
    encoder = predict.predict(KL, SIZE, DecodePlan(options={"encode": True}))
    assert encoder.sample == (1, 4, 16, 16)
    assert not encoder.findings
    stream = DecodePlan(offload="group_block", options={"offload_stream": True}, tiling=Tiling(8, 0.25))
    told = predict.predict(KL, SIZE, stream, device="cuda")
    assert told.pinned_bytes > told.weights_bytes / 2  # its blocks, in powers of two
    with pytest.raises(RequestError, match="a preview needs what its own decode needs"):
        predict.predict(KL, SIZE, DecodePlan(options={"preview": True}))


# ---------------------------------------------------------------- findings


def test_tiles_are_held_against_the_whole():
    tiled = predict.predict(KL, (192, 192), DecodePlan(tiling=Tiling(16, 0.25)))
    whole = predict.predict(KL, (192, 192))
    assert tiled.untiled_peak_bytes == whole.allocated_peak_bytes > tiled.allocated_peak_bytes
    assert whole.untiled_peak_bytes is None
    assert not [finding for finding in tiled.findings if "does not lower" in finding]


@pytest.mark.parametrize(("peak", "says"), [(99, False), (100, True), (101, True)])
def test_tiles_that_save_nothing_are_a_finding(found, peak, says):
    tiled = msgspec.structs.replace(found, allocated_peak_bytes=peak, untiled_peak_bytes=100, stages=())
    assert bool([said for said in prediction.findings(tiled) if "does not lower the peak" in said]) == says


def test_an_assembly_or_conversion_that_needs_most_is_a_finding(found):
    stages = tuple(
        prediction.Stage(name, peak) for name, peak in (("decode", 30), ("tile", 20), ("assemble", 30), ("convert", 40))
    )
    said = prediction.findings(msgspec.structs.replace(found, untiled_peak_bytes=10**9, stages=stages))
    assert len([line for line in said if line.startswith(("assembling", "the conversion"))]) == 2


# ---------------------------------------------------------------- configurations


WEIGHTS = {"sd15": 83_653_863, "sdxl": 83_653_863, "flux": 83_819_683, "sd3": 83_819_683, "taesd": 2_445_063,
           "wan21": 126_892_531, "qwen-image": 126_892_531}  # fmt: skip


LARGE_WINDOWS = {"ltx-2.5-diffusion-decoder": (8, 49)}
"""Latent pixels of a side and frames, where attention needs more than two by two."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.campaign) if name in LARGE_WINDOWS else name
                                  for name in configs.known()])  # fmt: skip
def test_configurations_that_ship_decode(name):
    model = configs.from_name(name)
    geometry = model.geometry
    frames = geometry.sample_frames(max(2, model.family.least_frames)) if geometry.video else 1
    cells, frames = LARGE_WINDOWS.get(name, (2, frames))
    side = geometry.size[0] * geometry.spatial if geometry.size else cells * geometry.spatial
    if model.family.absent() is not None:
        pytest.skip(str(model.family.absent()))
    told = predict.predict(model, (side, side), DecodePlan(dtype="bf16"), frames=frames, device="cuda")
    assert told.sample[-2:] == (side, side)
    assert told.allocated_peak_bytes > told.weights_bytes
    if name in WEIGHTS:
        assert told.weights_bytes == 2 * WEIGHTS[name]
    with pytest.raises(ModelError, match="configuration without weights"):
        model.load()


def test_frames_left_out_are_the_fewest_that_the_class_decodes():
    def frames(name: str) -> int:
        model = configs.from_name(name)
        shape = predict.latents_shape(model, (64, 64), None, 1)
        return model.geometry.sample_frames(shape[2])

    assert [frames(name) for name in ("wan21", "allegro", "minimax-h3")] == [1, 4, 22]


@pytest.mark.slow
def test_a_picture_of_another_size_than_asked_is_a_finding():
    model = configs.from_name("hunyuan-image-2.1-refiner")
    found = predict.predict(model, (96, 96), DecodePlan(dtype="bf16", tiling=Tiling(4, 0.25)))
    assert found.sample[-2:] == (6, 6)
    assert "gives 6×6 under this plan where 96×96 was asked" in found.findings[0]


def test_a_config_is_enough(tmp_path, capsys):
    config = (FOLDER / "config.json").read_text()
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text(config)
    for path in (tmp_path, tmp_path / "vae", tmp_path / "vae" / "config.json"):
        code, out, _ = run(capsys, f"mine={path}", "--size", "64x64")
        assert code == 0
        assert out.startswith("mine · AutoencoderKL")


# ---------------------------------------------------------------- the benchmark, a sample of it


@pytest.mark.slow
def test_a_sample_of_the_benchmark_is_within_its_limits(capsys, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    spec = importlib.util.spec_from_file_location("benchmark_of_predictions", ROOT / "benchmarks" / "prediction.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        matrix = list(benchmark.of_matrix(ROOT / "suites" / "reference.toml", 60))
        points = [*matrix, *islice(benchmark.of_families(), 2), *islice(benchmark.of_published(), 1)]
    finally:
        torch.set_num_threads(before)
    assert len(matrix) >= 2
    assert all(abs(point.error) < 0.005 for point in points)
    assert benchmark.plot(points).count("<circle") == len(points)
    assert benchmark.of_published_families(["taesd"])
    assert "taesd" in capsys.readouterr().out


# ---------------------------------------------------------------- requests that cannot be


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["sdlx", "--size", "64x64"], "did you mean 'sdxl'"),
        (["sdxl", "--size", "64"], "write HEIGHTxWIDTH"),
        (["sdxl", "--size", "1004x64"], "multiples of 8 pixels; nearest: 1008x64"),
        (["sdxl", "--size", "0x64"], "must be at least 1"),
        (["sdxl", "--size", "64x64", "--frames", "5"], "image autoencoder: leave --frames out"),
        (["wan21", "--size", "64x64", "--frames", "8"], "nearest: 9"),
        (["minimax-h3", "--size", "64x64", "--frames", "1"], "nearest: 22"),
        (["sdxl", "--size", "64x64", "--overlap", "0.5"], "--overlap without --tile"),
        (["sdxl", "--size", "64x64", "--temporal-overlap", "0.5"], "--temporal-overlap without --temporal-tile"),
        (["sdxl", "--size", "64x64", "--tile", "4", "--overlap", "1"], "up to, not including, 1"),
        (["sdxl", "--size", "64x64", "--temporal-tile", "4"], "an image autoencoder has no frames"),
        (["sdxl", "--size", "64x64", "--concurrency", "0"], "at least 1 decode"),
        (["sdxl", "--size", "64x64", "--resident", "lots"], "--resident 'lots': write a size above 0"),
        (["sdxl", "--size", "64x64", "--concurrency", "2", "--offload", "sequential"], "send away the weights"),
        (["sdxl", "--size", "64x64", "--offload", "group_leaf", "--offload-stream"], "on cuda"),
        (["sdxl", "--size", "64x64", "--tile", "8"], "tile 8 is not smaller than the latents"),
        (["sdxl", "--size", "256x256", "--tile", "10", "--overlap", "0.33"], "nearest legal"),
        (["sdxl", "--size", "64x64", "--slicing"], "a batch of one has nothing to slice"),
        (["sdxl", "--size", "64x64", "--force-upcast"], "fp16 only"),
        (["sdxl", "--size", "64x64", "--budget", "many"], "write a size above 0"),
        (["sdxl", "--size", "64x64", "--budget", "0GiB"], "write a size above 0"),
        (["sdxl", "--size", "64x64", "--plan", "bf16", "--tile", "4"], "--plan and --tile"),
        (["=x", "--size", "64x64"], "write NAME=PATH"),
        (["mine=nowhere", "--size", "64x64"], "no config.json at nowhere"),
        (["sdxl", "--size", "64x64", "--plan", "bf16", "--overlap", "0"], "--plan and --overlap"),
        (["sdxl", "--size", "64x64", "--plan", "bf16", "--dtype", "fp32"], "--plan and --dtype"),
        (["sdxl", "--size", "64x64", "--budget", "4"], "'4' is 4 bytes: write its unit, as in 4GiB"),
        (["sdxl", "--size", "64x64", "--budget", "9" * 400], "more than any device has"),
        (["sdxl", "--size", "80000000000x80000000000"], "choose a smaller size"),
        (["sdxl", "--size", "64x64", "--batch", "100000000000000000"], "choose a smaller size"),
        (["wan21", "--size", "64x64", "--frames", "100000000000"], "nearest: 100000000001"),
        (["wan21", "--size", "64x64", "--frames", "100000000001"], "choose a smaller size"),
        (["wan21", "--size", "64x64", "--frames", "9" * 30], "choose a smaller size"),
        (["rae-dinov2", "--size", "512x512"], "decodes 256x256 alone"),
        (["rae-dinov2", "--size", "256x256", "--law"], "no law over sizes"),
        (["svd", "--size", "64x64", "--offload", "disk", "--temporal-tile", "1"], "leave it out"),
    ],
)
def test_wrong_requests_are_one_line_and_status_2(arguments, says, capsys):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert says in err


def test_requests_by_function_are_refused_too():
    with pytest.raises(RequestError, match="device 'mps'"):
        predict.predict(KL, SIZE, device="mps")
    with pytest.raises(IllegalTiling):
        predict.predict(KL, SIZE, DecodePlan(tiling=Tiling(10, 0.33)))
    with pytest.raises(UnknownName, match="did you mean 'flux'"):
        configs.from_name("fluxx")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8GiB", 8 * 2**30),
        ("6.5 GB", 6_500_000_000),
        ("512mib", 2**29),
        ("1TiB", 2**40),
        ("100B", 100),
        ("1048576", 2**20),
    ],
)
def test_budgets(text, count):
    assert wording.parse_bytes(text, "--budget") == count
