"""Causal and strided video autoencoders, and Qwen-Image's: chunks, caches, timesteps, and what goes wrong there.

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
from fidelity.models.ltx_video import TIMESTEP
from fidelity.models.small import seeded
from fidelity.records import DecodePlan, Temporal, Tiling
from fidelity.registry import FAMILIES, MODELS
from fidelity.runner import Runner

registry.load_plugins()
TILED = DecodePlan(tiling=Tiling(2, 0.5))


@cache
def runner(name: str) -> Runner:
    import diffusers

    model = MODELS.get(name)
    if not hasattr(diffusers, model.family.name):
        pytest.skip(f"this diffusers has no {model.family.name}")
    return Runner(model)


def drawn(name: str, frames: int = 4, size: tuple[int, int] = (3, 4), batch: int = 1) -> torch.Tensor:
    geometry = MODELS.get(name).geometry
    shape = (batch, geometry.latent_channels, *((frames,) if geometry.video else ()), *size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def decoded(name: str, z: torch.Tensor, plan: DecodePlan = DecodePlan()) -> torch.Tensor:  # noqa: B008  (frozen)
    return runner(name).decode(z, plan, trace=False).sample


def full(name: str, z: torch.Tensor) -> torch.Tensor:
    """What the class gives of all frames and the whole picture, without asking for anything."""
    with torch.no_grad():
        return runner(name).model.family.decode(runner(name).module, z)


def small_config(name: str) -> dict[str, Any]:
    return configs.entries("seed")[name]["config"]


def no_load() -> Any:
    raise AssertionError("describing loads nothing")


# ---------------------------------------------------------------- what a config says


@pytest.mark.parametrize(
    ("name", "compression"),
    [
        ("wan21", (8, 4, 16, 3, True)),
        ("wan22-ti2v", (16, 4, 48, 3, True)),
        ("ltx-video", (32, 8, 128, 3, True)),
        ("ltx-video-0.9.1", (32, 8, 128, 3, True)),
        ("ltx-video-0.9.7", (32, 8, 128, 3, True)),
        ("ltx-2", (32, 8, 128, 3, True)),
        ("mochi", (8, 6, 12, 3, True)),
        ("qwen-image", (8, 4, 16, 3, True)),
        ("qwen-image-2.1", (16, 1, 64, 4, False)),
        ("cosmos-1.0", (8, 8, 16, 3, True)),
        ("ltx-2.5-diffusion-decoder", (32, 8, 128, 3, True)),
        ("easyanimate-v5.1", (8, 4, 16, 3, True)),
    ],
)
def test_published_geometry(name: str, compression: tuple[Any, ...]) -> None:
    found = configs.from_name(name).geometry
    assert (found.spatial, found.temporal, found.latent_channels, found.sample_channels, found.video) == compression


@pytest.mark.parametrize(
    ("cls", "config", "says"),
    [
        ("AutoencoderKLLTXVideo", {"decoder_spatio_temporal_scaling": [True]}, "spatial_compression_ratio is 32, but"),
        ("AutoencoderKLLTXVideo", {"decoder_spatio_temporal_scaling": [1, 1]}, "expected a list of true and false"),
        ("AutoencoderKLLTXVideo", {"temporal_compression_ratio": 4}, "temporal_compression_ratio is 4, but .* give 8"),
        ("AutoencoderKLLTX2Video", {"upsample_type": ["spatial"]}, "expected 3 of spatiotemporal, spatial, temporal"),
        ("AutoencoderKLMochi", {"temporal_expansions": []}, "temporal_expansions is"),
        ("AutoencoderKLQwenImage", {"temperal_downsample": [True]}, "expected 3 of true or false"),
        ("AutoencoderKLQwenImage21", {"patch_size": 2}, "scale_factor_spatial is 16, but the blocks and patch give 32"),
        ("AutoencoderKLCosmos", {"spatial_compression_ratio": 64}, "spatial_compression_ratio is 64, but patch 4"),
        ("LTX2VideoDiffusionDecoderModel", {"patch_size": 2}, "spatial_compression_ratio is 32, but .* give 16"),
        ("AutoencoderKLMagvit", {"up_block_types": ["SpatialUpBlock3D"]}, "expected 4 names of blocks"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(cls: str, config: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says) as error:
        FAMILIES.get(cls).describe("m", config, no_load)
    assert "\n" not in str(error.value)


def test_the_defaults_of_ltx2_would_cut_tiles_in_the_wrong_unit() -> None:
    """Its encoder halves four times and its decoder doubles three times; what it cuts tiles by comes from the encoder.

    Published configurations name the ratio.
    """
    family = FAMILIES.get("AutoencoderKLLTX2Video")
    with pytest.raises(ModelError, match="spatial_compression_ratio is 64, but the decoder's blocks and patch give 32"):
        family.describe("m", {}, no_load)


@pytest.mark.parametrize(
    ("blocks", "patch", "spatial", "temporal"), [(3, 2, 4, 4), (4, 2, 8, 4), (4, 2, 8, 8), (4, 2, 4, 8), (3, 4, 8, 4)]
)
def test_cosmos_geometry_is_what_its_blocks_give(blocks: int, patch: int, spatial: int, temporal: int) -> None:
    """Also where the blocks do not give what was asked for: then the config is refused."""
    family = FAMILIES.get("AutoencoderKLCosmos")
    config = {**small_config("small-cosmos"), "encoder_block_out_channels": [8] * blocks, "patch_size": patch,
              "decode_block_out_channels": [8] * blocks, "spatial_compression_ratio": spatial,
              "temporal_compression_ratio": temporal}  # fmt: skip
    with torch.no_grad():
        sample = family.build(config).decode(torch.zeros(1, 4, 2, 2, 2)).sample
    given = (sample.shape[2] - 1, sample.shape[3] // 2)
    if given == (temporal, spatial):
        geometry = family.describe("m", config, no_load).geometry
        assert (geometry.temporal, geometry.spatial) == given
    else:
        with pytest.raises(ModelError, match="blocks of the decoder give"):
            family.describe("m", config, no_load)


def test_seeded_weights_take_a_gain_and_leave_constants() -> None:
    config = small_config("small-ltx-timestep")
    plain, quiet = (
        seeded(FAMILIES.get("AutoencoderKLLTXVideo").build(config), 3, gain)
        for gain in (None, {"decoder.conv_out": 0.5})
    )
    assert plain.decoder.timestep_scale_multiplier.item() == 1000.0
    assert torch.equal(plain.decoder.conv_out.conv.weight * 0.5, quiet.decoder.conv_out.conv.weight)
    assert torch.equal(plain.decoder.conv_in.conv.weight, quiet.decoder.conv_in.conv.weight)


# ---------------------------------------------------------------- LTX-Video and LTX-2


@pytest.mark.parametrize("name", ["small-ltx", "small-ltx2"])
def test_chunks_by_the_law_lie_where_the_full_decode_has_them(name: str) -> None:
    """Upstream drops the last frame of a later chunk, not the first: what it shows is one frame late."""
    z = drawn(name, frames=6)
    plan, whole = DecodePlan(temporal=Temporal(2, 0.0)), full(name, z)
    law, candidate = runner(name).expected(z, plan), decoded(name, z, plan)
    late = slice(MODELS.get(name).geometry.temporal * 2 + 1, None)

    def error(sample: torch.Tensor, by: int = 0) -> float:
        return float((sample[:, :, late] - whole.roll(by, dims=2)[:, :, late]).square().mean())

    assert law.shape == candidate.shape == whole.shape
    assert error(law) < 0.6 * error(candidate)  # measured 0.53 and less: short chunks see less to both sides
    assert error(candidate, by=1) < 0.6 * error(candidate)


def test_a_timestep_for_each_item_reaches_the_decoder() -> None:
    seen: list[torch.Tensor] = []
    bench, z = runner("small-ltx-timestep"), drawn("small-ltx-timestep", frames=2, batch=3)
    handle = bench.module.decoder.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    try:
        whole = full("small-ltx-timestep", z)
    finally:
        handle.remove()
    assert [each.tolist() for each in seen] == [pytest.approx([TIMESTEP] * 3)]
    with torch.no_grad():
        other = bench.module.decode(z, torch.full((3,), 0.5)).sample
    assert not torch.allclose(whole, other, atol=1e-3)


def test_noise_that_the_decoder_injects_is_the_same_each_time_and_moves_no_generator() -> None:
    """As LTX-Video 0.9.1 does."""
    family = FAMILIES.get("AutoencoderKLLTXVideo")
    module = seeded(family.build({**small_config("small-ltx"), "decoder_inject_noise": [True] * 5}), 3)
    z, before = drawn("small-ltx", frames=2), torch.get_rng_state()
    with torch.no_grad():
        one, two, quiet = family.decode(module, z), family.decode(module, z), full("small-ltx", z)
    assert torch.equal(one, two)
    assert not torch.allclose(one, quiet, atol=1e-3)
    assert torch.equal(torch.get_rng_state(), before)


def test_mirrored_borders_refuse_a_tile_of_one() -> None:
    """Today's behaviour of LTX-2: the suite has it as an error that is expected."""
    with pytest.raises(RuntimeError, match="Padding size should be less than"):
        decoded("small-ltx2", drawn("small-ltx2", frames=1, size=(3, 5)), DecodePlan(tiling=Tiling(4, 0.0)))


# ---------------------------------------------------------------- LTX-2.5's diffusion decoder

TINY_DIFFUSION = {
    "latent_channels": 8, "patch_size": 2, "decoder_head_dim": 16, "decoder_stage_channels": [32, 16, 16, 16, 16],
    "decoder_stage_depths": [1] * 5, "decoder_stage_kernels": [[3, 3, 3]] * 4,
    "decoder_upsample_strides": [[1, 1, 1], [2, 1, 1], [1, 2, 2], [1, 1, 1]], "decoder_t_emb_dim": 32,
    "decoder_upsample_channel_reductions": [2, 1, 1, 1], "decoder_stage5_kernel": [3, 3, 3],
    "spatial_compression_ratio": 4, "temporal_compression_ratio": 2,
}  # fmt: skip
"""A few hundred tokens: without its kernel, attention takes every pair of them."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_diffusion_decoder_tiles_what_its_early_stages_give() -> None:
    pytest.importorskip("diffusers.models.autoencoders.ltx2_diffusion_decoder")
    family: Any = FAMILIES.get("LTX2VideoDiffusionDecoderModel")
    model = family.describe("tiny", TINY_DIFFUSION, lambda: seeded(family.build(TINY_DIFFUSION), 5))
    z = torch.randn(1, 8, 2, 4, 6, generator=torch.Generator().manual_seed(0))
    bench, plan = Runner(model), DecodePlan(tiling=Tiling(4, 0.5))
    whole, tiled = bench.decode(z, DecodePlan(), trace=False), bench.decode(z, plan, trace=False)
    assert whole.sample.shape == tiled.sample.shape == (1, 3, 3, 16, 24)
    assert whole.receipts["decoder"]["shapes"] == [[1, 16, 2, 4, 6]]
    assert tiled.receipts["tiling"]["engaged"], tiled.receipts["tiling"]["reason"]
    assert tiled.receipts["state"]["restored"]
    assert torch.equal(bench.decode(z, DecodePlan(), trace=False).sample, whole.sample), "its noise has a seed"
    assert not oracles.has_one(plan, model)
    with pytest.raises(ModelError, match="has no encoder"):
        family.encode(bench.module, z)
    with pytest.raises(IllegalTiling, match=r"the last tile has 1, its attention needs 1\.5"):
        family.tile_grid(model.geometry, (4, 9), Tiling(4, 0.0))


# ---------------------------------------------------------------- Mochi


def test_mochi_reads_no_cache_unless_it_cannot_decode_at_all() -> None:
    """Today's behaviour: with its own switch for the cache the convolutions stop padding in space."""
    z = drawn("small-mochi")
    whole, plan = full("small-mochi", z), DecodePlan(temporal=Temporal(1, 0.0))
    chunks, alone = decoded("small-mochi", z, plan), z[:, :, 2:3]
    assert chunks.shape == whole.shape
    assert not torch.allclose(chunks, whole, atol=0.01)
    with torch.no_grad():
        restarted, _ = runner("small-mochi").module.decoder(alone)
    assert torch.allclose(chunks[:, :, 7:13], restarted, atol=1e-5), "its third latent frame begins anew"
    module = MODELS.get("small-mochi").load()
    module._enable_framewise_decoding()
    with pytest.raises(RuntimeError, match="Kernel size can't be greater than actual input size"), torch.no_grad():
        module.decode(z)


@pytest.mark.parametrize("name", ["small-mochi", "small-magvit"])
@pytest.mark.parametrize("temporal", [Temporal(2, 0.5), Temporal(0, 0.0)], ids=str)
def test_chunks_that_follow_one_another_do_not_overlap(name: str, temporal: Temporal) -> None:
    model = MODELS.get(name)
    with pytest.raises(IllegalTiling, match=r"nearest legal: tile [12], overlap 0"):
        model.family.chunks(model.geometry, 6, temporal)


# ---------------------------------------------------------------- EasyAnimate


@pytest.mark.parametrize("tile", [1, 2, 3])
def test_frames_a_call_change_nothing(tile: int) -> None:
    z, plan = drawn("small-magvit", frames=6), DecodePlan(temporal=Temporal(tile, 0.0))
    run = runner("small-magvit").decode(z, plan, trace=False)
    assert torch.allclose(run.sample, full("small-magvit", z), atol=1e-5)
    assert run.receipts["temporal"]["frames"] == [1, *(min(tile, 6 - start) for start in range(1, 6, tile))]


def test_a_decode_that_raised_leaves_its_cache_to_the_next() -> None:
    """Today's behaviour: the next video begins as if it went on, with f_t frames for its first latent frame."""
    module, z = MODELS.get("small-magvit").load(), drawn("small-magvit", frames=2)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with torch.no_grad():
        handle = module.decoder.up_blocks[-1].register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            module.decode(z)
        handle.remove()
        stale, fresh = module.decode(z).sample, module.decode(z).sample
    geometry = MODELS.get("small-magvit").geometry
    assert fresh.shape[2] == geometry.sample_frames(2)
    assert stale.shape[2] > fresh.shape[2]
    with torch.no_grad():
        assert torch.equal(MODELS.get("small-magvit").family.decode_alone(module, z), fresh)


# ---------------------------------------------------------------- Qwen-Image and Wan 2.2


def test_qwen_image_clamps_pictures_but_not_tiles() -> None:
    """Today's behaviour; Wan, whose code it is, clamps both."""
    z = 2.0 * drawn("small-qwen-image", frames=2)
    assert full("small-qwen-image", z).abs().max() == 1.0
    assert decoded("small-qwen-image", z, TILED).abs().max() > 1.0
    assert decoded("small-wan22", 2.0 * drawn("small-wan22", frames=2), TILED).abs().max() <= 1.0


@pytest.mark.parametrize("name", ["small-qwen-image", "small-wan22"])
def test_streaming_equals_one_shot(name: str) -> None:
    z = drawn(name)
    measured = oracles.compare(full(name, z), runner(name).expected(z, DecodePlan()), data_range=(-1, 1))
    assert measured.value is not None
    assert measured.value < 0.003  # grey levels; measured 0.0005


def test_qwen_image_21_is_of_pictures_with_alpha() -> None:
    bench, picture = runner("small-qwen-image-2.1"), torch.rand(1, 3, 48, 64) * 2 - 1
    with torch.no_grad():
        opaque = bench.model.family.encode(bench.module, torch.cat([picture, torch.ones(1, 1, 48, 64)], dim=1))
        assert torch.equal(bench.model.family.encode(bench.module, picture), opaque)
        assert bench.model.family.decode(bench.module, opaque).shape == (1, 4, 48, 64)
        with pytest.raises((ValueError, RuntimeError)):
            bench.module.decode(torch.zeros(1, 8, 2, 3, 4))
