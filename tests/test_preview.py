"""The preview decoder: what it is put in place of, what proves it, and what it does to a photograph."""

from __future__ import annotations

import pytest
import torch

from fidelity import DecodePlan, Geometry, Tiling, decoder, registry
from fidelity.errors import RequestError
from fidelity.inspection import inspect
from fidelity.models.tiny_reference import FOLDER, reference_tiny
from fidelity.optimizations.preview import _restated
from fidelity.predict import predict
from fidelity.records import Scaling
from fidelity.runner import Runner

PREVIEW = {"preview": True}


@pytest.fixture(scope="module")
def runner() -> Runner:
    registry.load_plugins()
    return Runner(registry.MODELS.get("reference-kl"))


@pytest.fixture(scope="module")
def latents(runner: Runner) -> torch.Tensor:
    source = registry.LATENTS.get("photo-pair")
    return source.make(runner.model, runner.module).tensor[:1, :, :16, :24]


def test_it_ships_small():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 1_500_000
    module = reference_tiny.load()
    assert sum(weight.numel() for weight in module.decoder.parameters()) == 307_139
    assert reference_tiny.geometry == registry.MODELS.get("reference-kl").geometry


def test_it_stands_in_for_the_full_decoder_on_the_same_latents(runner, latents):
    decoded = runner.decode(latents, DecodePlan(options=PREVIEW), trace=False)
    assert decoded.receipts["preview"] | {"weights": 0} == {
        "requested": True, "engaged": True, "reason": None, "decoder": "reference-tiny", "calls": 1, "full_calls": 0,
        "weights": 0,
    }  # fmt: skip
    assert decoded.receipts["state"]["leaks"] == []
    with torch.no_grad():
        own = reference_tiny.load().decode(latents * runner.model.scaling.factor).sample
    assert torch.allclose(decoded.sample, own, atol=1e-5)
    full = runner.decode(latents, DecodePlan(), trace=False).sample
    rmse = float((decoded.sample - full).square().mean().sqrt()) * 127.5
    assert 3 < rmse < 20
    assert abs(float((decoded.sample - full).mean())) * 127.5 < 3


@pytest.mark.parametrize(
    "plan",
    [
        DecodePlan(options=PREVIEW, tiling=Tiling(12, 0.25)),
        DecodePlan(options=PREVIEW, tiling=Tiling(12, 0.25), slicing=True, dtype="bf16", offload="sequential"),
        DecodePlan(options=PREVIEW, dtype="fp16"),
        DecodePlan(options=PREVIEW, offload="group_leaf"),
    ],
    ids=lambda plan: plan.id,
)
def test_every_other_option_applies_to_it(runner, latents, plan):
    decoded = runner.decode(latents.repeat(2, 1, 1, 1), plan, trace=False)
    assert {name: receipt["reason"] for name, receipt in decoded.receipts.items() if not receipt["engaged"]} == {}
    assert decoded.receipts["preview"]["full_calls"] == 0
    assert decoded.receipts["state"]["leaks"] == []


def test_a_decode_that_calls_the_full_decoder_is_found_out(runner, latents, monkeypatch):
    full, decode = runner.module.decoder, type(runner.model.family).decode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(runner.model.family), "decode", lambda self, module, z: full(z) + 0 * decode(self, module, z)
        )
        receipt = runner.decode(latents, DecodePlan(options=PREVIEW), trace=False).receipts["preview"]
    assert receipt["engaged"] is False
    assert receipt["reason"] == "of 1 decoder calls 1 were the preview's, and 1 the full decoder's"
    runner.reload()


def test_it_is_not_applicable_where_there_is_none(runner):
    option = registry.OPTIMIZATIONS.get("preview")

    def why(value, model):
        return option.inapplicable(value, DecodePlan(), registry.MODELS.get(model), (1, 4, 8, 8))

    assert why(True, "reference-kl") is None
    assert why("reference-tiny", "reference-kl") is None
    assert why(True, "reference-video").startswith("preview: none is known of reference-video")
    assert "is no registered model" in why("taesd-mine", "reference-kl")
    assert "decodes other latents (f 8, c 4) than reference-video" in why("reference-tiny", "reference-video")


def test_a_preview_of_another_range_and_scaling_is_translated(runner, latents, monkeypatch):
    monkeypatch.setattr(registry.MODELS, "_entries", dict(registry.MODELS.items()))

    def halves(z):
        return torch.nn.functional.interpolate(z[:, :3], scale_factor=8)

    decoder("unit", geometry=Geometry(spatial=8, latent_channels=4), data_range=(0, 1))(lambda: halves)
    sample = runner.decode(latents, DecodePlan(options={"preview": "unit"}), trace=False).sample
    denoised = latents * runner.model.scaling.factor
    assert torch.allclose(sample, 2 * halves(denoised) - 1, atol=1e-5)


def test_latents_are_restated_by_both_conventions():
    denoised = torch.randn(1, 2, 4, 4)
    full, small = Scaling(factor=0.25, shift=0.5), Scaling(mean=(1.0, 2.0), std=(3.0, 4.0))
    mean, std = torch.tensor([1.0, 2.0]).view(1, 2, 1, 1), torch.tensor([3.0, 4.0]).view(1, 2, 1, 1)
    assert torch.allclose(_restated(denoised / 0.25 + 0.5, full, small), denoised * std + mean, atol=1e-5)
    assert torch.allclose(_restated(denoised * std + mean, small, full), denoised / 0.25 + 0.5, atol=1e-5)


def test_its_memory_is_predicted_as_its_own(runner):
    with pytest.raises(RequestError, match="fidelity predict reference-tiny"):
        predict(runner.model, (128, 128), DecodePlan(options=PREVIEW))
    tiny, full = (predict(model, (128, 128)).allocated_peak_bytes for model in (reference_tiny, runner.model))
    assert tiny < full


@pytest.mark.slow
def test_its_photographs_are_encoded_by_the_model_that_it_previews(runner):
    source = registry.LATENTS.get("photo-pair")
    made = source.make(reference_tiny, reference_tiny.load()).tensor
    assert torch.equal(made, source.make(runner.model, runner.module).tensor * runner.model.scaling.factor)
    trip = inspect(reference_tiny, [source]).round_trip["photo-pair"]
    assert 18 < trip < inspect(runner.model, [source]).round_trip["photo-pair"]
