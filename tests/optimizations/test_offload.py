"""Offload by the real mechanisms: bit-equal, proved by hooks and bytes, and gone afterwards."""

from __future__ import annotations

import gc
import glob
import tempfile
from pathlib import Path

import pytest
import torch

from fidelity import registry, suite
from fidelity.errors import EvaluationError, SuiteError
from fidelity.optimizations import apply_plan, observe
from fidelity.records import OFFLOADS, DecodePlan, Tiling
from tests.optimizations.small import MODEL, build, decode, latents, model_with

SUITES = Path(__file__).parents[2] / "suites"

MODES = [mode for mode in OFFLOADS if mode != "none"]
MOVING = ("sequential", "disk")


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert glob.glob(str(tmp_path / "fidelity-offload-*")) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("mode", MODES)
def test_bit_equal_to_the_plain_decode_and_proved(module, mode, dtype):
    plain, _ = decode(module, DecodePlan(dtype=dtype))
    sample, receipts = decode(module, DecodePlan(dtype=dtype, offload=mode))
    assert torch.equal(sample, plain)
    receipt = receipts["offload"]
    assert receipt["engaged"] is True
    assert receipt["hooks"] > 0
    assert receipt["devices"] == ["cpu"]
    weights = sum(
        weight.numel()
        for name, weight in module.named_parameters()
        if name.startswith(("decoder.", "post_quant_conv."))
    )
    size = 4 if dtype == "fp32" else 2
    assert receipt["moved_bytes"] == receipt["returned_bytes"] == (weights * size if mode in MOVING else 0)
    whole = sum(weight.numel() for weight in module.parameters()) * size
    assert receipt["waiting_bytes"] == (whole if mode == "sequential" else 0)  # in files, or where they compute
    assert (receipt["resident_bytes"] == whole) is (mode not in MOVING)
    assert 0 < receipt["resident_bytes"] <= whole
    assert receipt["seconds"] > 0
    assert (receipt["note"] is None) is (mode in MOVING)


@pytest.mark.parametrize("mode", MODES)
def test_everything_is_as_it_was(module, mode):
    objects = {name: (weight, weight.data_ptr(), weight.clone()) for name, weight in module.named_parameters()}
    attributes = {name: set(part.__dict__) for name, part in module.named_modules()}
    hooked = []

    def fail(self, part, z):
        hooked.extend(inner for inner in part.modules() if {"_hf_hook", "_diffusers_hook"} & set(inner.__dict__))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        decode(module, DecodePlan(offload=mode), model=model_with(decode=fail))
    assert hooked
    assert {name: set(part.__dict__) for name, part in module.named_modules()} == attributes
    for name, weight in module.named_parameters():
        held, place, bits = objects[name]
        assert weight is held
        assert weight.data_ptr() == place
        assert torch.equal(weight, bits)
    assert module.decoder.conv_in.forward.__func__ is torch.nn.Conv2d.forward


def bf16_tensors():
    every = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
    return {id(tensor) for tensor in every if tensor.dtype is torch.bfloat16}


@pytest.mark.parametrize("mode", ["model", "sequential", "disk"])
def test_no_copy_of_the_weights_waits_for_the_garbage_collector(module, mode):
    gc.collect()
    gc.disable()
    before = bf16_tensors()
    try:
        decode(module, DecodePlan(dtype="bf16", offload=mode), z=torch.zeros(1, 4, 8, 8))
        assert bf16_tensors() <= before
    finally:
        gc.enable()


@pytest.mark.parametrize("mode", ["sequential", "disk"])
def test_weights_really_leave(module, mode):
    with apply_plan(module, DecodePlan(offload=mode), model=MODEL, device="cpu"):
        assert {weight.device.type for weight in module.decoder.parameters()} == {"meta"}


def test_disk_reads_from_the_disk(module, temporary):
    with apply_plan(module, DecodePlan(offload="disk"), model=MODEL, device="cpu"), torch.no_grad():
        (folder,) = temporary.glob("fidelity-offload-*")
        Path(folder, "decoder.conv_in.weight.dat").unlink()
        with pytest.raises(FileNotFoundError, match="conv_in"):
            module.decode(torch.zeros(1, 4, 8, 8))


@pytest.mark.parametrize("mode", ["sequential", "group_leaf"])
def test_hooks_are_those_of_the_judged_decode_only(module, mode):
    once = decode(module, DecodePlan(offload=mode))[1]["offload"]["hooks"]

    def decode_before(part):
        MODEL.family.decode(part, torch.zeros(1, 4, 8, 8))

    assert decode(module, DecodePlan(offload=mode), before=decode_before)[1]["offload"]["hooks"] == once


def test_offload_under_tiles_and_slices_fires_for_each(module):
    plan = DecodePlan(offload="sequential", tiling=Tiling(8, 0.25), slicing=True)
    once = decode(module, DecodePlan(offload="sequential"))[1]["offload"]
    tiled = decode(module, plan)[1]["offload"]
    assert tiled["hooks"] == 12 * once["hooks"]
    assert tiled["moved_bytes"] == 12 * once["moved_bytes"]


def test_decode_that_bypasses_the_model_hook_is_seen(module):
    # diffusers #2285: `decode` without the decorator that calls the hook
    model = model_with(decode=lambda self, part, z: type(part).decode.__wrapped__(part, z).sample)
    sample, receipts = decode(module, DecodePlan(offload="model"), model=model)
    assert torch.equal(sample, decode(module)[0])
    assert receipts["offload"]["engaged"] is False
    assert receipts["offload"]["reason"] == "the decode bypassed the hooks: none fired"


def test_groups_attached_to_forward_only_are_seen(module):
    # diffusers #12692: without block modules the only group hangs on `forward`, which decode never calls
    module._group_offload_block_modules = None
    try:
        sample, receipts = decode(module, DecodePlan(offload="group_block"))
    finally:
        del module._group_offload_block_modules
    assert torch.equal(sample, decode(module)[0])
    assert receipts["offload"]["engaged"] is False
    assert receipts["offload"]["hooks"] == 0


def test_hooks_that_fire_and_move_nothing_are_seen(module):
    def onload_for_good(part):
        for inner in part.modules():
            hook = inner.__dict__.get("_hf_hook")
            for one in getattr(hook, "hooks", (hook,)):
                if getattr(one, "offload", False):
                    one.pre_forward(inner)
                    one.offload = False

    _, receipts = decode(module, DecodePlan(offload="sequential"), before=onload_for_good)
    assert receipts["offload"]["engaged"] is False
    assert "no weights moved to cpu" in receipts["offload"]["reason"]


@pytest.mark.parametrize("mode", MOVING)
def test_weights_that_come_twice_are_said_to(module, mode):
    def bring_in_twice(part):
        for inner in part.modules():
            for one in getattr(inner.__dict__.get("_hf_hook"), "hooks", (inner.__dict__.get("_hf_hook"),)):
                if hasattr(one, "weights_map"):
                    one.pre_forward = again(one)

    def again(hook):
        first, last = hook.pre_forward, hook.post_forward

        def pre_forward(part, *args, **kwargs):
            first(part, *args, **kwargs)
            last(part, None)
            return first(part, *args, **kwargs)

        return pre_forward

    plan = DecodePlan(offload=mode, tiling=Tiling(8, 0.25))
    honest = decode(module, plan)[1]["offload"]
    assert honest["note"] is None, "each tile needs them anew"
    wasteful = decode(module, plan, before=bring_in_twice)[1]["offload"]
    assert wasteful["moved_bytes"] == 2 * honest["moved_bytes"]
    assert "times over" in wasteful["note"]
    assert "6 calls of the decoder: once a call is enough" in wasteful["note"]


@pytest.mark.parametrize("mode", ["model", "group_leaf"])
def test_offload_of_an_offloaded_module_is_refused(module, mode):
    with (
        apply_plan(module, DecodePlan(offload="sequential"), model=MODEL, device="cpu"),
        pytest.raises(EvaluationError, match="carries an offload hook already"),
    ):
        apply_plan(module, DecodePlan(offload=mode), model=MODEL, device="cpu").__enter__()


def test_group_offload_of_a_module_that_has_none_is_a_clean_error():
    with pytest.raises(EvaluationError, match="Linear has no enable_group_offload"):
        apply_plan(torch.nn.Linear(1, 1), DecodePlan(offload="group_leaf"), model=MODEL, device="cpu").__enter__()


# ---------------------------------------------------------------- a stream


def why(plan):
    return registry.OPTIMIZATIONS.get("offload_stream").inapplicable(True, plan, MODEL, (1, 4, 16, 16))


def test_a_stream_brings_in_groups_only():
    assert why(DecodePlan(offload="group_leaf")) is None
    assert why(DecodePlan(offload="group_block")) is None
    assert "no groups" in why(DecodePlan(offload="sequential"))
    assert "no groups" in why(DecodePlan())
    with pytest.raises(SuiteError, match="write true"):
        registry.OPTIMIZATIONS.get("offload_stream").inapplicable(
            2, DecodePlan(offload="group_leaf"), MODEL, (1, 4, 16, 16)
        )


def test_on_a_cpu_a_stream_is_not_applicable_and_elsewhere_it_is():
    plain = suite.load(SUITES / "smoke.toml", registry)
    streamed = suite.with_plan(plain, suite.parse_plan("offload=group_leaf,offload_stream", registry))
    assert all(case.not_applicable is None for case in suite.on(streamed, "cuda").cases)
    with pytest.raises(SuiteError, match=r"nothing to judge.*offload_stream: a stream copies to an accelerator"):
        suite.on(streamed, "cpu")
    assert suite.on(plain, "cpu") is plain


def test_a_stream_on_a_cpu_is_refused_and_nothing_is_left(module):
    plan = DecodePlan(offload="group_leaf", options={"offload_stream": True})
    with pytest.raises(EvaluationError, match="need an accelerator"):
        decode(module, plan)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", ["group_block", "group_leaf"])
def test_a_stream_moves_weights_from_pinned_copies(mode):
    part = build().to("cuda")
    plan = DecodePlan(offload=mode, options={"offload_stream": True})
    z = latents(1, 16, 16).to("cuda")
    with torch.no_grad():
        plain = MODEL.family.decode(part, z)
        with apply_plan(part, plan, model=MODEL, device="cuda") as proofs, observe(part, MODEL) as seen:
            sample = MODEL.family.decode(part, z)
            receipts = {name: prove(seen) for name, prove in proofs.items()}
    assert torch.equal(sample, plain)
    assert receipts["offload_stream"]["engaged"] is True
    assert receipts["offload"]["moved_bytes"] > 0
    assert receipts["offload"]["waiting_bytes"] > 0
