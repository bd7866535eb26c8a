"""What is particular to the classes of pictures, and to Stable Video Diffusion's; what all share is in the table."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fidelity import oracles, registry
from fidelity.errors import IllegalTiling, LatentsError, ModelError
from fidelity.models import configs, from_path
from fidelity.models.base import FamilyBase
from fidelity.optimizations import apply_plan, inapplicable
from fidelity.optimizations.observe import observe
from fidelity.records import DecodePlan, Geometry, Model, Scaling, Tiling
from fidelity.registry import FAMILIES, LATENTS, MODELS
from fidelity.suite import load
from tests.suites import write_suite

registry.load_plugins()


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def described(cls: str, **changes: Any) -> Model:
    """The Model of a class's small configuration, changed."""
    entry = next(each for each in configs.entries("seed").values() if each["config"]["_class_name"] == cls)
    return FAMILIES.get(cls).describe("mine", {**entry["config"], **changes}, lambda: None)


# ---------------------------------------------------------------- from the config


@pytest.mark.parametrize(
    ("cls", "change", "part"),
    [
        ("AutoencoderTiny", {"num_decoder_blocks": [1, 1]}, "halves 3 times"),
        ("AutoencoderTiny", {"upsampling_scaling_factor": 3}, "enlarge by 27"),
        ("AutoencoderKLFlux2", {"decoder_block_out_channels": [16, 32]}, "has 2 blocks"),
        ("AsymmetricAutoencoderKL", {"up_block_out_channels": [16]}, "up_block_out_channels 1"),
        ("AutoencoderDC", {"decoder_block_out_channels": [8]}, "decoder_block_out_channels 1"),
        ("AutoencoderKLHunyuanImage", {"spatial_compression_ratio": 16}, "power of two up to 8"),
        ("AutoencoderKLHunyuanImage", {"spatial_compression_ratio": 6}, "spatial_compression_ratio is 6"),
        ("ConsistencyDecoderVAE", {"latent_channels": 16}, "latent_channels is 16"),
        ("AutoencoderRAE", {"encoder_input_size": 60}, "no multiple of encoder_patch_size 8"),
        ("VQModel", {"vq_embed_dim": 0}, "vq_embed_dim is 0"),
        ("AutoencoderKLKVAE", {"ch_mult": []}, "ch_mult is []"),
        ("AutoencoderKLTemporalDecoder", {"latent_channels": None}, "latent_channels is None"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_in_one_line(cls: str, change: dict[str, Any], part: str) -> None:
    with pytest.raises(ModelError) as error:
        described(cls, **change)
    assert part in str(error.value)
    assert f"config of {cls}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "spatial", "channels", "scaling"),
    [
        ("taesd", 8, 4, Scaling(factor=1.0, shift=0.0)),
        ("taef1", 8, 16, Scaling(factor=1.0, shift=0.0)),
        ("flux2", 8, 32, Scaling()),
        ("sdxl-fp16-fix", 8, 4, Scaling(factor=0.13025)),
        ("dc-ae-f32c32-sana", 32, 32, Scaling(factor=0.41407)),
        ("hunyuan-image", 32, 64, Scaling(factor=0.75289)),
        ("movq", 8, 4, Scaling(factor=0.18215)),
        ("asymmetric-x2", 8, 4, Scaling(factor=0.18215)),
        ("consistency-decoder", 8, 4, Scaling(factor=0.18215)),
        ("kvae-2d", 8, 16, Scaling()),
        ("rae-dinov2", 16, 768, Scaling()),
        ("svd", 8, 4, Scaling(factor=0.18215)),
    ],
)
def test_published_configurations(name: str, spatial: int, channels: int, scaling: Scaling) -> None:
    model = configs.from_name(name)
    assert (model.geometry.spatial, model.geometry.latent_channels, model.scaling) == (spatial, channels, scaling)


def test_the_fix_of_sdxl_needs_no_upcast() -> None:
    assert configs.from_name("sdxl").force_upcast
    assert not configs.from_name("sdxl-fp16-fix").force_upcast


class Tomorrow(FamilyBase):
    name = "AutoencoderOfTomorrow"

    def geometry(self, config: Any) -> Geometry:
        return Geometry(8, 4)


def test_a_class_that_diffusers_does_not_have_is_said_in_one_line() -> None:
    with pytest.raises(ModelError, match=r"^diffusers [\w.]+ has no AutoencoderOfTomorrow: install a later one$"):
        Tomorrow().build({})


def test_no_case_of_such_a_class_applies(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(MODELS._entries, "tomorrow", Tomorrow().describe("tomorrow", {}, lambda: None))
    path = write_suite(tmp_path, 'dtype = ["fp32"]')
    path.write_text(path.read_text().replace('["reference-kl"]', '["reference-kl", "tomorrow"]'))
    assert [case.not_applicable for case in load(path, registry).cases] == [None, Tomorrow().absent()]


# ---------------------------------------------------------------- what a class lacks


def test_what_a_class_lacks_does_not_apply() -> None:
    reasons = {
        "VQModel": DecodePlan(offload="group_leaf"),
        "AsymmetricAutoencoderKL": DecodePlan(slicing=True),
        "AutoencoderRAE": DecodePlan(tiling=Tiling(4, 0.25)),
    }
    for cls, plan in reasons.items():
        model = described(cls)
        reason = inapplicable(plan, model, (2, model.geometry.latent_channels, 8, 8))
        assert reason is not None
        assert cls in reason
        assert inapplicable(DecodePlan(offload="sequential"), model, (2, 4, 8, 8)) is None


def test_a_class_without_tiles_refuses_them() -> None:
    model = described("VQModel")
    with pytest.raises(IllegalTiling, match="VQModel does not tile"):
        model.family.tile_grid(model.geometry, (8, 8), Tiling(4, 0.25))
    with pytest.raises(IllegalTiling, match="VQModel does not tile"):
        model.family.set_tiling(None, model.geometry, Tiling(4, 0.25))


# ---------------------------------------------------------------- AutoencoderTiny


@pytest.fixture(scope="module")
def tiny() -> torch.nn.Module:
    return MODELS.get("small-tiny").load()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("tiling", [Tiling(4, 0.25), Tiling(5, 0.5), Tiling(6, 0.75), Tiling(7, 0.125 + 1 / 16)])
@pytest.mark.parametrize("size", [(6, 9), (4, 11)])
def test_tiny_tiles_are_painted_as_its_law_says(tiny, dtype: Any, tiling: Tiling, size: tuple[int, int]) -> None:
    model, plan = MODELS.get("small-tiny"), DecodePlan(dtype=dtype, tiling=tiling)
    z = noise(2, 4, *size).to(torch.float32 if dtype == "fp32" else torch.bfloat16)
    grid = model.family.tile_grid(model.geometry, size, tiling)
    with torch.no_grad(), apply_plan(tiny, plan, model=model, device="cpu"), observe(tiny, model) as seen:
        sample = model.family.decode(tiny, z)
    assert seen.calls == grid.count
    assert max(max(shape[-2:]) for shape in seen.shapes) == tiling.tile
    assert torch.equal(sample, oracles.expected(tiny, z, plan, model=model, device="cpu"))


def test_tiny_has_no_threshold(tiny) -> None:
    """A tile that holds the picture is no reason for it not to cut: what counts is the stride."""
    model, tiling = MODELS.get("small-tiny"), Tiling(8, 0.5)
    calls = {}
    for side in (4, 5, 8):
        applied = apply_plan(tiny, DecodePlan(tiling=tiling), model=model, device="cpu")
        with torch.no_grad(), applied, observe(tiny, model) as seen:
            model.family.decode(tiny, noise(1, 4, side, side))
        calls[side] = seen.calls
        assert seen.calls == model.family.tile_grid(model.geometry, (side, side), tiling).count
        assert (seen.calls > 1) == model.family.will_tile((side, side), tiling)
    assert calls == {4: 1, 5: 4, 8: 4}


def test_tiny_cannot_overlap_by_less_than_a_pixel() -> None:
    family = FAMILIES.get("AutoencoderTiny")
    with pytest.raises(
        IllegalTiling, match=r"0\.4 latent pixels are rounded down to none; nearest legal: overlap 0\.25"
    ):
        family.tile_grid(Geometry(8, 4), (9, 9), Tiling(4, 0.1))
    for tile in range(2, 64):
        with pytest.raises(IllegalTiling) as error:
            family.tile_grid(Geometry(8, 4), (9, 9), Tiling(tile, 0.5 / tile))
        advised = float(str(error.value).split("nearest legal: overlap ")[1].split(" ")[0])
        assert family.tile_grid(Geometry(8, 4), (9, 9), Tiling(tile, advised)).rows.band >= 8
    for wrong in (Tiling(0, 0.25), Tiling(4, 1.0), Tiling(4, -0.5), Tiling(4, float("nan"))):
        with pytest.raises(IllegalTiling):
            family.tile_grid(Geometry(8, 4), (9, 9), wrong)


def test_tiles_of_tiny_without_overlap_should_abut() -> None:
    model, tile = MODELS.get("small-tiny"), torch.ones(1, 3, 32, 32)
    grid = model.family.tile_grid(model.geometry, (4, 8), Tiling(4, 0.0))
    assert (grid.rows.starts, grid.cols.starts, grid.cols.band) == ((0,), (0, 32), 0)
    assert torch.equal(model.family.assemble([[tile, 2 * tile]], grid), torch.cat([tile, 2 * tile], dim=-1))


# ---------------------------------------------------------------- FLUX.2


@pytest.fixture
def flux2_folder(tmp_path: Path) -> Path:
    model = MODELS.get("small-flux2")
    (tmp_path / "config.json").write_text(json.dumps(model.config))
    save_file(model.load().state_dict(), tmp_path / "diffusion_pytorch_model.safetensors")
    return tmp_path


@pytest.mark.parametrize("counter", [True, False])
def test_a_batch_norm_counter_may_be_there_or_not(flux2_folder: Path, counter: bool) -> None:
    file = flux2_folder / "diffusion_pytorch_model.safetensors"
    state = load_file(file)
    assert state["bn.num_batches_tracked"].dtype == torch.int64
    state = {**state, "bn.running_mean": state["bn.running_mean"] + 0.5}
    save_file({key: value for key, value in state.items() if counter or "num_batches" not in key}, file)
    module: Any = from_path("mine", flux2_folder).load()
    assert torch.equal(module.bn.running_mean, torch.full((128,), 0.5))
    assert module.bn.num_batches_tracked.dtype == torch.int64


def test_the_statistics_of_flux2_are_weights_and_must_be_there(flux2_folder: Path) -> None:
    file = flux2_folder / "diffusion_pytorch_model.safetensors"
    save_file({key: value for key, value in load_file(file).items() if key != "bn.running_mean"}, file)
    with pytest.raises(ModelError, match=r"1 missing \(bn\.running_mean\)"):
        from_path("mine", flux2_folder)


# ---------------------------------------------------------------- DC, HunyuanImage, KVAE


def test_dc_keeps_its_threshold_in_attributes_of_its_own() -> None:
    """`tiled_decode` reads the sample's sizes, `_decode` the latents': both must be set."""
    model = MODELS.get("small-dc")
    module: Any = model.load()
    assert model.geometry.spatial == module.spatial_compression_ratio == 32
    model.family.set_tiling(module, model.geometry, Tiling(2, 0.5))
    with torch.no_grad(), observe(module, model) as seen:
        model.family.decode(module, noise(1, 8, 3, 2))
    assert seen.calls == model.family.tile_grid(model.geometry, (3, 2), Tiling(2, 0.5)).count == 6


def test_hunyuan_image_has_f32_with_six_levels() -> None:
    changes = {"block_out_channels": [32] * 6, "spatial_compression_ratio": 32}
    model = described("AutoencoderKLHunyuanImage", **changes)
    module = model.family.build(model.config)
    with torch.no_grad():
        assert model.family.decode(module, noise(1, 16, 1, 2)).shape == (1, 3, 32, 64)
        assert model.family.encode(module, noise(1, 3, 32, 64)).shape == (1, 16, 1, 2)


def test_nobody_reads_what_a_decode_of_kvae_leaves_behind() -> None:
    import diffusers

    source = inspect.getsource(inspect.getmodule(diffusers.AutoencoderKLKVAE))  # type: ignore[arg-type]
    for name in FAMILIES.get("AutoencoderKLKVAE").scratch:
        assert source.count(name) == source.count(f"self.{name} = ") == 1


# ---------------------------------------------------------------- ConsistencyDecoderVAE


def test_noise_of_the_consistency_decoder_is_the_same_for_each_item_and_decode() -> None:
    model = MODELS.get("small-consistency")
    module, z = model.load(), noise(3, 4, 2, 3)
    before = torch.random.get_rng_state()
    with torch.no_grad(), observe(module, model) as seen:
        sample = model.family.decode(module, z)
        assert torch.equal(sample, model.family.decode(module, z))
        alone = torch.cat([model.family.decode(module, item) for item in z.split(1)])
    assert (sample - alone).abs().max() <= 1e-5  # kernels round otherwise at another batch size
    assert torch.equal(before, torch.random.get_rng_state())
    assert seen.calls == 2 * 5
    assert seen.shapes[0] == (3, 4, 2, 3)


# ---------------------------------------------------------------- AutoencoderRAE


def test_rae_decodes_one_size_in_a_range_of_its_own() -> None:
    model = MODELS.get("small-rae")
    assert (model.data_range, model.geometry.size) == ((0.0, 1.0), (8, 8))
    assert LATENTS.get("normal").shape(model.geometry) == LATENTS.get("small").shape(model.geometry) == (2, 64, 8, 8)
    with pytest.raises(LatentsError, match="latents 'photo-pair'"):
        LATENTS.get("photo-pair").make(model, torch.nn.Module())


def test_statistics_of_rae_are_undone_inside() -> None:
    mean = [[[0.5] * 8] * 8] * 64
    model = described("AutoencoderRAE", latents_mean=mean, latents_std=mean, scaling_factor=2.0)
    assert model.scaling == Scaling()
    module: Any = model.family.build(model.config)
    z = noise(1, 64, 8, 8)
    with torch.no_grad():
        sample = model.family.decode(module, z)
        tokens = (z / 2.0 * (0.5 + 1e-5) + 0.5).flatten(2).transpose(1, 2)
        pixels = module.decoder.unpatchify(module.decoder(tokens).logits)
        assert torch.allclose(sample, module._denormalize_image(pixels), atol=1e-5)


# ---------------------------------------------------------------- Stable Video Diffusion


def test_a_video_is_what_the_class_gives_of_its_frames() -> None:
    model = MODELS.get("small-svd")
    module: Any = model.load()
    z = noise(2, 4, 3, 2, 2)
    with torch.no_grad(), observe(module, model) as seen:
        sample = model.family.decode(module, z)
        frames = module.decode(z.transpose(1, 2).reshape(6, 4, 2, 2), num_frames=3).sample
    assert torch.equal(sample, frames.reshape(2, 3, 3, 16, 16).transpose(1, 2))
    assert seen.shapes == [(2, 4, 3, 2, 2)] * 2
    assert model.geometry == Geometry(8, 4, video=True, frames="every")
    with torch.no_grad():  # the decoder looks along time: a frame alone is another one
        assert not torch.allclose(model.family.decode(module, z[:, :, :1]), sample[:, :, :1], atol=1e-3)
