"""The watcher names the module and the items; the headroom foretells what overflows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fidelity import registry
from fidelity.optimizations import activations, apply_plan
from fidelity.optimizations.activations import explain, headroom, watch
from fidelity.records import DecodePlan, Tiling
from fidelity.runner import Runner
from tests.optimizations.small import DTYPES, MODEL, build, latents

FP16 = DecodePlan(dtype="fp16")


@torch.no_grad()
def watched(module, z, plan=DecodePlan()):  # noqa: B008 - frozen
    """The sample, and what each module gave."""
    with apply_plan(module, plan, model=MODEL, device="cpu"), watch(module, MODEL, z.shape[0]) as found:
        sample = MODEL.family.decode(module, z.to(DTYPES[plan.dtype]))
    return sample.float(), found


def hot_item(item: int, batch: int = 8):
    """Latents of which one item is a hundred times as large."""
    z = latents(batch)
    z[item] *= 100
    return z


@pytest.fixture(scope="module")
def touchy():
    """In fp16 its first convolution overflows for latents of 300, not for those of 3."""
    module = build()
    module.decoder.conv_in.weight.mul_(1000)
    return module


# ---------------------------------------------------------------- overflow


@pytest.mark.parametrize(
    ("plan", "item"),
    [
        (FP16, 5),
        (DecodePlan(dtype="fp16", slicing=True), 6),
        (DecodePlan(dtype="fp16", tiling=Tiling(8, 0.25)), 3),
        (DecodePlan(dtype="fp16", slicing=True, tiling=Tiling(8, 0.25)), 7),
        (DecodePlan(dtype="fp16", slicing=True, offload="sequential"), 2),
    ],
    ids=lambda value: getattr(value, "id", value),
)
def test_one_item_of_eight_overflows_and_is_named(touchy, plan, item):
    sample, found = watched(touchy, hot_item(item), plan)
    (first,) = found.overflows
    assert (first.module, first.gave, first.items) == ("conv_in", "inf", (item,))
    said = explain(found, sample)
    assert said.startswith(f"conv_in gave inf first in item {item}, from inputs of at most ")
    assert said.endswith(f"item {item} of the batch of 8 is not finite")


def test_the_largest_input_is_that_of_the_item_that_overflowed(touchy):
    z = hot_item(1)
    _, found = watched(touchy, z, FP16)
    given = touchy.post_quant_conv(z[1:2])
    assert found.overflows[0].given == pytest.approx(float(given.abs().max()), rel=2e-3)  # rounded to fp16


def test_a_finite_decode_names_nothing(touchy):
    sample, found = watched(touchy, latents(2), FP16)
    assert found.overflows == []
    assert explain(found, sample).endswith("no item of the batch of 2 are not finite")


def test_weights_that_are_not_finite_are_named_as_such():
    module = build()
    module.decoder.mid_block.resnets[0].conv1.weight[0, 0, 0, 0] = math.nan
    sample, found = watched(module, latents(2))
    said = explain(found, sample)
    assert said.startswith("mid_block.resnets.0.conv1 gave nan first: its own weights are not finite")
    assert "items 0, 1 of the batch of 2 are not finite" in said


class Doubles(nn.Module):
    """A block that doubles what its child gives."""

    def __init__(self):
        super().__init__()
        self.child, self.act = nn.Identity(), nn.ReLU()

    def forward(self, x):
        return self.act(x) * 2


class Between(Doubles):
    """A block that overflows before its child is called."""

    def forward(self, x):
        return self.act(x * 2)


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (Doubles, "up gave inf first, from inputs of at most 60,000"),
        (Between, "the input of up.act was not finite before any module gave such a value"),
    ],
)
def test_a_blocks_own_arithmetic_is_told_from_its_childrens(block, said):
    module = build()
    module.decoder = nn.Sequential()
    module.decoder.add_module("up", block())
    module.decoder.forward = lambda z, *_: module.decoder.up(z)
    module.post_quant_conv = nn.Identity()
    z = torch.ones(1, 4, 2, 2) * 60000
    with torch.no_grad(), watch(module, MODEL, 1) as found:
        sample = module.decoder(z.half())
    assert explain(found, sample.float()).startswith(said)


def test_watching_changes_no_bit_and_leaves_no_hook(module):
    z = latents()
    with torch.no_grad():
        plain = MODEL.family.decode(module, z)
    sample, found = watched(module, z)
    assert torch.equal(sample, plain)
    assert found.calls == 1
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


# ---------------------------------------------------------------- headroom


def test_peaks_are_what_the_modules_gave(module):
    z, gave = latents(), {}
    handle = module.decoder.conv_in.register_forward_hook(lambda *call: gave.update(conv_in=call[2].clone()))
    _, found = watched(module, z)
    handle.remove()
    assert found.peaks["conv_in"] == float(gave["conv_in"].abs().max())
    assert found.kinds["conv_in"] == "Conv2d"
    # a block that hands on its last convolution's output is not counted beside it
    assert "up_blocks.0.upsamplers.0.conv" in found.peaks
    assert "up_blocks.0.upsamplers.0" not in found.peaks


@pytest.mark.parametrize(
    ("values", "peak"), [([-5, 2], 5.0), ([-math.inf, 1], math.inf), ([math.nan, 1], math.inf), ([0, 0], 0.0)]
)
@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=str)
def test_a_peak_is_of_either_sign_and_never_hides_what_is_not_finite(values, peak, dtype):
    assert activations._peak(torch.tensor(values, dtype=dtype)) == peak


def test_headroom_lists_the_tightest_first_and_what_is_not_finite_before_all():
    found = activations.Activations(1, peaks={"a": 65504.0, "b": math.inf, "c": 131008.0, "d": 0.0, "e": 1.0})
    found.kinds = dict.fromkeys(found.peaks, "Conv2d")
    rooms = headroom(found, force_upcast=False)
    assert [(layer.name, layer.headroom) for layer in rooms.layers] == [
        ("b", None),
        ("c", 0.5),
        ("a", 1.0),
        ("e", 65504.0),
    ]
    assert [layer.name for layer in rooms.over] == ["b", "c"]
    assert (rooms.tightest, rooms.agrees) == (0.0, False)
    assert headroom(found, force_upcast=True).agrees is True


def test_nothing_watched_is_no_headroom():
    rooms = headroom(activations.Activations(1), force_upcast=False)
    assert (rooms.layers, rooms.tightest, rooms.agrees) == ((), None, None)
    assert "none of the 0 modules" in str(rooms.reason)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reference-kl", "reference-kl-hot"])
def test_headroom_below_one_is_what_overflows_in_fp16(name):
    model = registry.MODELS.get(name)
    runner = Runner(model)
    z = registry.LATENTS.get("ramp").make(model, runner.module).tensor
    decoded = runner.decode(z, DecodePlan(), trace=False, watch=True)
    rooms = headroom(decoded.activations, model.force_upcast)
    half = runner.decode(z, FP16, trace=False, watch=True)
    assert decoded.receipts["state"]["leaks"] == []
    if name == "reference-kl":
        assert rooms.tightest > 10
        assert half.activations.overflows == []
    else:
        stream = {"up_blocks.2.upsamplers.0.conv", "up_blocks.3.resnets.0", "up_blocks.3.resnets.1"}
        assert {layer.name for layer in rooms.over} == stream
        (first,) = half.activations.overflows
        assert first.module == "up_blocks.2.upsamplers.0.conv"
        assert first.given < 65504
