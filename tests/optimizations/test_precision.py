"""Precision: what is asked is what runs, and the master weights come back to the bit."""

from __future__ import annotations

import pytest
import torch

from fidelity.errors import UnknownName
from fidelity.optimizations import apply_plan, inapplicable
from fidelity.optimizations.weights import kept_in_fp32
from fidelity.records import DecodePlan
from tests.optimizations.small import MODEL, build, decode, latents


@pytest.mark.parametrize(("dtype", "name", "emulated"), [("bf16", "bfloat16", False), ("fp16", "float16", True)])
def test_asked_dtype_is_seen_everywhere_and_undone(module, dtype, name, emulated):
    objects = {key: (weight, weight.data_ptr(), weight.clone()) for key, weight in module.named_parameters()}
    sample, receipts = decode(module, DecodePlan(dtype=dtype))
    assert sample.dtype is getattr(torch, name)
    assert receipts["precision"] == {
        "requested": True, "engaged": True, "reason": None, "weights": [name], "middle_layer": [name], "output": name,
        "emulated": emulated,
    }  # fmt: skip
    for key, weight in module.named_parameters():
        held, place, bits = objects[key]
        assert weight is held
        assert weight.data_ptr() == place
        assert torch.equal(weight, bits)


def test_weights_come_back_when_the_decode_raises(module):
    with pytest.raises(ZeroDivisionError), apply_plan(module, DecodePlan(dtype="bf16"), model=MODEL, device="cpu"):
        raise ZeroDivisionError
    assert {weight.dtype for weight in module.parameters()} == {torch.float32}


def test_output_promoted_to_fp32_is_not_engaged(module):
    def promote(part):
        part.decoder.conv_out.register_forward_hook(lambda *call: call[-1].float())

    try:
        _, receipts = decode(module, DecodePlan(dtype="bf16"), before=promote)
    finally:
        module.decoder.conv_out._forward_hooks.clear()
    assert receipts["precision"]["engaged"] is False
    assert receipts["precision"]["reason"] == "bfloat16 asked, the output was in float32"


def test_a_dtype_that_was_not_watched_is_not_proved(module):
    with apply_plan(module, DecodePlan(dtype="bf16"), model=MODEL, device="cpu") as proofs:
        from fidelity.records import Observation

        receipt = proofs["precision"](Observation())
    assert receipt["engaged"] is False
    assert "nothing that was seen" in receipt["reason"]


def test_half_weights_and_fp32_latents_crash_as_natively(module):
    with (
        pytest.raises(RuntimeError, match="should be the same"),
        torch.no_grad(),
        apply_plan(module, DecodePlan(dtype="fp16"), model=MODEL, device="cpu"),
    ):
        module.decode(latents())


def test_upcast_is_fp32_compute_of_weights_rounded_to_fp16(module):
    sample, receipts = decode(module, DecodePlan(dtype="fp16", force_upcast=True))
    rounded = build()
    for weight in rounded.parameters():
        weight.data = weight.data.half().float()
    with torch.no_grad():
        assert torch.equal(sample, rounded.decode(latents()).sample)
    assert not torch.equal(sample, decode(module)[0])
    assert receipts["force_upcast"]["engaged"] is True
    assert receipts["force_upcast"]["weights"] == receipts["force_upcast"]["middle_layer"] == ["float32"]
    assert receipts["precision"]["engaged"] is True
    assert receipts["precision"]["emulated"] is False


def test_upcast_that_leaves_the_middle_block_in_half_is_not_engaged(module):
    def leave_half(part):
        middle = part.decoder.mid_block
        middle.to(torch.bfloat16)
        middle.register_forward_pre_hook(lambda _, args: tuple(arg if arg is None else arg.bfloat16() for arg in args))
        middle.register_forward_hook(lambda *call: call[-1].float())

    try:
        _, receipts = decode(module, DecodePlan(dtype="fp16", force_upcast=True), before=leave_half)
    finally:
        module.decoder.mid_block._forward_hooks.clear()
        module.decoder.mid_block._forward_pre_hooks.clear()
    assert receipts["force_upcast"]["engaged"] is False
    assert "the middle layer was in bfloat16, float32" in receipts["force_upcast"]["reason"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_upcast_applies_to_fp16_only(dtype):
    plan = DecodePlan(dtype=dtype, force_upcast=True)
    assert inapplicable(plan, MODEL, (2, 4, 12, 16)) == "force_upcast: the pipelines apply it to fp16 only"
    assert inapplicable(DecodePlan(dtype="fp16", force_upcast=True), MODEL, (2, 4, 12, 16)) is None


def test_upcast_without_rounding_first_is_not_engaged(module):
    _, receipts = decode(module, DecodePlan(force_upcast=True))
    assert receipts["force_upcast"]["engaged"] is False
    assert "not rounded" in receipts["force_upcast"]["reason"]


@pytest.mark.parametrize("pinned", [["norm1"], "norm1"])
def test_modules_that_the_class_keeps_in_fp32_stay(module, pinned):
    module._keep_in_fp32_modules = pinned
    try:
        with apply_plan(module, DecodePlan(dtype="fp16"), model=MODEL, device="cpu"):
            for name, weight in module.named_parameters():
                assert weight.dtype is (torch.float32 if "norm1" in name.split(".") else torch.float16)
                assert kept_in_fp32(module, name) is ("norm1" in name.split("."))
    finally:
        del module._keep_in_fp32_modules


def test_an_unknown_option_is_refused_before_anything_is_touched(module):
    plan = DecodePlan(dtype="bf16", options={"slicin": True})
    with pytest.raises(UnknownName, match="did you mean 'slicing'"):
        apply_plan(module, plan, model=MODEL, device="cpu").__enter__()
    with pytest.raises(UnknownName, match="slicin"):
        inapplicable(plan, MODEL, (2, 4, 12, 16))
