"""Named latents: the same everywhere, of the announced shape, and refused in one line where they do not fit."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from fidelity import latents as module_under_test
from fidelity.errors import LatentsError
from fidelity.latents import check, digest, from_file, from_image, unscale
from fidelity.models.kl import KLFamily
from fidelity.photographs import PHOTOGRAPHS, SHA256, Photograph
from fidelity.records import Geometry, Model, Scaling
from fidelity.registry import LATENTS, MODELS

VIDEOS = ("photo-pan", "temporal-step")
PHOTO = [name for name in LATENTS if name.startswith("photo") and name not in VIDEOS]
DRAWN = [name for name in LATENTS if name not in (*PHOTO, *VIDEOS)]
UNSTATED = Scaling()
VIDEO = Geometry(spatial=8, latent_channels=16, temporal=4, video=True)


@pytest.fixture(scope="module")
def model() -> Model:
    return MODELS.get("reference-kl")


@pytest.fixture(scope="module")
def loaded(model: Model) -> torch.nn.Module:
    return model.load()


def one_line(error: pytest.ExceptionInfo[Exception], *parts: str) -> None:
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def shaped(model: Model, geometry: Geometry, scaling: Scaling = UNSTATED) -> Model:
    return dataclasses.replace(model, geometry=geometry, scaling=scaling)


# ---------------------------------------------------------------- what there is


def test_importing_and_shaping_leaves_heavy_packages_out(tmp_path: Path) -> None:
    file = tmp_path / "mine.safetensors"
    save_file({"z": torch.zeros(1, 4, 24, 24)}, file)
    code = (
        "import sys; from fidelity.latents import from_file; from fidelity.records import Geometry; "
        "from fidelity.registry import LATENTS; "
        f"from_file('mine', {str(file)!r}, scaled=True).shape(Geometry(8, 4)); "
        f"[source.shape(Geometry(8, 4, 4, video=name in {VIDEOS})) for name, source in LATENTS.items()]; "
        "print([name for name in ('torch', 'numpy', 'diffusers', 'skimage', 'PIL') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_recipes_of_the_design_are_there() -> None:
    assert set(LATENTS) == {
        "photo-pair", "photo-512", "photo-text", "photo-texture", "photo-night",
        "normal", "small", "flat", "ramp", "contrast", "hot-pixel", *VIDEOS,
    }  # fmt: skip
    assert all(source.name == name and source.summary for name, source in LATENTS.items())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "photo-512" else ())
        for name in LATENTS
        if name not in VIDEOS
    ],
)
def test_made_as_announced_and_always_the_same(name: str, model: Model, loaded: torch.nn.Module) -> None:
    source = LATENTS.get(name)
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = source.make(model, loaded)
    assert torch.equal(state, torch.random.get_rng_state())
    torch.manual_seed(2)
    second = source.make(model, loaded)
    assert first.name == name
    assert tuple(first.tensor.shape) == source.shape(model.geometry)
    assert (first.tensor.dtype, first.tensor.device.type) == (torch.float32, "cpu")
    assert first.tensor.is_contiguous()
    assert not first.tensor.requires_grad
    assert first.digest == second.digest == digest(first.tensor)
    assert torch.equal(first.tensor, second.tensor)
    if name in PHOTO:
        f = model.geometry.spatial
        assert first.image is not None
        assert tuple(first.image.shape) == (len(first.tensor), 3, *(side * f for side in first.tensor.shape[-2:]))
        assert first.image.min() >= -1
        assert first.image.max() <= 1
        assert torch.equal(first.image, second.image)
    else:
        assert first.image is None


def test_items_of_a_batch_differ(model: Model, loaded: torch.nn.Module) -> None:
    for name in ("photo-pair", "photo-texture", "normal"):
        tensor = LATENTS.get(name).make(model, loaded).tensor
        assert (tensor[0] - tensor[1]).abs().mean() > 0.5 * tensor.std()


def test_a_photograph_does_not_depend_on_its_neighbour(model: Model, loaded: torch.nn.Module) -> None:
    pair = LATENTS.get("photo-pair").make(model, loaded)
    with torch.no_grad():
        for item, image in zip(pair.tensor, pair.image):
            assert torch.equal(model.family.encode(loaded, image[None])[0], item)


def test_the_image_is_the_photograph_in_the_declared_range(model: Model, loaded: torch.nn.Module) -> None:
    pixels = torch.from_numpy(np.asarray(PHOTOGRAPHS["photo-pair"][1][1].read()).copy()).permute(2, 0, 1)
    for low, high in ((-1.0, 1.0), (0.0, 1.0)):
        image = LATENTS.get("photo-pair").make(dataclasses.replace(model, data_range=(low, high)), loaded).image
        assert torch.equal(((image[1] - low) / (high - low) * 255).round().to(torch.uint8), pixels)


# ---------------------------------------------------------------- what the drawn ones are

BITS = {
    "normal": "38ad355cef920d8a1c5353f332b9750a",
    "small": "1d51135ed86a04fb10ffa3bcfdda17d9",
    "flat": "69e8774b668f05e4c4ade002c2f00a51",
    "ramp": "e878e8a134d276eebab910bf0f877fca",
    "contrast": "e4ecae3ac291e19a20d4e0c79a654730",
    "hot-pixel": "794997b55a43cfced7c8e7c2861363eb",
}


@pytest.mark.parametrize("name", DRAWN)
def test_drawn_latents_are_the_same_bits_on_every_machine(name: str, model: Model) -> None:
    assert LATENTS.get(name).make(model, None).digest == BITS[name]


def test_drawn_latents_are_what_they_are_called(model: Model) -> None:
    plain = shaped(model, model.geometry)
    made = {name: LATENTS.get(name).make(plain, None).tensor for name in DRAWN}
    normal = made["normal"]
    assert normal.mean().abs() < 0.03
    assert normal.std() == pytest.approx(1, abs=0.02)
    assert ((normal.abs() < 1).float().mean()) == pytest.approx(0.6827, abs=0.01)
    assert 3 < normal.abs().max() < 5
    assert all(plane.unique().numel() == 1 for plane in made["flat"][0])
    assert made["ramp"].diff(dim=-1).abs().max() < 0.15
    assert made["ramp"].diff(dim=-2).abs().max() < 0.15
    assert set(made["contrast"].unique().tolist()) == {-2.0, 2.0}
    hot = made["hot-pixel"].abs().amax(dim=(0, 1)).nonzero().tolist()
    assert hot == [[10, 19]]
    assert made["hot-pixel"].abs().max() == 8


def test_drawn_latents_take_the_models_spread(model: Model) -> None:
    scaling = Scaling(mean=(1.0, 2.0, 3.0, 4.0), std=(0.5, 1.0, 2.0, 4.0))
    plain = LATENTS.get("normal").make(shaped(model, model.geometry), None).tensor
    scaled = LATENTS.get("normal").make(shaped(model, model.geometry, scaling), None).tensor
    for channel in range(4):
        expected = plain[:, channel] * scaling.std[channel] + scaling.mean[channel]
        assert torch.equal(scaled[:, channel], expected)


@pytest.mark.parametrize("name", DRAWN)
def test_drawn_latents_have_frames_for_a_video_model(name: str, model: Model) -> None:
    source = LATENTS.get(name)
    tensor = source.make(shaped(model, VIDEO), None).tensor
    assert tuple(tensor.shape) == source.shape(VIDEO)
    assert tensor.ndim == 5
    assert tensor.shape[2] > 1


@pytest.mark.parametrize("name", PHOTO)
@pytest.mark.parametrize("f", [1, 4, 8, 16, 32])
def test_photographs_fit_every_usual_compression(name: str, f: int) -> None:
    batch, channels, height, width = LATENTS.get(name).shape(Geometry(spatial=f, latent_channels=7))
    photos = PHOTOGRAPHS[name][1]
    assert (batch, channels) == (len(photos), 7)
    assert {(photo.height, photo.width) for photo in photos} == {(height * f, width * f)}


@pytest.mark.parametrize(
    ("geometry", "part"),
    [
        (VIDEO, "this one is of videos"),
        (Geometry(spatial=8, latent_channels=4, sample_channels=1), "this one is of 1 channels"),
        (Geometry(spatial=7, latent_channels=4), "no multiple of the model's compression 7"),
    ],
)
def test_photographs_are_refused_where_they_do_not_fit(geometry: Geometry, part: str, model: Model) -> None:
    for act in (LATENTS.get("photo-pair").shape, lambda g: LATENTS.get("photo-pair").make(shaped(model, g), None)):
        with pytest.raises(LatentsError) as error:
            act(geometry)
        one_line(error, "'photo-pair'", part)


def test_an_encoder_of_another_compression_is_noticed(model: Model, loaded: torch.nn.Module) -> None:
    with pytest.raises(LatentsError) as error:
        LATENTS.get("photo-pair").make(shaped(model, Geometry(spatial=16, latent_channels=4)), loaded)
    one_line(error, "came out as [2, 4, 24, 32], expected [2, 4, 12, 16]")


# ---------------------------------------------------------------- the photographs' files


def test_photographs_are_inside_the_wheel_and_inside_their_files() -> None:
    folder = Path(importlib.util.find_spec("skimage").submodule_search_locations[0]) / "data"
    for _, photos in PHOTOGRAPHS.values():
        for photo in photos:
            assert hashlib.sha256((folder / photo.file).read_bytes()).hexdigest() == SHA256[photo.file]
            with Image.open(folder / photo.file) as whole:
                assert photo.left + photo.width <= whole.width
                assert photo.top + photo.height <= whole.height
            assert (photo.height % 32, photo.width % 32) == (0, 0)
            assert np.asarray(photo.read()).std() > 10  # not an empty corner


def test_a_missing_or_altered_photograph_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    photo = Photograph("text.png", 0, 0, 8, 8)
    with monkeypatch.context() as patch:
        patch.setitem(SHA256, "text.png", "0" * 64)
        with pytest.raises(LatentsError) as error:
            photo.read()
        one_line(error, "text.png", "is not the one", "reinstall scikit-image")
    with pytest.raises(LatentsError) as error:
        Photograph("gone.png", 0, 0, 8, 8).read()
    one_line(error, "gone.png", "is missing")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LatentsError, match="is missing"):
        photo.read()


# ---------------------------------------------------------------- digest, units, check


def test_digest_sees_shape_dtype_and_every_bit() -> None:
    base = torch.arange(6, dtype=torch.float32)
    assert digest(base) == digest(base.clone().requires_grad_())
    assert digest(base) == hashlib.blake2b(b"torch.float32(6,)" + base.numpy().tobytes(), digest_size=16).hexdigest()
    changed = base.clone()
    changed[3] = float(np.nextafter(np.float32(3), np.float32(4)))
    others = [changed, base.view(2, 3), base.view(3, 2), base.double(), base.bfloat16(), base.flip(0)]
    assert len({digest(base), *map(digest, others)}) == 7
    assert digest(base.view(2, 3).T) == digest(base.view(2, 3).T.contiguous())
    assert digest(torch.tensor(1.0)) != digest(torch.tensor([1.0]))


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (Scaling(), [3.0, 5.0]),
        (Scaling(factor=0.5), [6.0, 10.0]),
        (Scaling(factor=0.5, shift=1.0), [7.0, 11.0]),
        (Scaling(mean=(1.0, 2.0), std=(2.0, 4.0)), [7.0, 22.0]),
        (Scaling(factor=0.5, mean=(1.0, 2.0), std=(2.0, 4.0)), [13.0, 42.0]),
        (Scaling(mean=(1.0, 2.0)), [4.0, 7.0]),
    ],
)
def test_unscale_is_the_pipelines_arithmetic(scaling: Scaling, expected: list[float]) -> None:
    for tail in ((1, 1), (1, 1, 1)):
        latents = torch.tensor([3.0, 5.0]).view(1, 2, *tail)
        assert unscale(latents, scaling).flatten().tolist() == expected


@pytest.mark.parametrize(
    ("tensor", "part"),
    [
        (torch.zeros(4, 8, 8), "3 axes [4, 8, 8], the model takes (B, C, H, W)"),
        (torch.zeros(1, 4, 1, 8, 8), "5 axes"),
        (torch.zeros(1, 3, 8, 8), "3 channels, the model takes 4"),
        (torch.zeros(0, 4, 8, 8), "empty"),
        (torch.zeros(1, 4, 0, 8), "empty"),
        (torch.zeros(1, 4, 8, 8, dtype=torch.int32), "torch.int32"),
        (torch.zeros(1, 4, 8, 8).index_fill(3, torch.tensor(2), float("nan")), "32 of 256 values are NaN or inf"),
        (torch.full((1, 4, 8, 8), float("inf")), "first at [0, 0, 0, 0]"),
    ],
)
def test_check_refuses_in_one_line(tensor: torch.Tensor, part: str, model: Model) -> None:
    with pytest.raises(LatentsError) as error:
        check(tensor, model, "mine.safetensors")
    one_line(error, "mine.safetensors: ", part)


def test_check_accepts_what_fits(model: Model) -> None:
    check(torch.zeros(1, 4, 1, 1, dtype=torch.bfloat16), model, "mine")
    check(torch.zeros(2, 16, 1, 8, 8), shaped(model, VIDEO), "mine")
    with pytest.raises(LatentsError, match=r"takes \(B, C, T, H, W\)"):
        check(torch.zeros(2, 16, 8, 8), shaped(model, VIDEO), "mine")


# ---------------------------------------------------------------- a user's own


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_file_in_both_units(tmp_path: Path, model: Model, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    tensor = torch.randn(2, 4, 6, 10, generator=generator).to(dtype)
    file = tmp_path / "mine.safetensors"
    save_file({"z": tensor}, file)
    as_decoder, as_denoiser = (from_file("mine", file, scaled=scaled) for scaled in (False, True))
    assert as_decoder.shape(model.geometry) == (2, 4, 6, 10)
    raw = as_decoder.make(model, None)
    assert torch.equal(raw.tensor, tensor.float())
    assert raw.digest == digest(tensor.float())
    assert torch.equal(as_denoiser.make(model, None).tensor, tensor.float() / 0.2447)
    assert "denoiser units" in as_denoiser.summary


def test_one_tensor_of_several_is_named(tmp_path: Path, model: Model) -> None:
    file = tmp_path / "two.safetensors"
    save_file({"first": torch.zeros(1, 4, 8, 8), "second": torch.ones(1, 4, 8, 8)}, file)
    assert from_file("mine", file, tensor="second", scaled=False).make(model, None).tensor.min() == 1
    for tensor, part in ((None, "2 tensors, name one of: first, second"), ("secnd", "did you mean 'second'")):
        with pytest.raises(LatentsError) as error:
            from_file("mine", file, tensor=tensor, scaled=False)
        one_line(error, "'mine'", "two.safetensors", part)


def header_only(header: object, data: bytes = b"") -> bytes:
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


GOOD = {"z": {"dtype": "F32", "shape": [1, 4, 1, 1], "data_offsets": [0, 16]}}


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (None, "No such file"),
        (b"", "no safetensors file"),
        (b"PK\x03\x04 a pickle or so", "no safetensors file"),
        (header_only([]), "no safetensors file"),
        (header_only({"z": {}}), "no safetensors file"),
        (header_only(GOOD, b"\0" * 12), "is damaged"),
        (header_only(GOOD, b"\0" * 20), "is damaged"),
        (header_only({"z": {**GOOD["z"], "shape": [1, 4, 1, 2]}}, b"\0" * 16), "'z' has 16 bytes"),
        (header_only({}), "0 tensors"),
        (header_only({"z": {"dtype": "I32", "shape": [1, 4, 1, 1], "data_offsets": [0, 16]}}, b"\0" * 16), "is I32"),
    ],
)
def test_a_bad_file_is_refused_at_once(tmp_path: Path, content: bytes | None, part: str) -> None:
    file = tmp_path / "mine.safetensors"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(LatentsError) as error:
        from_file("mine", file, scaled=False)
    one_line(error, "mine.safetensors", part)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(LatentsError) as error:
        from_file("mine", tmp_path, scaled=False)
    one_line(error, str(tmp_path), "cannot be read")


@pytest.mark.parametrize("shape", [(4, 8, 8), (1, 4, 1, 8, 8), (1, 3, 8, 8), (0, 4, 8, 8)])
def test_a_file_of_another_shape_is_refused_by_shape_and_make(tmp_path: Path, model: Model, shape) -> None:
    file = tmp_path / "mine.safetensors"
    save_file({"z": torch.zeros(shape)}, file)
    source = from_file("mine", file, scaled=False)
    for act in (lambda: source.shape(model.geometry), lambda: source.make(model, None)):
        with pytest.raises(LatentsError) as error:
            act()
        one_line(error, "'mine'", "mine.safetensors")


def test_values_of_a_file_are_checked(tmp_path: Path, model: Model) -> None:
    file = tmp_path / "mine.safetensors"
    save_file({"z": torch.full((1, 4, 8, 8), float("nan"))}, file)
    with pytest.raises(LatentsError) as error:
        from_file("mine", file, scaled=True).make(model, None)
    one_line(error, "'mine'", "256 of 256 values are NaN or inf")


def test_a_file_that_overflows_fp32_is_refused(tmp_path: Path, model: Model) -> None:
    file = tmp_path / "mine.safetensors"
    save_file({"z": torch.full((1, 4, 8, 8), 1e300, dtype=torch.float64)}, file)
    with pytest.raises(LatentsError, match="NaN or inf"):
        from_file("mine", file, scaled=False).make(model, None)


def test_denoiser_units_need_a_convention(tmp_path: Path, model: Model) -> None:
    file = tmp_path / "mine.safetensors"
    save_file({"z": torch.zeros(1, 4, 8, 8)}, file)
    unknown = shaped(model, model.geometry)
    assert from_file("mine", file, scaled=False).make(unknown, None).tensor.shape == (1, 4, 8, 8)
    with pytest.raises(LatentsError) as error:
        from_file("mine", file, scaled=True).make(unknown, None)
    one_line(error, "'reference-kl' states no scaling")


@pytest.mark.parametrize("name", ["", "a/b", "..", "with space"])
def test_names_that_are_no_folder_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(LatentsError):
        from_file(name, tmp_path / "x.safetensors", scaled=False)
    with pytest.raises(LatentsError):
        from_image(name, tmp_path / "x.png")


def test_a_picture_is_cut_in_the_middle_and_encoded(tmp_path: Path, model: Model, loaded: torch.nn.Module) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (38, 51, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "mine.png")
    source = from_image("mine", tmp_path / "mine.png")
    made = source.make(model, loaded)
    assert source.shape(model.geometry) == tuple(made.tensor.shape) == (1, 4, 4, 6)
    middle = torch.from_numpy(pixels[3:35, 1:49].copy()).permute(2, 0, 1)
    assert torch.equal(((made.image[0] + 1) * 127.5).round().to(torch.uint8), middle)
    with torch.no_grad():
        assert torch.equal(made.tensor, KLFamily().encode(loaded, made.image))


def test_pictures_stand_upright(tmp_path: Path, model: Model) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    Image.new("RGB", (64, 32)).save(tmp_path / "turned.jpg", exif=exif)
    assert from_image("mine", tmp_path / "turned.jpg").shape(model.geometry) == (1, 4, 8, 4)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "LA"])
def test_8_bit_modes_are_read(tmp_path: Path, model: Model, mode: str) -> None:
    Image.new("RGBA", (16, 16), (10, 20, 30, 255)).convert(mode).save(tmp_path / "mine.png")
    assert from_image("mine", tmp_path / "mine.png").shape(model.geometry) == (1, 4, 2, 2)


def test_bad_pictures_are_refused(tmp_path: Path, model: Model) -> None:
    (tmp_path / "text.png").write_text("no picture")
    Image.fromarray(np.full((16, 16), 40000, dtype=np.uint16)).save(tmp_path / "deep.png")
    Image.new("RGBA", (16, 16), (1, 2, 3, 4)).save(tmp_path / "glass.png")
    Image.new("RGB", (300, 300), (9, 9, 9)).save(tmp_path / "whole.png")
    (tmp_path / "torn.png").write_bytes((tmp_path / "whole.png").read_bytes()[:200])
    for file, part in (
        ("gone.png", "cannot be read"),
        ("text.png", "cannot be read"),
        ("torn.png", "cannot be read"),
        ("deep.png", "mode I;16"),
        ("glass.png", "transparent"),
    ):
        with pytest.raises(LatentsError) as error:
            from_image("mine", tmp_path / file)
        one_line(error, file, part)
    Image.new("RGB", (16, 7)).save(tmp_path / "low.png")
    with pytest.raises(LatentsError) as error:
        from_image("mine", tmp_path / "low.png").shape(model.geometry)
    one_line(error, "7×16", "8×8")


def test_public_names() -> None:
    for name in ("check", "digest", "from_file", "from_image", "unscale"):
        assert getattr(module_under_test, name).__doc__
