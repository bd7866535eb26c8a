"""LPIPS: the published answers, the package itself, and weights that are missing or altered."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

from fidelity.errors import AttestationError
from fidelity.metrics import perceptual
from tests.metrics.samples import measure, noisy, picture


@pytest.fixture
def forget():
    """A process that has not attested yet."""
    perceptual.attested.cache_clear()
    yield
    perceptual.attested.cache_clear()


def read(path) -> torch.Tensor:
    array = np.asarray(Image.open(path).convert("RGB"), dtype=np.float32)
    return torch.from_numpy(array).permute(2, 0, 1)[None] / 255


def test_the_published_distances(shared):
    reference = read(shared / "data/lpips/ex_ref.png")
    for name, published in (("ex_p0", 0.722), ("ex_p1", 0.138)):
        other = read(shared / f"data/lpips/{name}.png")
        assert measure("lpips_alex", other, reference, data_range=(0.0, 1.0)).value == pytest.approx(
            published, abs=6e-4
        )


def test_the_heads_are_those_of_the_lpips_package():
    import lpips

    path = f"{lpips.__path__[0]}/weights/v0.1/alex.pth"
    ours = safetensors.torch.load_file(perceptual.WEIGHTS)
    for name, head in torch.load(path, map_location="cpu", weights_only=True).items():
        assert torch.equal(ours[name], head.half()), name


def test_against_the_lpips_package_s_own_forward():
    golden = picture()
    candidate = noisy(golden, 0.2)
    model = perceptual.load(perceptual.WEIGHTS)
    with torch.no_grad():
        want = model(candidate.clamp(-1, 1), golden.clamp(-1, 1)).flatten().tolist()
    assert measure("lpips_alex", candidate, golden).per_image == pytest.approx(want, rel=1e-4)


def test_values_outside_the_range_are_clipped():
    golden = picture().sign()
    assert measure("lpips_alex", golden * 1.5, golden).value == pytest.approx(0, abs=1e-6)


def test_equal_samples_are_attested_all_the_same(forget, monkeypatch):
    monkeypatch.setattr(perceptual, "KNOWN_ANSWER", 0.5)
    with pytest.raises(AttestationError, match=r"0\.08.* not 0\.5"):
        measure("lpips_alex", picture(), picture())


def test_missing_weights_are_an_error(forget, monkeypatch, tmp_path):
    monkeypatch.setattr(perceptual, "WEIGHTS", tmp_path / "gone.safetensors")
    with pytest.raises(AttestationError, match="missing"):
        measure("lpips_alex", picture(), picture(seed=1))


def test_altered_weights_are_an_error(forget, monkeypatch, tmp_path):
    data = bytearray(perceptual.WEIGHTS.read_bytes())
    data[-1000] ^= 1
    altered = tmp_path / "altered.safetensors"
    altered.write_bytes(data)
    monkeypatch.setattr(perceptual, "WEIGHTS", altered)
    with pytest.raises(AttestationError, match="altered"):
        measure("lpips_alex", picture(), picture(seed=1))


@pytest.mark.parametrize("change", ["missing", "extra", "shape"])
def test_keys_and_shapes_are_strict(change):
    weights = safetensors.torch.load_file(perceptual.WEIGHTS)
    if change == "missing":
        del weights["lin3.model.1.weight"]
    elif change == "extra":
        weights["lin7.model.1.weight"] = torch.zeros(1)
    else:
        weights["net.slice2.3.weight"] = weights["net.slice2.3.weight"][:, :1]
    with pytest.raises(AttestationError, match=r"do not fit: (lin3|lin7|net\.slice2)"):
        perceptual.fill(perceptual.build(), weights)


def test_random_weights_do_not_pass_attestation(forget, monkeypatch):
    def random(path):
        model = perceptual.build()
        shapes = {name: p.shape for name, p in model.named_parameters()}
        generator = torch.Generator().manual_seed(0)
        return perceptual.fill(model, {n: torch.randn(s, generator=generator) * 0.02 for n, s in shapes.items()})

    monkeypatch.setattr(perceptual, "load", random)
    with pytest.raises(AttestationError, match="known pair"):
        measure("lpips_alex", picture(), picture(seed=1))


def test_the_golden_s_features_are_computed_once(monkeypatch):
    golden = picture()
    measure("lpips_alex", noisy(golden), golden)
    calls = []
    original = perceptual.features
    monkeypatch.setattr(perceptual, "features", lambda model, images: calls.append(1) or original(model, images))
    measure("lpips_alex", noisy(golden, seed=3), golden)
    assert len(calls) == 1


@pytest.mark.parametrize(("channels", "size"), [(1, 64), (4, 64), (3, 30)])
def test_what_alexnet_cannot_take_says_so(channels, size):
    golden = torch.zeros(1, channels, size, size)
    result = measure("lpips_alex", golden + 0.1, golden)
    assert result.value is None
    assert "AlexNet" in result.reason


def test_the_smallest_picture_it_can_take():
    golden = picture(1, 31, 31)
    assert measure("lpips_alex", noisy(golden, 0.3), golden).value > 0
