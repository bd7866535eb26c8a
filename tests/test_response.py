"""The stages after the decode: diffusers' own conversion bit for bit, and figures that arithmetic knows."""

from __future__ import annotations

import io
import subprocess
import sys
import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from fidelity import conversion, response
from fidelity.records import DecodePlan, MemoryTrace, Stage

RANGE = (-1.0, 1.0)
MIB = 2**20
LARGE = 2048


def sample_of(*shape, dtype=torch.float32, seed=0):
    """Smooth with a little noise, and a little out of range, as decoders give them."""
    side = torch.linspace(-1.2, 1.2, shape[-1])
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul_(0.02)
    return (side * torch.linspace(-1, 1, shape[-2])[:, None] + noise).to(dtype)


def part(found, name):
    (stage,) = [stage for stage in found if stage.part == name]
    return stage


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(response, "_KEPT", {})


# ---------------------------------------------------------------- the steps are diffusers' own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_are_converted_as_by_diffusers(dtype, channels):
    from diffusers.image_processor import VaeImageProcessor

    sample = sample_of(2, channels, 24, 40, dtype=dtype)
    processor = VaeImageProcessor()
    unit = conversion.denormalise(sample, RANGE)
    array = conversion.array_of(unit)
    pictures = conversion.to_pil(conversion.to_uint8(array))
    assert torch.equal(unit, processor.postprocess(sample, output_type="pt"))
    assert np.array_equal(array, processor.postprocess(sample, output_type="np"))
    theirs = processor.postprocess(sample, output_type="pil")
    assert [(one.mode, one.tobytes()) for one in pictures] == [(one.mode, one.tobytes()) for one in theirs]


def test_clips_are_converted_as_by_diffusers():
    from diffusers.video_processor import VideoProcessor

    sample = sample_of(1, 3, 5, 16, 24)
    array = conversion.array_of(conversion.denormalise(sample[0].transpose(0, 1), RANGE))
    processor = VideoProcessor()
    assert np.array_equal(np.stack([array]), processor.postprocess_video(sample, output_type="np"))
    (theirs,) = processor.postprocess_video(sample, output_type="pil")
    mine = conversion.to_pil(conversion.to_uint8(array))
    assert [one.tobytes() for one in mine] == [one.tobytes() for one in theirs]


def test_another_range_is_mapped_by_its_own_ends():
    sample = torch.tensor([-0.5, 0.0, 0.5, 1.0, 2.0]).reshape(1, 1, 1, 5)
    assert conversion.denormalise(sample, (0.0, 1.0)).flatten().tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]


def test_files_are_what_they_say():
    picture = conversion.to_pil(conversion.to_uint8(conversion.array_of(torch.rand(1, 3, 32, 48))))[0]
    files = {kind: conversion.encode(picture, kind) for kind in conversion.PICTURE_FILES}
    opened = {kind: Image.open(io.BytesIO(file)) for kind, file in files.items()}
    assert {kind: (one.format, one.size) for kind, one in opened.items()} == {
        kind: (kind.upper(), (48, 32)) for kind in files
    }
    assert np.array_equal(np.asarray(opened["PNG"]), np.asarray(picture)), "PNG loses nothing"
    tables = Image.open(io.BytesIO(conversion.encode(picture, "JPEG"))).quantization
    again = io.BytesIO()
    picture.save(again, format="JPEG", quality=95)
    assert tables == Image.open(again).quantization


@pytest.mark.parametrize("size", [(16, 24), (17, 23)], ids=["even", "odd"])
def test_a_clip_is_sent_whole(size):
    av = pytest.importorskip("av", reason="PyAV is not installed: pip install 'fidelity[video]'")
    shade = [torch.full((3, *size), level / 4) for level in range(5)]
    frames = conversion.to_pil(conversion.to_uint8(conversion.array_of(torch.stack(shade))))
    assert Image.open(io.BytesIO(conversion.animation(frames))).n_frames == 5
    with av.open(io.BytesIO(conversion.film(frames))) as container:
        track = container.streams.video[0]
        seen = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert (track.codec_context.name, len(seen), seen[0].shape[:2]) == ("h264", 5, size)
    assert np.abs(np.array([one.mean() for one in seen]) - np.array([0, 64, 128, 191, 255])).max() < 8


# ---------------------------------------------------------------- figures that arithmetic knows


@pytest.fixture(scope="module")
def large():
    """2048² in fp32, and how many pixels that is; in a process of its own, whose heap has no holes of other tests."""
    code = (
        "from tests.test_response import *\n"
        "torch.set_num_threads(1)\n"
        "found = response.stages(sample_of(1, 3, LARGE, LARGE), RANGE, held_bytes=7)\n"
        "sys.stdout.buffer.write(msgspec.json.encode(found))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, cwd=Path(__file__).parents[1])
    return msgspec.json.decode(done.stdout, type=tuple[Stage, ...]), LARGE * LARGE


@pytest.mark.slow
def test_allocated_is_the_sample_and_two_temporaries_and_what_is_held_besides(large):
    found, pixels = large
    assert part(found, "denormalise").peak_bytes == pytest.approx(3 * 12 * pixels + 7, abs=64)
    # a float32 tensor in main memory is its own array: nothing is copied
    assert part(found, "float32 array").peak_bytes == pytest.approx(2 * 12 * pixels + 7, abs=64)
    assert [stage.part for stage in found if stage.peak_bytes is None] == ["uint8", "PIL", "PNG", "JPEG", "WebP"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "bytes_per_pixel"),
    [
        ("denormalise", 2 * 12),
        ("uint8", 12 + 12),  # times 255 and rounded, both float32; the result comes when the first is gone
        ("PIL", 3 + 4),  # the array is no picture row by row, so that Pillow gets a copy; its own pixels have 4 bytes
    ],
)
def test_resident_is_within_a_tenth_of_arithmetic(large, name, bytes_per_pixel):
    found, pixels = large
    assert part(found, name).resident_bytes == pytest.approx(bytes_per_pixel * pixels, rel=0.1)


@pytest.mark.slow
def test_no_copy_is_resident_where_none_is_made(large):
    found, pixels = large
    assert part(found, "float32 array").resident_bytes < 0.1 * 12 * pixels


@pytest.mark.slow
def test_numpy_is_counted_to_the_byte_but_for_the_interpreter(large):
    found, pixels = large
    assert part(found, "uint8").traced_bytes == pytest.approx(24 * pixels, abs=64 * 1024)
    assert part(found, "PIL").traced_bytes == pytest.approx(3 * pixels, abs=64 * 1024)
    assert part(found, "denormalise").traced_bytes is None


@pytest.mark.slow
def test_results_are_exact_and_the_copies_are_named(large):
    found, pixels = large
    results = {stage.part: stage.result_bytes / pixels for stage in found if stage.name == "convert"}
    assert results == {"denormalise": 12, "float32 array": 12, "uint8": 3, "PIL": 4}
    held = {stage.part: [(copy.what, copy.bytes // pixels) for copy in stage.held] for stage in found}
    assert held["denormalise"] == [("sample", 12)]
    assert held["uint8"] == [("sample", 12), ("float32 array", 12)]
    assert held["PIL"] == [("sample", 12), ("float32 array", 12), ("uint8 array", 3)]
    assert held["PNG"] == held["WebP"] == [("PIL", 4)], "a server that sends the file holds the picture alone"
    assert all(stage.seconds > 0 for stage in found)


def test_half_precision_is_cast_on_its_way():
    found = response.stages(sample_of(2, 3, 64, 64, dtype=torch.bfloat16), RANGE, held_bytes=0)
    pixels = 2 * 64 * 64
    assert part(found, "denormalise").peak_bytes == pytest.approx(3 * 6 * pixels, abs=64)
    assert part(found, "float32 array").peak_bytes == pytest.approx((6 + 6 + 12) * pixels, abs=64)
    assert part(found, "float32 array").result_bytes == 12 * pixels


def test_encoded_sizes_are_those_of_the_files():
    sample = sample_of(2, 3, 64, 96)
    pictures = conversion.to_pil(conversion.to_uint8(conversion.array_of(conversion.denormalise(sample, RANGE))))
    for stage in response.stages(sample, RANGE, held_bytes=0):
        if stage.name == "encode":
            assert stage.calls == 2
            assert stage.result_bytes == sum(len(conversion.encode(one, stage.part)) for one in pictures)


def test_small_samples_have_no_resident_figure_but_its_reason():
    for stage in response.stages(sample_of(1, 3, 32, 32), RANGE, held_bytes=0):
        assert stage.resident_bytes is None
        assert "lost among the process's own pages" in stage.reason
        assert (stage.peak_bytes is None) == ("past torch's allocator" in stage.reason)


# ---------------------------------------------------------------- clips


def test_a_clip_has_frames_a_stack_and_both_encodings():
    pytest.importorskip("av", reason="PyAV is not installed: pip install 'fidelity[video]'")
    sample = sample_of(2, 3, 5, 32, 48)
    found = response.stages(sample, RANGE, held_bytes=0)
    assert [(stage.name, stage.part) for stage in found] == [
        ("convert", "denormalise"), ("convert", "float32 array"), ("convert", "float32 stack"), ("convert", "uint8"),
        ("convert", "PIL"), ("encode", "WebP"), ("encode", "MP4"),
    ]  # fmt: skip
    pixels = 5 * 32 * 48
    assert part(found, "uint8").result_bytes == 3 * pixels, "(T, H, W, 3) of one clip"
    assert part(found, "float32 stack").traced_bytes == pytest.approx(12 * pixels, abs=8192)
    assert part(found, "denormalise").held[0].bytes == sample.numel() * 4, "the other clip is there too"
    assert part(found, "denormalise").peak_bytes == pytest.approx(sample.numel() * 4 + 2 * 12 * pixels, abs=64)
    assert "the first of 2 clips" in part(found, "denormalise").reason


def test_without_pyav_there_is_a_stage_without_a_figure(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    conversion.has_pyav.cache_clear()
    response._warm.cache_clear()
    try:
        missing = part(response.stages(sample_of(1, 3, 2, 16, 16), RANGE, held_bytes=0), "MP4")
    finally:
        conversion.has_pyav.cache_clear()
        response._warm.cache_clear()
    assert missing == Stage("encode", None, part="MP4", reason="PyAV is not installed: pip install 'fidelity[video]'")


# ---------------------------------------------------------------- CUDA


def test_on_cuda_the_allocators_counters_are_read_without_what_others_hold(monkeypatch):
    """1000 bytes on the device before the step, which holds 50 more at once: the arithmetic, without a GPU."""
    now, peak = [1000], [1200]
    fakes = {
        "synchronize": lambda device: None, "empty_cache": lambda: None, "memory_allocated": lambda device: now[0],
        "max_memory_allocated": lambda device: peak[0], "max_memory_reserved": lambda device: 0,
        "reset_peak_memory_stats": lambda device: peak.__setitem__(0, now[0]),
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    with response._allocated(torch.device("cuda")) as found:
        now[0], peak[0] = 1020, 1050
    assert found.rise == 50


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device_denormalising_is_counted_there_and_the_array_lies_in_main_memory():
    sample = sample_of(1, 3, 1024, 1024).cuda()
    found, pixels = response.stages(sample, RANGE, held_bytes=0), 1024 * 1024
    assert part(found, "denormalise").peak_bytes == pytest.approx(36 * pixels, rel=0.01)
    assert part(found, "float32 array").peak_bytes == pytest.approx(24 * pixels, rel=0.01)
    assert part(found, "float32 array").resident_bytes == pytest.approx(12 * pixels, rel=0.1)


# ---------------------------------------------------------------- what may go wrong, and what is kept


def test_equal_samples_are_measured_once_and_weights_come_on_top(monkeypatch):
    sample = sample_of(1, 3, 32, 32)
    first = response.stages(sample, RANGE, held_bytes=0)
    monkeypatch.setattr(response, "_measured", lambda *_: pytest.fail("measured again"))
    second = response.stages(sample.clone(), RANGE, held_bytes=1000)
    assert part(second, "denormalise").peak_bytes == part(first, "denormalise").peak_bytes + 1000
    assert part(second, "uint8") == part(first, "uint8")
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        response.stages(sample.bfloat16(), RANGE, held_bytes=0)


def test_a_sample_that_is_not_finite_is_measured_without_a_warning():
    sample = sample_of(1, 3, 16, 16)
    sample[..., 0] = float("nan")
    assert part(response.stages(sample, RANGE, held_bytes=0), "PNG").result_bytes > 0


def test_channels_that_are_no_picture_end_with_a_reason():
    found = response.stages(sample_of(1, 4, 16, 16), RANGE, held_bytes=0)
    assert [stage.part for stage in found] == ["denormalise", "float32 array", "PIL"]
    assert found[-1].reason == "a picture has 1 or 3 channels, this sample has 4"
    assert found[-1].result_bytes is None


def test_what_a_codec_refuses_has_its_reason():
    found = response.stages(torch.zeros(1, 1, 1, 16384), RANGE, held_bytes=0)
    assert part(found, "PNG").result_bytes
    assert part(found, "WebP").result_bytes is None
    assert "16383 pixels" in part(found, "WebP").reason


def test_of_a_large_batch_some_are_encoded_and_it_says_so():
    found = response.stages(torch.zeros(6, 3, 8, 8), RANGE, held_bytes=0)
    assert part(found, "PNG").calls == 4
    assert "the first 4 of 6 pictures" in part(found, "PNG").reason


def test_somebody_elses_tracing_goes_on():
    tracemalloc.start()
    try:
        response.stages(sample_of(1, 3, 16, 16), RANGE, held_bytes=0)
        assert tracemalloc.is_tracing()
    finally:
        tracemalloc.stop()
    response.stages(sample_of(1, 3, 16, 16, seed=1), RANGE, held_bytes=0)
    assert not tracemalloc.is_tracing()


# ---------------------------------------------------------------- findings


def trace_of(found, decode, **about):
    return MemoryTrace(allocated_peak_bytes=decode, weights_bytes=0, stages=(Stage("decode", decode), *found), **about)


def test_a_conversion_that_holds_more_than_the_decode_is_a_finding():
    found = response.stages(sample_of(1, 3, 64, 64), RANGE, held_bytes=0)
    pixels = 64 * 64
    # sample and float32 array (24), and 24 more while they are turned into uint8
    assert part(found, "uint8").traced_bytes == pytest.approx(24 * pixels, abs=8192)
    (said,) = response.findings(trace_of(found, 40 * pixels))
    assert said.startswith("uint8 after the decode holds more than the decode itself: 0.2 MiB against 0.2")
    assert response.findings(trace_of(found, 60 * pixels)) == ()


def test_main_memory_is_not_held_against_a_device():
    found = response.stages(sample_of(1, 3, 64, 64), RANGE, held_bytes=0)
    assert response.findings(trace_of(found, 40 * 64 * 64, reserved_peak_bytes=1)) == ()
    assert response.findings(trace_of(found, 30 * 64 * 64, reserved_peak_bytes=1))[0].startswith("denormalise")


def test_nothing_is_found_where_nothing_was_measured():
    assert response.findings(MemoryTrace(reason="not asked for")) == ()
    assert response.findings(trace_of((Stage("encode", None, part="MP4", reason="not there"),), 1)) == ()


# ---------------------------------------------------------------- in a decode


@pytest.fixture(scope="module")
def runner():
    from fidelity.runner import Runner
    from tests.optimizations.small import MODEL

    return Runner(MODEL)


def after(memory):
    return [stage for stage in memory.stages if stage.part]


@pytest.mark.slow
def test_a_decode_carries_its_steps_and_offload_shares_them(runner, monkeypatch):
    from tests.optimizations.small import latents

    plain = runner.decode(latents(), DecodePlan())
    assert [stage.part for stage in after(plain.memory)] == [
        "denormalise", "float32 array", "uint8", "PIL", "PNG", "JPEG", "WebP",
    ]  # fmt: skip
    first = after(plain.memory)[0]
    assert first.peak_bytes == pytest.approx(plain.memory.weights_bytes + 3 * plain.sample.numel() * 4, abs=64)
    monkeypatch.setattr(response, "_measured", lambda *_: pytest.fail("offload moves no pixel"))
    disk = runner.decode(latents(), DecodePlan(offload="disk"))
    assert disk.memory.weights_bytes < plain.memory.weights_bytes
    assert after(disk.memory)[0].peak_bytes == first.peak_bytes - plain.memory.weights_bytes + disk.memory.weights_bytes


@pytest.mark.slow
def test_steps_are_taken_of_the_sample_as_it_comes_in_its_own_dtype(runner):
    from tests.optimizations.small import latents

    half = runner.decode(latents(), DecodePlan("bf16"))
    held = after(half.memory)[0].held[0]
    assert (held.dtype, held.bytes) == ("bfloat16", half.sample.numel() * 2)


@pytest.mark.slow
def test_what_is_emulated_or_not_traced_has_no_steps(runner):
    from tests.optimizations.small import latents

    assert after(runner.decode(latents(), DecodePlan("fp16")).memory) == []
    assert after(runner.decode(latents(), DecodePlan(), trace=False).memory) == []
