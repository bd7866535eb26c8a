"""The largest tensors of a decode: by hooks, beside what a prediction says of the same decode."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fidelity import intermediates, optimizations, registry
from fidelity.intermediates import lines, measure
from fidelity.predict import of_shape
from fidelity.records import DecodePlan, Tiling

registry.load_plugins()
KL = registry.MODELS.get("reference-kl")


def decoded(name, side, plan=None):
    """The intermediates of one decode, and the predicted largest tensor."""
    model, plan = registry.MODELS.get(name), plan or DecodePlan()
    frames = (model.family.least_frames,) if model.geometry.video else ()
    shape = (1, model.geometry.latent_channels, *frames, side, side)
    module = model.load()
    with torch.no_grad(), optimizations.apply_plan(module, plan, model=model, device="cpu"):
        found = measure(model, module, torch.zeros(shape))
    return found, of_shape(model, shape, plan, "cpu").largest


@pytest.mark.slow
def test_the_reference_blows_its_latents_up_where_the_last_upsampling_ends():
    found, predicted = decoded("reference-kl", 24)
    first = found.largest[0]
    assert (first.module, first.shape, first.dtype) == (
        "decoder.up_blocks.2.upsamplers.0.conv", (1, 32, 192, 192), "float32",
    )  # fmt: skip
    assert (first.bytes, first.times_latents) == (4 * 32 * 192**2, 512.0)
    assert found.inside is None
    assert (predicted.bytes, predicted.shape, predicted.times_latents) == (first.bytes, first.shape, 512.0)
    assert first.module.startswith(predicted.module)  # it is made by the upsampling before that convolution
    assert len(found.largest) == 5
    assert [one.bytes for one in found.largest] == sorted((one.bytes for one in found.largest), reverse=True)
    assert len({one.module for one in found.largest}) == 5


@pytest.mark.parametrize("name", ["small-wan", "small-cogvideox", "small-mochi"])
def test_what_no_module_gives_is_told_apart_and_is_what_prediction_sees(name):
    found, predicted = decoded(name, 8)
    assert found.inside is not None
    assert found.inside.bytes == predicted.bytes > found.largest[0].bytes
    assert (found.inside.module, found.inside.shape) == (predicted.module, predicted.shape)
    assert found.inside.operator == predicted.what
    assert f"made by {predicted.what}: no module gives it" in lines(found)[-1]


@pytest.mark.slow
def test_a_tile_s_tensors_are_a_tile_s():
    found, _ = decoded("reference-kl", 16, DecodePlan(tiling=Tiling(8, 0.25)))
    assert found.largest[0].shape == (1, 32, 64, 64)
    assert found.latents_bytes == 4 * 4 * 16 * 16
    assert found.largest[0].times_latents == 32 * 64**2 / (4 * 16**2)


def test_what_is_passed_on_counts_once_and_for_the_module_that_made_it():
    class Inner(nn.Module):
        def forward(self, x):
            return torch.cat([x, x])

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return {"kept": self.inner(x), "small": x[:1] + 1}

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.outer = Outer()

        def decode(self, x):
            return self.outer(x)["kept"]

    model = SimpleNamespace(family=SimpleNamespace(decode=lambda module, latents: module.decode(latents)))
    found = intermediates.measure(model, Whole(), torch.zeros(4, 8))
    assert [(one.module, one.shape, one.times_latents) for one in found.largest] == [
        ("outer.inner", (8, 8), 2.0), ("outer", (1, 8), 0.25),
    ]  # fmt: skip


def test_in_words():
    said = lines(decoded("reference-kl", 24)[0])
    assert said[0] == ("largest       4.5 MiB at decoder.up_blocks.2.upsamplers.0.conv 1×32×192×192 float32, 512× of "
                       "1×4×24×24 latents (9 KiB)")  # fmt: skip
    assert len(said) == 5
