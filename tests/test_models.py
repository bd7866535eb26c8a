"""Describing, loading and tiling autoencoders; the models that ship."""

from __future__ import annotations

import inspect
import json
import pickle
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import fidelity.latents  # noqa: F401  registers
from fidelity.errors import IllegalTiling, ModelError
from fidelity.models import from_path, legal_tiles, overflow_twin
from fidelity.models.reference import FOLDER
from fidelity.photographs import PHOTOGRAPHS
from fidelity.records import Family, Geometry, Scaling, TileAxis, Tiling
from fidelity.registry import FAMILIES, LATENTS, MODELS

KL = FAMILIES.get("AutoencoderKL")
SMALL = {
    "_class_name": "AutoencoderKL",
    "block_out_channels": [4, 4],
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "latent_channels": 4,
    "norm_num_groups": 2,
    "sample_size": 32,
}


@pytest.fixture(scope="module")
def small() -> torch.nn.Module:
    torch.manual_seed(0)
    return KL.build(SMALL)


@pytest.fixture
def folder(tmp_path: Path, small: torch.nn.Module) -> Path:
    """A diffusers folder of the small model."""
    path = tmp_path / "vae"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(SMALL))
    save_file(small.state_dict(), path / "diffusion_pytorch_model.safetensors")
    return path


def one_line(error: pytest.ExceptionInfo[Exception], *parts: str) -> None:
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


# ---------------------------------------------------------------- describing


def test_importing_and_describing_leaves_heavy_packages_out(folder: Path) -> None:
    code = (
        "import sys; from fidelity.models import from_path; from fidelity.registry import MODELS; "
        f"from_path('mine', {str(folder)!r}); assert 'reference-kl' in MODELS; "
        "print([name for name in ('torch', 'numpy', 'diffusers', 'accelerate', 'skimage') if name in sys.modules])"
    )
    assert python(code) == "[]"


def test_defaults_are_those_of_the_class() -> None:
    import diffusers

    known = inspect.signature(diffusers.AutoencoderKL.__init__).parameters
    assert KL.defaults == {key: known[key].default for key in KL.defaults}


def test_describe_derives_everything_from_the_config() -> None:
    config = {**SMALL, "block_out_channels": [4, 4, 4, 4], "latent_channels": 16, "scaling_factor": 0.3611,
              "shift_factor": 0.1159, "latents_mean": [0.5] * 16, "latents_std": [2] * 16, "out_channels": 4,
              "force_upcast": False}  # fmt: skip
    model = KL.describe("mine", config, lambda: None)
    assert model.geometry == Geometry(spatial=8, latent_channels=16, sample_channels=4)
    assert model.scaling == Scaling(factor=0.3611, shift=0.1159, mean=(0.5,) * 16, std=(2.0,) * 16)
    assert (model.force_upcast, model.data_range, model.reference) == (False, (-1.0, 1.0), "full")
    assert KL.describe("mine", {}, lambda: None).force_upcast  # the class's default


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"latent_channels": "four"}, "latent_channels is 'four'"),
        ({"latent_channels": 0}, "latent_channels is 0"),
        ({"block_out_channels": []}, "block_out_channels is []"),
        ({"block_out_channels": [4, True]}, "block_out_channels[1] is True"),
        ({"scaling_factor": float("nan")}, "scaling_factor is nan"),
        ({"scaling_factor": 0}, "must not be 0"),
        ({"latents_mean": [0.0] * 3}, "expected a list of 4 numbers"),
        ({"latents_std": [1.0, 1.0, 1.0, None]}, "latents_std"),
        ({"force_upcast": "yes"}, "force_upcast is 'yes'"),
    ],
)
def test_describe_refuses_what_does_not_fit(change: dict[str, object], part: str) -> None:
    with pytest.raises(ModelError) as error:
        KL.describe("mine", {**SMALL, **change}, lambda: None)
    one_line(error, "'mine'", "AutoencoderKL", part)


def test_family_keeps_the_protocol() -> None:
    for name, entry in vars(Family).items():
        if inspect.isfunction(entry) and not name.startswith("_"):
            assert [*inspect.signature(entry).parameters][1:] == [*inspect.signature(getattr(KL, name)).parameters]


# ---------------------------------------------------------------- driving


def test_build_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    module = KL.build({**SMALL, "a_key_of_the_future": 1})
    assert torch.equal(before, torch.random.get_rng_state())
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())


def test_encode_is_the_posterior_mode_and_decode_the_sample(small: torch.nn.Module) -> None:
    image = torch.rand(2, 3, 8, 12, generator=torch.Generator().manual_seed(0)) * 2 - 1
    latents = KL.encode(small, image)
    assert torch.equal(latents, small.encode(image).latent_dist.mean)
    assert torch.equal(KL.decode(small, latents), small.decode(latents).sample)
    seen: list[torch.Size] = []
    handles = [
        part(small).register_forward_hook(lambda m, a, o: seen.append(o.shape)) for part in (KL.decoder, KL.middle)
    ]
    KL.decode(small, latents)
    for handle in handles:
        handle.remove()
    assert [tuple(shape) for shape in seen] == [(2, 4, 4, 6), (2, 3, 8, 12)]


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,)])
def test_decode_tolerates_tensor_and_tuple(wrap) -> None:
    class Bare:
        def decode(self, latents):
            return wrap(latents * 2)

    assert torch.equal(KL.decode(Bare(), torch.ones(1)), torch.full((1,), 2.0))


# ---------------------------------------------------------------- tiles


class Probe(torch.nn.Module):
    """A decoder whose n-th call paints the n-th item of the batch with ones and the others with zeros."""

    def __init__(self, factor: int):
        super().__init__()
        self.factor, self.calls = factor, 0

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        sample = torch.zeros(latents.shape[0], 1, *(side * self.factor for side in latents.shape[-2:]))
        sample[self.calls] = 1
        self.calls += 1
        return sample


def assert_grid_is_what_happens(module: torch.nn.Module, size: tuple[int, int], tiling: Tiling) -> None:
    geometry = Geometry(spatial=2, latent_channels=4)
    grid = KL.tile_grid(geometry, size, tiling)
    KL.set_tiling(module, geometry, tiling)
    whole, module.decoder = module.decoder, Probe(geometry.spatial)
    try:
        pictures = module.decode(torch.zeros(grid.count, 4, *size)).sample[:, 0]
        calls = module.decoder.calls
    finally:
        module.decoder = whole
    assert calls == grid.count
    assert pictures.shape[1:] == (grid.rows.size, grid.cols.size) == (2 * size[0], 2 * size[1])
    assert KL.will_tile(size, tiling) == (max(size) > tiling.tile)
    assert torch.allclose(pictures.sum(0), torch.ones(()), atol=1e-5)  # weights of all tiles add up everywhere
    for picture, places in zip(pictures, product(places_of(grid.rows), places_of(grid.cols))):
        shows = [picture.amax(dim=other).nonzero().flatten().tolist() for other in (1, 0)]
        if any(place.first == axis.size for place, axis in zip(places, (grid.rows, grid.cols))):
            assert shows == [[], []]  # a last tile of one blended pixel does not show at all
            continue
        assert [side[0] for side in shows] == [place.first for place in places]
        if tiling.overlap <= 0.5:  # beyond, a band is longer than the step, and no place shows one tile alone
            rows, cols = (slice(place.alone, place.ends) for place in places)
            assert (picture[rows, cols] == 1).all()


class Place(NamedTuple):
    first: int
    """Where the tile starts to show: the first pixel of a blend has weight 0."""
    alone: int
    ends: int


def places_of(axis: TileAxis) -> list[Place]:
    ends = (*axis.starts[1:], axis.size)
    return [
        Place(start + bool(start and axis.band), start + (axis.band if start else 0), end)
        for start, end in zip(axis.starts, ends)
    ]


@pytest.mark.parametrize(
    ("size", "tile", "overlap"),
    [
        ((24, 32), 16, 0.25),
        ((24, 32), 16, 0.0),
        ((16, 40), 16, 0.25),  # a side as long as the tile is cut in two all the same
        ((10, 40), 16, 0.25),  # a single row
        ((40, 3), 16, 0.25),  # a single column
        ((25, 17), 8, 0.5),  # the last tile is one latent pixel
        ((25, 26), 8, 0.75),
        ((23, 21), 8, 0.125),
        ((16, 16), 16, 0.25),  # not cut at all
        ((9, 7), 1, 0.0),
        ((30, 20), 10, 0.1),
    ],
)
def test_grid_is_where_diffusers_puts_the_tiles(small, size, tile, overlap) -> None:
    try:
        assert_grid_is_what_happens(small, size, Tiling(tile, overlap))
    finally:
        small.disable_tiling()


@settings(max_examples=25, deadline=None)
@given(st.tuples(st.integers(1, 21), st.integers(1, 21)), st.integers(2, 12), st.data())
def test_grid_is_where_diffusers_puts_the_tiles_at_any_size(size, tile, data) -> None:
    overlap = data.draw(st.integers(0, tile - 1)) / tile
    module = KL.build(SMALL)
    try:
        KL.tile_grid(Geometry(2, 4), size, Tiling(tile, overlap))
    except IllegalTiling:
        return  # k / tile that floats make illegal; what is legal is tested below
    assert_grid_is_what_happens(module, size, Tiling(tile, overlap))


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 40), st.floats(0, 1, exclude_max=True), st.sampled_from([2, 8]))
def test_a_tiling_is_legal_exactly_where_step_and_crop_agree(tile, overlap, factor) -> None:
    step, crop = int(tile * (1 - overlap)), tile * factor - int(tile * factor * overlap)
    try:
        grid = KL.tile_grid(Geometry(factor, 4), (97, 98), Tiling(tile, overlap))
    except IllegalTiling:
        assert step < 1 or step * factor != crop
    else:
        assert step * factor == crop
        assert {b - a for a, b in zip(grid.rows.starts, grid.rows.starts[1:])} <= {crop}


def test_illegal_overlap_really_spoils_the_picture_in_diffusers(small: torch.nn.Module) -> None:
    tiling = Tiling(16, 0.3)
    with pytest.raises(IllegalTiling):
        KL.tile_grid(Geometry(2, 4), (24, 24), tiling)
    KL.set_tiling(small, Geometry(2, 4), tiling)
    try:
        assert small.decode(torch.zeros(1, 4, 24, 24)).sample.shape[-1] > 48
    finally:
        small.disable_tiling()


@pytest.mark.parametrize(
    ("tile", "overlap", "parts"),
    [
        (0, 0.0, ("at least 1 latent pixel",)),
        (-3, 0.0, ("at least 1 latent pixel",)),
        (16, 1.0, ("below 1",)),
        (16, -0.1, ("at least 0",)),
        (16, float("nan"), ("below 1",)),
        (4, 0.9, ("0.4 latent pixels is below 1", "overlap 0.75 with this tile")),
        (16, 0.3, ("start 88 sample pixels apart", "each shows 90", "11.2 is not whole", "overlap 0.3125", "tile 20")),
    ],
)
def test_illegal_tilings_name_the_nearest_legal(tile: int, overlap: float, parts: tuple[str, ...]) -> None:
    with pytest.raises(IllegalTiling) as error:
        KL.tile_grid(Geometry(8, 4), (64, 64), Tiling(tile, overlap))
    one_line(error, "AutoencoderKL", *parts)


def test_advice_is_legal_itself() -> None:
    for tile in range(1, 40):
        with pytest.raises(IllegalTiling) as error:
            KL.tile_grid(Geometry(8, 4), (64, 64), Tiling(tile, 0.987654321))
        advised = float(str(error.value).split("nearest legal: overlap ")[1].split(" ")[0])
        KL.tile_grid(Geometry(8, 4), (64, 64), Tiling(tile, advised))


def test_legal_tiles() -> None:
    assert legal_tiles(KL, Geometry(8, 4), 0.25, largest=20) == (4, 8, 12, 16, 20)
    assert legal_tiles(KL, Geometry(8, 4), 0.0, largest=3) == (1, 2, 3)


def test_set_tiling_writes_the_declared_attributes_only(small: torch.nn.Module) -> None:
    before = {key: value for key, value in vars(small).items() if not key.startswith("_")}
    module = KL.build(SMALL)
    KL.set_tiling(module, Geometry(2, 4), Tiling(12, 0.5))
    after = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    assert {key for key in after if after[key] != before.get(key)} == set(KL.tiling_attributes())
    assert (module.use_tiling, module.tile_latent_min_size, module.tile_sample_min_size) == (True, 12, 24)
    assert module.tile_overlap_factor == 0.5


# ---------------------------------------------------------------- from a path


def test_a_folder_loads_as_it_was_saved(folder: Path, small: torch.nn.Module) -> None:
    model = from_path("mine", folder)
    assert (model.name, model.source, model.geometry.spatial) == ("mine", str(folder), 2)
    first, second = model.load(), model.load()
    for key, value in small.state_dict().items():
        assert torch.equal(first.state_dict()[key], value)
    assert first is not second
    with torch.no_grad():
        next(first.parameters()).zero_()
    assert next(second.parameters()).any()
    assert {value.dtype for value in second.state_dict().values()} == {torch.float32}
    assert pickle.loads(pickle.dumps(model)).load() is not None


@pytest.mark.parametrize("layout", ["fp16", "shards", "single", "single_stem", "pipeline", "bin", "old_attention"])
def test_every_layout_of_weights_loads(folder: Path, small: torch.nn.Module, layout: str, tmp_path: Path) -> None:
    state, weights = small.state_dict(), folder / "diffusion_pytorch_model.safetensors"
    path, exact = folder, True
    if layout == "fp16":
        exact = False
        weights.unlink()
        save_file({k: v.half() for k, v in state.items()}, folder / "diffusion_pytorch_model.fp16.safetensors")
    elif layout == "shards":
        weights.unlink()
        names = sorted(state)
        table = {name: f"diffusion_pytorch_model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
        for file in set(table.values()):
            save_file({name: state[name] for name in names if table[name] == file}, folder / file)
        (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    elif layout == "single":
        path = weights
    elif layout == "single_stem":
        path = weights.rename(folder / "mine.safetensors")
        (folder / "config.json").rename(folder / "mine.json")
    elif layout == "pipeline":
        path = tmp_path
        (tmp_path / "model_index.json").write_text("{}")
    elif layout == "bin":
        weights.unlink()
        torch.save(state, folder / "diffusion_pytorch_model.bin")
    elif layout == "old_attention":
        old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
        renamed = {}
        for key, value in state.items():
            for new, name in old.items():
                key = key.replace(f".attentions.0.{new}.", f".attentions.0.{name}.")
            renamed[key] = value
        assert renamed.keys() != state.keys()
        save_file(renamed, weights)
    loaded = from_path("mine", path).load().state_dict()
    for key, value in state.items():
        assert torch.equal(loaded[key], value if exact else value.half().float())


def rewrite(folder: Path, change) -> None:
    file = folder / "diffusion_pytorch_model.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda s: [s.pop(k) for k in list(s) if ".norm" in k], ("missing (", "…")),
        (lambda s: s.update(odd=torch.zeros(2)), ("1 extra (odd)",)),
        (
            lambda s: s.update({"decoder.conv_norm_out.bias": torch.zeros(5)}),
            ("1 of another shape", "[5] instead of [4]"),
        ),
        (lambda s: s["decoder.conv_out.bias"].fill_(float("nan")), ("'decoder.conv_out.bias'", "3 of 3", "NaN")),
        (lambda s: s["decoder.conv_out.bias"][1:2].fill_(float("inf")), ("'decoder.conv_out.bias'", "1 of 3", "inf")),
    ],
)
def test_loading_is_strict(folder: Path, change, parts: tuple[str, ...]) -> None:
    rewrite(folder, change)
    model = from_path("mine", folder)
    with pytest.raises(ModelError) as error:
        model.load()
    one_line(error, "'mine'", *parts)


def write_config(folder: Path, **change: object) -> None:
    (folder / "config.json").write_text(json.dumps({**SMALL, **change}))


def truncate(folder: Path) -> None:
    file = folder / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


OLD_KEY = "decoder.mid_block.attentions.0.query.bias"
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (shutil.rmtree, ("does not exist",)),
        (lambda f: (f / "config.json").unlink(), ("no config.json",)),
        (lambda f: (f / WEIGHTS).unlink(), ("no weights", WEIGHTS)),
        (lambda f: (f / "config.json").write_text("{"), ("config.json is not JSON",)),
        (lambda f: (f / "config.json").write_text("[]"), ("holds list",)),
        (lambda f: (f / "config.json").write_bytes(b"\xff\xfe"), ("is not JSON",)),
        (lambda f: write_config(f, _class_name="AutoencoderLK"), ("did you mean 'AutoencoderKL'",)),
        (lambda f: write_config(f, _class_name=None), ("names no _class_name",)),
        (lambda f: write_config(f, in_channels="3"), ("in_channels is '3'", "'mine'")),
        (
            lambda f: rewrite(f, lambda s: s.update({OLD_KEY: s[OLD_KEY.replace("query", "to_q")].clone()})),
            ("'decoder.mid_block.attentions.0.to_q.bias' comes twice",),
        ),
        (lambda f: write_config(f, latent_channels=8), ("of another shape", "decoder.conv_in.weight")),
        (lambda f: (f / WEIGHTS).write_text("hello, no tensors"), ("no safetensors file",)),
        (lambda f: (f / WEIGHTS).write_bytes(b""), ("no safetensors file",)),
        (truncate, ("is damaged", "fetch it again")),
        (lambda f: rewrite(f, lambda s: s.pop("decoder.conv_in.weight")), ("1 missing (decoder.conv_in.weight)",)),
        (lambda f: rewrite(f, lambda s: s.update(odd=torch.zeros(2, dtype=torch.int64))), ("odd: I64",)),
        (
            lambda f: save_file({"first_stage_model.decoder.conv_in.weight": torch.zeros(1)}, f / WEIGHTS),
            ("from_single_file",),
        ),
        (
            lambda f: (f / WEIGHTS).rename(f / "x") and (f / f"{WEIGHTS}.index.json").write_text("{}"),
            ("no weight_map",),
        ),
        (
            lambda f: (
                (f / WEIGHTS).rename(f / "x")
                and (f / f"{WEIGHTS}.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
            ),
            ("1 shards missing (gone.safetensors)",),
        ),
        (
            lambda f: (
                (f / WEIGHTS).rename(f / "x.safetensors")
                and (f / f"{WEIGHTS}.index.json").write_text('{"weight_map": {"a": "x.safetensors"}}')
            ),
            ("disagree on 'a'",),
        ),
    ],
)
def test_a_wrong_folder_is_refused_before_anything_is_loaded(folder: Path, spoil, parts: tuple[str, ...]) -> None:
    spoil(folder)
    with pytest.raises(ModelError) as error:
        from_path("mine", folder)
    one_line(error, *parts)


def test_wrong_single_files_are_refused(folder: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone.safetensors"
    shutil.copy(folder / WEIGHTS, alone)
    for path, part in ((alone, "alone.json or config.json"), (folder / "config.json", "nor a .safetensors file")):
        with pytest.raises(ModelError) as error:
            from_path("mine", path)
        one_line(error, part)


@pytest.mark.parametrize("name", ["", "a/b", "../up", "with space", ".hidden"])
def test_names_that_are_no_folder_names_are_refused(folder: Path, name: str) -> None:
    with pytest.raises(ModelError):
        from_path(name, folder)


def test_a_config_that_diffusers_cannot_build_is_a_model_error(folder: Path) -> None:
    write_config(folder, norm_num_groups=3)
    with pytest.raises(ModelError) as error:
        from_path("mine", folder).load()
    one_line(error, "'mine'", "cannot build AutoencoderKL")


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


@pytest.mark.parametrize("content", [Evil(), [1, 2], {"a": 1}])
def test_pickles_are_read_as_plain_weights_only(folder: Path, content: object, capsys) -> None:
    (folder / WEIGHTS).unlink()
    torch.save(content, folder / "diffusion_pytorch_model.bin")
    with pytest.raises(ModelError) as error:
        from_path("mine", folder).load()
    one_line(error, "diffusion_pytorch_model.bin")
    assert "executed" not in capsys.readouterr().out


# ---------------------------------------------------------------- the models that ship


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    return MODELS.get("reference-kl").load()


def photograph(name: str, index: int = 0) -> torch.Tensor:
    import numpy as np

    pixels = np.asarray(PHOTOGRAPHS[name][1][index].read())
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].float() / 127.5 - 1


def psnr(a: torch.Tensor, b: torch.Tensor) -> float:
    return (10 * torch.log10(4 / (a - b).square().mean())).item()


def test_the_packaged_folder_is_complete_and_speaks_of_itself() -> None:
    manifest = json.loads((FOLDER / "MANIFEST.json").read_text())
    assert len(manifest) == 55
    assert all(entry.keys() == {"package", "file", "licence"} for entry in manifest)
    held_out = {photo.file for name in ("photo-pair", "photo-512", "photo-text") for photo in PHOTOGRAPHS[name][1]}
    assert not held_out & {entry["file"] for entry in manifest}  # never trained on
    assert (FOLDER / "LICENSE").is_file()
    assert (FOLDER / "train_reference_kl.py").is_file()


def test_reference_is_described_by_its_own_config() -> None:
    model, hot = MODELS.get("reference-kl"), MODELS.get("reference-kl-hot")
    assert model.geometry == Geometry(spatial=8, latent_channels=4)
    assert model.scaling == Scaling(factor=0.2447)
    assert model.source == str(FOLDER)
    assert (model.force_upcast, hot.force_upcast) == (False, True)
    assert hot.config == {**model.config, "force_upcast": True}
    assert pickle.loads(pickle.dumps(hot)).name == "reference-kl-hot"


@pytest.mark.parametrize(("size", "figure"), [(256, 20.93), pytest.param(512, 24.03, marks=pytest.mark.slow)])
def test_round_trip_is_as_the_readme_says(reference: torch.nn.Module, size: int, figure: float) -> None:
    from PIL import Image

    assert f"{figure:.2f} /" in (FOLDER / "README.md").read_text(encoding="utf-8")
    image = photograph("photo-512")
    if size != 512:
        import numpy as np

        picture = PHOTOGRAPHS["photo-512"][1][0].read().resize((size, size), Image.Resampling.LANCZOS)
        image = torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
    with torch.no_grad():
        sample = KL.decode(reference, KL.encode(reference, image)).clamp(-1, 1)
    assert psnr(sample, image) == pytest.approx(figure, abs=0.3)


@pytest.fixture(scope="module")
def hot() -> torch.nn.Module:
    return MODELS.get("reference-kl-hot").load()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if "photo" in name else ())
        for name in LATENTS
        if name not in ("photo-pan", "temporal-step")
    ],
)
def test_hot_twin_is_the_same_in_fp32_and_beyond_fp16_inside(name: str, reference, hot) -> None:
    latents = LATENTS.get(name).make(MODELS.get("reference-kl"), reference).tensor
    (sample, peaks), (plain, plain_peaks) = (decode_and_peaks(module, latents) for module in (hot, reference))
    assert (sample - plain).abs().max().item() * 127.5 <= 0.01
    assert all(peak > 65504 for peak in peaks)  # every item of the batch
    assert all(peak < 65504 / 10 for peak in plain_peaks)


@pytest.mark.slow
def test_hot_twin_overflows_in_every_tile(reference: torch.nn.Module, hot: torch.nn.Module) -> None:
    latents = LATENTS.get("photo-pair").make(MODELS.get("reference-kl"), reference).tensor
    for top, left in product((0, 8), (0, 8, 16)):
        _, peaks = decode_and_peaks(hot, latents[:, :, top : top + 16, left : left + 16])
        assert all(peak > 65504 for peak in peaks)


def decode_and_peaks(module: torch.nn.Module, latents: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
    """The sample, and the largest absolute value inside the last decoder block for each item of the batch."""
    seen: list[torch.Tensor] = []
    handles = [
        part.register_forward_hook(lambda m, a, out: seen.append(out.abs().amax(dim=(1, 2, 3))))
        for part in module.decoder.up_blocks[3].modules()
    ]
    try:
        with torch.no_grad():
            sample = KL.decode(module, latents)
    finally:
        for handle in handles:
            handle.remove()
    return sample, torch.stack(seen).amax(dim=0).tolist()


def test_hot_twin_states_force_upcast_and_keeps_finite_weights(hot: torch.nn.Module) -> None:
    assert hot.config.force_upcast is True
    assert all(value.half().isfinite().all() for value in hot.state_dict().values())  # it overflows inside only


def test_hot_twin_is_non_finite_in_fp16_arithmetic() -> None:
    module = MODELS.get("reference-kl-hot").load()
    with torch.no_grad():
        latents = KL.encode(module, photograph("photo-pair")[..., :64, :64])
        assert not KL.decode(module.half(), latents.half()).isfinite().all()


def test_overflow_twin_works_in_place_on_the_stream_alone() -> None:
    module = MODELS.get("reference-kl").load()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    assert overflow_twin(module) is module
    changed = {key for key, value in module.state_dict().items() if not torch.equal(value, before[key])}
    assert len(changed) == 6
    assert all(torch.equal(module.state_dict()[key], 256 * before[key]) for key in changed)
