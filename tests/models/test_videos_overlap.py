"""Video autoencoders that tile by overlap or by a law of their own: streams, clips, cubes, and what goes wrong there.

What holds of every class alike is in test_every_family.py; here is what only these have.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from fidelity import oracles, registry
from fidelity.errors import IllegalTiling, ModelError
from fidelity.models import configs
from fidelity.models.small import seeded
from fidelity.records import DecodePlan, Model, Temporal, Tiling
from fidelity.registry import FAMILIES, MODELS
from fidelity.runner import Runner

registry.load_plugins()
PLAIN = DecodePlan()


@cache
def runner(name: str) -> Runner:
    import diffusers

    model = MODELS.get(name)
    if not hasattr(diffusers, model.family.name):
        pytest.skip(f"this diffusers has no {model.family.name}")
    return Runner(model)


def drawn(model: Model, frames: int, size: tuple[int, int] = (3, 4), batch: int = 1) -> torch.Tensor:
    shape = (batch, model.geometry.latent_channels, frames, *size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def seen(name: str, z: torch.Tensor, plan: DecodePlan = PLAIN) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The sample under a plan, and the latent frames of each call of the decoder."""
    bench = runner(name)
    frames: list[int] = []
    decoder = bench.model.family.decoder(bench.module)
    handle = decoder.register_forward_pre_hook(lambda _, args: frames.append(args[0].shape[2]))
    try:
        with bench.applied(plan) as decode:
            sample, _ = decode(z)
    finally:
        handle.remove()
    return sample, tuple(frames)


def apart(name: str, z: torch.Tensor, plan: DecodePlan) -> float | None:
    """Grey levels between a decode and its oracle; None where their shapes differ."""
    bench = runner(name)
    candidate = bench.decode(z, plan, trace=False).sample
    return oracles.compare(candidate, bench.expected(z, plan), data_range=bench.model.data_range).value


# ---------------------------------------------------------------- what a config says


@pytest.mark.parametrize(
    ("name", "compression"),
    [
        ("cogvideox-2b", (8, 4, 16, "odd")),
        ("cogvideox-5b", (8, 4, 16, "odd")),
        ("hunyuan-video", (8, 4, 16, "causal")),
        ("hunyuan-video-1.5", (16, 4, 32, "causal")),
        ("hunyuan-image-2.1-refiner", (16, 1, 32, "causal")),
        ("vidtok-kl-causal-488-4chn", (8, 4, 4, "causal")),
        ("kvae-video", (8, 4, 16, "causal")),
        ("allegro", (8, 4, 4, "every")),
        ("minimax-h3", (16, 4, 24, "clips")),
        ("kandinsky6-sr", (16, 4, 64, "causal")),
    ],
)
def test_published_geometry(name: str, compression: tuple[Any, ...]) -> None:
    geometry = configs.from_name(name).geometry
    assert (geometry.spatial, geometry.temporal, geometry.latent_channels, geometry.frames) == compression
    assert geometry.video
    assert geometry.sample_channels == 3


@pytest.mark.parametrize(
    ("cls", "change", "word"),
    [
        ("AutoencoderKLCogVideoX", {"temporal_compression_ratio": 3}, "power of two"),
        ("AutoencoderKLCogVideoX", {"use_post_quant_conv": True}, "no decode passes"),
        ("AutoencoderKLHunyuanVideo15", {"spatial_compression_ratio": 64}, "up to 16"),
        ("AutoencoderKLHunyuanVideo15", {"temporal_compression_ratio": 32}, "up to 16"),
        ("AutoencoderKLHunyuanVideo15", {"latent_channels": 24}, "multiple of 48"),
        ("AutoencoderVidTok", {"ch_mult": [1, 2]}, "at least 3"),
        ("AutoencoderVidTok", {"tempo_ds": 2}, "a list of levels"),
        ("AutoencoderKLKVAEVideo", {"temporal_compress_times": 6}, "power of two"),
        ("AutoencoderKLAllegro", {"temporal_compression_ratio": 8}, "temporal_upsample_blocks"),
        ("AutoencoderKLMiniMaxH3", {"token_drop": 5}, "less than the 5"),
        ("Kandinsky6SRVAE", {"temporal_compression_start_level": 3}, "4 levels halve"),
        ("Kandinsky6SRVAE", {"decoder_block_out_channels": [8]}, "differ in length"),
    ],
)
def test_a_config_that_no_class_can_build_is_refused(cls: str, change: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelError, match=word):
        FAMILIES.get(cls).describe("mine", change, runner)  # type: ignore[arg-type]


def test_a_family_whose_laws_need_the_config_is_an_instance_of_its_own() -> None:
    two, four = (
        FAMILIES.get("AutoencoderKLKVAEVideo").describe("mine", {"temporal_compress_times": times}, runner)  # type: ignore[arg-type]
        for times in (2, 4)
    )
    assert two.family.call_frames(10) == (9, 1)
    assert four.family.call_frames(10) == (5, 4, 1)
    assert FAMILIES.get("AutoencoderKLKVAEVideo").call_frames(10) == (5, 4, 1)


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize("frames", [1, 3, 6, 9])
@pytest.mark.parametrize("name", ["small-cogvideox", "small-kandinsky6-sr", "small-kvae-video"])
def test_a_stream_is_cut_as_the_family_says(name: str, frames: int) -> None:
    bench = runner(name)
    z = drawn(bench.model, frames, (2, 3))
    sample, calls = seen(name, z)
    assert calls == bench.model.family.call_frames(frames)
    lost = bench.model.geometry.sample_frames(frames) - sample.shape[2]
    # a segment of one latent frame is not upsampled in time (KVAECachedPXSUpsample.temporal_upsample)
    assert lost == (3 if name == "small-kvae-video" and frames in (6, 10) else 0)
    found = apart(name, z, PLAIN)
    assert found is None if lost else found is not None and found < (0.001 if name == "small-kandinsky6-sr" else 1e-9)


def test_cogvideox_is_no_decode_at_once() -> None:
    """GroupNorm sees two latent frames a call: all at once give another film, though of the same length."""
    bench = runner("small-cogvideox")
    z = drawn(bench.model, 6)
    with torch.no_grad():
        at_once, _ = bench.module.decoder(z)
    sample = bench.decode(z, PLAIN, trace=False).sample
    assert at_once.shape == sample.shape
    assert (at_once - sample).abs().max() > 0.1


# ---------------------------------------------------------------- HunyuanVideo 1.5 and the image refiner


@pytest.mark.parametrize(
    ("name", "words"), [("small-hunyuan-video15", "broadcast shape"), ("small-allegro", "number of sizes")]
)
def test_two_items_pass_in_slices_only(name: str, words: str) -> None:
    bench = runner(name)
    z = drawn(bench.model, 4, batch=2)
    assert bench.model.reference == "sliced"
    assert bench.model.reference_plan == DecodePlan(slicing=True)
    with pytest.raises(RuntimeError, match=words):
        bench.decode(z, PLAIN, trace=False)
    assert apart(name, z, DecodePlan(slicing=True)) == 0


def test_the_refiner_crops_its_tiles_in_latent_pixels() -> None:
    bench = runner("small-hunyuan-image-refiner")
    z = drawn(bench.model, 2, (8, 12))
    assert bench.decode(z, PLAIN, trace=False).sample.shape[2:] == (2, 32, 48)
    tiled = bench.decode(z, DecodePlan(tiling=Tiling(4, 0.25)), trace=False)
    assert tiled.receipts["tiling"]["engaged"]  # the decoder's calls are as they should be
    assert tiled.sample.shape[2:] == (2, 9, 12)  # 3 × 4 tiles, of each three pixels instead of twelve


# ---------------------------------------------------------------- VidTok


@pytest.mark.parametrize("frames", [1, 4, 5, 9])
def test_vidtok_tiles_are_cut_in_time_as_well(frames: int) -> None:
    bench = runner("small-vidtok")
    z, plan = drawn(bench.model, frames, (3, 2)), DecodePlan(tiling=Tiling(2, 0.0))
    decoded = bench.decode(z, plan, trace=False)
    assert decoded.receipts["tiling"]["engaged"], decoded.receipts["tiling"]["reason"]
    _, calls = seen("small-vidtok", z, plan)
    assert calls == 2 * bench.model.family.tile_frames(frames)


def test_vidtok_mixes_frames_where_its_first_segment_ends() -> None:
    """The second upsampler keeps the two frames ahead of the first segment for the next one, whose first frame it then
    mixes with the one after it. With the frame itself kept instead, segments give what all frames give."""
    bench = runner("small-vidtok")
    upsampler = bench.module.decoder.up_temporal[1].upsample
    z = drawn(bench.model, 9, (3, 2))
    plan = DecodePlan(tiling=Tiling(2, 0.0))
    assert (apart("small-vidtok", z, plan) or 0) > 1

    def mend(module: Any, args: tuple[torch.Tensor], _: Any) -> None:
        if module.is_first_chunk and args[0].shape[2] > 2:
            module.causal_cache = args[0][:, :, -2:-1].repeat(1, 1, 2, 1, 1)

    handle = upsampler.register_forward_hook(mend)
    try:
        with torch.no_grad():
            bench.module.use_tiling = True
            for name, value in (("latent", 2), ("sample", 8)):
                setattr(bench.module, f"tile_{name}_min_height", value)
                setattr(bench.module, f"tile_{name}_min_width", value)
            mended = bench.module.decode(z)
    finally:
        handle.remove()
        bench.reload()
    assert (mended - bench.expected(z, plan)).abs().max() < 1e-4


@pytest.mark.parametrize(("frames", "shown"), [(4, 16), (5, 16), (7, 16), (8, 32), (9, 32)])
def test_vidtok_drops_frames_unless_it_is_causal(frames: int, shown: int) -> None:
    bench = runner("small-vidtok-noncausal")
    assert bench.decode(drawn(bench.model, frames, (2, 2)), PLAIN, trace=False).sample.shape[2] == shown
    assert bench.model.family.fits(frames) == (4 * frames == shown)


def test_vidtok_takes_no_less_than_a_segment_unless_it_is_causal() -> None:
    bench = runner("small-vidtok-noncausal")
    with pytest.raises(AssertionError, match="Too short latent frames"):
        bench.decode(drawn(bench.model, 3, (2, 2)), PLAIN, trace=False)


# ---------------------------------------------------------------- Allegro


@pytest.mark.parametrize(
    "plan",
    [
        DecodePlan(tiling=Tiling(4, 0.5)),
        DecodePlan(dtype="bf16", tiling=Tiling(4, 0.5)),
        DecodePlan(temporal=Temporal(2, 0.0)),
        DecodePlan(dtype="bf16", temporal=Temporal(2, 0.5)),
        DecodePlan(tiling=Tiling(4, 0.25), temporal=Temporal(2, 0.5)),
    ],
    ids=lambda plan: plan.id,
)
def test_cubes_that_end_with_the_video_are_as_they_should_be(plan: DecodePlan) -> None:
    size = (4, 7) if plan.tiling == Tiling(4, 0.25) else (6, 8)
    z = drawn(runner("small-allegro").model, 4, size)
    found = apart("small-allegro", z, plan)
    assert found == 0 if plan.tiling is None or plan.temporal is None else found is not None and found < 0.001


def test_cubes_that_do_not_end_with_the_video_leave_black() -> None:
    bench = runner("small-allegro")
    z = drawn(bench.model, 3, (6, 9))
    cut = DecodePlan(tiling=Tiling(4, 0.25), temporal=Temporal(2, 0.0))
    decoded = bench.decode(z, cut, trace=False)
    covered = torch.zeros(decoded.sample.shape[2:], dtype=torch.bool)
    covered[:8, :16, :28] = True
    assert not decoded.sample[..., ~covered].any()
    assert bool((decoded.sample[..., covered] != 0).all())
    assert not decoded.receipts["tiling"]["engaged"]
    assert not decoded.receipts["temporal"]["engaged"]


def test_cubes_larger_than_the_video_decode_nothing() -> None:
    bench = runner("small-allegro")
    decoded = bench.decode(drawn(bench.model, 2, (3, 9)), DecodePlan(tiling=Tiling(4, 0.25)), trace=False)
    assert not decoded.sample.any()
    assert decoded.receipts["tiling"]["reason"] == "expected 3 decoder calls, saw 0"


def test_cubes_may_overlap_by_half_at_most() -> None:
    family, geometry = FAMILIES.get("AutoencoderKLAllegro"), configs.from_name("allegro").geometry
    assert family.tile_grid(geometry, (10, 10), Tiling(4, 0.5)).count == 16
    with pytest.raises(IllegalTiling, match=r"weights do not sum to 1; nearest legal: overlap 0\.5"):
        family.tile_grid(geometry, (10, 10), Tiling(4, 0.75))
    with pytest.raises(IllegalTiling, match=r"weights do not sum to 1; nearest legal: overlap 0\.4"):
        family.chunks(geometry, 10, Temporal(5, 0.6))


# ---------------------------------------------------------------- MiniMax H3


@cache
def tiled_minimax() -> Runner:
    """One of the same class whose tiles of 256 pixels are of 8 latent pixels, so that few latents are cut."""
    small = MODELS.get("small-minimax-h3")
    factors = {"spatial_downsample_factors": [2] * 5, "temporal_downsample_factors": [2, 2, 1, 1, 1]}
    config = {**small.config, **factors, "block_out_channels": [8] * 5}
    family: Any = FAMILIES.get(small.family.name)
    runner("small-minimax-h3")  # is it there?
    return Runner(family.describe("mine", config, lambda: seeded(family.build(config), 3)))


@pytest.mark.parametrize("frames", [3, 4, 7, 8, 12, 17])
def test_clips_are_as_many_as_the_family_says(frames: int) -> None:
    bench = runner("small-minimax-h3")
    z = drawn(bench.model, frames, (2, 2))
    sample, calls = seen("small-minimax-h3", z)
    assert sample.shape[2] == bench.model.geometry.sample_frames(frames)
    assert calls == bench.model.family.call_frames(frames)
    assert apart("small-minimax-h3", z, PLAIN) == 0
    if bench.model.family.fits(frames):
        with torch.no_grad():
            assert bench.model.family.encode(bench.module, sample).shape == z.shape


@pytest.mark.parametrize("frames", [1, 2])
def test_less_than_a_clip_is_decoded_to_nothing(frames: int) -> None:
    bench = runner("small-minimax-h3")
    with pytest.raises((ValueError, RuntimeError, NotImplementedError), match="non-empty"):
        bench.decode(drawn(bench.model, frames, (2, 2)), PLAIN, trace=False)


def test_tiles_lie_where_the_class_lays_them() -> None:
    bench = runner("small-minimax-h3")
    f = bench.model.geometry.spatial
    for size in range(1, 40):
        for tiling in (Tiling(4, 0.25), Tiling(8, 0.25), Tiling(8, 0.5), Tiling(5, 0.0)):
            least = round(tiling.tile * tiling.overlap) * f
            starts, lengths, overlaps = bench.module._split_tiles(size * f, tiling.tile * f, least)
            axis = bench.model.family.tile_grid(bench.model.geometry, (size, 1), tiling).rows
            assert list(axis.starts) == starts, (size, tiling)
            assert axis.band == max(overlaps, default=0)
            assert starts[-1] + lengths[-1] == axis.size


def test_native_tiles_are_the_reference() -> None:
    bench = tiled_minimax()
    assert bench.model.reference == "native_tile"
    assert bench.model.family.native_tiling(bench.model.geometry) == Tiling(8, 0.25)
    for size, calls in (((8, 8), 1), ((10, 7), 2), ((7, 20), 3)):
        z = drawn(bench.model, 3, size)
        for plan in (PLAIN, DecodePlan(dtype="bf16"), DecodePlan(slicing=True)):
            decoded = bench.decode(z, plan, trace=False)
            assert decoded.receipts["decoder"]["calls"] == calls
            assert all(receipt["engaged"] is not False for receipt in decoded.receipts.values())
            expected = bench.expected(z, plan)
            assert torch.equal(decoded.sample, expected), (size, plan.id)
    with torch.no_grad():
        bench.module.use_tiling = False
        whole = bench.model.family.decode(bench.module, z)
        bench.module.use_tiling = True
    assert (whole - decoded.sample).abs().max() > 0.01  # what an untiled decode would give is something else


def test_corners_of_four_tiles_do_not_see_the_first() -> None:
    """`_stitch_tiles` blends a tile with the one on its left as that was before it was blended with the one above. By
    constant tiles, of which the first alone is not 0, what fades out downwards breaks off where the blend across
    begins: a step of the whole difference between two tiles, where there should be none."""
    module = tiled_minimax().module
    tiles = [[torch.full((1, 1, 1, 8, 8), float(not i and not j)) for j in (0, 1)] for i in (0, 1)]
    stitched = module._stitch_tiles(tiles, [4], [4])[0, 0, 0]
    assert torch.equal(stitched[4:8, 3], torch.tensor([1.0, 0.75, 0.5, 0.25]))
    assert not stitched[4:8, 4:].any()
    own = FAMILIES.get("AutoencoderKLMiniMaxH3").assemble(
        tiles, oracles.TileGrid(*(oracles.TileAxis((0, 4), 4, 8, 12) for _ in range(2)))
    )
    assert torch.equal(own[0, 0, 0, 4:8, 4], stitched[4:8, 3])  # and it should go on
